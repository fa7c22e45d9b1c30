"""What would change in an object? A flat list of paths, each with what stands there and what would; it decides nothing.

Told is what was said: a field that has its default is not there. What the authority stamps, and what is observed, is not
compared; what is secret is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

import msgspec
from msgspec import UNSET

from remit.model.answers import Difference
from remit.model.data import Secret
from remit.model.objects import AnyObject, encode
from remit.model.problems import Path, path_text

DIFFERENCES_MAX: Final = 1_000
TEXT_MAX: Final = 4_096

_STAMPED: Final = ("name", "tenant", "uid", "generation", "revision", "deleting")
"""And what it is called, which is told beside."""
_HIDDEN: Final = "(hidden)"


def differences(before: AnyObject | None, after: AnyObject | None) -> tuple[Difference, ...]:
    """In the order of the fields; of very many, the first."""
    secret = isinstance(before, Secret) or isinstance(after, Secret)
    found: list[Difference] = []
    for path, old, new in _differ((), _said(before), _said(after)):
        if len(found) == DIFFERENCES_MAX:
            break
        if secret and path[:2] == ("spec", "data"):
            old, new = None if old is None else _HIDDEN, None if new is None else _HIDDEN
        found.append(Difference(path=path_text(path), before=_short(old), after=_short(new)))
    return tuple(found)


def _said(thing: AnyObject | None) -> dict[str, Any]:
    """What a manifest would say of it."""
    if thing is None:
        return {}
    written = msgspec.json.decode(encode(thing))
    kept = {name: written[name] for name in ("metadata", "spec") if name in written}
    kept["metadata"] = {name: value for name, value in kept["metadata"].items() if name not in _STAMPED}
    for owner in kept["metadata"].get("owners", ()):
        owner.pop("uid", None)
    return kept


def _differ(path: Path, before: Any, after: Any) -> Iterator[tuple[Path, Any, Any]]:
    if before == after or not (_said_of(before) or _said_of(after)):
        return
    if isinstance(before, dict | None) and isinstance(after, dict | None):
        old, new = before or {}, after or {}
        for name in dict.fromkeys((*old, *new)):
            yield from _differ((*path, name), old.get(name), new.get(name))
    elif _listed(before) and _listed(after) and (_deep(before) or _deep(after)):
        for at, (one, other) in enumerate(zip_longest(before or (), after or ())):
            yield from _differ((*path, at), one, other)
    else:
        yield path, before, after


def _listed(value: Any) -> bool:
    return value is None or isinstance(value, list | tuple)


def _deep(value: Any) -> bool:
    """A list of plain values is told whole: its places mean nothing alone."""
    return any(isinstance(one, dict) for one in value or ())


def _short(value: Any) -> Any:
    if value is None:
        return UNSET
    return value[:TEXT_MAX] + "…" if isinstance(value, str) and len(value) > TEXT_MAX else value


def _said_of(value: Any) -> bool:
    """An empty table or list says nothing."""
    return value is not None and value != {} and value != []
