"""Which devices of a node does a replica get? Chosen here, and named in the claim; that some will do, law/fit.py has said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from remit.law.columns import Columns
from remit.law.fit import NOBODY, Ask, Devices, Model, devices_left
from remit.law.fit import devices as fit_whole
from remit.law.fit import shares as fit_shares
from remit.model.kinds import Device
from remit.model.resources import WHOLE


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
