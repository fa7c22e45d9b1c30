"""Model of a scope with two authorities for a while: branches over the real `decide`, their merge, and a checker.

A branch applies operations from a common origin. Two branches merge row by row: a row changed by one of them is taken; a row
changed by both gets the merge of its kind; where there is none the rows *clash*, and either side's row is a candidate. The
checker reads rows and operations only; it imports neither law nor ledgers, so a wrong sum cannot confirm itself.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from remit.commitment.books import Books, DecisionTime
from remit.commitment.decide import decide
from remit.commitment.draft import Draft
from remit.commitment.rulings.evidence import CONDITIONS_MAX, merge_conditions, merge_summaries
from remit.model.claims import (
    Accept,
    AcceptIncarnation,
    Actor,
    Adopt,
    BindGang,
    Claim,
    Credit,
    Operation,
    RecordDecision,
    RecordEvent,
    Refused,
    Renew,
    Report,
    ReturnCapacity,
    SetCondition,
    Vacate,
    operation_id,
)
from remit.model.kinds import Node, Policy, Tenant, Workload
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Condition, Deadline
from remit.model.objects import encode, key, key_of
from remit.model.records import (
    Decision,
    Event,
    Generation,
    Grant,
    GrantPhase,
    Lease,
    Phase,
    PolicyRevision,
    Replica,
    Summary,
    SummarySpec,
)
from remit.model.resources import Amount
from remit.model.roles import Role

NOW: Final = 1_000_000
BOOT: Final = "boot-1"
INCARNATION: Final = "i1"
ORIGIN_REVISION: Final = 1

Rows = dict[str, AnyObject]
Row = AnyObject | None
T = TypeVar("T")


# --------------------------------------------------------------------------------------------------------------- branches


class AppliedOperation(NamedTuple):
    """One accepted operation, and each row it changed, before and after."""

    claim: Any
    actor: Actor
    changed: dict[str, tuple[Row, Row]]


def actor(role: Role, node: str = "") -> Actor:
    if role in (Role.USER, Role.OPERATOR):
        return Actor(f"{role}-1", role)
    return Actor(f"{role}-1", role, f"{role}/{node}" if node else str(role), 1)


class Branch:
    """Rows that diverge from an origin. Claims of type `without` are left out, to show their effect."""

    def __init__(self, origin: Rows, sequence: int, without: type[Claim] | None = None) -> None:
        self.origin, self.rows, self.without = origin, dict(origin), without
        self.books, self.operations = books_of(origin), list[AppliedOperation]()
        self.renewed_ms = {obj.metadata.name: NOW for obj in origin.values() if isinstance(obj, Lease)}
        # Branches count from distant numbers, so that uids are unique without coordination.
        self.sequence, self.revision = sequence, ORIGIN_REVISION

    def at(self, name: str) -> int:
        found = self.books.replica(name) or self.books.lookup(name)
        return ORIGIN_REVISION if found is None else found[1]

    def ask(self, by: Actor, claim: Any) -> int | Refused:
        """Decide one operation and, if accepted, commit it here."""
        moment = DecisionTime(NOW, BOOT, dict(self.renewed_ms), 0, self.sequence, INCARNATION)
        draft = Draft(self.books, moment)
        answer = decide(draft, Operation(operation_id(INCARNATION, 1, str(self.sequence)), by, claim))
        if isinstance(answer, Refused):
            return answer
        after = {**draft.changes.replicas, **draft.changes.objects, **draft.changes.notes}
        changed = {name: (self.rows.get(name), row) for name, row in after.items() if self.rows.get(name) != row}
        self.sequence, self.revision = self.sequence + 1, self.revision + 1
        self.books.absorb(
            draft.changes, moment, self.revision, {name: encode(row) for name, row in after.items() if row is not None}
        )
        self.renewed_ms.update(draft.changes.renewed_ms)
        self.operations.append(AppliedOperation(claim, by, changed))
        for name, row in after.items():
            if row is None:
                self.rows.pop(name, None)
            else:
                self.rows[name] = row
        return answer

    def does(self, by: Role, claim: Any, node: str = "") -> None:
        """Like `ask`, but it must be accepted unless claims are left out."""
        if self.without is not None and isinstance(claim, self.without):
            return
        answer = self.ask(actor(by, node), claim)
        assert self.without is not None or not isinstance(answer, Refused), f"{claim}: {answer}"


def books_of(rows: Mapping[str, AnyObject]) -> Books:
    """Insert rows as at a takeover: each after those it refers to."""
    books, long_ago = Books(), DecisionTime(0, BOOT, {}, 0, 0, INCARNATION)
    for name, row in sorted(rows.items(), key=lambda item: _rank(rows, item[1])):
        if isinstance(row, Event | Decision):
            books.notes[name] = None
            continue
        draft = Draft(books, long_ago)
        draft.put(row)
        books.absorb(draft.changes, long_ago, ORIGIN_REVISION, {name: encode(row)})
    return books


def _rank(rows: Mapping[str, AnyObject], row: AnyObject) -> int:
    match row:
        case Grant():
            depth, parent = 1, rows.get(key_of("Grant", row.spec.parent))
            while isinstance(parent, Grant):
                depth, parent = depth + 1, rows.get(key_of("Grant", parent.spec.parent))
            return depth
        case Replica():
            return 101 if row.status.phase is Phase.RESERVED else 100
        case _:
            return 0


# ---------------------------------------------------------------------------------------------------------------- merging


class Clash(Exception):
    """Both branches changed one row, and no rule selects the winner."""


def merge(origin: Rows, one: Rows, other: Rows) -> Rows:
    """The unambiguous merge of two branches. Raises `Clash`."""
    merged = {name: joined(origin.get(name), one.get(name), other.get(name)) for name in sorted({*origin, *one, *other})}
    return {name: row for name, row in merged.items() if row is not None}


def resolutions(origin: Rows, one: Rows, other: Rows) -> Iterator[Rows]:
    """Every possible merge: for rows changed on both sides, the merge of the kind if any, and either side's row."""
    names = sorted({*origin, *one, *other})
    for chosen in itertools.product(*(_offers(origin.get(n), one.get(n), other.get(n)) for n in names)):
        yield {name: row for name, row in zip(names, chosen, strict=True) if row is not None}


def _offers(was: Row, one: Row, other: Row) -> list[Row]:
    if was in (one, other) or one == other:
        return [joined(was, one, other)]
    try:
        return [joined(was, one, other), one, other]
    except Clash:
        return [one, other]


def joined(was: Row, one: Row, other: Row) -> Row:
    """The merge of one row. Raises `Clash`."""
    if one == other or other == was:
        return one
    if one == was:
        return other
    if one is None or other is None:
        if _plain(was) == _plain(one if other is None else other):
            return None  # hints and reports do not preserve a deleted row
        raise Clash
    match one, other:
        case Summary(), Summary():
            return merge_summaries(one, other)
        case (Event(), Event()) | (Decision(), Decision()):
            return max(one, other, key=encode)
        case Lease(), Lease():
            return _later_word(one, other)
        case PolicyRevision(), PolicyRevision():
            return _longer_lease(one, other)
        case (Grant(), Grant()) | (Node(), Node()) | (Workload(), Workload()):
            woven = weave(_plain(was), _plain(one), _plain(other))
            row: Row = replace(woven, status=replace(woven.status, **_freely(one, other)))
        case _:
            row = weave(was, one, other)
    return row


def _later_word(one: Lease, other: Lease) -> Lease:
    if one.spec.epoch != other.spec.epoch:
        return max(one, other, key=lambda lease: lease.spec.epoch)
    if one.spec.holder and other.spec.holder:
        raise Clash
    return other if one.spec.holder else one


def _longer_lease(one: PolicyRevision, other: PolicyRevision) -> PolicyRevision:
    a, b = one.spec.deadline, other.spec.deadline
    if one.spec.policies != other.spec.policies or a is None or b is None or a.boot != b.boot:
        raise Clash
    return one if a.at_ms >= b.at_ms else other


def _plain(row: Row) -> Any:
    """The row without fields that merge by their own rule: conditions and reports."""
    match row:
        case Node() | Workload():
            return replace(row, status=replace(row.status, conditions=()))
        case Grant() if not row.spec.issuer and row.spec.holder.startswith("scope/"):
            return replace(row, status=replace(row.status, returned=Amount(), epoch=0, report=0, phase=GrantPhase.LIVE))
        case _:
            return row


def _freely(one: Any, other: Any) -> dict[str, Any]:
    """Fields of two rows that merge by their own rule: the later report, and the final closing."""
    if not isinstance(one, Grant):
        return {"conditions": merge_conditions(one.status.conditions, other.status.conditions)}
    if one.spec.issuer or not one.spec.holder.startswith("scope/"):
        return {}
    a, b = one.status, other.status
    if (a.epoch, a.report) == (b.epoch, b.report) and a.returned != b.returned:
        raise Clash
    later = max(a, b, key=lambda status: (status.epoch, status.report))
    closed = GrantPhase.CLOSED if GrantPhase.CLOSED in (a.phase, b.phase) else later.phase
    return {"returned": later.returned, "epoch": later.epoch, "report": later.report, "phase": closed}


def weave(was: Any, one: Any, other: Any) -> Any:
    """Field by field from the side that changed it. Raises `Clash`."""
    if one == other or other == was:
        return one
    if one == was:
        return other
    if not isinstance(one, msgspec.Struct) or not type(was) is type(one) is type(other):
        raise Clash
    fields = one.__struct_fields__
    return replace(one, **{name: weave(getattr(was, name), getattr(one, name), getattr(other, name)) for name in fields})


# --------------------------------------------------------------------------------------------------------------- invariants


class Scene(NamedTuple):
    """The merged rows, and the branches that led to them."""

    rows: Rows
    origin: Rows
    branches: Sequence[Branch]

    def all(self, kind: type[T]) -> list[T]:
        return [row for row in self.rows.values() if isinstance(row, kind)]

    def operations(self) -> Iterator[AppliedOperation]:
        for branch in self.branches:
            yield from branch.operations

    def ever(self, kind: type[T]) -> Iterator[T]:
        """Every version of every such row that was ever visible."""
        for row in (*self.origin.values(), *self.rows.values()):
            if isinstance(row, kind):
                yield row
        for operation in self.operations():
            for _, after in operation.changed.values():
                if isinstance(after, kind):
                    yield after


Found = Iterator[str]
INVARIANTS: Final[dict[str, Callable[[Scene], Found]]] = {}


def invariant(check: Callable[[Scene], Found]) -> Callable[[Scene], Found]:
    INVARIANTS[check.__name__.replace("_", "-")] = check
    return check


def violations(rows: Rows, origin: Rows, branches: Sequence[Branch]) -> dict[str, list[str]]:
    """Violations by the name of the invariant."""
    scene = Scene(rows, origin, branches)
    found = {name: list(check(scene)) for name, check in INVARIANTS.items()}
    return {name: values for name, values in found.items() if values}


def holds(replica: Replica) -> bool:
    return replica.status.phase not in (Phase.PENDING, Phase.RELEASED)


def shape(scene: Scene, replica: Replica) -> Generation | None:
    name = f"{replica.spec.workload}/{replica.spec.generation:08d}"
    found = scene.rows.get(key_of("Generation", name, replica.metadata.tenant))
    return found if isinstance(found, Generation) else None


def _needs(scene: Scene, replica: Replica) -> tuple[Amount, Amount]:
    """Usage of the node with devices by name, and the charge with devices by kind."""
    found = shape(scene, replica)
    resources = Amount() if found is None else found.spec.spec.template.resources
    asks = () if found is None else found.spec.spec.template.devices
    charged: dict[str, int] = defaultdict(int)
    for ask in asks:
        charged[f"devices/{ask.kind}"] += 1000 * ask.count
    return resources + Amount({f"@{name}": part for name, part in replica.status.devices.items()}), resources + Amount(charged)


def _victims(scene: Scene) -> dict[str, list[str]]:
    """Victims that still hold capacity a reservation waits for, with their preemptors."""
    found: dict[str, list[str]] = defaultdict(list)
    for one in scene.all(Replica):
        for name, copy in one.status.victims.items() if one.status.phase is Phase.RESERVED else ():
            victim = scene.rows.get(name)
            if isinstance(victim, Replica) and holds(victim) and f"{victim.metadata.uid}/{victim.status.attempt}" == copy:
                found[name].append(key(one))
    return found


def _taken(
    scene: Scene, ledger: Callable[[Replica, Amount, Amount], Iterable[tuple[str, Amount]]]
) -> Iterator[dict[str, Amount]]:
    """Usage of each ledger now, and once all victims have stopped and their preemptors are bound."""
    leaving = _victims(scene)
    waiting = {name for names in leaving.values() for name in names}
    for absent in (waiting, set(leaving)):
        sums: dict[str, Amount] = defaultdict(Amount)
        for replica in scene.all(Replica):
            if holds(replica) and key(replica) not in absent:
                for name, amount in ledger(replica, *_needs(scene, replica)):
                    sums[name] += amount
        yield sums


def _node_excess(scene: Scene) -> Iterator[tuple[str, Amount]]:
    limits = {
        node.metadata.name: node.spec.capacity + Amount({f"@{device.name}": 1000 for device in node.spec.devices})
        for node in scene.all(Node)
    }
    for sums in _taken(scene, lambda replica, on_node, _: [(replica.status.node, on_node)]):
        for name, amount in sums.items():
            if name in limits and not amount <= limits[name]:
                yield name, amount.excess_over(limits[name])


@invariant
def device_owner(scene: Scene) -> Found:
    for node, over in _node_excess(scene):
        yield from (
            f"{resource} on {node} is owned {1000 + count} thousandths" for resource, count in over if resource[0] == "@"
        )


@invariant
def node_capacity(scene: Scene) -> Found:
    for node, over in _node_excess(scene):
        yield from (f"{node} is over by {count} {resource}" for resource, count in over if resource[0] != "@")


@invariant
def grant_and_quota_sum(scene: Scene) -> Found:
    limits: dict[str, Amount] = {}
    lent: dict[str, Amount] = defaultdict(Amount)
    for tenant in scene.all(Tenant):
        limits[f"tenant/{tenant.metadata.name}"] = tenant.spec.quota
        limits[f"tenant/{tenant.metadata.name}/emergency"] = tenant.spec.emergency_quota
    for grant in scene.all(Grant):
        name, spec = grant.metadata.name, grant.spec
        limits[name] = spec.amount if spec.issuer else spec.amount - grant.status.returned
        limits.update({f"{name}/{tenant}": share for tenant, share in spec.shares.items()})
        if not spec.issuer:
            lent[spec.parent] += spec.amount - grant.status.returned
            for tenant_name, share in spec.shares.items():
                lent[f"tenant/{tenant_name}/emergency"] += share
    for sums in _taken(scene, lambda replica, _, charge: [(grant, charge) for grant in replica.status.grants]):
        for name, limit in limits.items():
            amount = sums.get(name, Amount()) + lent.get(name, Amount())
            if not amount <= limit:
                yield f"{name}: {amount} of {limit}"


@invariant
def given_back_is_not_held(scene: Scene) -> Found:
    """Returned capacity is granted to others: what a holder keeps plus what it returned is at most what it got."""
    got: dict[str, Amount] = {}
    gave: dict[str, Amount] = defaultdict(Amount)
    for row in scene.origin.values():
        if isinstance(row, Grant):
            got[row.metadata.name] = row.spec.amount
    for operation in scene.operations():
        if isinstance(operation.claim, Accept):
            got.setdefault(operation.claim.name, operation.claim.spec.amount)
        elif isinstance(operation.claim, ReturnCapacity):
            gave[operation.claim.name] += operation.claim.amount
    for grant in scene.all(Grant):
        name = grant.metadata.name
        if grant.spec.issuer and not grant.spec.amount + gave[name] <= got[name]:
            yield f"{name}: {grant.spec.amount} is held and {gave[name]} given back, of {got[name]}"


@invariant
def reissued_is_still_debited(scene: Scene) -> Found:
    """A restored holder accepts what is offered again: that amount stays debited at the issuer, less later returns."""
    credits = {
        (operation.claim.name, operation.claim.sender)
        for operation in scene.operations()
        if isinstance(operation.claim, Credit)
    }
    for branch in scene.branches:
        met: dict[str, str] = {}
        for operation in branch.operations:
            if isinstance(operation.claim, AcceptIncarnation):
                met[operation.claim.peer] = operation.claim.incarnation
            for before, offered in operation.changed.values() if isinstance(operation.claim, Renew) else ():
                if isinstance(offered, Grant) and (offered.metadata.name, met.get(offered.spec.holder)) not in credits:
                    kept = _debited(scene.rows.get(key(offered)))
                    if before is not None and offered.spec.holder in met and not _debited(offered) <= kept:
                        yield f"{offered.metadata.name}: {_debited(offered)} was offered anew, {kept} is debited"


def _debited(grant: Row) -> Amount:
    return grant.spec.amount - grant.status.returned if isinstance(grant, Grant) else Amount()


@invariant
def one_binding_per_attempt(scene: Scene) -> Found:
    bound: dict[tuple[str, int], set[tuple[str, tuple[str, ...]]]] = defaultdict(set)
    for one in scene.ever(Replica):
        if holds(one):
            bound[key(one), one.status.attempt].add((one.status.node, tuple(sorted(one.status.devices))))
    yield from (f"{name} attempt {n}: {places}" for (name, n), places in bound.items() if len(places) > 1)


@invariant
def one_preemptor_per_victim(scene: Scene) -> Found:
    yield from (f"{victim} makes room for {names}" for victim, names in _victims(scene).items() if len(names) > 1)


@invariant
def one_result_per_attempt(scene: Scene) -> Found:
    results: dict[tuple[str, int], set[str]] = defaultdict(set)
    for one in scene.ever(Replica):
        if one.status.result:
            results[key(one), one.status.attempt].add(one.status.result)
    yield from (f"{name} attempt {n}: {results_seen}" for (name, n), results_seen in results.items() if len(results_seen) > 1)


@invariant
def transitions_chain(scene: Scene) -> Found:
    """In some order of the branches, each transition starts where the previous one ended."""
    steps: dict[str, list[list[tuple[object, object]]]] = defaultdict(list)
    for branch in scene.branches:
        mine: dict[str, list[tuple[object, object]]] = defaultdict(list)
        for operation in branch.operations:
            for name, (before, after) in operation.changed.items():
                if before is not None and after is not None and _stand(before) != _stand(after):
                    mine[name].append((_stand(before), _stand(after)))
        for name, taken in mine.items():
            steps[name].append(taken)
    for name, sides in steps.items():
        orders = ([step for side in order for step in side] for order in itertools.permutations(sides))
        if not any(all(a[1] == b[0] for a, b in itertools.pairwise(order)) for order in orders):
            yield f"{name}: {sides}"


def _stand(row: AnyObject) -> object:
    match row:
        case Replica():
            return row.status.phase, row.status.attempt
        case Node():
            return row.status.health
        case _:
            return None


@invariant
def gang_minimum(scene: Scene) -> Found:
    """Of the members bound by one claim, at least the minimum stays bound, except those it saw leave."""
    for branch in scene.branches:
        for place, operation in enumerate(branch.operations):
            if not isinstance(operation.claim, BindGang):
                continue
            later = {name for after in branch.operations[place + 1 :] for name in after.changed}
            members = [name for name in operation.changed if name not in later]
            there = [row for name in members if isinstance(row := scene.rows.get(name), Replica) and holds(row)]
            found = [shape(scene, row) for _, row in operation.changed.values() if isinstance(row, Replica)]
            least = max((one.spec.spec.gang.min for one in found if one is not None and one.spec.spec.gang), default=0)
            if len(there) < least - (len(operation.changed) - len(members)):
                yield f"{len(there)} of {least} are bound"


def _labels(scene: Scene, replica: Replica) -> dict[str, str]:
    found = shape(scene, replica)
    return {"remit/workload": replica.spec.workload, **({} if found is None else found.spec.labels)}


def _domain(scene: Scene, node: str, topology: str) -> str:
    found = scene.rows.get(key_of("Node", node))
    if not isinstance(found, Node):
        return ""
    return {"node": node, "zone": found.spec.zone, "region": found.spec.region}.get(
        topology, found.metadata.labels.get(topology, "")
    )


@invariant
def anti_affinity(scene: Scene) -> Found:
    held = [replica for replica in scene.all(Replica) if holds(replica)]
    for one, other in itertools.permutations(held, 2):
        found = shape(scene, one)
        for term in () if found is None else found.spec.spec.placement.anti_affinity:
            same = _domain(scene, one.status.node, term.topology_key) == _domain(scene, other.status.node, term.topology_key)
            if same and term.label_selector.items() <= _labels(scene, other).items():
                yield f"{key(one)} shuns {key(other)}"


@invariant
def spread(scene: Scene) -> Found:
    for found in scene.all(Generation):
        mine = [one for one in scene.all(Replica) if holds(one) and shape(scene, one) == found]
        for term in found.spec.spec.placement.topology_spread:
            counts = dict.fromkeys((_domain(scene, node.metadata.name, term.topology_key) for node in scene.all(Node)), 0)
            for one in mine:
                counts[_domain(scene, one.status.node, term.topology_key)] += 1
            if counts and max(counts.values()) - min(counts.values()) > term.max_skew:
                yield f"{found.spec.workload}: {counts}"


@invariant
def replicas_within_desired_and_surge(scene: Scene) -> Found:
    for workload in scene.all(Workload):
        meta, spec = workload.metadata, workload.spec
        there = [
            one
            for one in scene.all(Replica)
            if (one.metadata.tenant, one.spec.workload) == (meta.tenant, meta.name) and one.status.phase is not Phase.RELEASED
        ]
        limit = max(spec.replicas, spec.completions) + spec.rollout.max_surge
        if spec.type != "daemon" and len(there) > limit:
            yield f"{meta.name}: {len(there)} of {limit}"


@invariant
def one_holder_per_lease_and_epoch(scene: Scene) -> Found:
    holders: dict[tuple[str, int], set[str]] = defaultdict(set)
    for lease in scene.ever(Lease):
        if lease.spec.holder:
            holders[lease.metadata.name, lease.spec.epoch].add(lease.spec.holder)
    yield from (f"{name} epoch {epoch}: {sorted(who)}" for (name, epoch), who in holders.items() if len(who) > 1)


@invariant
def one_content_per_policy_number(scene: Scene) -> Found:
    contents: dict[int, set[bytes]] = defaultdict(set)
    for revision in scene.ever(PolicyRevision):
        contents[revision.spec.number].add(encode(sorted(revision.spec.policies.items())))
    yield from (f"policy revision {number} was published twice" for number, content in contents.items() if len(content) > 1)


@invariant
def policies_declared_are_in_force(scene: Scene) -> Found:
    latest = max(scene.all(PolicyRevision), key=lambda revision: revision.spec.number, default=None)
    declared = {policy.metadata.name: policy.spec for policy in scene.all(Policy)}
    if latest is not None and latest.spec.deadline is None and latest.spec.policies != declared:
        yield f"{sorted(declared)} are declared, revision {latest.spec.number} has {sorted(latest.spec.policies)}"


@invariant
def one_spec_per_generation(scene: Scene) -> Found:
    specs: dict[str, set[bytes]] = defaultdict(set)
    for generation in scene.ever(Generation):
        specs[key(generation)].add(encode(generation.spec))
    yield from (f"{name} has two specs" for name, specs_seen in specs.items() if len(specs_seen) > 1)


@invariant
def nothing_dangles(scene: Scene) -> Found:
    """Every row that is referred to exists."""
    ledgers = {grant.metadata.name for grant in scene.all(Grant)}
    ledgers |= {f"{g.metadata.name}/{tenant}" for g in scene.all(Grant) for tenant in g.spec.shares}
    ledgers |= {f"tenant/{t.metadata.name}{end}" for t in scene.all(Tenant) for end in ("", "/emergency")}
    for one in scene.all(Replica):
        named = [key_of("Workload", one.spec.workload, one.metadata.tenant), key_of("Tenant", one.metadata.tenant)]
        named += [key_of("Node", one.status.node)] if holds(one) else []
        yield from (f"{key(one)} names {name}" for name in named if name not in scene.rows)
        yield from (f"{key(one)} is charged to {name}" for name in one.status.grants if name not in ledgers)
        if shape(scene, one) is None:
            yield f"{key(one)} has no generation"
    for workload in scene.all(Workload):
        named = [key_of("Tenant", workload.metadata.tenant)]
        named += [key_of("PriorityClass", workload.spec.priority_class)] if workload.spec.priority_class else []
        yield from (f"{key(workload)} names {name}" for name in named if name not in scene.rows)
    for grant in scene.all(Grant):
        if grant.spec.parent and not grant.spec.issuer and grant.spec.parent not in ledgers:
            yield f"{key(grant)} is carved out of {grant.spec.parent}"


@invariant
def conditions_are_few(scene: Scene) -> Found:
    rows: list[Node | Workload] = [*scene.all(Node), *scene.all(Workload)]
    for row in rows:
        if len(row.status.conditions) > CONDITIONS_MAX:
            yield f"{key(row)} has {len(row.status.conditions)} conditions"


@invariant
def nothing_acknowledged_is_lost(scene: Scene) -> Found:
    """Merging a branch again adds nothing, and the content of each soft claim, or a later one, is there."""
    for branch in scene.branches:
        for name in sorted({name for operation in branch.operations for name in operation.changed}):
            was, mine, now = scene.origin.get(name), branch.rows.get(name), scene.rows.get(name)
            try:
                lost = mine not in (was, now) and joined(was, mine, now) != now
            except Clash:
                lost = True
            if lost:
                yield f"{name} is {now}, acknowledged was {mine}"
    for operation in scene.operations():
        if not heeded(operation, scene.rows):
            yield f"{operation.claim} left no trace"


def heeded(operation: AppliedOperation, rows: Rows) -> bool:
    """Whether the content of a soft claim, or a later one, is in these rows; other claims are judged above."""
    match operation.claim:
        case RecordEvent(name=name, event=event):
            row: Any = rows.get(key_of("Event", name))
            return row is not None and row.spec == event
        case RecordDecision(name=name, tenant=tenant, decision=decision):
            row = rows.get(key_of("Decision", name, tenant))
            return row is not None and row.spec == decision
        case Report(name=name, summary=SummarySpec(epoch=epoch, sequence=sequence)):
            row = rows.get(key_of("Summary", name))
            return row is not None and (row.spec.epoch, row.spec.sequence) >= (epoch, sequence)
        case SetCondition(kind=kind, name=name, tenant=tenant, condition=claimed):
            row = rows.get(key_of(kind, name, tenant))
            return row is None or _observed(row.status.conditions, claimed)
        case Adopt(number=number, policies=policies, asked_ms=ms, ttl=ttl):
            row = rows.get(key_of("PolicyRevision", f"{number:08d}"))
            deadline: Deadline | None = None if row is None else row.spec.deadline
            return row is not None and row.spec.policies == policies and deadline is not None and deadline.at_ms >= ms + ttl
        case Credit(name=name, epoch=epoch, report=report, final=final):
            row = rows.get(key_of("Grant", name))
            if row is None:
                return True
            status = row.status
            later = (status.epoch, status.report) > (epoch, report)
            return later or (
                (status.epoch, status.report) == (epoch, report) and (not final or status.phase is GrantPhase.CLOSED)
            )
        case Vacate(lease=lease):
            row = rows.get(key_of("Lease", lease))
            return row is not None and (row.spec.epoch > operation.actor.epoch or not row.spec.holder)
        case _:
            return True


def _observed(conditions: tuple[Condition, ...], claimed: Condition) -> bool:
    """The condition is there, or a later one of its type, or the maximum number of later ones."""

    def when(condition: Condition) -> tuple[int, str]:
        return condition.observed_generation, condition.last_transition

    same = [condition for condition in conditions if condition.type == claimed.type]
    if same:
        return when(same[0]) >= when(claimed)
    return len(conditions) == CONDITIONS_MAX and all(when(condition) >= when(claimed) for condition in conditions)
