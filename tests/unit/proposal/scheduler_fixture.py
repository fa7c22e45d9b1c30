"""A scheduling cycle before a real authority, step by step: it sees commits only when a test lets it. No tests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from remit.law.overrides import Instant
from remit.model.claims import Accepted, AnyClaim, Apply, Bind, BindGang, Mark, RecordDecision, Refused, Reserve, Spawn, Verdict
from remit.model.kinds import Node, NodeHealth, PriorityClass, PriorityClassSpec, Tenant, TenantSpec
from remit.model.metadata import Metadata
from remit.model.records import DecisionSpec
from remit.observation.frozen_view import recompute
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.cycle import Cycle
from remit.proposal.proposals import Proposal
from remit.proposal.queue.class_queues import QueueWait
from tests.properties.authority_world import OPERATOR, USER, Scope, amounts, populated_scope, run, workload
from tests.properties.observation.view_feed import events_after, listed

ROUNDS_MAX = 200


class CycleFixture:
    """One scheduling cycle over one scope. `limit` is the number of replicas that it tries at once."""

    def __init__(self, scope: Scope, *, limit: int = 100, **shape: Any) -> None:
        self.scope, self.limit = scope, limit
        self.view = SchedulerView(scope.clock)
        self._shape = shape
        self.proposed: list[Proposal] = []
        self._by: dict[int, Cycle] = {}
        """The cycle that made each proposal, by the proposal's identity: its verdicts go to that cycle."""
        self.answered: list[tuple[AnyClaim, Verdict]] = []
        self.cycle = self._cycle()

    def _cycle(self) -> Cycle:
        return Cycle(self.view, lambda most: 0, f"s-{len(self.proposed)}", **self._shape)

    def depose(self) -> None:
        """End the current term and start another on the same view."""
        self.cycle.step_down()
        self.cycle = self._cycle()

    @property
    def now_ms(self) -> int:
        return self.scope.clock.at_ms

    def authority(self) -> Instant:
        return self.scope.clock.on, self.scope.clock.at_ms

    # -- steps -------------------------------------------------------------------------------------------------------------

    async def sync(self) -> None:
        """Apply everything committed to the view; the first time, by a list."""
        store = self.scope.store.inner
        if self.view.head is None:
            await listed(self.view, store)
        else:
            for event in await events_after(store, self.view.revision):
                self.view.apply(event)

    def notify(self) -> None:
        self.cycle.on_changes(self.now_ms, self.authority())

    def propose(self) -> Proposal:
        """Propose on the changes seen so far; nothing is submitted."""
        self.notify()
        made = self.cycle.propose(self.now_ms, self.limit)
        self._by[id(made)] = self.cycle
        self.proposed.append(made)
        self.assert_consistent()
        return made

    async def ask(self, made: Proposal) -> list[Verdict]:
        if not made.claims:
            return []
        return await self.scope.ask(self.scope.actors["scheduler"], *made.claims, evidence=made.evidence)

    def deliver(self, made: Proposal, verdicts: Sequence[Verdict]) -> bool:
        """Deliver the verdicts; return whether the proposing cycle is still in office."""
        self.answered += zip(made.claims, verdicts, strict=True)
        self._by[id(made)].on_verdicts(made, verdicts, self.now_ms)
        return self._by[id(made)] is self.cycle

    def deliver_no_answer(self, made: Proposal) -> None:
        self._by[id(made)].on_no_answer(made, self.now_ms)

    async def run_cycle(self) -> Proposal:
        """Sync, propose, submit, deliver."""
        await self.sync()
        made = self.propose()
        self.deliver(made, await self.ask(made))
        return made

    async def settle(self) -> None:
        """Run cycles until nothing more is proposed; backoffs are waited out."""
        for _ in range(ROUNDS_MAX):
            made = await self.run_cycle()
            await self.sync()
            self.notify()
            if not made and not self.cycle.backlog.active:
                held = any(not wait.unblock_events for _, wait in self.cycle.backlog.waiting())
                if not held:
                    self.assert_consistent()
                    return
                self.scope.clock.at_ms += 500
        raise AssertionError(f"it does not settle: {list(self.cycle.backlog.waiting())}")

    def assert_consistent(self) -> None:
        found = list(recompute(self.view))
        assert not found, "\n".join(found)

    # -- results -----------------------------------------------------------------------------------------------------------

    def where(self, name: str = "") -> dict[str, str]:
        """Nodes of the replicas that hold capacity, by replica name."""
        found = {}
        for key, (_, row) in sorted(self.scope.checker.rows.items()):
            status = row.get("status", {}) if key.startswith("replica/") else {}
            short = key.removeprefix("replica/").partition("/")[2]
            if status.get("node") and status.get("phase") not in ("pending", "released") and short.startswith(name):
                found[short] = str(status["node"])
        return found

    def slot(self, name: str, tenant: str = "t1") -> int:
        return self.view.replicas.slots[f"replica/{tenant}/{name}"]

    def wait(self, name: str, tenant: str = "t1") -> QueueWait | None:
        line = self.cycle.backlog.queue_of(self.slot(name, tenant))
        assert line is not None, f"{name} is in no queue"
        return line.wait

    def reason(self, name: str, tenant: str = "t1") -> str:
        wait = self.wait(name, tenant)
        return "" if wait is None else str(wait.reason)

    def decisions(self, word: str = "") -> list[DecisionSpec]:
        found = [claim.decision for made in self.proposed for claim in made.claims if isinstance(claim, RecordDecision)]
        return [one for one in found if not word or one.verdict == word]


def binds(made: Proposal) -> dict[str, str]:
    """The node of each replica that a proposal binds, gangs included."""
    found = {}
    for claim in made.claims:
        for bind in claim.members if isinstance(claim, BindGang) else (claim,):
            if isinstance(bind, Bind):
                found[bind.replica.rpartition("/")[2]] = bind.node
    return found


def reserves(made: Proposal) -> list[Reserve]:
    return [claim for claim in made.claims if isinstance(claim, Reserve)]


def cycle_test(test: Callable[[CycleFixture], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test on a cycle over a prepared scope: n1 (zone a, two GPUs) and n2 (zone b), four cores each."""

    def run_test() -> None:
        async def scenario() -> None:
            scope = await populated_scope()
            try:
                await test(CycleFixture(scope))
            finally:
                await scope.close()

        run(scenario())

    run_test.__name__, run_test.__doc__, run_test.__module__ = test.__name__, test.__doc__, test.__module__
    return run_test


# -- builders --------------------------------------------------------------------------------------------------------------


async def create_pending(scope: Scope, name: str, count: int = 1, cpu: str = "1", **shape: Any) -> None:
    """Create a workload with `count` pending replicas."""
    owner = shape.get("owner", "t1")
    await scope.must(USER, Apply(workload(name, cpu, max(count, shape.pop("replicas", 0)), **shape)))
    if count:
        await scope.must(scope.actors["workloads"], Spawn(owner, name, 1, 0, count))


async def nodes(scope: Scope, *new_nodes: Node) -> None:
    """Add nodes and mark them ready."""
    await scope.acquire(*(f"agent/{node_.metadata.name}" for node_ in new_nodes))
    await scope.must(OPERATOR, *(Apply(node_) for node_ in new_nodes))
    for node_ in new_nodes:
        await mark(scope, node_.metadata.name, NodeHealth.READY)


async def mark(scope: Scope, name: str, health: NodeHealth) -> None:
    await scope.must(scope.actors["node-lifecycle"], Mark(name, scope.at(f"node/{name}"), health))


async def quota(scope: Scope, name: str, weight: int = 1, **counted: str) -> None:
    counted.setdefault("memory", "640Gi")
    made = Tenant(metadata=Metadata(name=name), spec=TenantSpec(quota=amounts(gpu=4, **counted), weight=weight))
    await scope.must(OPERATOR, Apply(made))


async def rank(scope: Scope, name: str, value: int, *, preempts: bool = True) -> None:
    made = PriorityClass(metadata=Metadata(name=name), spec=PriorityClassSpec(value=value, preempts=preempts))
    await scope.must(OPERATOR, Apply(made))


def refused(cycle_fixture: CycleFixture) -> list[str]:
    return [str(verdict.code) for _, verdict in cycle_fixture.answered if isinstance(verdict, Refused)]


def accepted(cycle_fixture: CycleFixture) -> int:
    return sum(isinstance(verdict, Accepted) for _, verdict in cycle_fixture.answered)
