"""Smallest changes that would make a replica fit.

The smallest changes, each tried with the kernel on a frozen copy. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final

import numpy as np
from msgspec.structs import replace

from remit.law.fit import Ask, Devices
from remit.model.kinds import Device, Node
from remit.model.resources import DEVICES, WHOLE, Amount
from remit.proposal.explain.result_types import Change, Unblock
from remit.proposal.explain.what_if import MENDED, NODE_HEALTH, TAKES_WORK, Trial, ready_node
from remit.proposal.placement.devices import fits_devices
from remit.proposal.placement.plugins import COUPLED, ROOM, applies

EASED_MAX: Final = 3
"""How many filters are eased together, at most: whoever would have to change more has other work in mind."""
OPTIONS_MAX: Final = 3
SHAPES_MAX: Final = 64
LOOK_AT: Final = 256
NAMED_MAX: Final = 3


def options(trial: Trial, want: int) -> tuple[Unblock, ...]:
    """What would do for so many at once, the capacity first; nothing, if they find their places already or nothing would do."""
    if trial.places(want):
        return ()
    names = _names(trial)
    found = [*_capacity(trial, want, ()), *_eased(trial, names, want)]
    for some in combinations_upto(names, EASED_MAX - 1) if not found else ():
        found = list(_capacity(trial.eased(*some), want, some))
        if found:
            break
    return tuple(found)


def combinations_upto(names: Sequence[str], most: int) -> Iterator[tuple[str, ...]]:
    for size in range(1, most + 1):
        yield from combinations(names, size)


def _names(trial: Trial) -> list[str]:
    """The filters that may be in the way, now or once another one is not. Room is not among them: that is capacity."""
    refusing = {one.name for one in trial.refusing()}
    return [
        one.name
        for one in trial.kernel.all_filters
        if one.check not in ROOM
        and one.name not in trial.setting.fixed
        and applies(one, trial.one.ask)
        and (one.name in refusing or one.check in COUPLED)
    ]


def _eased(trial: Trial, names: Sequence[str], want: int) -> list[Unblock]:
    """The fewest filters that it would do to ease; of equally many, those that open the most nodes."""
    for size in range(1, EASED_MAX + 1):
        found = []
        for some in combinations(names, size):
            eased = trial.eased(*some)
            if eased.places(want):
                found.append(_unblock(eased, _changes(trial, eased, some, want)))
        if found:
            return sorted(found, key=lambda one: -one.fits)[:OPTIONS_MAX]
    return []


def _changes(trial: Trial, eased: Trial, names: Sequence[str], want: int) -> list[Change]:
    """The filters to ease. Where that means to put nodes right, a few will do: which, is said."""
    nodes: tuple[str, ...] = ()
    if MENDED & frozenset(names):
        used = dict.fromkeys(eased.kernel.name(row) for row in eased.tried(want).rows)
        nodes = tuple(used)
        for one in used:
            rest = tuple(name for name in nodes if name != one)
            if trial.eased(*names, nodes=rest).places(want):
                nodes = rest
    rows, columns = trial.columns.rows, trial.columns
    refused = {NODE_HEALTH: ~columns.ready, TAKES_WORK: ~columns.open}
    return [
        Change("filter", name, nodes=tuple(one for one in nodes if name in refused and refused[name][rows[one]]))
        for name in names
    ]


def _unblock(trial: Trial, changes: Iterable[Change]) -> Unblock:
    rows = np.flatnonzero(trial.fits())
    return Unblock(tuple(changes), len(rows), tuple(trial.kernel.name(row) for row in rows[:NAMED_MAX].tolist()))


# -- capacity ------------------------------------------------------------------------------------------------------------------


def _capacity(trial: Trial, want: int, eased: Sequence[str]) -> Iterator[Unblock]:
    """More room on one node, or more nodes, in a trial in which these filters are eased already."""
    if want == 1 and (found := _growth(trial)) is not None:
        change, larger = found
        before = [Change("filter", name, nodes=(change.what,) if name in MENDED else ()) for name in eased]
        tried = trial.grown(larger)
        if tried.places(1):
            yield _unblock(tried, [*before, change])
            asked = dict(trial.one.ask.resources)
            if all(count < asked.get(name, 0) for name, count in change.amount):
                yield Unblock((*before, Change("shrink", amount=change.amount)), 1, (change.what,))
    if not MENDED & frozenset(eased) and (more := _more_nodes(trial, want)) is not None:
        node, count, tried = more
        changes = (*(Change("filter", name) for name in eased), Change("nodes", node, count=count))
        yield Unblock(changes, int(tried.fits().sum()))


def _growth(trial: Trial) -> tuple[Change, Node] | None:
    """Which node lacks nothing but room, and the least of that; how much; and what it would be with it."""
    columns, ask = trial.columns, trial.one.ask
    rows = np.flatnonzero(trial.kernel.roomless(trial.one))
    if not len(rows):
        return None
    short = np.zeros(len(rows))
    for name, need in ask.resources:
        if need:
            free = columns.free.get(name)
            short += np.maximum(need - free[rows], 0) / need if free is not None else 1.0
    nearest = rows[np.argsort(short, kind="stable")][:LOOK_AT]
    sized = []
    for order, row in enumerate(nearest.tolist()):
        node = columns.nodes[row]
        if node is not None:
            devices = missing_devices(ask, node.spec.devices, columns.used[row])
            sized.append((len(devices), order, row, node, devices))
    if not sized:
        return None
    _, _, row, node, devices = min(sized, key=lambda one: one[:2])
    resources = Amount(_short(trial, row))
    # Less than nothing may be left of a node that shrank; what is lacking counts from there.
    spec = replace(node.spec, capacity=node.spec.capacity + resources, devices=(*node.spec.devices, *devices))
    amount = sum((Amount({DEVICES + device.kind: WHOLE}) for device in devices), resources)
    models = tuple(sorted({device.model for device in devices if device.model}))
    return Change("grow", node.metadata.name, amount, models=models), replace(node, spec=spec)


def _short(trial: Trial, row: int) -> dict[str, int]:
    free = trial.columns.free
    left = {name: int(free[name][row]) if name in free else 0 for name, _ in trial.one.ask.resources}
    return {name: need - left[name] for name, need in trial.one.ask.resources if need > left[name]}


def missing_devices(ask: Ask, devices: Sequence[Device], used: Mapping[str, int]) -> list[Device]:
    """The fewest devices that a node would need beside its own, for the ask to find all that it wants there.

    One after another, each wanted device is asked for together with those before it; for what is not found one is added. Since
    a device that serves one want may serve another in its place, no other order would come to fewer.
    """
    extra: list[Device] = []
    amounts = [0] * len(ask.whole)

    def add(part: Devices) -> None:
        extra.append(Device(name=f"more-{len(extra)}", kind=part.kind, model=part.models[0] if part.models else ""))

    def fits(asked: Ask) -> bool:
        return fits_devices(asked, (*devices, *extra), used)

    for at, part in enumerate(ask.whole):
        for _ in range(part.amount):
            amounts[at] += 1
            so_far = tuple(one._replace(amount=amount) for one, amount in zip(ask.whole, amounts, strict=True))
            if not fits(ask._replace(whole=so_far, shares=())):
                add(part)
    for part in ask.shares:
        if not fits(ask._replace(whole=(), shares=(part,))):
            add(part)
    return extra


def _more_nodes(trial: Trial, want: int) -> tuple[str, int, Trial] | None:
    """Of which existing node how many more it takes: the fewest, and of equally few the smallest ones."""
    best: tuple[str, int, Trial] | None = None
    for node in _shapes(trial):
        most = want if best is None else best[1] - 1
        tried = _with_more(trial, node, most)
        if not tried.places(want):
            continue
        few, enough = 0, most
        while enough - few > 1:
            middle = (few + enough) // 2
            if _with_more(trial, node, middle).places(want):
                enough = middle
            else:
                few = middle
        best = node.metadata.name, enough, _with_more(trial, node, enough)
        if enough == 1:
            break
    return best


def _with_more(trial: Trial, node: Node, count: int) -> Trial:
    meta = node.metadata
    copies = [replace(node, metadata=replace(meta, name=f"{meta.name}-more-{number}")) for number in range(1, count + 1)]
    return trial.grown(*(ready_node(copy) for copy in copies))


def _shapes(trial: Trial) -> list[Node]:
    """One node of each shape that could take it, were it empty, healthy and open; the smallest first."""
    columns, one = trial.columns, trial.one
    trial.kernel.refresh(one)
    could = one.static.copy()
    for name, need in one.ask.resources:
        at = columns.resources.get(name)
        could &= columns.capacity[at] >= need if at is not None else False
    keys = [term.of.key for term in (*one.ask.spread, *one.ask.affinity, *one.ask.anti)]
    keys += [index.key for index in trial.peers.shunners(one.ask)]
    places = [columns.domains(key).ids for key in dict.fromkeys(keys) if key != "node"]
    found: dict[object, tuple[float, Node]] = {}
    for row in np.flatnonzero(could).tolist():
        node = columns.nodes[row]
        if node is None or not fits_devices(one.ask, node.spec.devices, {}):
            continue
        spec = node.spec
        devices = tuple(sorted((device.kind, device.model) for device in spec.devices))
        shape = (spec.region, spec.zone, spec.pool, spec.capacity, devices, spec.taints, tuple(int(ids[row]) for ids in places))
        if shape not in found:
            size = sum(spec.capacity.get(name) / need for name, need in one.ask.resources if need) + len(devices)
            found[shape] = size, node
    ordered = sorted(found.values(), key=lambda pair: (pair[0], pair[1].metadata.name))
    return [node for _, node in ordered[:SHAPES_MAX]]
