"""Claims declared soft merge freely, and hard ones cannot. PAPERS.md section 5 is the model; see merge_model.py.

Three properties of the class beside each ruling:

- *Free* (bounded, soft): the merge of any free claims on branches, also with one branch of hard claims, violates nothing,
  and the order of merging leaves no trace.
- *Hard*: there are two branches, each valid, whose every merge violates an invariant, whichever row is chosen where both
  changed one. The claim is the cause: without it, some merge violates nothing.
- *Complete*: a claim without an entry here fails a test.

`pytest -s tests/properties/commitment/test_merges.py` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.commitment.decide import rulings
from remit.commitment.rulings.evidence import CONDITIONS_MAX
from remit.commitment.rulings.registry import UNLEASED_ROLES, Coordination
from remit.model.claims import (
    CLAIMS,
    Abandon,
    Accept,
    AcceptIncarnation,
    Acquire,
    Actor,
    Adopt,
    Apply,
    Bind,
    BindGang,
    Claim,
    Close,
    Code,
    ConfirmHoldings,
    Credit,
    DeclareLost,
    Delete,
    Forget,
    Issue,
    Mark,
    Move,
    RecordDecision,
    RecordEvent,
    Refused,
    Renew,
    Report,
    Reserve,
    ReturnCapacity,
    Rollback,
    SetCondition,
    Spawn,
    Vacate,
)
from remit.model.kinds import (
    Affinity,
    Device,
    DeviceRequest,
    Gang,
    Node,
    NodeHealth,
    NodeSpec,
    NodeStatus,
    Placement,
    Policy,
    PolicyAllow,
    PolicyRule,
    PolicySpec,
    Rollout,
    Spread,
    Template,
    Tenant,
    TenantSpec,
    Workload,
    WorkloadSpec,
)
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Condition, Deadline, Metadata, RecordMetadata
from remit.model.objects import key
from remit.model.records import (
    DecisionSpec,
    EventSpec,
    Generation,
    GenerationSpec,
    Grant,
    GrantSpec,
    GrantStatus,
    Lease,
    LeaseSpec,
    Peer,
    PeerConfirmation,
    PeerSpec,
    Phase,
    PolicyRevision,
    PolicyRevisionSpec,
    Replica,
    ReplicaSpec,
    ReplicaStatus,
    Summary,
    SummarySpec,
)
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from tests.properties.commitment.merge_model import (
    BOOT,
    INCARNATION,
    INVARIANTS,
    NOW,
    Branch,
    Rows,
    actor,
    books_of,
    merge,
    resolutions,
    violations,
)

MINUTE: Final = Duration(60_000)
TENANT: Final = "acme"
QUOTA: Final = "tenant/acme"


# ------------------------------------------------------------------------------------------------------------ common rows


def cpu(count: int) -> Amount:
    return Amount({"cpu": 1000 * count})


def gpu(count: int) -> Amount:
    return Amount({"devices/gpu": 1000 * count})


def node(name: str, gpus: int = 0, health: NodeHealth = NodeHealth.READY, cpus: int = 8, **status: Any) -> Node:
    devices = tuple(Device(name=f"gpu-{n}", kind="gpu") for n in range(gpus))
    spec = NodeSpec(region="here", zone=f"zone-{name}", capacity=cpu(cpus), devices=devices)
    return Node(metadata=Metadata(name=name, uid=f"u-{name}"), spec=spec, status=NodeStatus(health=health, **status))


def spec_of(replicas: int = 4, cpus: int = 1, gpus: int = 0, **more: Any) -> WorkloadSpec:
    devices = (DeviceRequest(kind="gpu", count=gpus),) if gpus else ()
    template = Template(command=("true",), resources=cpu(cpus), devices=devices)
    return WorkloadSpec(
        type="service", template=template, replicas=replicas, rollout=Rollout(max_surge=0, max_unavailable=1), **more
    )


def workload(name: str, spec: WorkloadSpec) -> Workload:
    return Workload(metadata=Metadata(name=name, tenant=TENANT, uid=f"u-{name}", generation=1), spec=spec)


def work(name: str, *statuses: ReplicaStatus, priority: int = 0, **shape: Any) -> list[AnyObject]:
    """A workload in its first generation, with a replica for each status."""
    spec = spec_of(**shape)
    first = GenerationSpec(workload=name, generation=1, labels={}, spec=spec)
    rows: list[AnyObject] = [
        workload(name, spec),
        Generation(metadata=RecordMetadata(name=f"{name}/00000001", tenant=TENANT, uid=f"u-{name}"), spec=first),
    ]
    for index, status in enumerate(statuses):
        stamp = RecordMetadata(name=f"{name}-{index}", tenant=TENANT, uid=f"u-{name}-{index}")
        of = ReplicaSpec(workload=name, generation=1, index=index, priority=priority)
        rows.append(Replica(metadata=stamp, spec=of, status=status))
    return rows


def grant(name: str, amount: Amount, holder: str, until_ms: int = NOW + MINUTE, **spec: Any) -> Grant:
    deadline = Deadline(boot=BOOT, at_ms=until_ms)
    return Grant(
        metadata=RecordMetadata(name=name, uid=f"u-{name}"),
        spec=slice_of(amount, holder, **spec),
        status=GrantStatus(deadline=deadline),
    )


def slice_of(amount: Amount, holder: str, **spec: Any) -> GrantSpec:
    return GrantSpec(**{"holder": holder, "amount": amount, "tenant": TENANT, "parent": QUOTA, "ttl": MINUTE, **spec})


def policy(name: str, region: str) -> Policy:
    return Policy(metadata=Metadata(name=name), spec=rules(region))


def rules(region: str) -> PolicySpec:
    return PolicySpec(rules=(PolicyRule(allow=PolicyAllow(regions=("here", region))),))


def revision(number: int, policies: dict[str, PolicySpec], until_ms: int | None = None) -> PolicyRevision:
    deadline = None if until_ms is None else Deadline(boot=BOOT, at_ms=until_ms)
    spec = PolicyRevisionSpec(number=number, policies=policies, deadline=deadline)
    return PolicyRevision(metadata=RecordMetadata(name=f"{number:08d}"), spec=spec)


def scope(*more: AnyObject | Iterable[AnyObject], quota: Amount = cpu(64) + gpu(64)) -> Rows:
    """A tenant, a holder for every lease, and further rows."""
    rows: list[AnyObject] = [Tenant(metadata=Metadata(name=TENANT, uid="u-acme"), spec=TenantSpec(quota=quota))]
    actors = [actor(role) for role in Role if role not in UNLEASED_ROLES and role is not Role.AGENT] + [actor(Role.AGENT, "n1")]
    rows += [Lease(metadata=RecordMetadata(name=one.lease), spec=LeaseSpec(holder=one.name, epoch=1)) for one in actors]
    for one in more:
        rows += one if isinstance(one, list) else [one]  # type: ignore[list-item]
    return {key(row): row for row in rows}


PENDING: Final = ReplicaStatus()
RELEASED: Final = ReplicaStatus(phase=Phase.RELEASED, result="exit 1")


def on(where: str, phase: Phase = Phase.BOUND, gpus: int = 0, **status: Any) -> ReplicaStatus:
    devices = {f"gpu-{n}": 1000 for n in range(gpus)}
    return ReplicaStatus(phase=phase, node=where, devices=devices, grants=(QUOTA,), **status)


def replica(name: str) -> str:
    return f"replica/{TENANT}/{name}"


def bind(branch: Branch, name: str, where: str, drawing: str = QUOTA, **devices: int) -> None:
    branch.does(Role.SCHEDULER, binding(branch, name, where, drawing, **devices))


def binding(branch: Branch, name: str, where: str, drawing: str = QUOTA, **devices: int) -> Bind:
    parts = {f"gpu-{device[1:]}": share for device, share in devices.items()}
    return Bind(replica(name), branch.at(replica(name)), where, drawing, parts)


def move(branch: Branch, by: Role, name: str, transition: str, result: str = "", where: str = "", attempt: int = 1) -> None:
    claim = Move(replica(name), branch.at(replica(name)), transition, attempt, result)
    branch.does(by, claim, where)


# ----------------------------------------------------------------------------------------------------- hard: counter-examples


class CounterExample(NamedTuple):
    """Every resolution of the merge violates one of `breaks`; each of these is violated by some resolution."""

    claim: type[Claim]
    description: str
    breaks: tuple[str, ...]
    origin: Callable[[], Rows]
    one: Callable[[Branch], None]
    other: Callable[[Branch], None]


def bind_one(branch: Branch) -> None:
    bind(branch, "a-0", "n1", g0=1000)


def bind_other(branch: Branch) -> None:
    bind(branch, "b-0", "n1", g0=1000)


def shunning(name: str) -> list[AnyObject]:
    apart = (Affinity(label_selector={"remit/workload": name}, topology_key="node"),)
    return work(name, PENDING, PENDING, placement=Placement(anti_affinity=apart))


def spreading(name: str) -> list[AnyObject]:
    even = (Spread(topology_key="zone", max_skew=1),)
    return work(name, PENDING, PENDING, PENDING, PENDING, placement=Placement(topology_spread=even))


def preempt(preemptor: str) -> Callable[[Branch], None]:
    def reserves(branch: Branch) -> None:
        victims = {replica("low-0"): branch.at(replica("low-0"))}
        claim = Reserve(replica(preemptor), branch.at(replica(preemptor)), "n1", QUOTA, {"gpu-0": 1000}, 0, victims)
        branch.does(Role.SCHEDULER, claim)

    return reserves


def gang(name: str) -> Callable[[Branch], None]:
    def binds(branch: Branch) -> None:
        members = (binding(branch, f"{name}-0", "n1", g0=1000), binding(branch, f"{name}-1", "n1", g1=1000))
        branch.does(Role.SCHEDULER, BindGang(members))

    return binds


def spawn(first: int) -> Callable[[Branch], None]:
    return lambda branch: branch.does(Role.WORKLOADS, Spawn(TENANT, "a", 1, first, 2))


def lose_and_give_its_room_away(branch: Branch) -> None:
    branch.renewed_ms.pop("agent/n1")
    move(branch, Role.NODES, "a-0", "lose", "lost")
    move(branch, Role.REPAIR, "a-0", "release")
    bind(branch, "b-0", "n1", g0=1000)


def resume_and_finish(branch: Branch) -> None:
    move(branch, Role.AGENT, "a-0", "resume", where="n1")
    move(branch, Role.AGENT, "a-0", "finish", "ok", where="n1")


def forget_and_delete(branch: Branch) -> None:
    branch.does(Role.WORKLOADS, Forget(replica("a-0"), branch.at(replica("a-0"))))
    branch.does(Role.USER, Delete("Workload", "a", TENANT))


def mark(*healths: NodeHealth) -> Callable[[Branch], None]:
    def marks(branch: Branch) -> None:
        for health in healths:
            branch.does(Role.NODES, Mark("n1", branch.at("node/n1"), health))

    return marks


def mark_ready_and_bind(branch: Branch) -> None:
    mark(NodeHealth.READY)(branch)
    bind(branch, "a-0", "n1")


def issue(name: str, amount: Amount, holder: str) -> Callable[[Branch], None]:
    return lambda branch: branch.does(Role.BUDGETS, Issue(name, slice_of(amount, holder)))


def accept(branch: Branch) -> None:
    spec = slice_of(cpu(4), "scope/here", issuer="scope/global")
    branch.does(Role.BUDGETS, Accept("slice", spec, 1, NOW, "one", INCARNATION))


def accept_and_give_back(branch: Branch) -> None:
    accept(branch)
    branch.does(Role.BUDGETS, ReturnCapacity("slice", cpu(4)))


def accept_and_draw(branch: Branch) -> None:
    accept(branch)
    bind(branch, "a-0", "n1", "slice")


def close_and_issue_anew(branch: Branch) -> None:
    branch.does(Role.REPAIR, Close("slice"))
    issue("fresh", cpu(4), "scheduler-1")(branch)


def renew_and_draw(branch: Branch) -> None:
    branch.does(Role.BUDGETS, Renew("slice"))
    bind(branch, "a-0", "n1", "slice")


def declare_lost_and_issue(branch: Branch) -> None:
    branch.does(Role.OPERATOR, DeclareLost("scope/eu"))
    issue("us", cpu(8), "scope/us")(branch)


def awaiting_eu() -> Rows:
    restored = Lease(metadata=RecordMetadata(name="*"), spec=LeaseSpec(epoch=2_000_000))
    return scope(restored, peer("scope/eu", PeerConfirmation.AWAITED), quota=cpu(8))


def peer(name: str, standing: PeerConfirmation = PeerConfirmation.MET) -> Peer:
    return Peer(metadata=RecordMetadata(name=name), spec=PeerSpec(incarnation="one", standing=standing))


def lent_to_eu() -> Rows:
    return scope(peer("scope/eu"), grant("eu", cpu(8), "scope/eu"), quota=cpu(8))


def credit(branch: Branch) -> None:
    branch.does(Role.BUDGETS, Credit("eu", 1, 1, cpu(2), "one", INCARNATION))


def recognise(incarnation: str) -> Callable[[Branch], None]:
    return lambda branch: branch.does(Role.BUDGETS, AcceptIncarnation("scope/eu", incarnation, "one"))


def recognise_and_offer_anew(branch: Branch) -> None:
    recognise("two")(branch)
    branch.does(Role.BUDGETS, Renew("eu"))


def vouch(branch: Branch) -> None:
    branch.does(Role.BUDGETS, ConfirmHoldings("scope/eu", 1, {"eu": slice_of(cpu(6), "scope/eu")}, "one", INCARNATION))


def acquire(name: str) -> Callable[[Branch], None]:
    def acquires(branch: Branch) -> None:
        if branch.without is not Acquire:
            assert branch.ask(Actor(name, Role.SCHEDULER), Acquire("scheduler/east", MINUTE)) == 8

    return acquires


def apply(obj: AnyObject, by: Role = Role.OPERATOR) -> Callable[[Branch], None]:
    return lambda branch: branch.does(by, Apply(obj))


def apply_spawn_bind(branch: Branch) -> None:
    branch.does(Role.USER, Apply(workload("a", spec_of(cpus=2))))
    branch.does(Role.WORKLOADS, Spawn(TENANT, "a", 2, 0))
    bind(branch, "a-0", "n1")


def published() -> Rows:
    one, two = rules("one"), rules("two")
    revisions = [revision(1, {"p": one}), revision(2, {"p": two}), revision(3, {})]
    return scope(revisions)


def late_slice() -> Rows:
    return scope(
        node("n1"), work("a", PENDING), grant("slice", cpu(4), "scheduler-1", until_ms=NOW - 1), quota=cpu(4)
    )  # fmt: skip


def held_slice(*more: AnyObject | Iterable[AnyObject]) -> Callable[[], Rows]:
    held = grant("slice", cpu(4), "scope/here", issuer="scope/global", parent="")
    return lambda: scope(node("n1"), work("a", PENDING, cpus=4), held, *more)


def close(branch: Branch) -> None:
    branch.does(Role.BUDGETS, Close("slice"))


SUM, DEVICE, DANGLES, LOST = "grant-and-quota-sum", "device-owner", "nothing-dangles", "nothing-acknowledged-is-lost"
REISSUED = "reissued-is-still-debited"
NUMBER, VIEW = "one-content-per-policy-number", "policies-declared-are-in-force"

HARD: Final[tuple[CounterExample, ...]] = (
    CounterExample(
        Bind, "two replicas are bound to one exclusive gpu", (DEVICE,),
        lambda: scope(node("n1", 1), work("a", PENDING, gpus=1), work("b", PENDING, gpus=1)), bind_one, bind_other,
    ),
    CounterExample(
        Bind, "two replicas are charged to what is left of one quota", (SUM,),
        lambda: scope(node("n1"), work("a", PENDING), work("b", PENDING), quota=cpu(1)),
        lambda branch: bind(branch, "a-0", "n1"), lambda branch: bind(branch, "b-0", "n1"),
    ),
    CounterExample(
        Bind, "two replicas fill the last room of one node", ("node-capacity",),
        lambda: scope(node("n1", cpus=1), work("a", PENDING), work("b", PENDING)),
        lambda branch: bind(branch, "a-0", "n1"), lambda branch: bind(branch, "b-0", "n1"),
    ),
    CounterExample(
        Bind, "one replica is bound to two nodes", ("one-binding-per-attempt",),
        lambda: scope(node("n1"), node("n2"), work("a", PENDING)),
        lambda branch: bind(branch, "a-0", "n1"), lambda branch: bind(branch, "a-0", "n2"),
    ),
    CounterExample(
        Bind, "two that shun each other meet on one node", ("anti-affinity",), lambda: scope(node("n1"), shunning("a")),
        lambda branch: bind(branch, "a-0", "n1"), lambda branch: bind(branch, "a-1", "n1"),
    ),
    CounterExample(
        Bind, "two that are to be spread crowd one zone", ("spread",),
        lambda: scope(node("n1"), node("n2"), spreading("a")),
        lambda branch: bind(branch, "a-0", "n1"), lambda branch: bind(branch, "a-1", "n1"),
    ),
    CounterExample(
        Reserve, "two preemptors reserve what one victim will free", (DEVICE, "one-preemptor-per-victim"),
        lambda: scope(node("n1", 1), work("low", on("n1", gpus=1), gpus=1), work("a", PENDING, gpus=1, priority=9),
                      work("b", PENDING, gpus=1, priority=9)),
        preempt("a-0"), preempt("b-0"),
    ),
    CounterExample(
        BindGang, "two gangs are bound to the same two gpus", (DEVICE,),
        lambda: scope(node("n1", 2), work("a", PENDING, PENDING, gpus=1, gang=Gang(min=2)),
                      work("b", PENDING, PENDING, gpus=1, gang=Gang(min=2))),
        gang("a"), gang("b"),
    ),
    CounterExample(
        BindGang, "a member is cancelled while its gang is bound", ("gang-minimum", "transitions-chain"),
        lambda: scope(node("n1", 2), work("a", PENDING, PENDING, gpus=1, gang=Gang(min=2))),
        gang("a"), lambda branch: move(branch, Role.WORKLOADS, "a-1", "cancel"),
    ),
    CounterExample(
        Spawn, "both make the replicas that are still wanted", ("replicas-within-desired-and-surge",),
        lambda: scope(work("a", replicas=3)), spawn(0), spawn(2),
    ),
    CounterExample(
        Move, "one gives a lost replica's gpu away, the other hears that it runs and finishes",
        (DEVICE, "one-result-per-attempt"),
        lambda: scope(node("n1", 1), work("a", on("n1", Phase.UNKNOWN, 1, before="running"), gpus=1),
                      work("b", PENDING, gpus=1)),
        lose_and_give_its_room_away, resume_and_finish,
    ),
    CounterExample(
        Forget, "a record is dropped, and its workload, while its replica is queued again", (DANGLES, LOST),
        lambda: scope(work("a", RELEASED)), forget_and_delete, lambda branch: move(branch, Role.REPAIR, "a-0", "requeue"),
    ),
    CounterExample(
        Mark, "a suspect node is found well by one and lost by the other", ("transitions-chain",),
        lambda: scope(node("n1", health=NodeHealth.SUSPECT)),
        mark(NodeHealth.READY), mark(NodeHealth.UNKNOWN, NodeHealth.LOST),
    ),
    CounterExample(
        Mark, "a node is made ready and used by one, deleted by the other", (DANGLES, LOST),
        lambda: scope(node("n1", health=NodeHealth.JOINING), work("a", PENDING)),
        mark_ready_and_bind, lambda branch: branch.does(Role.OPERATOR, Delete("Node", "n1")),
    ),
    CounterExample(
        Apply, "two policies are published under one number", (NUMBER, VIEW), lambda: scope(revision(1, {})),
        apply(policy("p", "one")), apply(policy("q", "two")),
    ),
    CounterExample(
        Apply, "two specs are given to one generation, and replicas placed by one of them",
        ("one-spec-per-generation", "node-capacity"),
        lambda: scope(node("n1", cpus=2), work("a")), apply_spawn_bind, apply(workload("a", spec_of(cpus=4)), Role.USER),
    ),
    CounterExample(
        Delete, "a tenant is deleted while a workload of it is declared", (DANGLES,), scope,
        lambda branch: branch.does(Role.OPERATOR, Delete("Tenant", TENANT)), apply(workload("a", spec_of()), Role.USER),
    ),
    CounterExample(
        Delete, "a node is deleted while a replica is bound to it", (DANGLES,),
        lambda: scope(node("n1"), work("a", PENDING)),
        lambda branch: branch.does(Role.OPERATOR, Delete("Node", "n1")), lambda branch: bind(branch, "a-0", "n1"),
    ),
    CounterExample(
        Rollback, "two roll back to different revisions under one number", (NUMBER, VIEW), published,
        lambda branch: branch.does(Role.OPERATOR, Rollback(1)), lambda branch: branch.does(Role.OPERATOR, Rollback(2)),
    ),
    CounterExample(
        Issue, "both hand on what is left of one quota", (SUM,), lambda: scope(quota=cpu(8)),
        issue("eu", cpu(5), "scope/eu"), issue("us", cpu(5), "scope/us"),
    ),
    CounterExample(
        Accept, "one serial is taken up and given back by one, taken up and drawn on by the other",
        (SUM, "given-back-is-not-held"), lambda: scope(node("n1"), work("a", PENDING, cpus=4), peer("scope/global")),
        accept_and_give_back, accept_and_draw,
    ),
    CounterExample(
        Renew, "an expired grant is closed and handed on by one, renewed and drawn on by the other", (SUM, DANGLES), late_slice,
        close_and_issue_anew, renew_and_draw,
    ),
    CounterExample(
        ReturnCapacity, "what one gives back the other draws on", (SUM,), held_slice(),
        lambda branch: branch.does(Role.BUDGETS, ReturnCapacity("slice", cpu(4))),
        lambda branch: bind(branch, "a-0", "n1", "slice"),
    ),
    CounterExample(
        ReturnCapacity, "both give back the same part under one report number", ("given-back-is-not-held",), held_slice(),
        lambda branch: branch.does(Role.BUDGETS, ReturnCapacity("slice", cpu(3))),
        lambda branch: branch.does(Role.BUDGETS, ReturnCapacity("slice", cpu(3))),
    ),
    CounterExample(
        Close, "a grant is closed and gone while a replica is charged to it", (DANGLES,),
        lambda: scope(node("n1"), work("a", PENDING), grant("slice", cpu(4), "scheduler-1")),
        close, lambda branch: bind(branch, "a-0", "n1", "slice"),
    ),
    CounterExample(
        Credit, "a holder's report is counted by one, while the other takes note of its restore and offers it all of it anew",
        (REISSUED, LOST), lent_to_eu, credit, recognise_and_offer_anew,
    ),
    CounterExample(
        ConfirmHoldings, "after a restore a holder is believed by one and given up by the other", (SUM,), awaiting_eu, vouch,
        declare_lost_and_issue,
    ),
    CounterExample(
        AcceptIncarnation,
        "a holder is known to be restored and offered its grant anew by one, the other counts a report of before",
        (REISSUED, LOST), lent_to_eu, recognise_and_offer_anew, credit,
    ),
    CounterExample(
        AcceptIncarnation, "two incarnations of one peer are recognised in the place of one", (LOST,), lent_to_eu,
        recognise("two"), recognise("three"),
    ),
    CounterExample(
        DeclareLost, "a holder is given up, and what it held handed on, while its grant is renewed", (SUM, LOST),
        lambda: scope(grant("eu", cpu(8), "scope/eu"), quota=cpu(8)), declare_lost_and_issue,
        lambda branch: branch.does(Role.BUDGETS, Renew("eu")),
    ),
    CounterExample(
        DeclareLost, "after a restore a holder is given up by one and believed by the other", (SUM,), awaiting_eu,
        declare_lost_and_issue, vouch,
    ),
    CounterExample(
        Acquire, "two become the holder of one lease at one epoch", ("one-holder-per-lease-and-epoch",),
        lambda: scope(Lease(metadata=RecordMetadata(name="scheduler/east"), spec=LeaseSpec(holder="", epoch=7))),
        acquire("ann"), acquire("bob"),
    ),
)  # fmt: skip


def named(example: CounterExample) -> str:
    description = example.description.replace(" ", "_").replace(",", "")
    return f"{example.claim.__name__}-breaks-{'-or-'.join(example.breaks)}-{description}"


def play(
    example: CounterExample, one_without: type[Claim] | None = None, other_without: type[Claim] | None = None
) -> tuple[Rows, Branch, Branch]:
    origin = example.origin()
    one, other = Branch(origin, 1000, one_without), Branch(origin, 2000, other_without)
    example.one(one)
    example.other(other)
    return origin, one, other


@pytest.mark.parametrize("example", HARD, ids=named)
def test_no_merge_of_hard_claim_keeps_invariants(example: CounterExample) -> None:
    origin, one, other = play(example)
    assert not violations(origin, origin, ())
    assert any(isinstance(operation.claim, example.claim) for operation in (*one.operations, *other.operations))
    for branch in (one, other):
        assert not violations(branch.rows, origin, [branch]), "each branch must be valid by itself"
    broken: set[str] = set()
    for merged in resolutions(origin, one.rows, other.rows):
        found = violations(merged, origin, [one, other])
        assert found.keys() & set(example.breaks), f"this merge breaks {sorted(found)}: {merged}"
        broken |= found.keys()
    assert set(example.breaks) <= broken


@pytest.mark.parametrize("example", HARD, ids=named)
def test_merge_without_hard_claim_keeps_invariants(example: CounterExample) -> None:
    """Without the claim on one branch, some merge violates nothing."""
    for without in ((example.claim, None), (None, example.claim)):
        origin, one, other = play(example, *without)
        with_both_claims = play(example)
        if (len(one.operations), len(other.operations)) == (
            len(with_both_claims[1].operations),
            len(with_both_claims[2].operations),
        ):
            continue
        merges = [violations(merged, origin, [one, other]) for merged in resolutions(origin, one.rows, other.rows)]
        assert {} in merges, merges


# ------------------------------------------------------------------------------------------------------- free: any branches

FREE: Final[dict[type[Claim], str]] = {
    Adopt: "a number has one content, given to it above (where publishing is hard); the longer of two leases on it stands",
    Vacate: "it only gives up; at one epoch nobody else holds the lease, and a higher epoch stands",
    RecordEvent: "a set by name; one name is one event",
    RecordDecision: "a set by name; one name is one decision",
    Report: "the highest (epoch, sequence) stands",
    SetCondition: "by type the latest stands; of too many the latest are kept",
}

ABOVE: Final = {number: {"p": rules(f"region-{number}")} for number in range(2, 7)}
"""The parent scope publishes one content per number; this scope adopts it."""


def crowded() -> NodeStatus:
    many = tuple(Condition(type=f"t{n:02d}", status="True", last_transition=f"{n:02d}") for n in range(CONDITIONS_MAX - 1))
    return NodeStatus(health=NodeHealth.READY, conditions=many)


def adopting() -> Rows:
    """A scope with an object for every soft claim."""
    rows = scope(
        node("n1", 1), work("a", on("n1"), PENDING),
        grant("eu", cpu(6), "scope/eu"), grant("us", cpu(6), "scope/us"), revision(2, ABOVE[2], until_ms=NOW),
        Summary(metadata=RecordMetadata(name="eu"), spec=SummarySpec(holder="scope/eu", epoch=1, sequence=1)), quota=cpu(13),
    )  # fmt: skip
    crowd = node("n2")
    return {**rows, key(crowd): Node(metadata=crowd.metadata, spec=crowd.spec, status=crowded())}


ADOPTING: Final = adopting()
TIMES: Final = st.sampled_from(["", "05", "31", "40"])
CONDITIONS: Final = st.builds(
    Condition,
    type=st.sampled_from(["t05", "t30", "x", "y", "z"]),
    status=st.sampled_from(["True", "False"]),
    reason=st.sampled_from(["", "r"]),
    observed_generation=st.integers(0, 2),
    last_transition=TIMES,
)
SUMMARIES: Final = st.builds(
    SummarySpec,
    holder=st.sampled_from(["scope/eu", "scope/us"]),
    epoch=st.integers(1, 2),
    sequence=st.sampled_from([0, 2]),  # few, so that ties are many
    used=st.sampled_from([Amount(), cpu(1)]),
    counts=st.sampled_from([{}, {"running": 1}]),
)

SoftClaim = tuple[Actor, Any]
LEASED: Final = [actor(role) for role in (Role.SCHEDULER, Role.NODES, Role.POLICY, Role.BUDGETS)]


def soft_claims_of(claim: type[Claim], rows: Rows) -> st.SearchStrategy[SoftClaim]:
    """Claims of one soft type that can be made on these rows."""
    by = st.sampled_from([actor(Role.USER), *LEASED])
    names = st.sampled_from(["e1", "e2", "e3"])
    seen = observable(rows)
    strategies: dict[type[Claim], Callable[[], st.SearchStrategy[SoftClaim]]] = {
        RecordEvent: lambda: st.tuples(by, names.map(lambda n: RecordEvent(n, EventSpec(regarding=f"node/{n}", reason=n)))),
        RecordDecision: lambda: st.tuples(by, names.map(lambda n: RecordDecision(n, TENANT, DecisionSpec(replicas={n: ""})))),
        Report: lambda: st.tuples(by, st.builds(Report, name=st.sampled_from(["eu", "us"]), summary=SUMMARIES)),
        SetCondition: lambda: st.tuples(
            by, st.builds(lambda at, condition: SetCondition(at[0], at[1], condition, at[2]), st.sampled_from(seen), CONDITIONS)
        ),
        Adopt: lambda: st.builds(
            lambda number, requested_ms: (actor(Role.POLICY), Adopt(number, ABOVE[number], MINUTE, requested_ms)),
            st.sampled_from(sorted(ABOVE)), st.integers(NOW - 3, NOW),
        ),
        Vacate: lambda: st.sampled_from(LEASED).map(lambda one: (one, Vacate(one.lease))),
    }  # fmt: skip
    return strategies[claim]()


def observable(rows: Rows) -> list[tuple[str, str, str]]:
    objects = [row for row in rows.values() if isinstance(row, Node | Workload)]
    return sorted((type(obj).__name__, obj.metadata.name, obj.metadata.tenant) for obj in objects)


def claimable(rows: Rows) -> list[type[Claim]]:
    """Soft claims with a suitable object here. Policies are either published or adopted in a scope, never both."""
    publishes = any(isinstance(row, PolicyRevision) and row.spec.deadline is None for row in rows.values())
    missing = {Adopt: publishes, SetCondition: not observable(rows)}
    return [claim for claim in FREE if not missing.get(claim, False)]


SoftClaims = dict[type[Claim], st.SearchStrategy[SoftClaim]]


def soft_claims(rows: Rows) -> SoftClaims:
    return {claim: soft_claims_of(claim, rows) for claim in claimable(rows)}


EVERYWHERE: Final = soft_claims(ADOPTING)
HARD_WITH_SOFT_CLAIMS: Final[list[tuple[CounterExample, SoftClaims]]] = [
    (example, soft_claims(example.origin())) for example in HARD
]


def branch_with(origin: Rows, sequence: int, claims: Iterable[SoftClaim]) -> Branch:
    branch = Branch(origin, sequence)
    for by, claim in claims:
        branch.ask(by, claim)
    return branch


@pytest.mark.parametrize("claim", FREE, ids=lambda claim: claim.__name__)
@given(data=st.data())
def test_soft_claims_merge_in_any_order(claim: type[Claim], data: st.DataObject) -> None:
    either = EVERYWHERE[claim] | st.one_of(*EVERYWHERE.values())
    first, more = data.draw(EVERYWHERE[claim]), st.lists(either, max_size=4)
    words = [[first, *data.draw(more)], [data.draw(either), *data.draw(more)], data.draw(more)]
    branches = [branch_with(ADOPTING, 1000 * n, claims) for n, claims in enumerate(words, 1)]
    a, b, c = (branch.rows for branch in branches)
    assert branches[0].operations[0].claim == first[1], "the first claim is accepted"

    merged = merge(ADOPTING, a, b)
    assert merged == merge(ADOPTING, b, a)
    assert merge(ADOPTING, merged, a) == merged == merge(ADOPTING, merged, b)
    assert merge(ADOPTING, merged, c) == merge(ADOPTING, a, merge(ADOPTING, b, c))
    assert not violations(merged, ADOPTING, branches[:2])
    assert not violations(merge(ADOPTING, merged, c), ADOPTING, branches)
    assert not list(books_of(merged).excess())


@pytest.mark.parametrize("claim", FREE, ids=lambda claim: claim.__name__)
@given(data=st.data())
def test_soft_claims_merge_with_one_branch_of_hard_claims(claim: type[Claim], data: st.DataObject) -> None:
    """Hard claims pass through one authority; concurrent soft claims anywhere do not disturb them."""
    example, words = data.draw(st.sampled_from([pair for pair in HARD_WITH_SOFT_CLAIMS if claim in pair[1]]))
    side = data.draw(st.sampled_from([example.one, example.other]))
    origin = example.origin()
    hard = Branch(origin, 1000)
    side(hard)
    first = data.draw(words[claim])
    free = branch_with(origin, 2000, [first, *data.draw(st.lists(st.one_of(*words.values()), max_size=3))])
    assert free.operations[0].claim == first[1], "the first claim is accepted"
    merged = merge(origin, hard.rows, free.rows)
    assert merged == merge(origin, free.rows, hard.rows)
    assert not violations(merged, origin, [hard, free])


def test_later_report_takes_back_nothing() -> None:
    """The issuer could have granted the capacity to others meanwhile."""
    branch = Branch(lent_to_eu(), 1000)
    credit(branch)
    branch.does(Role.BUDGETS, Issue("us", slice_of(cpu(6), "scope/us")))
    assert refused(branch, Role.BUDGETS, Credit("eu", 1, 2, cpu(8), "one", INCARNATION)) is Code.INVALID
    assert not violations(branch.rows, branch.origin, [branch])


def test_replaced_replica_is_not_requeued() -> None:
    branch = Branch(scope(work("a", RELEASED, replicas=1)), 1000)
    branch.does(Role.WORKLOADS, Spawn(TENANT, "a", 1, 1))
    assert refused(branch, Role.REPAIR, Move(replica("a-0"), branch.at(replica("a-0")), "requeue", 1)) is Code.LIMIT
    assert not violations(branch.rows, branch.origin, [branch])


def test_user_cannot_report_awaited_summary() -> None:
    """A soft claim must not write a row that a hard one reads."""
    summary = SummarySpec(holder="scope/eu", epoch=9, sequence=9)
    assert refused(Branch(awaiting_eu(), 1000), Role.USER, Report("awaited/node/n1", summary)) is Code.NOT_OWNER


def refused(branch: Branch, by: Role, claim: Any) -> Code | None:
    answer = branch.ask(actor(by), claim)
    return answer.code if isinstance(answer, Refused) else None


# --------------------------------------------------------------------------------------------------------------- complete


def test_every_claim_is_classified_with_evidence() -> None:
    declared = rulings()
    assert set(CLAIMS) - {Abandon} == declared.keys(), "each claim has a ruling, except Abandon, which outcomes handle"
    hard = {claim for claim, ruling in declared.items() if ruling.coordination is Coordination.HARD}
    assert {example.claim for example in HARD} == hard, "each hard claim has a counter-example, and no other has"
    assert FREE.keys() == declared.keys() - hard, "each other claim states why it merges"
    shown = {name for example in HARD for name in example.breaks}
    assert shown == INVARIANTS.keys() - {"conditions-are-few"}, "each invariant is violated by some example"


def test_table_of_claims_has_row_for_every_ruling() -> None:
    """Printed with `pytest -s`."""
    lines = []
    for claim in (claim for claim in CLAIMS if claim is not Abandon):
        ruling = rulings()[claim]
        why = [f"{' or '.join(e.breaks)}: {e.description}" for e in HARD if e.claim is claim] or [f"merges: {FREE[claim]}"]
        lines += [f"{claim.__name__:12} {ruling.coordination:8} {one}" for one in why]
    print("\n" + "\n".join(lines))
    assert len(lines) >= len(rulings())
