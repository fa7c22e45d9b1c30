"""Builds a scheduler view of one revision, and compares a live view with a recomputed one.

`recompute` recalculates every sum from the view's own rows, which finds postings that were missed or made twice. `compare`
compares a view with one freshly listed from the store, which finds missed rows. Both are for tests and the simulator,
correct nothing, and must find nothing in a quiescent view (S23).

`frozen_view` builds a view from a listing and `view_of_manifests` from manifests; neither follows later changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from remit.law.charges import replica_postings
from remit.law.fit import PeerIndex, Requirements, free_devices
from remit.law.ledgers import DEVICE_PREFIX, ledgers_of, parent_charges
from remit.law.selectors import domain_of
from remit.model.kinds import Node, NodeHealth, NodeStatus, Policy, Tenant
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import RecordMetadata
from remit.model.objects import encode, key
from remit.model.records import Grant, PolicyRevision, PolicyRevisionSpec
from remit.observation.column_table import NONE
from remit.observation.postings import same_amounts
from remit.observation.replica_table import PHASES, ReplicaHold
from remit.observation.scheduler_view import LIST_RANGES, SchedulerView
from remit.observation.shapes import GenerationInfo
from remit.store.protocol import Head, Page, Row
from remit.world.interfaces import Clock

Sums = dict[str, dict[str, int]]


def recompute(view: SchedulerView) -> Iterator[str]:
    """Yield every sum of a view that differs from the sum over its rows and assumed bindings."""
    nodes: Sums = defaultdict(lambda: defaultdict(int))
    grants: Sums = defaultdict(lambda: defaultdict(int))
    for row, hold, requirements in _holders(view):
        victim_holds = (_victim_hold(view, victim, attempt) for victim, attempt in hold.victims.items())
        pairs, charges = replica_postings(hold, requirements, [victim for victim in victim_holds if victim is not None])
        for name, count in pairs:
            nodes[_node_at(view, row).metadata.name][name] += count
        for grant, charge in zip(hold.grants, charges, strict=True):
            for name, count in charge:
                grants[grant][name] += count
    yield from _check_nodes(view, nodes)
    yield from _check_ledgers(view, grants)
    yield from _check_counts(view)


def _holders(view: SchedulerView) -> Iterator[tuple[int, ReplicaHold, Requirements]]:
    replicas = view.replicas
    for slot in replicas.slots.values():
        if replicas.at.node[slot] != NONE:
            yield replicas.at.node[slot], replicas.hold_of(slot), view.requirements_of(slot)
    for slot, binding in view.assumed.items():
        yield (
            binding.row,
            ReplicaHold(PHASES[replicas.at.phase[slot]], binding.devices, binding.grants, {}),
            view.requirements_of(slot),
        )


def _victim_hold(view: SchedulerView, victim: str, attempt: str) -> tuple[ReplicaHold, Requirements] | None:
    slot = view.replicas.slots.get(victim)
    if slot is None or view.replicas.at.node[slot] == NONE or not view.replicas.is_attempt(slot, attempt):
        return None
    return view.replicas.hold_of(slot), view.requirements_of(slot)


def _node_at(view: SchedulerView, row: int) -> Node:
    node = view.columns.nodes[row]
    if node is None:
        raise LookupError(f"capacity is held on row {row}, which has no node")
    return node


def _check_nodes(view: SchedulerView, taken: Sums) -> Iterator[str]:
    columns = view.columns
    for name, row in columns.rows.items():
        spec, expected = _node_at(view, row).spec, taken[name]
        free = {resource: int(column[row]) for resource, column in columns.free.items()}
        expected_free = dict(spec.capacity.pairs)
        for resource, count in expected.items():
            if not resource.startswith(DEVICE_PREFIX):
                expected_free[resource] = expected_free.get(resource, 0) - count
        if not same_amounts(free, expected_free):
            yield f"node {name}: free {free}, but its holders leave {expected_free}"
        used = {
            resource.removeprefix(DEVICE_PREFIX): n
            for resource, n in expected.items()
            if resource.startswith(DEVICE_PREFIX) and n
        }
        if columns.used[row] != used:
            yield f"node {name}: devices used {columns.used[row]}, but their holders use {used}"
        whole_devices, shares = free_devices(spec.devices, used)
        actual_devices = {
            model: (int(column[row]), int(columns.largest_shares[model][row]))
            for model, column in columns.whole_devices.items()
        }
        if any(actual_devices[model] != (whole_devices.get(model, 0), shares.get(model, 0)) for model in actual_devices):
            yield f"node {name}: devices are recorded as {actual_devices}, but are {whole_devices}, {shares}"


def _check_ledgers(view: SchedulerView, charged: Sums) -> Iterator[str]:
    quota_ledgers = view.quota_ledgers
    granted_on: Sums = defaultdict(lambda: defaultdict(int))
    for grant in quota_ledgers.grants.values():
        for name, pairs in parent_charges(grant):
            for resource, count in pairs:
                granted_on[name][resource] += count
    owners: list[Tenant | Grant] = [*quota_ledgers.tenants.values(), *quota_ledgers.grants.values()]
    expected = {name: amount for owner in owners for name, amount, _ in ledgers_of(owner)}
    if expected.keys() != quota_ledgers.ledgers.keys():
        yield f"ledgers {sorted(expected.keys() ^ quota_ledgers.ledgers.keys())} exist without a row, or are missing"
    for name, ledger in quota_ledgers.ledgers.items():
        amount = dict(expected[name].pairs) if name in expected else {}
        if not (
            same_amounts(ledger.amount, amount)
            and same_amounts(ledger.granted_on, granted_on[name])
            and same_amounts(ledger.used, charged[name])
        ):
            actual = f"{ledger.amount}, granted on {ledger.granted_on}, used {ledger.used}"
            yield f"{name}: {actual}; by the rows {amount}, {dict(granted_on[name])}, {dict(charged[name])}"


def _check_counts(view: SchedulerView) -> Iterator[str]:
    replicas, shapes = view.replicas, view.shapes
    positions = [
        (replicas.at.generation[slot], replicas.at.node[slot])
        for slot in replicas.slots.values()
        if replicas.at.node[slot] != NONE
    ]
    positions += [(binding.generation, binding.row) for binding in view.assumed.values()]
    for index in list(view.peers.counted):
        expected: dict[str, int] = defaultdict(int)
        for generation, row in positions:
            if shapes.counts_in(generation, index):
                expected[domain_of(_node_at(view, row), index.topology_key)] += 1
        yield from _check_count(view, index, expected)


def _check_count(view: SchedulerView, index: PeerIndex, expected: dict[str, int]) -> Iterator[str]:
    counts, slots = view.peers.counts(index), view.columns.slots(index.topology_key)
    total = sum(expected.values())
    expected.pop("", None)
    actual = {domain: int(counts[slot]) for domain, slot in slots.items() if counts[slot]}
    if actual != dict(expected) or int(counts[-1]) or view.peers.total(index) != total:
        yield f"{index}: counts {actual}, total {view.peers.total(index)}; the rows give {dict(expected)}, total {total}"


def compare(view: SchedulerView, other: SchedulerView) -> Iterator[str]:
    """Yield every difference between the rows of two views. Assumed bindings are ignored."""
    for changed in sorted(view.objects.revisions.items() ^ other.objects.revisions.items()):
        yield f"{changed[0]} is known at different revisions"
    mine, theirs = _rows(view), _rows(other)
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            yield f"{name} is {mine.get(name)} in this view, and {theirs.get(name)} in the other"
    if (view.shapes.policy, view.head, view.revision) != (other.shapes.policy, other.head, other.revision):
        yield f"{view.head} at {view.revision} here, and {other.head} at {other.revision} there; or another policy"


def _rows(view: SchedulerView) -> dict[str, object]:
    replicas, shapes = view.replicas, view.shapes
    rows: dict[str, object] = {}
    for path, owner in shapes.workloads.ids.items():
        rows[f"workload/{path}"] = shapes.workloads.at.state[owner], shapes.workloads.at.revision[owner]
    for generation in shapes.ids.values():
        info = shapes.info(generation)
        rows[f"generation/{info.tenant}/{info.workload}/{info.number}"] = (
            _comparable(view, info),
            shapes.at.revision[generation],
        )
    for row_key, slot in replicas.slots.items():
        at = replicas.at
        numbers = tuple(getattr(at, name)[slot] for name in replicas.columns if name not in ("node", "generation", "grants"))
        node = at.node[slot]
        rows[row_key] = (
            numbers, replicas.hold_of(slot), "" if node == NONE else _node_at(view, node).metadata.name,
            shapes.info(at.generation[slot])._replace(shape=0),
        )  # fmt: skip
    return rows


def _comparable(view: SchedulerView, info: GenerationInfo) -> tuple[object, ...]:
    """Return a generation without ids, which differ from view to view, and the comparable part of its requirements."""
    requirements = view.shapes.requirements_of(info.shape)
    fields = (
        requirements.charge,
        requirements.resources,
        requirements.whole_devices,
        requirements.device_shares,
        requirements.node_expressions,
        requirements.spread,
        requirements.affinity,
        requirements.anti_affinity,
        requirements.gang,
    )
    return (
        info._replace(shape=0),
        fields,
        requirements.fenced,
        requirements.policy,
        requirements.policy_deadline,
        requirements.resources_only,
    )


Pages = Callable[[str, str], Iterable[Page]]
"""Returns all rows with a prefix, after a key."""

_MANIFEST_HEAD: Final = Head("declared", 1, 1, "", 0, "")


def frozen_view(clock: Clock, head: Head, revision: int, pages: Pages) -> SchedulerView:
    """Build a view of the listed rows in the steps of a `Reflector`'s first list. It does not follow later changes."""
    view = SchedulerView(clock)
    view.begin_list(head, revision)
    for prefix, after in LIST_RANGES:
        for page in pages(prefix, after):
            view.add_page(page.rows)
    view.end_list()
    return view


def view_of_manifests(clock: Clock, objects: Sequence[AnyObject]) -> SchedulerView:
    """Build a view from manifests as if they were the complete scope: its nodes are ready and its policies in force."""
    policies = {obj.metadata.name: obj.spec for obj in objects if isinstance(obj, Policy)}
    spec = PolicyRevisionSpec(number=1, policies=policies)
    published = (PolicyRevision(metadata=RecordMetadata(name="1"), spec=spec),) if policies else ()
    rows = {key(obj): Row(key(obj), encode(_as_ready(obj)), 1) for obj in (*objects, *published)}

    def pages(prefix: str, after: str) -> Iterable[Page]:
        page = sorted(row for name, row in rows.items() if name.startswith(prefix) and name > after)
        return (Page(tuple(page), 1, more=False),)

    return frozen_view(clock, _MANIFEST_HEAD, 1, pages)


def _as_ready(obj: AnyObject) -> AnyObject:
    return replace(obj, status=NodeStatus(health=NodeHealth.READY)) if isinstance(obj, Node) else obj
