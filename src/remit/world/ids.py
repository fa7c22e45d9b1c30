"""What is a name that nobody else has? Drawn from the system's generator; nothing can be replayed from here."""

from __future__ import annotations

import os
from typing import Final

_NONCE_SIGNS: Final = 16
"""80 bits: a thousand million names in one window meet with a chance of one in two million."""

_INCARNATION_SIGNS: Final = 8
"""40 bits: a scope has a new incarnation only after a restore. Every operation id carries it, so it is short."""

_ALPHABET: Final = b"abcdefghijklmnopqrstuvwxyz234567"
_SIGNS: Final = bytes([_ALPHABET[byte % len(_ALPHABET)] for byte in range(256)])
"""By byte: of 256, eight for each sign, so each is as likely. Every claim needs a name: this is one step for all of it."""


class RandomIds:
    """Base 32 in lower case: no sign that a shell, a URL or a file system that folds case would mistake."""

    def nonce(self) -> str:
        return os.urandom(_NONCE_SIGNS).translate(_SIGNS).decode()

    def incarnation(self) -> str:
        return os.urandom(_INCARNATION_SIGNS).translate(_SIGNS).decode()
