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

from remit.law.fit import DeviceRequirement, Requirements
from remit.model.kinds import Device, Node
from remit.model.resources import DEVICES_PREFIX, WHOLE_DEVICE, Amount
from remit.proposal.explain.result_types import Change, Remedy
from remit.proposal.explain.what_if import NODE_HEALTH, NODE_STATE_FILTERS, SCHEDULABLE, Trial, ready_node
from remit.proposal.placement.devices import fits_devices
from remit.proposal.placement.plugins import CAPACITY_CHECKS, PEER_CHECKS, applies

RELAXED_MAX: Final = 3
"""Filters relaxed together, at most. A remedy with more changes would amount to a different workload."""
OPTIONS_MAX: Final = 3
SHAPES_MAX: Final = 64
NODES_EXAMINED_MAX: Final = 256
NAMED_MAX: Final = 3


def find_remedies(trial: Trial, count: int) -> tuple[Remedy, ...]:
    """Remedies that make room for `count` replicas at once, capacity changes first.

    Returns nothing if they fit already, or if no remedy within the limits of this module would be enough.
    """
    if trial.can_place(count):
        return ()
    names = _relaxable_filters(trial)
    remedies = [*_capacity_remedies(trial, count, ()), *_relaxations(trial, names, count)]
    for relaxed in combinations_upto(names, RELAXED_MAX - 1) if not remedies else ():
        remedies = list(_capacity_remedies(trial.relaxed(*relaxed), count, relaxed))
        if remedies:
            break
    return tuple(remedies)


def combinations_upto(names: Sequence[str], most: int) -> Iterator[tuple[str, ...]]:
    for size in range(1, most + 1):
        yield from combinations(names, size)


def _relaxable_filters(trial: Trial) -> list[str]:
    """Filters that reject a node now, or might once another filter is relaxed; capacity filters are excluded."""
    refusing = {filter_.name for filter_ in trial.refusing_filters()}
    return [
        filter_.name
        for filter_ in trial.kernel.all_filters
        if filter_.check not in CAPACITY_CHECKS
        and filter_.name not in trial.setting.fixed
        and applies(filter_, trial.work_class.requirements)
        and (filter_.name in refusing or filter_.check in PEER_CHECKS)
    ]


def _relaxations(trial: Trial, names: Sequence[str], count: int) -> list[Remedy]:
    """The smallest sets of filters whose relaxation is sufficient; among sets of equal size, those that open the most nodes."""
    for size in range(1, RELAXED_MAX + 1):
        remedies = []
        for combination in combinations(names, size):
            relaxed = trial.relaxed(*combination)
            if relaxed.can_place(count):
                remedies.append(_remedy(relaxed, _filter_changes(trial, relaxed, combination, count)))
        if remedies:
            return sorted(remedies, key=lambda remedy: -remedy.fits)[:OPTIONS_MAX]
    return []


def _filter_changes(trial: Trial, relaxed: Trial, names: Sequence[str], count: int) -> list[Change]:
    """Return one change for each of these filters. If nodes must be repaired or uncordoned, it names a minimal sufficient set
    of nodes.
    """
    nodes: tuple[str, ...] = ()
    if NODE_STATE_FILTERS & frozenset(names):
        used = dict.fromkeys(relaxed.kernel.node_name(row) for row in relaxed.try_place(count).rows)
        nodes = tuple(used)
        for node in used:
            others = tuple(name for name in nodes if name != node)
            if trial.relaxed(*names, nodes=others).can_place(count):
                nodes = others
    rows, columns = trial.columns.rows, trial.columns
    refused = {NODE_HEALTH: ~columns.ready, SCHEDULABLE: ~columns.open}
    return [
        Change("filter", name, nodes=tuple(node for node in nodes if name in refused and refused[name][rows[node]]))
        for name in names
    ]


def _remedy(trial: Trial, changes: Iterable[Change]) -> Remedy:
    rows = np.flatnonzero(trial.fits())
    return Remedy(tuple(changes), len(rows), tuple(trial.kernel.node_name(row) for row in rows[:NAMED_MAX].tolist()))


# -- capacity ------------------------------------------------------------------------------------------------------------------


def _capacity_remedies(trial: Trial, count: int, relaxed: Sequence[str]) -> Iterator[Remedy]:
    """More capacity on one node, or more nodes, given a trial in which the filters `relaxed` are relaxed already."""
    if count == 1 and (growth := _smallest_growth(trial)) is not None:
        change, larger = growth
        before = [Change("filter", name, nodes=(change.what,) if name in NODE_STATE_FILTERS else ()) for name in relaxed]
        changed = trial.with_nodes(larger)
        if changed.can_place(1):
            yield _remedy(changed, [*before, change])
            requested = dict(trial.work_class.requirements.resources)
            if all(count < requested.get(name, 0) for name, count in change.amount):
                yield Remedy((*before, Change("shrink", amount=change.amount)), 1, (change.what,))
    if not NODE_STATE_FILTERS & frozenset(relaxed) and (more := _fewest_more_nodes(trial, count)) is not None:
        node, count, changed = more
        changes = (*(Change("filter", name) for name in relaxed), Change("nodes", node, count=count))
        yield Remedy(changes, int(changed.fits().sum()))


def _smallest_growth(trial: Trial) -> tuple[Change, Node] | None:
    """The node that lacks only capacity, and the least of it: the change it needs, and the node after that change."""
    columns, requirements = trial.columns, trial.work_class.requirements
    rows = np.flatnonzero(trial.kernel.without_capacity_check(trial.work_class))
    if not len(rows):
        return None
    shortage = np.zeros(len(rows))
    for name, need in requirements.resources:
        if need:
            free = columns.free.get(name)
            shortage += np.maximum(need - free[rows], 0) / need if free is not None else 1.0
    nearest = rows[np.argsort(shortage, kind="stable")][:NODES_EXAMINED_MAX]
    sized = []
    for order, row in enumerate(nearest.tolist()):
        node = columns.nodes[row]
        if node is not None:
            devices = missing_devices(requirements, node.spec.devices, columns.used[row])
            sized.append((len(devices), order, row, node, devices))
    if not sized:
        return None
    _, _, row, node, devices = min(sized, key=lambda entry: entry[:2])
    resources = Amount(_missing_resources(trial, row))
    # Free capacity is negative on a node that was shrunk below its usage; the shortage counts from there.
    spec = replace(node.spec, capacity=node.spec.capacity + resources, devices=(*node.spec.devices, *devices))
    amount = sum((Amount({DEVICES_PREFIX + device.kind: WHOLE_DEVICE}) for device in devices), resources)
    models = tuple(sorted({device.model for device in devices if device.model}))
    return Change("grow", node.metadata.name, amount, models=models), replace(node, spec=spec)


def _missing_resources(trial: Trial, row: int) -> dict[str, int]:
    free = trial.columns.free
    available = {name: int(free[name][row]) if name in free else 0 for name, _ in trial.work_class.requirements.resources}
    return {name: need - available[name] for name, need in trial.work_class.requirements.resources if need > available[name]}


def missing_devices(requirements: Requirements, devices: Sequence[Device], used: Mapping[str, int]) -> list[Device]:
    """The fewest devices to add to a node so that all device requirements are met.

    Requirements are added one device at a time; whenever the set no longer fits, one device is added. A device that
    satisfies one requirement can be reassigned to another (augmenting paths), so no other order of requirements needs fewer
    devices.
    """
    extra: list[Device] = []
    amounts = [0] * len(requirements.whole_devices)

    def add(part: DeviceRequirement) -> None:
        extra.append(Device(name=f"more-{len(extra)}", kind=part.kind, model=part.models[0] if part.models else ""))

    def fits(subset: Requirements) -> bool:
        return fits_devices(subset, (*devices, *extra), used)

    for at, part in enumerate(requirements.whole_devices):
        for _ in range(part.amount):
            amounts[at] += 1
            so_far = tuple(
                requirement._replace(amount=amount)
                for requirement, amount in zip(requirements.whole_devices, amounts, strict=True)
            )
            if not fits(requirements._replace(whole_devices=so_far, device_shares=())):
                add(part)
    for part in requirements.device_shares:
        if not fits(requirements._replace(whole_devices=(), device_shares=(part,))):
            add(part)
    return extra


def _fewest_more_nodes(trial: Trial, count: int) -> tuple[str, int, Trial] | None:
    """Which existing node to add copies of, and how many: the fewest copies; on a tie the smallest node."""
    best: tuple[str, int, Trial] | None = None
    for node in _node_shapes(trial):
        most = count if best is None else best[1] - 1
        changed = _with_copies(trial, node, most)
        if not changed.can_place(count):
            continue
        too_few, enough = 0, most
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if _with_copies(trial, node, middle).can_place(count):
                enough = middle
            else:
                too_few = middle
        best = node.metadata.name, enough, _with_copies(trial, node, enough)
        if enough == 1:
            break
    return best


def _with_copies(trial: Trial, node: Node, count: int) -> Trial:
    meta = node.metadata
    copies = [replace(node, metadata=replace(meta, name=f"{meta.name}-more-{number}")) for number in range(1, count + 1)]
    return trial.with_nodes(*(ready_node(copy) for copy in copies))


def _node_shapes(trial: Trial) -> list[Node]:
    """One node of each shape that would fit the replica if it were empty, ready and schedulable; smallest first."""
    columns, work_class = trial.columns, trial.work_class
    trial.kernel.refresh(work_class)
    could_fit = work_class.static.copy()
    for name, need in work_class.requirements.resources:
        at = columns.resources.get(name)
        could_fit &= columns.capacity[at] >= need if at is not None else False
    keys = [
        term.peers.topology_key
        for term in (*work_class.requirements.spread, *work_class.requirements.affinity, *work_class.requirements.anti_affinity)
    ]
    keys += [index.topology_key for index in trial.peers.anti_affinity_owners(work_class.requirements)]
    places = [columns.domains(key).ids for key in dict.fromkeys(keys) if key != "node"]
    shapes: dict[object, tuple[float, Node]] = {}
    for row in np.flatnonzero(could_fit).tolist():
        node = columns.nodes[row]
        if node is None or not fits_devices(work_class.requirements, node.spec.devices, {}):
            continue
        spec = node.spec
        devices = tuple(sorted((device.kind, device.model) for device in spec.devices))
        shape = (spec.region, spec.zone, spec.pool, spec.capacity, devices, spec.taints, tuple(int(ids[row]) for ids in places))
        if shape not in shapes:
            size = sum(spec.capacity.get(name) / need for name, need in work_class.requirements.resources if need) + len(
                devices
            )
            shapes[shape] = size, node
    ordered = sorted(shapes.values(), key=lambda pair: (pair[0], pair[1].metadata.name))
    return [node for _, node in ordered[:SHAPES_MAX]]
