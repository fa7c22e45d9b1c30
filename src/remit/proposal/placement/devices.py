"""Device assignment and free device shares per node.

Chosen here, and named in the claim; that some will do, law/fit.py has said.

Kept up with the columns, row by row. Nothing is ranked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from remit.law.fit import NOBODY, Ask, Devices, Model, devices_left
from remit.law.fit import devices as fit_whole
from remit.law.fit import shares as fit_shares
from remit.model.kinds import Device, Node
from remit.model.resources import WHOLE
from remit.observation.column_table import Names
from remit.observation.node_columns import Columns, Ints


def choose(ask: Ask, columns: Columns, row: int) -> dict[str, int]:
    """Thousandths by device name, of a row on which the ask fits."""
    node = columns.nodes[row]
    if node is None or not (ask.whole or ask.shares):
        return {}
    return choose_among(ask, node.spec.devices, columns.used[row]) or {}


class _Left(NamedTuple):
    """As much of a site as the rules about devices ask of it."""

    whole: Mapping[Model, int]
    room: Mapping[Model, int]


def fits_devices(ask: Ask, devices: Sequence[Device], used: Mapping[str, int]) -> bool:
    """What the law says of these devices, when so much of them is used."""
    site = cast(Any, _Left(*devices_left(devices, used)))
    return bool(fit_whole(ask, site, NOBODY)) and bool(fit_shares(ask, site, NOBODY))


Rank = Callable[[Devices, int], int]
"""How bad is it to take this share from a device of which so much is left?"""


def tightest(one: Devices, left: int) -> int:
    return left


def choose_among(ask: Ask, devices: Sequence[Device], used: Mapping[str, int], rank: Rank = tightest) -> dict[str, int] | None:
    """Shares go where they leave the least over, or where another rank is lowest, and to the first of equals; whole ones so
    that every part of the ask finds its own. None if that fails.
    """
    chosen: dict[str, int] = {}
    for one in ask.shares:
        name = _lowest(one, devices, used, chosen, rank)
        if name is None:
            return None
        chosen[name] = one.amount
    return chosen if _match(ask.whole, devices, used, chosen) else None


def _lowest(
    one: Devices, devices: Sequence[Device], used: Mapping[str, int], chosen: Mapping[str, int], rank: Rank
) -> str | None:
    found, lowest = None, 0
    for device in devices:
        if device.kind != one.kind or (one.models and device.model not in one.models) or device.name in chosen:
            continue
        left = WHOLE - used.get(device.name, 0)
        if left >= one.amount and (found is None or rank(one, left) < lowest):
            found, lowest = device.name, rank(one, left)
    return found


def _match(wholes: Sequence[Devices], devices: Sequence[Device], used: Mapping[str, int], chosen: dict[str, int]) -> bool:
    """Give each wanted device one of its own; where sorts overlap, an earlier choice may have to move (augmenting paths)."""
    wanted = [one for one in wholes for _ in range(one.amount)]
    free = [device for device in devices if not used.get(device.name, 0) and device.name not in chosen]
    owner: dict[str, int] = {}

    def find(want: int, tried: set[str]) -> bool:
        one = wanted[want]
        for device in free:
            if device.kind != one.kind or (one.models and device.model not in one.models) or device.name in tried:
                continue
            tried.add(device.name)
            if device.name not in owner or find(owner[device.name], tried):
                owner[device.name] = want
                return True
        return False

    if not all(find(want, set()) for want in range(len(wanted))):
        return False
    chosen.update(dict.fromkeys(owner, WHOLE))
    return True


_ROOM_MIN: Final = 16
_UNUSED: Final[Mapping[str, int]] = {}
_HOLE: Final[tuple[Node | None, Mapping[str, int]]] = None, _UNUSED


class Stock:
    """`left` has the thousandths that nobody uses, a line for each row and a column for each device in the order of the node's
    spec; `sort` has the id of the device's kind and model in `sorts`, and -1 where there is none. Both have lines to spare.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._seen = -1
        self._known: list[tuple[Node | None, Mapping[str, int]]] = []
        self.left: Ints = np.zeros((0, 0), dtype=np.int64)
        self.sort: Ints = np.full((0, 0), -1, dtype=np.int64)
        self._names = Names()

    @property
    def sorts(self) -> list[Model]:
        return self._names.values

    def follow(self) -> Ints | None:
        """Look at what changed; the rows of which anything did, devices or other amounts. None if nothing is known of which."""
        changed, rows = self._columns.changed, len(self._columns)
        if self._seen == changed.count:
            return np.zeros(0, dtype=np.int64)
        touched = changed.since(self._seen) if self._seen >= 0 else None
        self._seen = changed.count
        if rows > len(self.left):
            self._widen(max(2 * rows, _ROOM_MIN), self.left.shape[1])
        self._known += [_HOLE] * (rows - len(self._known))
        found = None if touched is None else np.unique(touched)
        for row in range(rows) if found is None else found.tolist():
            self._look(row)
        return found

    def _look(self, row: int) -> None:
        node, used = self._columns.nodes[row], self._columns.used[row]
        before = self._known[row]
        if node is before[0] and used is before[1]:
            return  # by far the most: somebody took cpu and memory
        self._known[row] = node, used
        devices = node.spec.devices if node is not None else ()
        if len(devices) > self.left.shape[1]:
            self._widen(len(self.left), len(devices))
        self.left[row], self.sort[row] = 0, -1
        for at, device in enumerate(devices):
            self.left[row, at] = max(WHOLE - used.get(device.name, 0), 0)
            self.sort[row, at] = self._names.id((device.kind, device.model))

    def _widen(self, rows: int, width: int) -> None:
        more = (0, rows - self.left.shape[0]), (0, width - self.left.shape[1])
        self.left = np.pad(self.left, more)
        self.sort = np.pad(self.sort, more, constant_values=-1)
