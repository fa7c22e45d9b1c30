"""What do the headers of a request say? Read once, by name; nothing is judged here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Headers(dict[str, str]):
    """By their names, in small letters; of several of one name the first counts."""

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Headers:
        """The names are in small letters already, as ASGI has it."""
        return cls([(name.decode("latin-1"), value.decode("latin-1")) for name, value in reversed(scope["headers"])])
