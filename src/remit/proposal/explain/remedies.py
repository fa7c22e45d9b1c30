"""Smallest changes that would make a replica fit.

Each candidate change is tried with the placement kernel on a frozen copy of the nodes (what_if.py). Nothing is changed in
the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final

import numpy as np
from msgspec.structs import replace

from remit.law.fit import Requirements, DeviceRequirement
from remit.model.kinds import Device, Node
from remit.model.resources import DEVICES_PREFIX, WHOLE_DEVICE, Amount
from remit.proposal.explain.result_types import Change, Remedy
from remit.proposal.explain.what_if import NODE_STATE_FILTERS, NODE_HEALTH, TAKES_WORK, Trial, ready_node
from remit.proposal.placement.devices import fits_devices
from remit.proposal.placement.plugins import PEER_CHECKS, CAPACITY_CHECKS, applies

RELAXED_MAX: Final = 3
"""Filters relaxed together, at most. A remedy with more changes would amount to a different workload."""
OPTIONS_MAX: Final = 3
SHAPES_MAX: Final = 64
NODES_EXAMINED_MAX: Final = 256
NAMED_MAX: Final = 3


def find_remedies(trial: Trial, want: int) -> tuple[Remedy, ...]:
    """Remedies that make room for `want` replicas at once, capacity changes first.

    Returns nothing if they fit already, or if no remedy within the limits of this module would be enough.
    """
    if trial.places(want):
        return ()
    names = _relaxable_filters(trial)
    found = [*_capacity_remedies(trial, want, ()), *_relaxations(trial, names, want)]
    for some in combinations_upto(names, RELAXED_MAX - 1) if not found else ():
        found = list(_capacity_remedies(trial.eased(*some), want, some))
        if found:
            break
    return tuple(found)


def combinations_upto(names: Sequence[str], most: int) -> Iterator[tuple[str, ...]]:
    for size in range(1, most + 1):
        yield from combinations(names, size)


def _relaxable_filters(trial: Trial) -> list[str]:
    """Filters that reject a node now, or might once another filter is relaxed. Capacity filters are excluded: see `_capacity_remedies`.
    """
    refusing = {one.name for one in trial.refusing()}
    return [
        one.name
        for one in trial.kernel.all_filters
        if one.check not in CAPACITY_CHECKS
        and one.name not in trial.setting.fixed
        and applies(one, trial.one.ask)
        and (one.name in refusing or one.check in PEER_CHECKS)
    ]


def _relaxations(trial: Trial, names: Sequence[str], want: int) -> list[Remedy]:
    """The smallest sets of filters whose relaxation is sufficient; among sets of equal size, those that open the most nodes."""
    for size in range(1, RELAXED_MAX + 1):
        found = []
        for some in combinations(names, size):
            eased = trial.eased(*some)
            if eased.places(want):
                found.append(_remedy(eased, _filter_changes(trial, eased, some, want)))
        if found:
            return sorted(found, key=lambda one: -one.fits)[:OPTIONS_MAX]
    return []


def _filter_changes(trial: Trial, eased: Trial, names: Sequence[str], want: int) -> list[Change]:
    """Changes for these filters. If nodes must be repaired, the change names a minimal set of nodes that is sufficient."""
    nodes: tuple[str, ...] = ()
    if NODE_STATE_FILTERS & frozenset(names):
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


def _remedy(trial: Trial, changes: Iterable[Change]) -> Remedy:
    rows = np.flatnonzero(trial.fits())
    return Remedy(tuple(changes), len(rows), tuple(trial.kernel.name(row) for row in rows[:NAMED_MAX].tolist()))


# -- capacity ------------------------------------------------------------------------------------------------------------------


def _capacity_remedies(trial: Trial, want: int, eased: Sequence[str]) -> Iterator[Remedy]:
    """More capacity on one node, or more nodes, given a trial in which the filters `eased` are relaxed already."""
    if want == 1 and (found := _smallest_growth(trial)) is not None:
        change, larger = found
        before = [Change("filter", name, nodes=(change.what,) if name in NODE_STATE_FILTERS else ()) for name in eased]
        tried = trial.grown(larger)
        if tried.places(1):
            yield _remedy(tried, [*before, change])
            asked = dict(trial.one.ask.resources)
            if all(count < asked.get(name, 0) for name, count in change.amount):
                yield Remedy((*before, Change("shrink", amount=change.amount)), 1, (change.what,))
    if not NODE_STATE_FILTERS & frozenset(eased) and (more := _fewest_more_nodes(trial, want)) is not None:
        node, count, tried = more
        changes = (*(Change("filter", name) for name in eased), Change("nodes", node, count=count))
        yield Remedy(changes, int(tried.fits().sum()))


def _smallest_growth(trial: Trial) -> tuple[Change, Node] | None:
    """The node that lacks only capacity, and the least of it: the change it needs, and the node after that change."""
    columns, ask = trial.columns, trial.one.ask
    rows = np.flatnonzero(trial.kernel.roomless(trial.one))
    if not len(rows):
        return None
    short = np.zeros(len(rows))
    for name, need in ask.resources:
        if need:
            free = columns.free.get(name)
            short += np.maximum(need - free[rows], 0) / need if free is not None else 1.0
    nearest = rows[np.argsort(short, kind="stable")][:NODES_EXAMINED_MAX]
    sized = []
    for order, row in enumerate(nearest.tolist()):
        node = columns.nodes[row]
        if node is not None:
            devices = missing_devices(ask, node.spec.devices, columns.used[row])
            sized.append((len(devices), order, row, node, devices))
    if not sized:
        return None
    _, _, row, node, devices = min(sized, key=lambda one: one[:2])
    resources = Amount(_missing_resources(trial, row))
    # Free capacity is negative on a node that was shrunk below its usage; the shortage counts from there.
    spec = replace(node.spec, capacity=node.spec.capacity + resources, devices=(*node.spec.devices, *devices))
    amount = sum((Amount({DEVICES_PREFIX + device.kind: WHOLE_DEVICE}) for device in devices), resources)
    models = tuple(sorted({device.model for device in devices if device.model}))
    return Change("grow", node.metadata.name, amount, models=models), replace(node, spec=spec)


def _missing_resources(trial: Trial, row: int) -> dict[str, int]:
    free = trial.columns.free
    left = {name: int(free[name][row]) if name in free else 0 for name, _ in trial.one.ask.resources}
    return {name: need - left[name] for name, need in trial.one.ask.resources if need > left[name]}


def missing_devices(ask: Requirements, devices: Sequence[Device], used: Mapping[str, int]) -> list[Device]:
    """The fewest devices to add to a node so that all device requirements are met.

    Requirements are added one device at a time; whenever the set no longer fits, one device is added. A device that
    satisfies one requirement can be reassigned to another (augmenting paths), so no other order of requirements needs fewer
    devices.
    """
    extra: list[Device] = []
    amounts = [0] * len(ask.whole_devices)

    def add(part: DeviceRequirement) -> None:
        extra.append(Device(name=f"more-{len(extra)}", kind=part.kind, model=part.models[0] if part.models else ""))

    def fits(asked: Requirements) -> bool:
        return fits_devices(asked, (*devices, *extra), used)

    for at, part in enumerate(ask.whole_devices):
        for _ in range(part.amount):
            amounts[at] += 1
            so_far = tuple(one._replace(amount=amount) for one, amount in zip(ask.whole_devices, amounts, strict=True))
            if not fits(ask._replace(whole_devices=so_far, device_shares=())):
                add(part)
    for part in ask.device_shares:
        if not fits(ask._replace(whole_devices=(), device_shares=(part,))):
            add(part)
    return extra


def _fewest_more_nodes(trial: Trial, want: int) -> tuple[str, int, Trial] | None:
    """Which existing node to add copies of, and how many: the fewest copies; on a tie the smallest node."""
    best: tuple[str, int, Trial] | None = None
    for node in _node_shapes(trial):
        most = want if best is None else best[1] - 1
        tried = _with_copies(trial, node, most)
        if not tried.places(want):
            continue
        few, enough = 0, most
        while enough - few > 1:
            middle = (few + enough) // 2
            if _with_copies(trial, node, middle).places(want):
                enough = middle
            else:
                few = middle
        best = node.metadata.name, enough, _with_copies(trial, node, enough)
        if enough == 1:
            break
    return best


def _with_copies(trial: Trial, node: Node, count: int) -> Trial:
    meta = node.metadata
    copies = [replace(node, metadata=replace(meta, name=f"{meta.name}-more-{number}")) for number in range(1, count + 1)]
    return trial.grown(*(ready_node(copy) for copy in copies))


def _node_shapes(trial: Trial) -> list[Node]:
    """One node of each shape that would fit the replica if it were empty, ready and schedulable; smallest first."""
    columns, one = trial.columns, trial.one
    trial.kernel.refresh(one)
    could = one.static.copy()
    for name, need in one.ask.resources:
        at = columns.resources.get(name)
        could &= columns.capacity[at] >= need if at is not None else False
    keys = [term.peers.topology_key for term in (*one.ask.spread, *one.ask.affinity, *one.ask.anti_affinity)]
    keys += [index.topology_key for index in trial.peers.anti_affinity_owners(one.ask)]
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
