"""Builds a scheduler view of one revision, and compares a live view with a recomputed one.

Recomputes and compares; it corrects nothing.

`recount` makes every sum again from the view's own rows, one after another: a posting that was forgotten or made twice shows.
`differences` compares a view with another that was listed from the store just now: a row that was missed shows. Both are for
tests and the simulator; a quiescent view must pass (S23).

A view of rows that stand still: it follows nothing, and nobody is asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from remit.law.charges import replica_postings
from remit.law.fit import Requirements, PeerIndex, free_devices
from remit.law.ledgers import DEVICE_PREFIX, parent_charges, ledgers_of
from remit.law.selectors import domain_of
from remit.model.kinds import Node, NodeHealth, NodeStatus, Policy, Tenant
from remit.model.metadata import RecordMetadata
from remit.model.objects import AnyObject, encode, key
from remit.model.records import Grant, PolicyRevision, PolicyRevisionSpec
from remit.observation.column_table import NONE
from remit.observation.postings import same
from remit.observation.replica_table import PHASES, Held
from remit.observation.scheduler_view import PARTS, View
from remit.observation.shapes import Seen
from remit.store.protocol import Head, Page, Row
from remit.world.interfaces import Clock

Sums = dict[str, dict[str, int]]


def recount(view: View) -> Iterator[str]:
    """Everything in which the sums of a view are not those of its rows and of what it assumes."""
    nodes: Sums = defaultdict(lambda: defaultdict(int))
    grants: Sums = defaultdict(lambda: defaultdict(int))
    for row, held, ask in _holders(view):
        there = (_copy(view, victim, copy) for victim, copy in held.victims.items())
        pairs, charges = replica_postings(held, ask, [found for found in there if found is not None])
        for name, count in pairs:
            nodes[_node(view, row).metadata.name][name] += count
        for grant, charge in zip(held.grants, charges, strict=True):
            for name, count in charge:
                grants[grant][name] += count
    yield from _nodes(view, nodes)
    yield from _ledgers(view, grants)
    yield from _counts(view)


def _holders(view: View) -> Iterator[tuple[int, Held, Requirements]]:
    kept = view.replicas
    for slot in kept.slots.values():
        if kept.at.node[slot] != NONE:
            yield kept.at.node[slot], kept.held(slot), view.ask(slot)
    for slot, one in view.assumed.items():
        yield one.row, Held(PHASES[kept.at.phase[slot]], one.devices, one.grants, {}), view.ask(slot)


def _copy(view: View, victim: str, copy: str) -> tuple[Held, Requirements] | None:
    slot = view.replicas.slots.get(victim)
    if slot is None or view.replicas.at.node[slot] == NONE or not view.replicas.is_copy(slot, copy):
        return None
    return view.replicas.held(slot), view.ask(slot)


def _node(view: View, row: int) -> Node:
    node = view.columns.nodes[row]
    if node is None:
        raise LookupError(f"somebody holds room on row {row}, which is a hole")
    return node


def _nodes(view: View, taken: Sums) -> Iterator[str]:
    columns = view.columns
    for name, row in columns.rows.items():
        spec, due = _node(view, row).spec, taken[name]
        free = {resource: int(column[row]) for resource, column in columns.free.items()}
        left = dict(spec.capacity.pairs)
        for resource, count in due.items():
            if not resource.startswith(DEVICE_PREFIX):
                left[resource] = left.get(resource, 0) - count
        if not same(free, left):
            yield f"node {name}: {free} left, by its holders {left}"
        used = {resource.removeprefix(DEVICE_PREFIX): n for resource, n in due.items() if resource.startswith(DEVICE_PREFIX) and n}
        if columns.used[row] != used:
            yield f"node {name}: {columns.used[row]} used of devices, by their holders {used}"
        whole, room = free_devices(spec.devices, used)
        shown = {model: (int(column[row]), int(columns.largest_shares[model][row])) for model, column in columns.whole_devices.items()}
        if any(shown[model] != (whole.get(model, 0), room.get(model, 0)) for model in shown):
            yield f"node {name}: devices show as {shown}, and are {whole}, {room}"


def _ledgers(view: View, drawn: Sums) -> Iterator[str]:
    accounts = view.accounts
    lent: Sums = defaultdict(lambda: defaultdict(int))
    for grant in accounts.grants.values():
        for name, pairs in parent_charges(grant):
            for resource, count in pairs:
                lent[name][resource] += count
    things: list[Tenant | Grant] = [*accounts.tenants.values(), *accounts.grants.values()]
    opened = {name: amount for thing in things for name, amount, _ in ledgers_of(thing)}
    if opened.keys() != accounts.ledgers.keys():
        yield f"ledgers {sorted(opened.keys() ^ accounts.ledgers.keys())} are kept without a row, or not kept"
    for name, ledger in accounts.ledgers.items():
        amount = dict(opened[name].pairs) if name in opened else {}
        if not (same(ledger.amount, amount) and same(ledger.granted_on, lent[name]) and same(ledger.used, drawn[name])):
            kept = f"{ledger.amount}, lent {ledger.granted_on}, used {ledger.used}"
            yield f"{name}: {kept}; by the rows {amount}, {dict(lent[name])}, {dict(drawn[name])}"


def _counts(view: View) -> Iterator[str]:
    kept, shapes = view.replicas, view.shapes
    spots = [(kept.at.generation[slot], kept.at.node[slot]) for slot in kept.slots.values() if kept.at.node[slot] != NONE]
    spots += [(one.generation, one.row) for one in view.assumed.values()]
    for index in list(view.peers.counted):
        due: dict[str, int] = defaultdict(int)
        for generation, row in spots:
            if shapes.counts_in(generation, index):
                due[domain_of(_node(view, row), index.topology_key)] += 1
        yield from _count(view, index, due)


def _count(view: View, index: PeerIndex, due: dict[str, int]) -> Iterator[str]:
    counts, slots = view.peers.counts(index), view.columns.slots(index.topology_key)
    total = sum(due.values())
    due.pop("", None)
    found = {domain: int(counts[slot]) for domain, slot in slots.items() if counts[slot]}
    if found != dict(due) or int(counts[-1]) or view.peers.total(index) != total:
        yield f"{index}: {found}, {view.peers.total(index)} in all; by the rows {dict(due)}, {total}"


def differences(view: View, other: View) -> Iterator[str]:
    """Everything in which two views do not show the same rows. What is assumed is left out."""
    for changed in sorted(view.things.revisions.items() ^ other.things.revisions.items()):
        yield f"{changed[0]} is not known at one revision"
    mine, theirs = _rows(view), _rows(other)
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            yield f"{name} is {mine.get(name)} here, and {theirs.get(name)} there"
    if (view.policy, view.head, view.revision) != (other.policy, other.head, other.revision):
        yield f"{view.head} at {view.revision} here, and {other.head} at {other.revision} there; or another policy"


def _rows(view: View) -> dict[str, object]:
    kept, shapes = view.replicas, view.shapes
    found: dict[str, object] = {}
    for path, owner in shapes.workloads.ids.items():
        found[f"workload/{path}"] = shapes.workloads.at.state[owner], shapes.workloads.at.revision[owner]
    for generation in shapes.ids.values():
        seen = shapes.seen(generation)
        found[f"generation/{seen.tenant}/{seen.workload}/{seen.number}"] = _shown(view, seen), shapes.at.revision[generation]
    for row_key, slot in kept.slots.items():
        at = kept.at
        numbers = tuple(getattr(at, name)[slot] for name in kept.columns if name not in ("node", "generation", "grants"))
        node = at.node[slot]
        found[row_key] = (
            numbers, kept.held(slot), "" if node == NONE else _node(view, node).metadata.name,
            shapes.seen(at.generation[slot])._replace(shape=0),
        )  # fmt: skip
    return found


def _shown(view: View, seen: Seen) -> tuple[object, ...]:
    """A generation without ids, which differ from view to view; its ask by what can be compared of it."""
    ask = view.shapes.ask(seen.shape)
    plain = ask.charge, ask.resources, ask.whole_devices, ask.device_shares, ask.node_expressions, ask.spread, ask.affinity, ask.anti_affinity, ask.gang
    return seen._replace(shape=0), plain, ask.fenced, ask.policy, ask.policy_deadline, ask.resources_only


Pages = Callable[[str, str], Iterable[Page]]
"""All rows that begin with a prefix, past a key."""

_DECLARED: Final = Head("declared", 1, 1, "", 0, "")


def still(clock: Clock, head: Head, revision: int, pages: Pages) -> View:
    """As `Follower` lists it."""
    view = View(clock)
    view.begin(head, revision)
    for prefix, after in PARTS:
        for page in pages(prefix, after):
            view.page(page.rows)
    view.end()
    return view


def declared(clock: Clock, things: Sequence[AnyObject]) -> View:
    """Of what manifests declare, as if it were all there is: its nodes are ready, its policies in force."""
    policies = {thing.metadata.name: thing.spec for thing in things if isinstance(thing, Policy)}
    spec = PolicyRevisionSpec(number=1, policies=policies)
    published = (PolicyRevision(metadata=RecordMetadata(name="1"), spec=spec),) if policies else ()
    rows = {key(thing): Row(key(thing), encode(_there(thing)), 1) for thing in (*things, *published)}

    def pages(prefix: str, after: str) -> Iterable[Page]:
        found = sorted(row for name, row in rows.items() if name.startswith(prefix) and name > after)
        return (Page(tuple(found), 1, more=False),)

    return still(clock, _DECLARED, 1, pages)


def _there(thing: AnyObject) -> AnyObject:
    return replace(thing, status=NodeStatus(health=NodeHealth.READY)) if isinstance(thing, Node) else thing
