"""Seeded random streams and unguessable ids.

Seeded streams, for jitter, sampling and ties. Names that must be unguessable come from ids.py.

Drawn from the system's generator; nothing can be replayed from here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")


class SeededChance:
    """The same seed and the same calls give the same lots; `seed` is for the line that says how to replay a run."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        # A text seed goes through SHA-512, so near seeds are far apart, and PYTHONHASHSEED has no say.
        self._lots = random.Random(seed)  # noqa: S311 - no secret is drawn from it

    def below(self, limit: int) -> int:
        return self._lots.randrange(limit)

    def uniform_ms(self, limit: int) -> int:
        return self._lots.randrange(limit + 1)

    def choice(self, items: Sequence[T], /) -> T:
        return items[self._lots.randrange(len(items))]

    def shuffled(self, items: Sequence[T], /) -> list[T]:
        lots = list(items)
        self._lots.shuffle(lots)
        return lots

    def stream(self, name: str) -> SeededChance:
        return SeededChance(f"{self.seed}/{name}")


def seeded_by_the_system() -> SeededChance:
    return SeededChance(os.urandom(16).hex())


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
