"""Does somebody undo what is done here? Deeds by name, and how often each was done. No clock is read, and nobody is asked.

A level-triggered controller does again whatever was undone; two of them with opposite wishes would go on for ever, each doing
its duty. A deed that was done twice and is wanted a third time has been undone twice. It is told once, and not done again until
its name changes, which is when the object does, or a long pause has passed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

UNDONE_MAX: Final = 2
KEPT_MAX: Final = 50_000


class _Done(NamedTuple):
    times: int
    last_ms: int
    told: bool = False


class Fights:
    """`pause_ms`: after so long without it a deed is forgotten."""

    def __init__(self, pause_ms: int) -> None:
        self._pause_ms = pause_ms
        self._done: dict[str, _Done] = {}

    def held(self, once: str, now_ms: int) -> bool:
        """Was it undone too often to be done now?"""
        known = self._known(once, now_ms)
        return known is not None and known.times >= UNDONE_MAX

    def untold(self, once: str) -> bool:
        """Is this the first time that it is held? Asked once: the next answer is no."""
        known = self._done.get(once)
        if known is None or known.told:
            return False
        self._done[once] = known._replace(told=True)
        return True

    def done(self, once: str, now_ms: int) -> None:
        """It was accepted."""
        known = self._known(once, now_ms)
        self._done.pop(once, None)  # the last one is the last to be forgotten
        self._done[once] = _Done(1, now_ms) if known is None else _Done(known.times + 1, now_ms, known.told)
        while len(self._done) > KEPT_MAX:
            del self._done[next(iter(self._done))]

    def _known(self, once: str, now_ms: int) -> _Done | None:
        known = self._done.get(once)
        if known is not None and now_ms - known.last_ms >= self._pause_ms:
            del self._done[once]
            return None
        return known
