"""Which lot is drawn? Seeded streams, for jitter, sampling and ties. Names that must be unguessable come from ids.py."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

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
