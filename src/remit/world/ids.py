"""What is a name that nobody else has? Drawn from the system's generator; nothing can be replayed from here."""

from __future__ import annotations

import os
from base64 import b32encode
from typing import Final

_NONCE_BYTES: Final = 10
"""80 bits: a thousand million names in one window meet with a chance of one in two million."""

_INCARNATION_BYTES: Final = 5
"""40 bits: a scope has a new incarnation only after a restore. Every operation id carries it, so it is short."""


class RandomIds:
    """Base 32 in lower case: no sign that a shell, a URL or a file system that folds case would mistake."""

    def nonce(self) -> str:
        return b32encode(os.urandom(_NONCE_BYTES)).decode().lower()

    def incarnation(self) -> str:
        return b32encode(os.urandom(_INCARNATION_BYTES)).decode().lower()
