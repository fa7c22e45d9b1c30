"""Guarantees that SIGINT ends a block of code even if a callback swallows the KeyboardInterrupt.

Python ignores exceptions in places such as weakref callbacks, and imported modules may catch everything. An interrupt that
is lost there is raised again by a timer, and at the latest when the block ends.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` is slow to import, and this runs first

AGAIN_S = 2.0
"""Delay until a swallowed interrupt is raised again. It must exceed the time from the interrupt to the end of the block in the
usual case, so that it is not raised twice.
"""


class persistent_interrupts:  # noqa: N801  (used like a function; contextlib would slow down startup)
    """Context manager that re-raises a swallowed KeyboardInterrupt. It does nothing if the program has installed its own SIGINT
    handler.
    """

    def __enter__(self) -> None:
        self._interrupted = False
        self._ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
        if self._ours:
            self._before = _signal.getsignal(_signal.SIGALRM)
            _signal.signal(_signal.SIGALRM, self._interrupt)
            _signal.signal(_signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: object) -> None:
        self._interrupted = True
        _signal.setitimer(_signal.ITIMER_REAL, AGAIN_S)
        raise KeyboardInterrupt

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._ours:
            _signal.setitimer(_signal.ITIMER_REAL, 0)
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            _signal.signal(_signal.SIGALRM, self._before)
        if self._interrupted and kind is None:
            raise KeyboardInterrupt
