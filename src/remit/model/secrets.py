"""Format and sizes of sealed values.

A sealed value is stored as

    remit:sealed:1:KEY:TEXT

where `KEY` identifies the sealing key and `TEXT` is the ciphertext in unpadded URL-safe base64. serve/auth/secrets.py seals and
unseals.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

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
