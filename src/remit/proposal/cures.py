"""Did what would have cured it happen meanwhile? A bounded past of cures. Nobody is woken here.

An attempt sees the world as it was at some version, and ends later. If it ends in a wait for a cure that happened in between,
nothing would wake it: the wake-up came while it was not yet waiting. So the end of an attempt asks here first. The memory is
bounded, and whatever was forgotten counts as happened: then the line is tried once too often, never once too little.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final

from remit.proposal.lines import Cure, Line

CURES_MAX: Final = 4096
PARTLY_MAX: Final = 64

Which = Callable[[Line], bool]
"""Is it a cure for this line? Asked when the cure happens, or later, when an attempt that was under way has ended."""


class _Seen:
    """When one cure happened: the last time for everybody, and since then for some."""

    __slots__ = ("everybody", "some")

    def __init__(self) -> None:
        self.everybody = -1
        self.some: deque[tuple[int, Which]] = deque()


class Past:
    def __init__(self, cures_max: int = CURES_MAX, partly_max: int = PARTLY_MAX) -> None:
        if min(cures_max, partly_max) < 1:
            raise ValueError(f"no past: {cures_max} cures, {partly_max} times each")
        self._cures_max, self._partly_max = cures_max, partly_max
        self._seen: OrderedDict[Cure, _Seen] = OrderedDict()
        self.forgotten = -1
        """The latest version of which something was forgotten."""

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, cure: Cure, version: int, which: Which | None = None) -> None:
        """It happened: for everybody, or for those lines that `which` picks."""
        seen = self._seen.get(cure)
        if seen is None:
            seen = self._seen[cure] = _Seen()
        self._seen.move_to_end(cure)
        if which is None:
            seen.everybody = max(seen.everybody, version)
            seen.some = deque(one for one in seen.some if one[0] > version)
        else:
            seen.some.append((version, which))
            if len(seen.some) > self._partly_max:
                # Whom it was for is forgotten, so it was for everybody.
                seen.everybody = max(seen.everybody, seen.some.popleft()[0])
        if len(self._seen) > self._cures_max:
            _, oldest = self._seen.popitem(last=False)
            self.forgotten = max(self.forgotten, oldest.everybody, *(version for version, _ in oldest.some))

    def cured(self, line: Line, cures: Iterable[Cure], since: int) -> bool:
        """Did one of `cures` happen for this line after `since`, or may it have?"""
        if since < self.forgotten:
            return True
        for cure in cures:
            seen = self._seen.get(cure)
            if seen is not None and (
                seen.everybody > since or any(version > since and which(line) for version, which in seen.some)
            ):
                return True
        return False
