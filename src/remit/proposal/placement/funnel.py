"""Nodes rejected by each filter, and the node nearest to fitting.

Used for decision records and explanations. Nothing is placed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from remit.law import fit
from remit.law.fit import Requirements
from remit.model.claims import Code
from remit.model.kinds import Node
from remit.observation.node_columns import Bools, Ints, SelectedRows
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.devices import fits_devices
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import CAPACITY_CHECKS, Filter, UnblockEvent, applies

_NO_DEVICES: Ints = np.zeros(1, dtype=np.int64)
"""Column of a device type that no node has."""
_DECLARATION_EVENTS: Final = frozenset((UnblockEvent.NODE, UnblockEvent.POLICY, UnblockEvent.WORKLOAD))
"""Events caused by a declaration. A rejection that only these can end does not go away by waiting."""


_REJECTIONS: Final = {
    "node-health": "not ready",
    "schedulable": "cordoned or draining",
    "placement": "outside the requested regions, zones and pools",
    "policy": "not allowed by the policy",
    "taints": "taint not tolerated",
    "labels": "node selector does not match",
    "spread": "topology spread would be violated",
    "affinity": "no matching replica for affinity",
    "anti-affinity": "runs a replica excluded by anti-affinity",
    "others-anti-affinity": "runs a replica whose anti-affinity excludes this one",
    "overrides": "excluded by an override",
}
"""By filter name, why a node was rejected. Capacity filters are worded from the requirements: see `_rejection`."""


class FunnelStep(NamedTuple):
    filter: Filter
    refused: int
    without_devices: int = 0
    """How many of the rejected nodes do not have the requested devices, even if none of theirs were in use."""


class Funnel(NamedTuple):
    """Each node is counted at the first filter that rejects it, so rejected and fitting nodes add up to `nodes`."""

    nodes: int
    steps: tuple[FunnelStep, ...]
    fits: int

    @property
    def dominant(self) -> FunnelStep | None:
        """The last filter that rejected nodes, which the nodes that got furthest failed: the one to look at first."""
        return self.steps[-1] if self.steps else None

    @property
    def reason(self) -> Code:
        return self.dominant.filter.code if self.dominant is not None else Code.NO_ROOM

    def unblock_events(self) -> tuple[UnblockEvent, ...]:
        """Events after which a rejected node may pass. A new node can always help."""
        events = dict.fromkeys(event for step in self.steps for event in step.filter.unblock_events)
        return tuple(dict.fromkeys((*events, UnblockEvent.NODE)))

    def pairs(self) -> tuple[tuple[str, int], ...]:
        return tuple((step.filter.name, step.refused) for step in self.steps)


def funnel(kernel: Kernel, work_class: WorkClass) -> Funnel:
    kernel.refresh(work_class)
    columns = kernel.columns
    remaining: Bools = columns.region >= 0  # rows without a node
    nodes = int(remaining.sum())
    steps = []
    for filter_ in kernel.all_filters:
        if not applies(filter_, work_class.requirements):
            continue
        passed = np.asarray(
            kernel.check(filter_, work_class.column_requirements, columns)
        )  # one value per row, or a single value for all
        rejected: Bools = remaining & ~passed
        refused = int(np.count_nonzero(rejected))
        if refused:
            steps.append(FunnelStep(filter_, refused, _count_without_devices(kernel, work_class, filter_, rejected)))
            remaining = remaining & passed
    return Funnel(nodes, tuple(steps), int(remaining.sum()))


def _count_without_devices(kernel: Kernel, work_class: WorkClass, filter_: Filter, rejected: Bools) -> int:
    if filter_.check is not fit.devices and filter_.check is not fit.shares:
        return 0
    declared = kernel.declared_devices
    declared.refresh()
    has_devices = filter_.check(work_class.requirements, cast(Any, declared), fit.NO_PEERS)
    return int(np.count_nonzero(rejected & np.logical_not(has_devices)))


def rejection_text(node_funnel: Funnel, requirements: Requirements) -> str:
    """How many nodes fit, and why the others do not: `0 of 3 nodes fit: 1 not ready, 2 have no gpu`."""
    if not node_funnel.nodes:
        return "the cluster has no nodes"
    rejections = ", ".join(text for step in node_funnel.steps for text in _rejections(step, requirements))
    return f"{node_funnel.fits} of {node_funnel.nodes} nodes fit" + (f": {rejections}" if rejections else "")


def _rejections(step: FunnelStep, requirements: Requirements) -> Iterator[str]:
    """The nodes without the requested devices are counted apart: for them, waiting until a device is freed does not help."""
    if step.without_devices:
        parts = [(part, _kind(part)) for part in (*requirements.whole_devices, *requirements.device_shares) if part.amount]
        wanted = " or ".join(
            f"fewer than {part.amount} {kind}" if part in requirements.whole_devices and part.amount > 1 else f"no {kind}"
            for part, kind in parts
        )
        yield f"{step.without_devices} {'has' if step.without_devices == 1 else 'have'} {wanted}"
    if step.refused > step.without_devices:
        yield f"{step.refused - step.without_devices} {_rejection(step.filter, requirements)}"


def _kind(part: fit.DeviceRequirement) -> str:
    return f"{part.kind} of model {' or '.join(part.models)}" if part.models else part.kind


def _rejection(filter_: Filter, requirements: Requirements) -> str:
    if filter_.check is fit.resources:
        return f"too little free {' or '.join(name for name, need in requirements.resources if need)}"
    if filter_.check is fit.devices:
        parts = [part for part in requirements.whole_devices if part.amount]
        return " or ".join(
            f"no free {_kind(part)}" if part.amount == 1 else f"fewer than {part.amount} free {_kind(part)}" for part in parts
        )
    if filter_.check is fit.shares:
        return " or ".join(f"no {_kind(part)} with {part.amount}m free" for part in requirements.device_shares)
    return _REJECTIONS.get(filter_.name, f"rejected by filter {filter_.name}")


def refused_only_by(kernel: Kernel, work_class: WorkClass, rows: Ints, filters: Sequence[Filter]) -> bool:
    """Whether at least one of these rows is rejected by some of these filters and by no other filter."""
    site = SelectedRows(kernel.columns, rows)
    refused = np.zeros(len(rows), dtype=np.bool_)
    for filter_ in filters:
        refused |= np.logical_not(kernel.check(filter_, work_class.column_requirements, site))
    for filter_ in kernel.all_filters if refused.any() else ():
        if filter_ not in filters and applies(filter_, work_class.requirements):
            refused &= kernel.check(filter_, work_class.column_requirements, site)
    return bool(refused.any())


class NearestFit(NamedTuple):
    """The node nearest to fitting: the filters that reject it, and what it lacks by resource or device kind."""

    row: int
    refused: tuple[Filter, ...]
    missing: dict[str, int]


def nearest_fit(kernel: Kernel, work_class: WorkClass) -> NearestFit | None:
    """The node rejected by the fewest filters; among nodes that lack only capacity, the one with the smallest relative
    shortage.
    """
    kernel.refresh(work_class)
    columns = kernel.columns
    exists = columns.region >= 0
    if not exists.any():
        return None
    refusals = np.zeros(len(exists), dtype=np.int64)
    for filter_ in kernel.all_filters:
        if applies(filter_, work_class.requirements):
            passed = kernel.check(filter_, work_class.column_requirements, columns)
            refusals += np.where(passed, 0, 1 if filter_.check in CAPACITY_CHECKS else 100)
    shortage = np.zeros(len(exists))
    for name, need in work_class.requirements.resources:
        if need:
            free = columns.free.get(name)
            shortage += (np.maximum(need - free, 0) if free is not None else need) / need
    for part in work_class.requirements.whole_devices:
        count = sum(columns.whole_devices.get((part.kind, model), _NO_DEVICES) for model in part.models or (fit.ANY_MODEL,))
        shortage += np.maximum(part.amount - count, 0) / max(part.amount, 1)
    for part in work_class.requirements.device_shares:
        most = [columns.largest_shares.get((part.kind, model), _NO_DEVICES) for model in part.models or (fit.ANY_MODEL,)]
        shortage += np.maximum(part.amount - np.maximum.reduce(np.broadcast_arrays(*most)), 0) / max(part.amount, 1)
    refusals = np.where(exists, refusals, np.iinfo(np.int64).max)
    row = int(np.lexsort((np.arange(len(exists)), shortage, refusals))[0])
    site = SelectedRows(columns, np.array([row]))
    refused = tuple(
        filter_
        for filter_ in kernel.all_filters
        if applies(filter_, work_class.requirements) and not np.all(kernel.check(filter_, work_class.column_requirements, site))
    )
    return NearestFit(row, refused, missing_capacity(kernel, work_class, row))


def missing_capacity(kernel: Kernel, work_class: WorkClass, row: int) -> dict[str, int]:
    """Capacity that this node lacks: resource amounts, and by device kind whole devices or thousandths of one."""
    columns, missing = kernel.columns, dict[str, int]()
    for name, need in work_class.requirements.resources:
        free = int(columns.free[name][row]) if name in columns.free else 0
        if free < need:
            missing[name] = need - free
    for part in work_class.requirements.whole_devices:
        free_devices = sum(_at(columns.whole_devices, (part.kind, model), row) for model in part.models or (fit.ANY_MODEL,))
        if free_devices < part.amount:
            missing[part.kind] = part.amount - free_devices
    for part in work_class.requirements.device_shares:
        largest_share = max(_at(columns.largest_shares, (part.kind, model), row) for model in part.models or (fit.ANY_MODEL,))
        if largest_share < part.amount:
            missing[f"{part.kind} share"] = part.amount - largest_share
    return missing


def could_ever_fit(kernel: Kernel, work_class: WorkClass) -> bool:
    """Whether the class would fit on some existing node if that node were empty, ready and schedulable. If not, waiting does
    not help.

    A third-party filter counts only if all of its unblock events are declarations (node, policy or workload must change). A
    filter that can pass when capacity is released, or with time, is worth waiting for.
    """
    kernel.refresh(work_class)
    columns = kernel.columns
    could_fit = work_class.static.copy()
    for filter_ in kernel.all_filters:
        if (
            filter_.third_party
            and _DECLARATION_EVENTS.issuperset(filter_.unblock_events)
            and applies(filter_, work_class.requirements)
        ):
            could_fit &= kernel.check(filter_, work_class.column_requirements, columns)
    for name, need in work_class.requirements.resources:
        at = columns.resources.get(name)
        could_fit &= columns.capacity[at] >= need if at is not None else np.zeros(len(could_fit), dtype=np.bool_)
    rows = np.flatnonzero(could_fit)
    if not (work_class.requirements.whole_devices or work_class.requirements.device_shares):
        return bool(len(rows))
    return any(_empty_fits(work_class, columns.nodes[row]) for row in rows.tolist())


def _empty_fits(work_class: WorkClass, node: Node | None) -> bool:
    return node is not None and fits_devices(work_class.requirements, node.spec.devices, {})


def _at(columns: Mapping[fit.DeviceModel, Ints], model: fit.DeviceModel, row: int) -> int:
    column = columns.get(model)
    return 0 if column is None else int(column[row])
