"""Guarantees that SIGINT ends a command even if a callback swallows it.

What it falls into may swallow whatever is raised there: then it comes again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes its time to load, and this is needed before anything is

AGAIN_S = 2.0
"""As long as it may take from where it was raised to the end of what is insisted on."""


class insisting:  # noqa: N801  (it is used like a function; one that is decorated would load more)
    """An interrupt ends this, at the latest when it is over. Whoever has a handler of their own keeps it."""

    def __enter__(self) -> None:
        self._heard = False
        self._ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
        if self._ours:
            self._before = _signal.getsignal(_signal.SIGALRM)
            _signal.signal(_signal.SIGALRM, self._interrupt)
            _signal.signal(_signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: object) -> None:
        self._heard = True
        _signal.setitimer(_signal.ITIMER_REAL, AGAIN_S)
        raise KeyboardInterrupt

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._ours:
            _signal.setitimer(_signal.ITIMER_REAL, 0)
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            _signal.signal(_signal.SIGALRM, self._before)
        if self._heard and kind is None:
            raise KeyboardInterrupt
