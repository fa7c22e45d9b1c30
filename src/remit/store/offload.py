"""How does blocking work leave the event loop? A promise only: the thread that keeps it is made outside this room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Offload(Protocol):
    """Run `work` elsewhere, one piece at a time, in the order of the calls.

    One dedicated thread keeps this. Order is what makes reads linearizable: a read that is asked for after a commit was
    answered runs after it. Two pieces at once would let two hands into one file.
    """

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...
