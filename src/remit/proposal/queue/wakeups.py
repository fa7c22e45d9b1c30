"""Which waiting queues an event unblocks, including events that came during an attempt.

A bounded past of cures. Nobody is woken here.

An attempt sees the world as it was at some version, and ends later. If it ends in a wait for a cure that happened in between,
nothing would wake it: the wake-up came while it was not yet waiting. So the end of an attempt asks here first. The memory is
bounded, and whatever was forgotten counts as happened: then the line is tried once too often, never once too little.

It picks among the lines that wait for room, or for a node. Nobody is woken here: see backlog.py.

News of a row helps whoever fits there now. It also helps whoever is kept out by something else than he waits for: what he was
told is no longer all that is true, and the cure of what keeps him out by now would pass him by.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from remit.observation.node_columns import Ints
from remit.proposal.placement.class_scores import Class
from remit.proposal.placement.funnel import refused_only_by
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import COUPLED, PluginError, applies
from remit.proposal.queue.class_queues import Cure, Line

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


class Waking:
    """`class_of` says what a line asks for; None if that has gone."""

    def __init__(self, kernel: Kernel, class_of: Callable[[Line], Class | None]) -> None:
        self._kernel, self._class_of = kernel, class_of

    def fits_on(self, rows: Sequence[int]) -> Which:
        """Could one of these rows take a member of the line now? For those whom freed room may help."""
        at = np.array(rows, dtype=np.int64)
        most = {name: int(column[at].max()) for name, column in self._kernel.columns.free.items()}

        def fits(line: Line) -> bool:
            try:
                one = self._class_of(line)
                if one is None:
                    return True
                if any(need > most.get(name, 0) for name, need in one.ask.resources):
                    return False
                return bool((self._kernel.refresh(one)[at] >= 0).any()) or self._is_misled(line, one, at)
            except PluginError:
                return True

        return fits

    def open_on(self, rows: Sequence[int]) -> Which:
        """Could one of these rows take a member, or be emptied for one, as far as what the node is goes?"""
        at = np.array(rows, dtype=np.int64)

        def is_open(line: Line) -> bool:
            try:
                one = self._class_of(line)
                if one is None:
                    return True
                self._kernel.refresh(one)
                return not one.closed[at].all() or self._is_misled(line, one, at)
            except PluginError:
                return True

        return is_open

    def spreads(self, line: Line) -> bool:
        """Does it matter to the line over which domains it could spread?"""
        try:
            one = self._class_of(line)
        except PluginError:
            return True
        return one is None or bool(one.ask.spread)

    def _is_misled(self, line: Line, one: Class, rows: Ints) -> bool:
        """Is one of these rows shut to the line only by what it does not wait for the end of?"""
        waits = {str(cure[0]) for cure in line.wait.cures if isinstance(cure, tuple)} if line.wait is not None else set()
        others = [
            filter_ for filter_ in self._kernel.all_filters if not waits.issuperset(filter_.cures) and applies(filter_, one.ask)
        ]
        if not one.alone and all(filter_.check in COUPLED for filter_ in others):
            return False  # who stands in wider domains is not regarded in a class's numbers: it has shut no row here
        return refused_only_by(self._kernel, one, rows, others)
