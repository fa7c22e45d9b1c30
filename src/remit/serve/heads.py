"""What do the headers of a request say? Read once, by name; nothing is judged here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload


class Headers:
    """By their names, in any case; of several of one name the first counts."""

    __slots__ = ("_values",)

    def __init__(self, headers: Mapping[str, str] | None = None, *, scope: Mapping[str, Any] | None = None) -> None:
        self._values = {name.lower(): value for name, value in (headers or {}).items()}
        if scope is not None:  # the names are in lower case already, as ASGI has it
            self._values |= {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...
    def get(self, name: str, default: str | None = None) -> str | None:
        found = self._values.get(name)
        return self._values.get(name.lower(), default) if found is None else found

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]
