"""Property: the authority keeps its invariants under any claims in any order, store faults and takeovers.

One scope with up to three authorities at once (the active one, and deposed ones that do not know it yet), and a store that
loses answers and delays writes. The independent judge checks every commit (simulate/checkers); after every step the books of
the running authority must equal its sums. Grants between two scopes are in test_authority_grants.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any
from unittest import mock

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from remit.client.endpoint import EndpointError, NotLeader, OutcomeUnknown
from remit.commitment.authority import LeadershipLost
from remit.commitment.outcomes import BATCH_PREFIX, batch_key, decode_batch
from remit.commitment.recovery import read_rows
from remit.commitment.standby import Standby
from remit.law.lifecycle import TRANSITIONS
from remit.model.claims import (
    Abandon,
    Accepted,
    Acquire,
    Actor,
    Adopt,
    AnyClaim,
    Apply,
    Bind,
    BindGang,
    Close,
    Code,
    Delete,
    Evidence,
    Forget,
    Issue,
    Mark,
    Move,
    Operation,
    OperationID,
    RecordDecision,
    RecordEvent,
    Refused,
    Renew,
    Report,
    Reserve,
    Rollback,
    SetCondition,
    Spawn,
    Vacate,
    Verdict,
)
from remit.model.kinds import (
    Affinity,
    DeviceRequest,
    NodeHealth,
    Placement,
    Policy,
    PolicyAllow,
    PolicyMatch,
    PolicyRule,
    PolicySpec,
    Spread,
    Toleration,
    Workload,
)
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Condition, Metadata
from remit.model.records import DecisionSpec, EventSpec, GrantSpec, SummarySpec
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.simulate.checkers.reference.ledger_sums import ledger_limits, node_limits, total_sums
from remit.simulate.checkers.reference.lifecycle import ACTIVE, HOLDING, ON_NODE
from remit.simulate.checkers.reference.rows import of_kind, phase_of
from remit.store.memory import MemoryBackup
from remit.store.protocol import StoreError
from tests.properties.authority_world import (
    HOUR,
    LEASES,
    OPERATOR,
    TAINTED,
    USER,
    CountedIds,
    Crash,
    Scope,
    amounts,
    node,
    populated_scope,
    tenant,
    workload,
)
from tests.properties.commitment.books_check import stale
from tests.properties.commitment.coverage_counts import Tallies
from tests.properties.effort import tries

REACHED = Tallies("authority")

PLACES = Placement(tolerations=(Toleration(key="dedicated", operator="Exists"),), node_selector={"disk": "ssd"})
SPREAD = Placement(topology_spread=(Spread(topology_key="zone"),))
APART = Placement(anti_affinity=(Affinity(label_selector={"app": "apart"}, topology_key="node"),))
NEAR = Placement(affinity=(Affinity(label_selector={"app": "near"}, topology_key="zone"),), zones=("a", "b"))


def catalogue(replicas: int = 3) -> list[Workload]:
    """One workload of each sort; small numbers, so that they interact."""
    whole_device, share = (DeviceRequest(kind="gpu", count=1, models=("A10",)),), (DeviceRequest(kind="gpu", share="400m"),)
    return [
        workload("plain", "1", replicas),
        workload("gang", "1", max(replicas, 2), gang=2),
        workload("big", "3", replicas, priority="high"),
        workload("whole", "500m", replicas, devices=whole_device, type_="job", retries=1),
        workload("share", "200m", replicas, devices=share),
        workload("spread", "500m", replicas, placement=SPREAD),
        workload("apart", "500m", replicas, placement=APART, labels={"app": "apart"}),
        workload("shy", "100m", replicas, labels={"app": "apart"}),
        workload("near", "300m", replicas, placement=NEAR, labels={"app": "near"}),
        workload("picky", "500m", replicas, placement=PLACES, priority="top"),
        workload("gpu-top", "500m", replicas, devices=whole_device, priority="top"),
        workload("theirs", "1", replicas, owner="t2"),
    ]


FAULTS = [
    ["landed"], ["lost"], ["late"], ["later"], ["afloat"], ["afloat", "lost"], ["unavailable"], ["before"], ["after"], ["slow"],
    ["lost", "landed"], ["lost", "lost", "later"], ["landed", "unavailable"], ["late", "lost"], ["later", "after"],
]  # fmt: skip

WRONG = ["at", "node", "device", "grant", "epoch", "stale", "name", "draft", "lease"]
NUMBER = st.integers(0, 63)
STEPS = st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=6, max_size=24)


def policy(
    name: str, *, zones: tuple[str, ...] = (), pools: tuple[str, ...] = (), tenants: tuple[str, ...] = (), app: str = ""
) -> PolicySpec:
    match = PolicyMatch(tenants=tenants, labels={"app": app} if app else {})
    return PolicySpec(rules=(PolicyRule(match=match, allow=PolicyAllow(zones=zones, pools=pools)),))


POLICIES = [
    policy("p", zones=("a",)),
    policy("p", zones=("a", "b")),
    policy("p", pools=("default",)),
    policy("p", zones=("b",), tenants=("t2",)),
    policy("p", zones=("b",), app="apart"),
]


class FaultyScopeMachine(RuleBasedStateMachine):
    """Shared by both machines: event loop, claims, faults, retries, takeovers."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.batches = mock.patch.object(Scope, "batch_max", 4)  # so that batches overlap
        self.batches.start()
        self.r: Scope
        self.silent: list[Operation] = []
        self.batch: list[Operation] | None = None
        self.backup: tuple[MemoryBackup, int, set[str]] | None = None

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        try:
            if hasattr(self, "r"):
                for scope in self.scopes():
                    self.do(scope.close())
                judge = self.r.judged.judge
                REACHED.add(judge)
                for code in judge.codes_seen:
                    event(f"code {code}")
        finally:
            self.batches.stop()
            self.loop.close()
        super().teardown()

    def scopes(self) -> list[Scope]:
        return [self.r]

    # -- operations --------------------------------------------------------------------------------------------------

    async def ensure_leader(self, scope: Scope) -> None:
        if not scope.lead.alive:
            await self.succeed(scope)

    async def succeed(self, scope: Scope) -> None:
        """Take over; after any failure the next attempt must succeed eventually."""
        for _ in range(8):
            try:
                await scope.take_over()
                return
            except (Crash, StoreError, OutcomeUnknown, LeadershipLost) as died:
                event(f"takeover ended by {type(died).__name__}")
            finally:
                scope.store.reads.clear()
        raise AssertionError("no takeover succeeded")

    def ask(self, actor: Actor, *claims: AnyClaim, evidence: Evidence = Evidence(), scope: Scope | None = None) -> None:
        self.do(self._ask(scope or self.r, actor, claims, evidence))

    async def _ask(self, scope: Scope, actor: Actor, claims: tuple[AnyClaim, ...], evidence: Evidence) -> None:
        await self.ensure_leader(scope)
        operations = [await scope.operation(actor, claim, evidence) for claim in claims]
        if self.batch is not None and scope is self.r:
            self.batch += operations
            return
        await self.send(scope, operations)

    async def send(self, scope: Scope, operations: list[Operation]) -> list[Verdict] | EndpointError:
        answer = await scope.send(operations)
        if isinstance(answer, OutcomeUnknown):
            self.silent += operations
        if isinstance(answer, EndpointError):
            REACHED.count(type(answer).__name__)
        else:
            for operation, verdict in zip(operations, answer, strict=True):
                code = verdict.code.value if isinstance(verdict, Refused) else "accepted"
                if isinstance(operation.claim, Reserve) and operation.claim.victims:
                    REACHED.count(f"Reserve with victims:{code}")
                REACHED.count(f"{type(operation.claim).__name__}:{code}")
        return answer

    # -- faults ------------------------------------------------------------------------------------------------------

    @rule(words=st.sampled_from(FAULTS))
    def inject_store_faults(self, words: list[str]) -> None:
        """F01 F12 F15: a lost answer with or without its write, a late write, a slow or absent store, a crash."""
        self.r.store.plan.extend(words)

    @rule()
    def land_lost_writes(self) -> None:
        self.do(self.r.store.land())

    reboots = False

    @rule(read=st.sampled_from(["unavailable", "ok", "before"]), reboot=st.booleans())
    def take_over(self, read: str, reboot: bool) -> None:
        """F15 F16 F17: the old authority keeps running without notice. The new one may crash on its way, and another follows.

        It may run on another boot, whose times cannot be compared with those of the last.
        """
        if reboot and self.reboots:
            self.r.clock.on = f"boot-{self.r.takeovers}"
        self.r.store.reads.extend(["ok", read])
        self.do(self.succeed(self.r))
        for forgotten in self.r.deposed[:-2]:
            self.do(forgotten.stop())
        del self.r.deposed[:-2]

    @rule(where=st.sampled_from(["gate", "gated"]), n=NUMBER)
    def take_over_during_commit(self, where: str, n: int) -> None:
        self.do(self._in_the_middle(where, Delete("Secret", f"s{n}", "t1")))

    async def _in_the_middle(self, where: str, claim: AnyClaim) -> None:
        scope = self.r
        await self.ensure_leader(scope)
        scope.store.plan.clear()
        operation = await scope.operation(USER, claim)
        scope.store.plan.append(where)
        old = scope.lead
        asking = asyncio.get_running_loop().create_task(old.ask([operation]))
        await scope.store.at_gate.wait()
        await scope.take_over()
        scope.store.gate.set()
        answer = await asking
        scope.store.gate, scope.store.at_gate = asyncio.Event(), asyncio.Event()
        if where == "gate":
            assert isinstance(answer, EndpointError), f"a deposed authority answered {answer}"
        elif not isinstance(answer, EndpointError):
            scope.hear(operation, answer[0])
        again = await self.send(scope, [operation])
        assert not isinstance(again, EndpointError)

    @rule(n=NUMBER)
    def call_deposed_authority(self, n: int) -> None:
        """F15: it neither accepts nor refuses nor renews."""
        if self.r.deposed:
            self.do(self._ask_deposed(n))

    async def _ask_deposed(self, n: int) -> None:
        old = self.r.deposed[n % len(self.r.deposed)]
        plan, self.r.store.plan = list(self.r.store.plan), type(self.r.store.plan)()
        operation = await self.r.operation(USER, Delete("Secret", "none", "t1"))
        before = await self.r.store.inner.revision()
        answer = await old.ask([operation])
        assert isinstance(answer, EndpointError), f"a deposed authority answered {answer}"
        try:
            held = await old.authority.renew(self.r.actors["scheduler"])
        except (NotLeader, OutcomeUnknown):
            held = False
        assert not held, "a deposed authority renewed a lease"
        assert await self.r.store.inner.revision() == before
        self.r.store.plan.extend(plan)

    # -- retries -----------------------------------------------------------------------------------------------------

    @rule(n=NUMBER)
    def repeat_operation(self, n: int) -> None:
        """F01 F37: the same id gets the same verdict from any authority, and nothing changes."""
        scope = self.r
        known = [operation for i, operation in scope.operations.items() if i in scope.answers]
        if known:
            self.do(self._again(scope, known[n % len(known)], through_standby=n % 3 == 0))

    async def _again(self, scope: Scope, operation: Operation, *, through_standby: bool) -> None:
        await self.ensure_leader(scope)
        scope.store.plan.clear()
        first, before = scope.answers[operation.id], await scope.dump()
        if through_standby:
            leader = scope.lead.authority
            peers = {leader.head.holder: leader}
            standby = Standby(scope.store, scope="r1", name="s", clock=scope.clock, ids=CountedIds("s"), peers=peers)
            answers: Any = list(await standby.submit([operation]))
        else:
            answers = await scope.send([operation])
        assert not isinstance(answers, EndpointError)
        horizon = scope.lead.authority.outcomes.horizon
        expired = isinstance(answers[0], Refused) and answers[0].code is Code.OPERATION_EXPIRED
        if expired:
            assert int(operation.id.split(".")[1]) < horizon, f"{operation.id} expired before the horizon {horizon}"
        else:
            assert answers[0] == first, f"{operation} was {first}, and then {answers[0]}"
        assert await scope.dump() == before, "a retry changed something"

    @rule(n=NUMBER)
    def resume_unanswered_operation(self, n: int) -> None:
        if self.silent:
            self.do(self._resume(self.silent.pop(n % len(self.silent))))

    async def _resume(self, operation: Operation) -> None:
        await self.ensure_leader(self.r)
        await self.send(self.r, [operation])

    @rule(n=NUMBER)
    def abandon_operation(self, n: int) -> None:
        """The outcome so far is returned; if there is none, the operation is never applied."""
        pool = self.silent or list(self.r.operations.values())
        if pool:
            self.do(self._abandon(pool[n % len(pool)]))

    async def _abandon(self, operation: Operation) -> None:
        scope = self.r
        await self.ensure_leader(scope)
        scope.store.plan.clear()
        known = scope.checker.outcomes.get(operation.id)
        made = await scope.operation(USER, Abandon(operation.id))
        answers = await self.send(scope, [made])
        assert not isinstance(answers, EndpointError)
        answer = answers[0]
        code = answer.code.value if isinstance(answer, Refused) else ""
        if code == "operation_expired":
            return
        if known is not None and known[2] != "operation_mismatch":
            assert (code, getattr(answer, "number", 0)) == (known[2], known[1] if not known[2] else 0), (answer, known)
        else:
            assert code == "abandoned", answer
            late = await scope.send([operation])
            assert isinstance(late, list) and isinstance(late[0], Refused), late

    @rule(n=NUMBER)
    def reuse_operation_id(self, n: int) -> None:
        known = list(self.r.answers)
        if known:
            self.do(self._misuse(known[n % len(known)]))

    async def _misuse(self, used: str) -> None:
        await self.ensure_leader(self.r)
        self.r.store.plan.clear()
        before = await self.r.dump()
        answers = await self.r.send([Operation(OperationID(used), USER, Delete("Secret", "misuse", "t1"))])
        assert isinstance(answers, list) and isinstance(answers[0], Refused), answers
        assert answers[0].code in (Code.OPERATION_MISMATCH, Code.OPERATION_EXPIRED, Code.ABANDONED), answers
        assert await self.r.dump() == before

    @rule(window=st.integers(0, 3), ahead=st.booleans())
    def use_id_of_other_window(self, window: int, ahead: bool) -> None:
        self.do(self._out_of_window(window, ahead))

    async def _out_of_window(self, window: int, ahead: bool) -> None:
        await self.ensure_leader(self.r)
        self.r.store.plan.clear()
        status = await self.r.lead.authority.status()
        horizon = self.r.lead.authority.outcomes.horizon
        id_window = status.window + 1 + window if ahead else horizon - 1 - window
        if id_window < 0:
            return
        made = Operation(OperationID(f"{status.incarnation}.{id_window}.x{id_window}"), USER, Apply(workload("never")))
        answers = await self.r.send([made])
        assert isinstance(answers, list) and isinstance(answers[0], Refused), answers
        assert answers[0].code is Code.OPERATION_EXPIRED
        assert "workload/t1/never" not in self.r.checker.rows

    # -- time --------------------------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 1_000, 16_000, 31_000, 61_000, 61_000, 310_000, 700_000, 3_700_000]), silent=NUMBER)
    def advance_time(self, ms: int, silent: int) -> None:
        """Usually all leases are renewed meanwhile."""
        for _ in range(4):
            self.r.clock.at_ms += ms // 4
            if silent % 4:
                self.do(self._renew(silent))

    @rule(n=NUMBER)
    def renew_leases(self, n: int) -> None:
        """All but one; an expired one is acquired again."""
        self.do(self._renew(n))

    async def _renew(self, n: int) -> None:
        for index, actor in enumerate(list(self.r.actors.values())):
            await self.ensure_leader(self.r)
            if index != n and not await self.r.lead.authority.renew(actor):
                await self._ask(self.r, Actor(actor.name, actor.role), (Acquire(actor.lease, HOUR),), Evidence())

    # -- restores ----------------------------------------------------------------------------------------------------

    @rule()
    def take_backup(self) -> None:
        self.backup = self.do(self._backup())

    async def _backup(self) -> tuple[MemoryBackup, int, set[str]]:
        # The backup contains all commits so far, also those whose answer was lost and is requested again later.
        return await self.r.store.inner.backup(), self.r.row("head")["sequence"], set(self.r.checker.outcomes)

    @precondition(lambda self: self.backup is not None)
    @rule()
    def restore_backup(self) -> None:
        """F10: a new incarnation; commits after the backup are listed; no replica is believed to run."""
        self.batch = None
        self.do(self._restore())
        self.backup = None

    async def _restore(self) -> None:
        assert self.backup is not None
        snapshot, sequence, known = self.backup
        old, lost = self.r.store.inner, set(self.r.answers) - known
        ran = [row.key for row in snapshot.rows if row.key.startswith("replica/")]
        revision = await old.revision()
        batches = read_rows(old, BATCH_PREFIX, lambda: revision, after=batch_key(sequence))
        listed = {entry.id async for row in batches for entry in decode_batch(row.value).entries}
        assert lost <= listed, f"acknowledged after the backup, and not listed: {lost - listed}"
        await self.r.restore(snapshot)
        await self.r.take_over()
        for key in ran:
            phase = phase_of(self.r.row(key))
            assert phase not in ON_NODE, f"{key} is believed to be {phase} after a restore"
        self.silent = [operation for operation in self.silent if operation.id in self.r.answers]
        REACHED.count("restore")

    # -- invariants ----------------------------------------------------------------------------------------------------

    @invariant()
    def no_violation_was_found(self) -> None:
        for scope in self.scopes() if hasattr(self, "r") else ():
            for running in [*scope.deposed, scope.lead]:
                running.check()

    @invariant()
    def books_equal_sums_of_rows(self) -> None:
        """S23: the authority's ledgers equal the checker's sums."""
        for scope in self.scopes() if hasattr(self, "r") else ():
            if scope.lead.alive:
                assert books(scope.lead.authority.books) == summed(scope), "the books and the rows disagree"

    @invariant()
    def cached_answers_equal_fresh_ones(self) -> None:
        for scope in self.scopes() if hasattr(self, "r") else ():
            if scope.lead.alive:
                assert list(stale(scope.lead.authority.books)) == []


def books(kept: Any) -> dict[str, Any]:
    """The ledgers of an authority, without anything that depends on its clock."""
    return {
        "free": {(n, name): left for n, ledger in kept.nodes.items() for name, left in ledger.free.items() if left},
        "used": {(g, name): n for g, ledger in kept.grants.items() for name, n in ledger.used.items() if n},
        "lent": {(g, name): n for g, ledger in kept.grants.items() for name, n in ledger.granted_on.items() if n},
        "left": {(g, name): n for g, ledger in kept.grants.items() for name, n in ledger.amount.items() if n},
        "replicas": {name: revision for name, (revision, _) in kept.replicas.items()},
    }


def summed(scope: Scope) -> dict[str, Any]:
    """The same, computed from the rows."""
    rows = scope.checker.rows
    nodes, used, lent = total_sums(rows)
    capacity = {(n, name): count for n, counts in node_limits(rows).items() for name, count in counts.items()}
    free = {which: capacity.get(which, 0) - nodes.get(which, 0) for which in {**capacity, **nodes}}
    return {
        "free": {which: left for which, left in free.items() if left},
        "used": used,
        "lent": {which: n for which, n in lent.items() if n and which[0] in ledger_limits(rows)},
        "left": {(g, name): n for g, counts in ledger_limits(rows).items() for name, n in counts.items() if n},
        "replicas": {key: revision for key, (revision, _) in rows.items() if key.startswith("replica/")},
    }


class AuthorityMachine(FaultyScopeMachine):
    """One scope: everything declared, placed, moved and granted within it."""

    reboots = True

    @initialize(sorts=st.sets(st.integers(0, 11), min_size=3, max_size=6), steps=STEPS)
    def set_up(self, sorts: set[int], steps: list[tuple[int, int, int]]) -> None:
        self.do(self._set_up(sorts))
        self.run_ordinary_steps(steps=steps)

    always: frozenset[int] = frozenset()
    """Entries of the catalogue that exist in every run."""

    async def _set_up(self, sorts: set[int]) -> None:
        nodes = [node("n1", gpus=2), node("n2", "2", "b", labels={"disk": "ssd"}), node("n3", "2", "b", gpus=1)]
        self.r = await populated_scope(nodes=nodes)
        works = [catalogue()[i] for i in sorted(sorts | self.always)]
        await self.r.must(USER, *(Apply(work) for work in works))
        spawns = [Spawn(work.metadata.tenant, work.metadata.name, 1, 0, 3) for work in works]
        await self.r.must(self.r.actors["workloads"], *spawns)

    # -- choice of objects -------------------------------------------------------------------------------------------

    def replicas(self, *phases: str) -> list[str]:
        rows = self.r.checker.rows
        return sorted(key for key, r in of_kind(rows, "replica") if not phases or phase_of(r) in phases)

    def nodes(self) -> list[str]:
        return sorted(key.removeprefix("node/") for key, _ in of_kind(self.r.checker.rows, "node"))

    def grants(self) -> list[str]:
        return [key.removeprefix("grant/") for key, _ in of_kind(self.r.checker.rows, "grant")]

    def devices(self, key: str, name: str, seed: int) -> dict[str, int]:
        """Devices of the node that satisfy the replica, free ones if there are any."""
        rows = self.r.checker.rows
        replica = rows[key][1]
        found = f"generation/{replica['metadata']['tenant']}/{replica['spec']['workload']}/{replica['spec']['generation']:08d}"
        if found not in rows or f"node/{name}" not in rows:
            return {}
        taken = total_sums(rows)[0]
        chosen: dict[str, int] = {}
        for ask in rows[found][1]["spec"]["spec"]["template"].get("devices", ()):
            share = 400 if ask.get("share") else 1000
            names = [d["name"] for d in rows[f"node/{name}"][1]["spec"].get("devices", ())]
            free = [d for d in names if taken.get((name, f"@{d}"), 0) + share <= 1000] or names
            chosen.update({free[(seed + i) % len(free)]: share for i in range(ask.get("count", 0) or 1) if free})
        return chosen

    def grant_for(self, key: str, seed: int) -> str:
        tenant_ = self.r.checker.rows[key][1]["metadata"]["tenant"]
        choices = [f"tenant/{tenant_}", f"tenant/{tenant_}", *self.grants()]
        return choices[seed % len(choices)]

    # -- declarations ------------------------------------------------------------------------------------------------

    @rule(n=NUMBER, replicas=st.integers(0, 4), fill=st.booleans())
    def declare_workload(self, n: int, replicas: int, fill: bool) -> None:
        works = catalogue(replicas)
        self.ask(USER, Apply(works[n % len(works)], fill=fill))

    @rule(n=NUMBER, cpu=st.sampled_from(["1", "2", "4", "8"]), zone=st.sampled_from("abb"), shape=st.integers(0, 7))
    def declare_node(self, n: int, cpu: str, zone: str, shape: int) -> None:
        """Also smaller than its usage, cordoned, tainted, relabelled, without its devices."""
        obj: AnyObject = node(
            f"n{n % 4 + 1}",
            cpu,
            zone,
            gpus=2 * (shape != 1),
            unschedulable=shape == 2,
            draining=shape == 3,
            taints=(TAINTED,) if shape in (4, 5) else (),
            labels={"disk": "ssd"} if shape in (5, 6) else {},
        )
        self.ask(OPERATOR, Apply(obj))

    @rule(n=NUMBER, cpu=st.sampled_from(["1", "3", "8", "16"]), gpu=st.integers(0, 4))
    def change_quota(self, n: int, cpu: str, gpu: int) -> None:
        self.ask(OPERATOR, Apply(tenant(f"t{n % 2 + 1}", cpu, gpu)))

    @rule(n=NUMBER)
    def mark_node(self, n: int) -> None:
        names = self.nodes()
        if names:
            name = names[n % len(names)]
            was = self.r.row(f"node/{name}").get("status", {}).get("health", "joining")
            health = NodeHealth.READY if was in ("joining", "suspect") and n % 4 else list(NodeHealth)[n % 5]
            self.ask(self.r.actors["node-lifecycle"], Mark(name, self.r.at(f"node/{name}"), health))

    @rule(n=NUMBER)
    def delete_object(self, n: int) -> None:
        kinds = [("Node", f"n{n % 4 + 1}", ""), ("Workload", catalogue()[n % 12].metadata.name, "t1"), ("Tenant", "t2", "")]
        kinds += [("PriorityClass", "high", ""), ("Policy", "p", "")]
        kind, name, owner = kinds[n % len(kinds)]
        self.ask(OPERATOR, Delete(kind, name, owner))

    @rule(n=NUMBER)
    def publish_or_roll_back_policy(self, n: int) -> None:
        if n % 3:
            self.ask(OPERATOR, Apply(Policy(metadata=Metadata(name=f"p{n % 2}"), spec=POLICIES[n % len(POLICIES)])))
        else:
            self.ask(self.r.actors["policy"], Rollback(n % 5))

    @rule(step=st.integers(-1, 1), n=NUMBER, ttl=st.sampled_from([1_000, 100_000]))
    def adopt_leased_policy(self, step: int, n: int, ttl: int) -> None:
        numbers = [content["spec"]["number"] for _, content in of_kind(self.r.checker.rows, "policyrevision")]
        number = max(1, max(numbers, default=1) + step)
        claim = Adopt(number, {"p": POLICIES[n % len(POLICIES)]}, Duration(ttl), self.r.clock.at_ms - (n % 2) * 500)
        self.ask(self.r.actors["policy"], claim)

    # -- replicas ----------------------------------------------------------------------------------------------------

    @rule(n=NUMBER, first=st.integers(0, 4), count=st.integers(1, 3))
    def spawn_replicas(self, n: int, first: int, count: int) -> None:
        works = sorted(key for key, _ in of_kind(self.r.checker.rows, "workload"))
        if works:
            _, owner, name = works[n % len(works)].split("/")
            generation = self.r.row(works[n % len(works)])["metadata"]["generation"] - (n % 7 == 6)
            self.ask(self.r.actors["workloads"], Spawn(owner, name, generation, first, count))

    @rule(n=NUMBER, m=NUMBER, seed=NUMBER)
    def bind_replica(self, n: int, m: int, seed: int) -> None:
        """F02 F27: most of these fit; the others are refused."""
        waiting, names = self.replicas("pending", "reserved"), self.nodes()
        if waiting and names:
            self.bind_to_node(waiting[n % len(waiting)], names[m % len(names)], seed)

    def bind_to_node(self, key: str, name: str, seed: int) -> None:
        row = self.r.row(key)
        if phase_of(row) == "reserved" and seed % 8:
            status = row["status"]
            claim = Bind(key, self.r.at(key), status["node"], status["grants"][0], status.get("devices", {}))
        else:
            claim = Bind(key, self.r.at(key), name, self.grant_for(key, seed), self.devices(key, name, seed))
        self.ask(self.r.actors["scheduler"], claim)

    @rule(
        n=NUMBER, m=NUMBER, wrong=st.sampled_from(["at", "node", "device", "grant", "epoch", "stale", "name", "draft", "lease"])
    )
    def make_wrong_claim(self, n: int, m: int, wrong: str) -> None:
        every, names = self.replicas(), self.nodes()
        if not every or not names:
            return
        key, name, actor = every[n % len(every)], names[m % len(names)], self.r.actors["scheduler"]
        at = {"at": self.r.at(key) - 1, "draft": -1}.get(wrong, self.r.at(key))
        devices = {"gpu-7": 1000} if wrong == "device" else self.devices(key, name, m)
        grant = "tenant/t9" if wrong == "grant" else f"tenant/{self.r.row(key)['metadata']['tenant']}"
        if wrong in ("epoch", "lease"):
            actor = Actor(actor.name, actor.role, "scheduler" if wrong == "epoch" else "repair", actor.epoch - 1)
        claim = Bind("replica/t1/none-0" if wrong == "name" else key, at, "n9" if wrong == "node" else name, grant, devices)
        self.ask(actor, claim, evidence=Evidence(age_ms=60_001 if wrong == "stale" else 0))

    @rule(n=NUMBER, m=NUMBER, count=st.integers(0, 3), seed=NUMBER)
    def reserve(self, n: int, m: int, count: int, seed: int) -> None:
        """F19 F24: with victims of lower priority if there are any, sometimes with wrong ones."""
        waiting, names = self.replicas("pending"), self.nodes()
        if not waiting or not names:
            return
        waiting.sort(key=lambda key: -self.r.row(key)["spec"].get("priority", 0))
        key, name = waiting[n % min(3, len(waiting))], names[m % len(names)]
        rank = self.r.row(key)["spec"].get("priority", 0)
        weaker = [
            other
            for other in self.replicas(*ACTIVE)
            if self.r.row(other)["status"]["node"] == name
            and (self.r.row(other)["spec"].get("priority", 0) < rank or seed == 0)
        ]
        victims = {other: self.r.at(other) for other in weaker[:count]}
        devices = self.devices(key, name, seed)
        claim = Reserve(key, self.r.at(key), name, self.grant_for(key, seed), devices, victims=victims)
        self.ask(self.r.actors["scheduler"], claim)

    @rule(n=NUMBER, m=NUMBER)
    def preempt(self, n: int, m: int) -> None:
        """F19 F24: on nodes and devices that weaker replicas hold."""
        rank = {key: self.r.row(key)["spec"].get("priority", 0) for key in self.replicas()}
        running = {key: self.r.row(key)["status"] for key in self.replicas(*ACTIVE)}
        pairs = [
            (key, name)
            for key in self.replicas("pending")
            for name in self.nodes()
            if any(status["node"] == name and rank[other] < rank[key] for other, status in running.items())
        ]
        if not pairs:
            return
        key, name = pairs[n % len(pairs)]
        weaker = [other for other, status in running.items() if status["node"] == name and rank[other] < rank[key]]
        chosen = weaker[m % len(weaker) :][:3]
        devices = self.devices(key, name, m)
        theirs = [device for other in chosen for device, share in running[other].get("devices", {}).items() if share == 1000]
        if 1000 in devices.values() and theirs:
            devices = {theirs[0]: 1000}
        victims = {other: self.r.at(other) for other in chosen}
        grant = f"tenant/{self.r.row(key)['metadata']['tenant']}"
        claim = Reserve(key, self.r.at(key), name, grant, devices, victims=victims)
        self.ask(self.r.actors["scheduler"], claim)

    @rule(m=NUMBER, least=st.integers(1, 3))
    def bind_gang(self, m: int, least: int) -> None:
        """F25: at least its minimum, or none."""
        members = [key for key in self.replicas("pending", "reserved") if "/gang-" in key][: least + 1]
        names = self.nodes()
        if members and names:
            binds = []
            for i, key in enumerate(members):
                status = self.r.row(key).get("status", {})
                name = status.get("node") or names[(m + i * (m % 2)) % len(names)]
                binds.append(Bind(key, self.r.at(key), name, (status.get("grants") or ["tenant/t1"])[0]))
            self.ask(self.r.actors["scheduler"], BindGang(tuple(binds)))

    @rule(n=NUMBER, k=NUMBER)
    def move_replica(self, n: int, k: int) -> None:
        """By a transition that starts in its phase, claimed by its owner."""
        every = self.replicas(*HOLDING, "released")
        if every:
            key = every[n % len(every)]
            names = sorted({row.name for row in TRANSITIONS if row.source == phase_of(self.r.row(key))})
            self.move(key, names[k % len(names)])

    @rule(n=NUMBER)
    def advance_replica(self, n: int) -> None:
        """The common path, so that runs get far: bound, starting, running, ready; draining, stopping, released."""
        on = {"bound": "start", "starting": "run", "running": "ready", "draining": "stop", "stopping": "stopped"}
        on |= {"ready": "serve", "finished": "settle", "failed": "release", "released": "requeue", "unknown": "resume"}
        every = self.replicas(*on)
        if every:
            for key in every[n % len(every) :][:4]:
                if key in self.r.checker.rows and phase_of(self.r.row(key)) in on:
                    self.move(key, on[str(phase_of(self.r.row(key)))])

    def move(self, key: str, transition: str) -> None:
        row = next(row for row in TRANSITIONS if row.name == transition)
        status = self.r.row(key).get("status", {})
        lease = f"agent/{status.get('node', '')}" if row.role is Role.AGENT else str(row.role)
        actor = self.r.actors.get(lease)
        if actor is None:
            return
        if transition == "forget":
            self.ask(actor, Forget(key, self.r.at(key)))
        elif transition in ("confirm", "bind", "reserve", "create", "distrust"):
            self.bind_to_node(key, status.get("node", "n1"), 1)
        else:
            result = "ok" if transition in ("finish", "stopped", "crash", "lose") else ""
            self.ask(actor, Move(key, self.r.at(key), transition, status.get("attempt", 1), result, transition))

    @rule(
        n=NUMBER,
        transition=st.sampled_from(sorted({row.name for row in TRANSITIONS} | {"teleport"})),
        lease=st.sampled_from((*LEASES, "agent/n1", "agent/n2")),
        wrong=st.sampled_from(["", "", "at", "attempt", "age"]),
    )
    def claim_any_transition(self, n: int, transition: str, lease: str, wrong: str) -> None:
        every = self.replicas()
        if every:
            key = every[n % len(every)]
            attempt = self.r.row(key).get("status", {}).get("attempt", 1) + (wrong == "attempt")
            claim = Move(key, self.r.at(key) - (wrong == "at"), transition, attempt, "r" * (n % 2))
            self.ask(self.r.actors[lease], claim, evidence=Evidence(age_ms=16_000 if wrong == "age" else 0))

    @rule(n=NUMBER)
    def lose_replicas_of_silent_node(self, n: int) -> None:
        """F34 F39: unknown, and failed past the fence; before that the refusal names the wait."""
        every = self.replicas(*ON_NODE)
        if every:
            key = every[n % len(every)]
            self.move(key, "doubt")
            self.r.clock.at_ms += (10_000, 31_000, 310_000)[n % 3]
            if key in self.r.checker.rows and phase_of(self.r.row(key)) == "unknown":
                self.move(key, "lose")

    @rule(steps=STEPS)
    def run_ordinary_steps(self, steps: list[tuple[int, int, int]]) -> None:
        """Many steps of ordinary schedulers, agents and controllers, so that runs get far."""
        for n, m, seed in steps:
            match seed % 16:
                case 0 | 1 | 2 | 3:
                    self.bind_replica(n=n, m=m, seed=m)
                case 4:
                    self.reserve(n=n, m=m, count=n % 3, seed=m)
                case 5:
                    self.preempt(n=n, m=m)
                case 6:
                    self.bind_gang(m=m, least=n % 3 + 1)
                case 7 | 8 | 9:
                    self.advance_replica(n=n)
                case 10 | 11:
                    self.move_replica(n=n, k=m)
                case 12:
                    self.confirm_reservation(n=n)
                case 13:
                    self.spawn_replicas(n=n, first=m % 5, count=1)
                case 14:
                    self.issue_grant(n=n, cpu="2", ttl=3_000_000, sort=("quota", "offer", "budget", "nested")[m % 4])
                case _:
                    self.claim_any_transition(
                        n=n, transition=TRANSITIONS[m % len(TRANSITIONS)].name, lease=(*LEASES, "agent/n1")[m % 10], wrong=""
                    )

    @rule(steps=STEPS)
    def run_more_ordinary_steps(self, steps: list[tuple[int, int, int]]) -> None:
        self.run_ordinary_steps(steps=steps)

    @rule(steps=STEPS)
    def run_still_more_ordinary_steps(self, steps: list[tuple[int, int, int]]) -> None:
        self.run_ordinary_steps(steps=steps)

    @rule(n=NUMBER)
    def confirm_reservation(self, n: int) -> None:
        """Its victims stop, their agents report it, and it is bound."""
        reserved = self.replicas("reserved")
        if not reserved:
            return
        key = reserved[n % len(reserved)]
        for victim in self.r.row(key)["status"].get("victims", {}):
            for _ in range(2):
                on = {"draining": "stop", "stopping": "stopped", "unknown": "resume"}
                if victim in self.r.checker.rows and phase_of(self.r.row(victim)) in on:
                    self.move(victim, on[str(phase_of(self.r.row(victim)))])
        if key in self.r.checker.rows and phase_of(self.r.row(key)) == "reserved":
            self.bind_to_node(key, "n1", 1)

    # -- grants within the scope, and soft state -----------------------------------------------------------------------

    @rule(
        n=NUMBER,
        cpu=st.sampled_from(["1", "2", "6"]),
        ttl=st.sampled_from([1_000, 100_000, 3_000_000]),
        sort=st.sampled_from(["quota", "offer", "budget", "nested", "slots"]),
    )
    def issue_grant(self, n: int, cpu: str, ttl: int, sort: str) -> None:
        parents = [f"tenant/t{n % 2 + 1}", *self.grants()]
        parent = parents[n % len(parents)] if sort == "nested" else parents[0]
        budget = sort == "budget"
        spec = GrantSpec(
            holder="scheduler" if n % 5 else "shard-1",
            amount=amounts(cpu=cpu, gpu=1),
            shares={f"t{n % 2 + 1}": amounts(cpu="1")} if budget else {},
            parent="" if budget else parent,
            tenant="" if budget or sort in ("offer", "slots") else f"t{n % 2 + 1}",
            purpose=sort if sort != "nested" else "quota",  # type: ignore[arg-type]
            ttl=Duration(ttl),
        )
        lease = "scheduler" if sort == "nested" and n % 2 else "budgets"
        self.ask(self.r.actors[lease], Issue(f"g{n % 6}", spec))

    @rule(n=NUMBER, action=st.sampled_from(["renew", "close", "close", "reap"]))
    def renew_or_close_grant(self, n: int, action: str) -> None:
        names = self.grants()
        if names:
            name = names[n % len(names)]
            actor = self.r.actors["repair" if action == "reap" else "budgets"]
            self.ask(actor, Renew(name) if action == "renew" else Close(name))

    @rule(n=NUMBER)
    def record_soft_state(self, n: int) -> None:
        self.ask(
            USER,
            RecordEvent(f"e{n % 5}", EventSpec(regarding="x")),
            RecordDecision(f"d{n % 5}", "t1", DecisionSpec(replicas={"x": ""})),
        )
        condition = Condition(type=f"C{n % 3}", status="True", observed_generation=n)
        self.ask(self.r.actors["agent/n1"], SetCondition("Node", f"n{n % 4 + 1}", condition))
        self.ask(USER, Report(f"r{n % 2}", SummarySpec(holder="x", epoch=n % 3, sequence=n)))

    # -- leases ------------------------------------------------------------------------------------------------------

    @rule(n=NUMBER, action=st.sampled_from(["steal", "again", "vacate", "wrong"]))
    def contend_for_lease(self, n: int, action: str) -> None:
        leases = sorted(self.r.actors)
        actor = self.r.actors[leases[n % len(leases)]]
        match action:
            case "vacate":
                self.ask(actor, Vacate(actor.lease))
                self.ask(Actor(actor.name, actor.role), Acquire(actor.lease, HOUR))
            case "wrong":
                self.ask(Actor("x", Role.REPAIR), Acquire("scheduler", HOUR))
            case _:
                name = actor.name if action == "again" else "thief"
                self.ask(Actor(name, actor.role), Acquire(actor.lease, HOUR))

    # -- batches, restarts, restores -------------------------------------------------------------------------------------

    @precondition(lambda self: self.batch is None)
    @rule(steps=STEPS)
    def claim_concurrently(self, steps: list[tuple[int, int, int]]) -> None:
        """Several batches of claims, made without knowledge of each other."""
        self.batch = []
        self.run_ordinary_steps(steps=steps)
        batch, self.batch = self.batch or [], None
        self.do(self._send_batch(batch))

    @precondition(lambda self: self.batch is None)
    @rule()
    def collect_claims_for_batch(self) -> None:
        self.batch = []

    @precondition(lambda self: self.batch)
    @rule()
    def send_collected_batch(self) -> None:
        batch, self.batch = self.batch or [], None
        self.do(self._send_batch(batch))

    async def _send_batch(self, batch: list[Operation]) -> None:
        await self.ensure_leader(self.r)
        await self.send(self.r, batch)

    @rule()
    def restarted_authority_has_same_books(self) -> None:
        """F20: everything follows from the store alone."""
        self.do(self._restart())

    async def _restart(self) -> None:
        await self.ensure_leader(self.r)
        self.r.store.plan.clear()
        old = self.r.lead.authority
        before, policy_before = books(old.books), old.books.current_policy()
        counts = {
            name: {k: v for k, v in getattr(old.books, name).items() if v} for name in ("population", "active", "reserved")
        }
        await self.r.take_over()
        new = self.r.lead.authority
        assert books(new.books) == before
        assert new.books.current_policy() == policy_before
        for name, counted in counts.items():
            assert {k: v for k, v in getattr(new.books, name).items() if v} == counted, name


class BusyMachine(AuthorityMachine):
    """Without rules that undo progress, so that load builds up; always with some work of higher priority."""

    always = frozenset({0, 2, 3, 10})

    restore_backup = None  # type: ignore[assignment]
    take_backup = None  # type: ignore[assignment]
    delete_object = None  # type: ignore[assignment]
    adopt_leased_policy = None  # type: ignore[assignment]
    publish_or_roll_back_policy = None  # type: ignore[assignment]
    contend_for_lease = None  # type: ignore[assignment]
    record_soft_state = None  # type: ignore[assignment]
    mark_node = None  # type: ignore[assignment]


def test_authority_keeps_invariants_under_any_claims_and_faults() -> None:
    """F01 F02 F10 F12 F15 F16 F19 F20 F24 F25 F27 F33 F34 F37 F38"""
    run_state_machine_as_test(AuthorityMachine, settings=tries(60, 150))
    REACHED.write()


def test_busy_authority_keeps_invariants() -> None:
    """F01 F02 F12 F15 F16 F19 F20 F24 F25 F33 F34 F37 F38"""
    run_state_machine_as_test(BusyMachine, settings=tries(60, 150))
    REACHED.write()


def test_tallies_count_codes_transitions_and_claims() -> None:
    """The soak prints these counts; they start empty."""
    tallies = Tallies("nothing")
    tallies.count("x")
    assert tallies.counted == Counter({"x": 1})
    assert isinstance(Accepted(1), Accepted)
