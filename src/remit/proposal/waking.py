"""Whom does this news help? It picks among the lines that wait for room, or for a node. Nobody is woken here: see backlog.py.

News of a row helps whoever fits there now. It also helps whoever is kept out by something else than he waits for: what he was
told is no longer all that is true, and the cure of what keeps him out by now would pass him by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from remit.law.columns import Ints
from remit.proposal.classes import Class
from remit.proposal.cures import Which
from remit.proposal.funnel import refused_only_by
from remit.proposal.kernel import Kernel
from remit.proposal.lines import Line
from remit.proposal.plugins import COUPLED, PluginError, applies


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
