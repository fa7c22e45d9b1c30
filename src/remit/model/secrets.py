"""Secret and Config kinds and the format of sealed values.

A sealed value is stored as

    remit:sealed:1:KEY:TEXT

where `KEY` identifies the sealing key and `TEXT` is the ciphertext in unpadded URL-safe base64. Format and sizes only:
serve/auth/secrets.py seals and unseals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, field

from remit.model.constraints import ConstraintViolation, FieldConstraint, constrained, text_of
from remit.model.manifests.documents import DocumentNode
from remit.model.metadata import FileName, Metadata, Object, Record
from remit.model.problems import Path

SEALED_PREFIX: Final = "remit:sealed:"
"""Prefix of sealed values. A value that a client sends must not start with it."""

TAG_BYTES: Final = 16
"""Length of the authentication tag that sealing adds."""

PLAIN_CHARS_MAX: Final = 65_536
SEALED_CHARS_MAX: Final = 350_000
"""PLAIN_CHARS_MAX characters of up to four bytes each, a third more for base64, and the prefix."""

_SEALED: Final = re.compile(SEALED_PREFIX + r"1:([0-9a-f]{12}):([A-Za-z0-9_-]{22,})")


def format_sealed(key: str, text: str) -> str:
    return f"{SEALED_PREFIX}1:{key}:{text}"


def parse_sealed(value: str) -> tuple[str, str] | None:
    """Returns the key id and the ciphertext; None if this is not a sealed value."""
    match = _SEALED.fullmatch(value) if value.startswith(SEALED_PREFIX) else None
    return None if match is None else (match[1], match[2])


def is_sealed(value: str) -> bool:
    return parse_sealed(value) is not None


def plain_bytes(value: str) -> int:
    """Returns the length of a value in bytes, of a sealed value after unsealing."""
    sealed = parse_sealed(value)
    return len(value.encode()) if sealed is None else len(sealed[1]) * 3 // 4 - TAG_BYTES


def sealing_overhead_bytes(data: Mapping[str, str]) -> int:
    """Returns by how many bytes sealing has lengthened these values."""
    return sum(len(value) - plain_bytes(value) for value in data.values() if is_sealed(value))


class PlainLengthMax(FieldConstraint):
    """Limits the length of a plain value. A sealed value is longer; its length was checked before it was sealed."""

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        if text is not None and len(text) > PLAIN_CHARS_MAX and not is_sealed(text):
            yield ConstraintViolation(
                node.position, path, f"{len(text)} characters are too many", f"use at most {PLAIN_CHARS_MAX}"
            )

    def schema(self) -> dict[str, Any]:
        return {}  # the schema is for manifests and cannot recognise sealed values


class DataSpec(Record, frozen=True):
    data: Annotated[dict[FileName, Annotated[str, Meta(max_length=PLAIN_CHARS_MAX)]], Meta(max_length=256)] = field(
        default_factory=dict
    )


class SecretSpec(Record, frozen=True):
    """Values by key. Each value is stored sealed, is never shown, and is sent only to the nodes whose replicas need it."""

    data: Annotated[
        dict[FileName, Annotated[str, constrained(PlainLengthMax(), max_length=SEALED_CHARS_MAX)]], Meta(max_length=256)
    ] = field(default_factory=dict)


class SecretStatus(Record, frozen=True):
    """Computed for API responses and never stored: the size of each value in bytes."""

    sizes: dict[str, int] = field(default_factory=dict)


class Secret(Object, tag="Secret", frozen=True, kw_only=True):
    metadata: Metadata
    spec: SecretSpec
    status: SecretStatus = SecretStatus()


class Config(Object, tag="Config", frozen=True, kw_only=True):
    metadata: Metadata
    spec: DataSpec
