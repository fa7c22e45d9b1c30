"""Property: a scheduler loses no replica, repeats no claim blindly, and converges after any events.

A cycle runs against a real authority. Between its steps other actors declare, bind, remove and change objects; answers come
late, out of order, or never; its lease term ends. At rest an oracle that shares nothing with the law determines what should
have been bound, and which preemptions should have happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from msgspec.structs import replace

from remit.model.claims import (
    Accepted,
    AnyClaim,
    Apply,
    Bind,
    Code,
    Delete,
    Mark,
    Refused,
    Spawn,
    Verdict,
)
from remit.model.kinds import (
    Affinity,
    DeviceRequest,
    Disruption,
    Node,
    NodeHealth,
    Override,
    OverrideScope,
    OverrideSpec,
    Placement,
    Spread,
    Workload,
)
from remit.model.metadata import Metadata
from remit.model.resources import Duration
from remit.observation.frozen_view import recompute
from remit.observation.node_columns import NodeFree
from remit.proposal.proposals import Proposal
from tests.properties.authority_world import OPERATOR, USER, node, populated_scope, workload
from tests.properties.effort import tries
from tests.properties.observation.view_feed import listed
from tests.unit.commitment.authority_fixture import transition_claim
from tests.unit.law import fit_oracle as oracle
from tests.unit.law.fit_oracle import PlacementCase, Work
from tests.unit.proposal.scheduler_fixture import CycleFixture, quota, rank

NUMBER = st.integers(0, 63)
SPREAD = Placement(topology_spread=(Spread(topology_key="zone"),))
APART = Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="node"),))
NEAR = Placement(affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),))
RUNS = ("bound", "starting", "running", "ready", "serving")
HOLDS = (*RUNS, "reserved", "draining", "stopping", "finished", "unknown", "failed")
SETTLE_MAX = 60


def catalogue(n: int) -> list[Workload]:
    """One workload of each sort that a scheduler treats specially; `n` makes their names differ."""
    gpu, part = (DeviceRequest(kind="gpu", count=1),), (DeviceRequest(kind="gpu", share="400m"),)
    safe = Disruption(min_available=2)
    return [
        workload(f"plain{n}", "1", 3),
        workload(f"twin{n}", "1", 2, labels={"app": "x"}),
        workload(f"kept{n}", "1", 3, disruption=safe),
        workload(f"gang{n}", "1", 4, gang=3, type_="job"),
        workload(f"pair{n}", "2", 2, gang=2, type_="job", owner="t2"),
        workload(f"high{n}", "2", 2, priority="high"),
        workload(f"meek{n}", "1", 2, priority="meek"),
        workload(f"top{n}", "3", 1, priority="top", owner="t2"),
        workload(f"gpu{n}", "500m", 2, devices=gpu, priority="high"),
        workload(f"part{n}", "500m", 2, devices=part),
        workload(f"wide{n}", "1", 3, placement=SPREAD, priority="high"),
        workload(f"shy{n}", "1", 2, placement=APART),
        workload(f"near{n}", "1", 1, placement=NEAR, priority="high"),
        workload(f"huge{n}", "9", 1, priority="top"),
        workload(f"theirs{n}", "1", 3, owner="t2"),
    ]


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.scope = self.do(populated_scope(nodes=[node("n1", gpus=1), node("n2", zone="b"), node("n3", "2", zone="b")]))
        self.scheduler = CycleFixture(self.scope, limit=4)
        self.works: dict[tuple[str, str], Workload] = {}
        self.under_way: list[Proposal] = []
        self.answers: list[tuple[Proposal, list[Verdict]]] = []
        self.blind: dict[str, int] = {}
        """Refused claims, and the revision that must be seen before they may be repeated."""
        self.born = 0
        self.do(rank(self.scope, "meek", 50, preempts=False))
        self.do(self.scheduler.sync())
        self.scheduler.notify()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        try:
            self.converge()
        finally:
            self.do(self.scope.close())
            self.loop.close()
        super().teardown()

    # -- the world ---------------------------------------------------------------------------------------------------------

    def replicas(self, *phases: str) -> list[str]:
        rows = self.scope.checker.rows
        return sorted(key for key in rows if key.startswith("replica/") and self.scope.phase(key) in phases)

    def ask(self, actor: Any, claim: AnyClaim) -> Verdict:
        verdict: Verdict = self.do(self.scope.ask(actor, claim))[0]
        return verdict

    def move(self, key: str, transition: str) -> bool:
        actor, claim = transition_claim(self.scope, key, transition)
        return isinstance(self.ask(actor, claim), Accepted)

    @rule(n=NUMBER, m=NUMBER)
    def declare_work(self, n: int, m: int) -> None:
        self.born += 1
        sorts = catalogue(self.born)
        for proposal in (sorts[n % len(sorts)], sorts[m % len(sorts)]):
            owner, name = proposal.metadata.tenant, proposal.metadata.name
            if (owner, name) not in self.works:
                self.works[owner, name] = proposal
                self.ask(USER, Apply(proposal))
                self.ask(self.scope.actors["workloads"], Spawn(owner, name, 1, 0, proposal.spec.replicas))

    @rule(n=NUMBER)
    def delete_work(self, n: int) -> None:
        there = [key for key in self.works if f"workload/{key[0]}/{key[1]}" in self.scope.checker.rows]
        if there:
            owner, name = there[n % len(there)]
            self.ask(OPERATOR, Delete("Workload", name, owner))
            for key in self.replicas("pending", "reserved")[: n % 4]:
                if key.startswith(f"replica/{owner}/{name}-"):
                    self.move(key, "cancel")

    @rule(n=NUMBER, m=NUMBER)
    def bind_by_rival(self, n: int, m: int) -> None:
        waiting, names = self.replicas("pending"), sorted(self.scope.books.nodes)
        if waiting:
            key = waiting[n % len(waiting)]
            owner = key.split("/")[1]
            bind = Bind(key, self.scope.at(key), names[m % len(names)], f"tenant/{owner}")
            if isinstance(self.ask(self.scope.actors["scheduler"], bind), Accepted):
                event("a rival was first")

    @rule(n=NUMBER, m=st.integers(1, 6))
    def move_replicas(self, n: int, m: int) -> None:
        on = {"bound": "start", "starting": "run", "running": "ready", "draining": "stop", "stopping": "stopped"}
        on |= {"released": "requeue", "ready": "remove" if n % 3 else "serve", "serving": "unserve"}
        there = self.replicas(*on)
        for key in [there[(n + i) % len(there)] for i in range(m)] if there else ():
            if self.scope.phase(key) in on:
                self.move(key, on[self.scope.phase(key)])

    @rule(n=NUMBER)
    def release_reservation(self, n: int) -> None:
        held = self.replicas("reserved")
        if held:
            self.move(held[n % len(held)], "unreserve")

    @rule(n=NUMBER)
    def change_node(self, n: int) -> None:
        names = sorted(self.scope.books.nodes)
        name = names[n % len(names)]
        now: Node = self.scope.books.nodes[name].node
        match n // 8 % 5:
            case 0 | 1:
                run_cycle = {"ready": NodeHealth.SUSPECT, "suspect": NodeHealth.READY}[str(now.status.health)]
                self.ask(self.scope.actors["node-lifecycle"], Mark(name, self.scope.at(f"node/{name}"), run_cycle))
            case 2:
                spec = replace(now.spec, unschedulable=not now.spec.unschedulable)
                self.ask(OPERATOR, Apply(Node(metadata=Metadata(name=name), spec=spec)))
            case 3:
                self.ask(OPERATOR, Delete("Node", name))
                if f"node/{name}" not in self.scope.checker.rows and len(names) == 1:
                    self._node(name)
            case _:
                self._node(f"m{n % 3}")

    def _node(self, name: str) -> None:
        if f"node/{name}" not in self.scope.checker.rows:
            self.do(self.scope.ask(OPERATOR, Apply(node(name, "3", zone="ab"[len(name) % 2]))))
            self.do(self.scope.acquire(f"agent/{name}"))
            self.ask(self.scope.actors["node-lifecycle"], Mark(name, self.scope.at(f"node/{name}"), NodeHealth.READY))

    @rule(name=st.sampled_from(["t1", "t2"]), cpu=st.sampled_from(["2", "5", "16"]))
    def change_quota(self, name: str, cpu: str) -> None:
        self.do(quota(self.scope, name, cpu=cpu))

    @rule(n=NUMBER, ttl_s=st.sampled_from([5, 60]))
    def apply_override(self, n: int, ttl_s: int) -> None:
        effects: list[tuple[Any, OverrideScope]] = [
            ("pause-expansion", OverrideScope(tenants=("t1",))),
            ("avoid", OverrideScope(zones=("b",))),
            ("pin", OverrideScope(tenants=("t2",), nodes=("n1", "n2"))),
            ("boost", OverrideScope(tenants=("t2",))),
        ]
        effect, scope = effects[n % 4]
        name = f"o{n % 4}"
        if f"override/{name}" in self.scope.checker.rows:
            self.ask(OPERATOR, Delete("Override", name))
            return
        by = 60 if effect == "boost" else 0
        spec = OverrideSpec(effect=effect, scope=scope, ttl=Duration(ttl_s * 1000), reason="r", author="a", by=by)
        self.ask(OPERATOR, Apply(Override(metadata=Metadata(name=name), spec=spec)))

    @rule(ms=st.sampled_from([10, 300, 5_000, 31_000]))
    def advance_time(self, ms: int) -> None:
        self.scope.clock.at_ms += ms

    # -- the scheduler -----------------------------------------------------------------------------------------------------

    @rule(complete=st.booleans())
    def update_view(self, complete: bool) -> None:
        if complete:
            self.do(listed(self.scheduler.view, self.scope.store.inner))
        else:
            self.do(self.scheduler.sync())

    @rule(limit=st.sampled_from([1, 3, 8, 100]))
    @precondition(lambda self: len(self.under_way) < 3)
    def propose(self, limit: int) -> None:
        self.scheduler.limit = limit
        over = self._overdrawn()
        proposal = self.scheduler.propose()
        assert self._overdrawn() <= over, "assumed claims exceed a quota"
        self._not_blind(proposal)
        if proposal:
            self.under_way.append(proposal)

    @rule(n=NUMBER)
    @precondition(lambda self: self.under_way)
    def answer_proposal_late(self, n: int) -> None:
        proposal = self.under_way.pop(n % len(self.under_way))
        verdicts = self.do(self.scheduler.ask(proposal))
        self.answers.append((proposal, verdicts))
        for claim, verdict in zip(proposal.claims, verdicts, strict=True):
            if isinstance(verdict, Refused):
                event(f"{type(claim).__name__} refused: {verdict.code}")

    @rule(n=NUMBER)
    @precondition(lambda self: self.answers)
    def deliver_answer(self, n: int) -> None:
        self._learn(*self.answers.pop(n % len(self.answers)))

    @rule()
    @precondition(lambda self: self.under_way)
    def lose_proposal(self) -> None:
        self.scheduler.deliver_no_answer(self.under_way.pop(0))

    @rule(n=NUMBER, m=NUMBER, lag_ms=st.sampled_from([0, 300, 5_000]))
    @precondition(lambda self: len(self.under_way) < 3)
    def lose_race(self, n: int, m: int, lag_ms: int) -> None:
        """Others bind first; the refusal arrives before the change is seen, and the scheduler goes on."""
        self.declare_work(n, m)
        self.update_view(False)
        self.propose(8)
        self.bind_by_rival(n, m)
        self.bind_by_rival(m, n)
        if self.under_way:
            self.answer_proposal_late(0)
            self.deliver_answer(len(self.answers) - 1)
        for _ in range(2):
            self.scope.clock.at_ms += lag_ms
            self.every_pending_replica_is_queued_once()
            if len(self.under_way) < 3:
                self.propose(8)

    @rule(n=NUMBER, m=NUMBER)
    @precondition(lambda self: len(self.under_way) < 3)
    def change_world_during_proposal(self, n: int, m: int) -> None:
        """Class attributes change, or a base row disappears, between the claim and the answer."""
        self.declare_work(n, m)
        self.update_view(False)
        self.propose(3)
        match n % 4:
            case 0:
                self.declare_work(11, 11)  # with anti-affinity: from now on, replicas with this label are distinguished
            case 1:
                self.delete_work(n)
            case 2:
                self.apply_override(n, 5)
            case _:
                self.change_node(m)
        self.update_view(bool(m % 2))
        self.every_pending_replica_is_queued_once()
        if len(self.under_way) < 3:
            self.propose(3)

    @rule()
    def end_lease_term(self) -> None:
        """Answers of the old term arrive at a scheduler without its lease."""
        self.scheduler.depose()
        self.blind.clear()

    @rule()
    def restart(self) -> None:
        self.scheduler.view._reset()
        self.do(self.scheduler.sync())
        self.blind.clear()

    def _learn(self, proposal: Proposal, verdicts: list[Verdict]) -> None:
        refused = {repr(c): v.revision for c, v in zip(proposal.claims, verdicts, strict=True) if isinstance(v, Refused)}
        if self.scheduler.deliver(proposal, verdicts):
            self.blind |= refused

    def _not_blind(self, proposal: Proposal) -> None:
        for claim in proposal.claims:
            seen = self.blind.get(repr(claim), 0)
            assert self.scheduler.view.revision >= seen, (
                f"{claim} was refused at {seen}; the view is at {self.scheduler.view.revision}"
            )

    def _overdrawn(self) -> set[str]:
        ledgers = self.scheduler.view.quota_ledgers.ledgers
        return {name for name, ledger in ledgers.items() if any(left < 0 for left in ledger.free.values())}

    # -- invariants --------------------------------------------------------------------------------------------------------

    @invariant()
    def sums_equal_rows(self) -> None:
        found = list(recompute(self.scheduler.view))
        assert not found, "\n".join(found)

    @invariant()
    def every_pending_replica_is_queued_once(self) -> None:
        """A pending replica is in the backlog once; it is in flight only until its answer is seen."""
        scheduler = self.scheduler
        if scheduler.view.head is None:
            return
        scheduler.notify()
        backlog, view = scheduler.cycle.backlog, scheduler.view
        members = [cast(int, slot) for line in backlog.queues() for slot in (*line.members(), *line._in_flight)]
        assert sorted(members) == view.replicas.pending()
        for line in backlog.queues():
            assert not set(line.members()) & set(view.assumed), f"{line} contains an assumed replica"
            for slot in cast(list[int], list(line._in_flight)):
                assert scheduler.cycle._is_in_flight(slot), f"{view.replicas.keys[slot]} is in flight without a claim"
            assert (line.wait is None) or line.wait.until_ms <= scheduler.now_ms + 60_000

    # -- convergence -------------------------------------------------------------------------------------------------------

    @rule()
    def converge(self) -> None:
        """Everything is seen, claimed and answered; evicted replicas stop. Preemption ends, so this ends."""
        while self.under_way:
            self.answer_proposal_late(0)
        while self.answers:
            self.deliver_answer(0)
        self.scheduler.limit = 100
        self._rest()
        if not self._overrides():
            self._all_is_right(later=False)
        self.scope.clock.at_ms += 61_000  # longer than any wait
        self._rest()
        if not self._overrides():
            self._all_is_right(later=True)

    def _rest(self) -> None:
        scheduler, calm = self.scheduler, 0
        for _ in range(SETTLE_MAX):
            scheduler.proposed.clear()
            self.do(scheduler.settle())
            leaving = self.replicas("draining", "stopping")
            for key in leaving:
                self.move(key, "stop" if self.scope.phase(key) == "draining" else "stopped")
            for key in self.replicas("released"):
                leaving += [key] if self.move(key, "requeue") else []
            scheduler.scope.clock.at_ms += 1_500
            calm = 0 if leaving else calm + 1
            if calm == 2:
                assert not scheduler.view.assumed
                return
        raise AssertionError("it does not come to rest: somebody is pushed aside again and again")

    def _overrides(self) -> bool:
        return bool(self.scheduler.cycle.override_filter.effects.overrides)

    def _all_is_right(self, *, later: bool) -> None:
        """A replica that fits is bound at once. After a minute every reason is current, and possible preemptions are done."""
        scene, places = self._scene()
        for key in self.replicas("pending", "reserved"):
            self._is_right(key, scene, places, later)

    def _scene(self) -> tuple[PlacementCase, dict[str, int]]:
        left, places = [], {}
        for row, (name, ledger) in enumerate(sorted(self.scope.books.nodes.items())):
            free = {resource: count for resource, count in ledger.free.items() if not resource.startswith("@")}
            used = {d.name: 1000 - ledger.free.get(f"@{d.name}", 0) for d in ledger.node.spec.devices}
            left.append(NodeFree(ledger.node, free, used))
            places[name] = row
        standing = [(self._work(key), places[self._node_of(key)]) for key in self.replicas(*HOLDS)]
        return PlacementCase(left, standing, [], Work("", "", {}, workload("x").spec)), places

    def _node_of(self, key: str) -> str:
        return str(self.scope.row(key)["status"]["node"])

    def _work(self, key: str) -> Work:
        owner, name = key.split("/")[1], str(self.scope.row(key)["spec"]["workload"])
        proposal = self.works[owner, name]
        return Work(owner, name, dict(proposal.metadata.labels), proposal.spec)

    def _covered(self, key: str, count: int = 1) -> bool:
        work = self._work(key)
        left = self.scope.books.grants[f"tenant/{work.tenant}"].free
        needs = dict(work.spec.template.resources.pairs)
        gpus = sum(ask.count * 1000 + (400 if ask.share else 0) for ask in work.spec.template.devices)
        return all(left.get(name, 0) >= need * count for name, need in {**needs, "devices/gpu": gpus}.items() if need)

    def _is_right(self, key: str, scene: PlacementCase, places: dict[str, int], later: bool) -> None:
        work = self._work(key)
        assert self.scope.phase(key) == "pending", f"{key} is reserved although all its victims have stopped"
        wait = self.scheduler.wait(key.split("/")[2], work.tenant)
        assert wait is not None, f"{key} is neither placed nor waiting"
        owner = self.scope.checker.rows.get(f"workload/{work.tenant}/{work.name}")
        if owner is None or owner[1]["metadata"].get("deleting"):
            assert wait.reason == Code.DELETING
            return
        here = scene._replace(work=work)
        violations = {name: oracle.violations(here, row) for name, row in places.items()}
        fits = [name for name, codes in violations.items() if not codes]
        covered = self._covered(key, work.spec.gang.min if work.spec.gang else 1)
        reasons = {code for codes in violations.values() for code in codes}
        if not covered:
            reasons.add(Code.OVER_QUOTA)
        if work.spec.gang:
            assert not later or wait.reason in {*reasons, Code.GANG_SHORT}
            if covered and not work.spec.template.devices:
                need = dict(work.spec.template.resources.pairs)["cpu"]
                room = sum(scene.left[places[name]].free["cpu"] // need for name in fits)
                waiting = len([k for k in self.replicas("pending") if self._work(k).name == work.name])
                assert min(room, waiting) < work.spec.gang.min, f"{key}: the gang fits but is not bound"
            return
        assert not later or wait.reason in reasons, f"{key} waits for {wait.reason}; the oracle says {reasons}"
        assert not (fits and covered), f"{key} fits on {fits} within quota, but waits for {wait.reason}"
        if later and covered and work.spec.priority_class in ("high", "top"):
            for name, codes in violations.items():
                if codes <= {Code.NO_ROOM}:
                    assert not self._could_make_room(work, name, here), f"{key} could preempt on {name}"

    def _could_make_room(self, work: Work, name: str, scene: PlacementCase) -> bool:
        """Is there enough on one node in the hands of lower work that may lose it? Only amounts are looked at, and only those
        workloads as victims whose going changes no count that the work looks at.
        """
        mine = {"": 0, "meek": 50, "high": 100, "top": 1000}
        free = dict(self.scope.books.nodes[name].free)
        for key in self.replicas(*RUNS):
            theirs = self._work(key)
            if self._node_of(key) != name or theirs.spec.disruption.min_available or work.spec.placement != Placement():
                continue
            if mine[theirs.spec.priority_class] < mine[work.spec.priority_class]:
                for resource, count in theirs.spec.template.resources.pairs:
                    free[resource] = free.get(resource, 0) + count
        return not work.spec.template.devices and all(free.get(r, 0) >= need for r, need in work.spec.template.resources.pairs)


def test_scheduler_loses_no_replica_and_converges() -> None:
    """S3 S4 S5 S12 S18 S23 L1 L2 L3 L7 F01 F02 F03 F19 F22 F24 F25."""
    run_state_machine_as_test(SchedulerMachine, settings=tries(30, 40, stateful_step_count=30))
