"""Seeded random streams and unguessable ids.

Seeded streams are for jitter, sampling and tie-breaking, and can be replayed. Ids must not be predictable, so they are drawn
from the system's generator and cannot be replayed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")


class SeededRandomness:
    """A pseudo-random stream. `seed` is public so that it can be printed with the command that replays a run."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        # A text seed is hashed with SHA-512, so similar seeds give unrelated streams and PYTHONHASHSEED has no effect.
        self._rng = random.Random(seed)  # noqa: S311 - not used for secrets

    def randrange(self, limit: int) -> int:
        return self._rng.randrange(limit)

    def jitter_ms(self, limit: int) -> int:
        return self._rng.randrange(limit + 1)

    def choice(self, items: Sequence[T], /) -> T:
        return items[self._rng.randrange(len(items))]

    def shuffled(self, items: Sequence[T], /) -> list[T]:
        shuffled = list(items)
        self._rng.shuffle(shuffled)
        return shuffled

    def stream(self, name: str) -> SeededRandomness:
        return SeededRandomness(f"{self.seed}/{name}")


def system_seeded() -> SeededRandomness:
    return SeededRandomness(os.urandom(16).hex())


_NONCE_CHARACTERS: Final = 16
"""80 bits: among 10^9 ids alive at a time, the probability of a collision is about one in two million."""

_INCARNATION_CHARACTERS: Final = 8
"""40 bits: a scope gets a new incarnation only after a restore. Every operation id contains it, so it is short."""

_ALPHABET: Final = b"abcdefghijklmnopqrstuvwxyz234567"
_CHARACTER_OF_BYTE: Final = bytes([_ALPHABET[byte % len(_ALPHABET)] for byte in range(256)])
"""Maps a byte to a character. 256 is a multiple of 32, so all characters are equally likely. Ids are created for every claim;
`bytes.translate` maps all bytes in one call.
"""


_NONCES_PER_READ: Final = 64
"""Nonces made from one read of the system's random source, because a system call costs more than all else of a nonce."""
_unused_nonces: Final[list[str]] = []
os.register_at_fork(after_in_child=_unused_nonces.clear)  # the parent uses these


class RandomIds:
    """Ids in lower-case base 32: no character that is special in a shell, a URL or a case-insensitive file system."""

    def nonce(self) -> str:
        try:
            return _unused_nonces.pop()
        except IndexError:
            text = os.urandom(_NONCE_CHARACTERS * _NONCES_PER_READ).translate(_CHARACTER_OF_BYTE).decode()
            nonce, *others = (text[start : start + _NONCE_CHARACTERS] for start in range(0, len(text), _NONCE_CHARACTERS))
            _unused_nonces.extend(others)
            return nonce

    def incarnation(self) -> str:
        return os.urandom(_INCARNATION_CHARACTERS).translate(_CHARACTER_OF_BYTE).decode()
