"""Secret and Config kinds and the format of sealed values.

Its form and its size; it is sealed and opened by whoever has the keys: serve/auth/secrets.py.

    remit:sealed:1:KEY:TEXT

`KEY` says which key opens it, `TEXT` is what was sealed, in the base 64 of URLs without padding.

Secrets and configs: texts by name; frozen structs, as in kinds.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, field

from remit.model.constraints import Breach, Limit, limited, text_of
from remit.model.manifests.documents import Node
from remit.model.metadata import FileName, Metadata, Object, Record
from remit.model.problems import Path

PREFIX: Final = "remit:sealed:"
"""What begins so is sealed, or pretends to be: no value that somebody sends may."""

TAG_BYTES: Final = 16
"""So much longer is what is sealed than what was."""

PLAIN_SIGNS_MAX: Final = 65_536
SEALED_SIGNS_MAX: Final = 350_000
"""Four bytes a sign at most, a third more in base 64, and its head."""

_SEALED: Final = re.compile(PREFIX + r"1:([0-9a-f]{12}):([A-Za-z0-9_-]{22,})")


def written(key: str, text: str) -> str:
    return f"{PREFIX}1:{key}:{text}"


def parts(value: str) -> tuple[str, str] | None:
    """Its key and its text; None if this is no sealed value."""
    found = _SEALED.fullmatch(value) if value.startswith(PREFIX) else None
    return None if found is None else (found[1], found[2])


def is_sealed(value: str) -> bool:
    return parts(value) is not None


def plain_bytes(value: str) -> int:
    """How long it is once it is opened; of a plain value, how long that is."""
    found = parts(value)
    return len(value.encode()) if found is None else len(found[1]) * 3 // 4 - TAG_BYTES


def excess_bytes(data: Mapping[str, str]) -> int:
    """By how much these are longer than what was sealed in them."""
    return sum(len(value) - plain_bytes(value) for value in data.values() if is_sealed(value))


class PlainLength(Limit):
    """So many signs at most of what somebody writes. What is sealed is longer, and was judged before it was."""

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        text = text_of(node)
        if text is not None and len(text) > PLAIN_SIGNS_MAX and not is_sealed(text):
            yield Breach(node.place, path, f"{len(text)} characters are too many", f"use at most {PLAIN_SIGNS_MAX}")

    def schema(self) -> dict[str, Any]:
        return {}  # a schema is for what people write, and cannot tell that from what is sealed


class DataSpec(Record, frozen=True):
    data: Annotated[dict[FileName, Annotated[str, Meta(max_length=PLAIN_SIGNS_MAX)]], Meta(max_length=256)] = field(
        default_factory=dict
    )


class SecretSpec(Record, frozen=True):
    """What is stored of each value is sealed (sealed.py); nobody is shown it, and it goes only to the nodes that need it."""

    data: Annotated[
        dict[FileName, Annotated[str, limited(PlainLength(), max_length=SEALED_SIGNS_MAX)]], Meta(max_length=256)
    ] = field(default_factory=dict)


class SecretStatus(Record, frozen=True):
    """Told of it, and never stored: how many bytes each value has."""

    sizes: dict[str, int] = field(default_factory=dict)


class Secret(Object, tag="Secret", frozen=True, kw_only=True):
    metadata: Metadata
    spec: SecretSpec
    status: SecretStatus = SecretStatus()


class Config(Object, tag="Config", frozen=True, kw_only=True):
    metadata: Metadata
    spec: DataSpec
