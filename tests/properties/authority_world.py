"""Fixture of the authority tests: a manual clock, a store with injected faults, and a scope checked by the judge.

What is correct is defined in simulate/checkers only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, TypeVar

from remit.client.endpoint import EndpointError, NotLeader
from remit.commitment.authority import Authority, LeadershipLost
from remit.commitment.operation_queue import BATCH_LIMITS
from remit.model.claims import (
    Accepted,
    Acquire,
    Actor,
    AnyClaim,
    Apply,
    Code,
    Evidence,
    Mark,
    Operation,
    OperationID,
    Refused,
    Verdict,
    operation_id,
)
from remit.model.kinds import (
    Device,
    DeviceRequest,
    Gang,
    Node,
    NodeHealth,
    NodeSpec,
    Placement,
    PriorityClass,
    PriorityClassSpec,
    Rollout,
    Taint,
    Template,
    Tenant,
    TenantSpec,
    Workload,
    WorkloadSpec,
)
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Metadata
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.simulate.checkers.judge import Judge
from remit.simulate.checkers.reference.past_states import CommitTimes
from remit.store.memory import MemoryBackup, MemoryStore
from remit.store.protocol import Commit, CommitOutcomeUnknown, Committed, Conflict, Page, Row, Unavailable, Watch

T = TypeVar("T")

HOUR = Duration(3_600_000)

OF_CONTROLLERS = ("disruption_keeps_min_available", "last_endpoint_is_not_withdrawn", "marking_nodes_unknown_is_rate_limited")
"""Invariants of controllers, not of the authority: these tests make any claim that the law permits."""


class FakeClock:
    """Advances only when a test sets it. A sleep advances it, so no task waits for ever."""

    def __init__(self, now_ms: int = 1_000_000, boot: str = "boot-1") -> None:
        self.at_ms, self.on = now_ms, boot

    def now_ms(self) -> int:
        return self.at_ms

    def boot(self) -> str:
        return self.on

    def wall(self) -> str:
        return "2026-01-01T00:00:00.000Z"

    async def sleep_ms(self, ms: int) -> None:
        self.at_ms += ms
        await asyncio.sleep(0)

    def timeout_ms(self, ms: int) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(ms / 1000)


class CountedIds:
    """Consecutive names, the same in every run."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix, self.count = prefix, 0

    def nonce(self) -> str:
        self.count += 1
        return f"{self.prefix}n{self.count}"

    def incarnation(self) -> str:
        self.count += 1
        return f"{self.prefix}i{self.count}"


class Violated(AssertionError):
    """The judge reports a violated invariant."""


class JudgedScope:
    """One scope under a judge, whose verdict is raised at once; scopes that exchange grants share one judge."""

    def __init__(self, scope: str, clock: FakeClock, judge: Judge | None) -> None:
        self.scope, self.clock = scope, clock
        self.judge = Judge(lambda: clock.at_ms) if judge is None else judge
        self.history = self.judge.history(scope)

    def applied(self, commit: Commit, revision: int, boot: str, decided_ms: int, sent_ms: int) -> None:
        stand = CommitTimes(boot, decided_ms, sent_ms, self.clock.at_ms)
        self.judge.on_commit(self.scope, commit.puts, commit.deletes, revision, stand)
        self.raise_first()

    def on_answer(self, operation: str, code: str, number: int, revision: int) -> None:
        self.judge.on_answer(self.scope, operation, code, number, revision)
        self.raise_first()

    def raise_first(self) -> None:
        broken = [violation for violation in self.judge.violations if violation.check not in OF_CONTROLLERS]
        if broken:
            found = broken[0]
            stories = [self.judge.story(scope, found.key) for scope in self.judge.histories]
            raise Violated("\n".join([str(found), *stories]))


class Crash(Exception):
    """The process crashes at this store call."""


class FaultyStore:
    """A memory store whose every applied commit is checked, and whose next calls fail as `plan` says.

    Words for commits: `ok`; `lost` (no answer, not applied); `landed` (no answer, applied); `late` (no answer, lands just
    before the next commit), `later` (just after the next one), `afloat` (when `land` is called); `unavailable`; `slow`;
    `before` and `after` (the process dies before or after it is applied); `gate` and `gated` (held up before it is applied, or
    after, until the gate opens).
    """

    def __init__(self, inner: MemoryStore, judged: JudgedScope | None) -> None:
        self.inner, self.judged = inner, judged
        self.sent_ms = self.returned_ms = 0
        """Interval in which the last commit was in flight: later ones may have been decided during it."""
        self.stands: dict[int, tuple[str, int, int]] = {}
        """By commit: boot, earliest decision time, send time."""
        self.plan: deque[str] = deque()
        self.reads: deque[str] = deque()
        self.afloat: list[Commit] = []
        self._late: list[Commit] = []
        self._later: list[Commit] = []
        self.gate = asyncio.Event()
        self.at_gate = asyncio.Event()
        self.calls = 0
        self.violation: Violated | None = None
        self.strikes: dict[int, str] = {}
        """By call number, of any kind: the fault to inject."""
        self.kinds: list[str] = []

    def _word(self, plan: deque[str]) -> str:
        self.calls += 1
        self.kinds.append("read" if plan is self.reads else "commit")
        if self.calls in self.strikes:
            return self.strikes[self.calls]
        return plan.popleft() if plan else "ok"

    async def _read(self) -> None:
        word = self._word(self.reads)
        if word in ("before", "after"):
            raise Crash(f"read {self.calls}")
        if word == "unavailable":
            raise Unavailable("planned")
        if word == "slow":
            for _ in range(5):
                await asyncio.sleep(0)

    async def get(self, key: str) -> Row | None:
        await self._read()
        return await self.inner.get(key)

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        await self._read()
        return await self.inner.range(prefix, after=after, limit=limit, revision=revision)

    async def commit(self, commit: Commit) -> Committed | Conflict:
        if self.judged is not None:
            now_ms = self.judged.clock.at_ms
            self.stands[id(commit)] = (self.judged.clock.on, self.sent_ms if now_ms == self.returned_ms else now_ms, now_ms)
            self.sent_ms = now_ms
        word = self._word(self.plan)
        (late, self._late), (later, self._later) = (self._late, []), (self._later, [])
        for one in late:
            await self.apply(one)
        try:
            return await self._commit(word, commit)
        finally:
            for one in later:
                await self.apply(one)
            self.returned_ms = 0 if self.judged is None else self.judged.clock.at_ms

    async def _commit(self, word: str, commit: Commit) -> Committed | Conflict:
        match word:
            case "ok" | "slow":
                await self._a_while()
                return await self.apply(commit)
            case "lost":
                await self._a_while()
                raise CommitOutcomeUnknown("planned")
            case "landed":
                await self._a_while()
                await self.apply(commit)
                raise CommitOutcomeUnknown("planned")
            case "late" | "later" | "afloat":
                {"late": self._late, "later": self._later, "afloat": self.afloat}[word].append(commit)
                raise CommitOutcomeUnknown("planned")
            case "unavailable":
                await self._a_while()
                raise Unavailable("planned")
            case "before":
                await self._a_while()
                raise Crash(f"before commit, call {self.calls}")
            case "after":
                await self.apply(commit)
                raise Crash(f"after commit, call {self.calls}")
            case "gate":
                self.at_gate.set()
                await self.gate.wait()
                return await self.apply(commit)
            case "gated":
                answer = await self.apply(commit)
                self.at_gate.set()
                await self.gate.wait()
                return answer
            case _:
                raise ValueError(word)

    async def _a_while(self) -> None:
        """Yield to the loop as a disk write does: the next batch may be decided meanwhile."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def land(self) -> None:
        """Apply the commits that were lost long ago."""
        waiting, self.afloat = self.afloat, []
        for commit in waiting:
            await self.apply(commit)

    async def apply(self, commit: Commit) -> Committed | Conflict:
        answer = await self.inner.commit(commit)
        if isinstance(answer, Committed) and self.judged is not None:
            try:
                self.judged.applied(commit, answer.revision, *self.stands.pop(id(commit)))
            except Violated as violation:
                # Kept: the committer would take it for a failure of the store, or of its own.
                self.violation = self.violation or violation
                raise
        return answer

    async def watch(self, prefix: str, *, after: int) -> Watch:
        return await self.inner.watch(prefix, after=after)

    async def compact(self, revision: int) -> None:
        await self._read()
        await self.inner.compact(revision)

    async def revision(self) -> int:
        return await self.inner.revision()

    async def close(self) -> None:
        await self.inner.close()


class RunningAuthority:
    """One authority and the task that runs it."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.task = asyncio.get_running_loop().create_task(self._run())
        self.ended: BaseException | None = None

    async def _run(self) -> None:
        try:
            await self.authority.run()
        except (LeadershipLost, Crash, Violated) as ended:
            self.ended = ended

    @property
    def alive(self) -> bool:
        return not self.task.done()

    async def ask(self, operations: Sequence[Operation]) -> list[Verdict] | EndpointError:
        """The verdicts, or the error. A dead process never received the request."""
        if self.task.done():
            return NotLeader()
        asking = asyncio.get_running_loop().create_task(self._ask(operations))
        done, _ = await asyncio.wait({asking, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if asking not in done:
            await asyncio.sleep(0)
        answer = await asyncio.wait_for(asking, 20)
        self.check()
        return answer

    def check(self) -> None:
        """Raise a violation, or a bug that ended the authority: neither may pass for an unknown outcome."""
        store = self.authority.store
        if isinstance(store, FaultyStore) and store.violation is not None:
            raise store.violation
        if self.task.done() and not self.task.cancelled() and (failed := self.task.exception()) is not None:
            raise failed

    async def _ask(self, operations: Sequence[Operation]) -> list[Verdict] | EndpointError:
        try:
            return await self.authority.submit(operations)
        except EndpointError as error:
            return error

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        if not self.task.cancelled() and (failed := self.task.exception()) is not None:
            raise failed


class Scope:
    """One scope's store with its judge, the leading authority, and deposed ones that do not know it yet."""

    batch_max: ClassVar[int] = BATCH_LIMITS.operations
    """Smaller than in production, so that batches overlap."""

    def __init__(
        self, name: str = "r1", clock: FakeClock | None = None, *, checked: bool = True, judge: Judge | None = None
    ) -> None:
        self.name = name
        self.clock = FakeClock() if clock is None else clock
        self.ids = CountedIds(name)
        self.judged = JudgedScope(name, self.clock, judge)
        self.checker = self.judged.history
        self.checked = checked
        self.store = FaultyStore(MemoryStore(), self.judged if checked else None)
        self.leader: RunningAuthority | None = None
        self.deposed: list[RunningAuthority] = []
        self.actors: dict[str, Actor] = {}
        self.operations: dict[str, Operation] = {}
        self.answers: dict[str, Verdict] = {}
        self.takeovers = 0
        self.reborn = False

    # -- leadership --------------------------------------------------------------------------------------------------

    async def take_over(self) -> RunningAuthority:
        """Start a new authority; the old one keeps running without notice."""
        self.takeovers += 1
        authority = await Authority.take_over(
            self.store,
            scope=self.name,
            holder=f"a{self.takeovers}",
            clock=self.clock,
            ids=self.ids,
            batch_limits=BATCH_LIMITS._replace(operations=self.batch_max),
        )
        if self.leader is not None:
            self.deposed.append(self.leader)
        self.leader = RunningAuthority(authority)
        if self.reborn:
            self.reborn = False
            await self.revive()
        return self.leader

    async def revive(self) -> None:
        """After a restore: reacquire leases, and make every node report and become ready. No faults are injected."""
        strikes, self.store.strikes = self.store.strikes, {}
        for lease, actor in list(self.actors.items()):
            await self.send([await self.operation(Actor(actor.name, actor.role), Acquire(lease, HOUR))])
        for health in (NodeHealth.JOINING, NodeHealth.READY):
            page = await self.store.inner.range("node/", limit=1_000)
            marks = [Mark(row.key.removeprefix("node/"), row.revision, health) for row in page.rows]
            if marks and "node-lifecycle" in self.actors:
                await self.send([await self.operation(self.actors["node-lifecycle"], mark) for mark in marks])
        self.store.strikes = strikes

    @property
    def lead(self) -> RunningAuthority:
        if self.leader is None:
            raise LookupError("nobody leads")
        return self.leader

    @property
    def books(self) -> Any:
        return self.lead.authority.books

    async def close(self) -> None:
        for running in [*self.deposed, *([self.leader] if self.leader else [])]:
            await running.stop()

    # -- operations --------------------------------------------------------------------------------------------------

    async def operation(self, actor: Actor, claim: AnyClaim, evidence: Evidence = Evidence()) -> Operation:
        incarnation, window = await self._window()
        made = Operation(operation_id(incarnation, window, self.ids.nonce()), actor, claim, evidence)
        self.operations[made.id] = made
        return made

    async def _window(self) -> tuple[str, int]:
        """Incarnation and window from the status; if unavailable, the last known ones, which are good enough for an id."""
        authority = self.lead.authority
        try:
            status = await authority.status()
        except EndpointError:
            return authority.head.incarnation, authority.outcomes.window
        return status.incarnation, status.window

    async def send(self, operations: Sequence[Operation], to: RunningAuthority | None = None) -> list[Verdict] | EndpointError:
        verdicts = await (to or self.lead).ask(operations)
        if not isinstance(verdicts, EndpointError):
            for operation, verdict in zip(operations, verdicts, strict=True):
                self.hear(operation, verdict)
        return verdicts

    def hear(self, operation: Operation, verdict: Verdict) -> None:
        if self.checked:
            code = verdict.code.value if isinstance(verdict, Refused) else ""
            number = verdict.number if isinstance(verdict, Accepted) else 0
            self.judged.on_answer(operation.id, code, number, verdict.revision)
        if not (isinstance(verdict, Refused) and verdict.code in (Code.OPERATION_MISMATCH, Code.OPERATION_EXPIRED)):
            self.answers[operation.id] = verdict
        if isinstance(operation.claim, Acquire) and isinstance(verdict, Accepted):
            held = Actor(operation.actor.name, operation.actor.role, operation.claim.lease, verdict.number)
            if held.epoch >= self.actors.get(operation.claim.lease, held).epoch:
                self.actors[operation.claim.lease] = held

    async def ask(self, actor: Actor, *claims: AnyClaim, evidence: Evidence = Evidence()) -> list[Verdict]:
        """Send in one request and return the verdicts, for tests without faults."""
        operations = [await self.operation(actor, claim, evidence) for claim in claims]
        verdicts = await self.send(operations)
        if isinstance(verdicts, EndpointError):
            raise verdicts
        return verdicts

    async def must(self, actor: Actor, *claims: AnyClaim) -> list[int]:
        """Expect acceptance of all claims; return their numbers."""
        verdicts = await self.ask(actor, *claims)
        for claim, verdict in zip(claims, verdicts, strict=True):
            assert isinstance(verdict, Accepted), f"{claim} was {verdict}"
        return [verdict.number for verdict in verdicts if isinstance(verdict, Accepted)]

    async def refused(self, actor: Actor, claim: AnyClaim, evidence: Evidence = Evidence()) -> Code:
        """Expect a refusal; return its code. Only the head and the batch record may change."""
        before = await self.dump()
        verdict = (await self.ask(actor, claim, evidence=evidence))[0]
        assert isinstance(verdict, Refused), f"{claim} was accepted: {verdict}"
        assert await self.dump() == before
        return verdict.code

    async def acquire(self, *leases: str, ttl: Duration = HOUR) -> None:
        operations = []
        for lease in leases:
            role = Role(lease.split("/")[0])
            operations.append(await self.operation(Actor(f"{lease}!", role), Acquire(lease, ttl)))
        verdicts = await self.send(operations)
        assert not isinstance(verdicts, EndpointError) and all(isinstance(v, Accepted) for v in verdicts), verdicts

    def at(self, key: str) -> int:
        return self.checker.rows[key][0]

    def row(self, key: str) -> Any:
        return self.checker.rows[key][1]

    def phase(self, key: str) -> str:
        return str(self.row(key).get("status", {}).get("phase", "pending"))

    async def dump(self, *, without: Iterable[str] = ("head", "batch/", "incarnation")) -> dict[str, bytes]:
        """All rows except the chain and the audit."""
        page = await self.store.inner.range("", limit=10_000)
        return {row.key: row.value for row in page.rows if not row.key.startswith(tuple(without))}

    async def restore(self, backup: MemoryBackup) -> None:
        """Replace the store by a backup; authorities of the old store keep running on it, without callers."""
        old = self.store
        for running in [*self.deposed, *([self.leader] if self.leader else [])]:
            await running.stop()
        self.leader, self.deposed = None, []
        inner, _ = MemoryStore.restore(backup, incarnation=self.ids.incarnation(), replacing=old.inner)
        self.store = FaultyStore(inner, self.judged if self.checked else None)
        self.store.calls, self.store.strikes, self.store.kinds = old.calls, old.strikes, old.kinds
        page = await inner.range("", limit=10_000)
        self.judged.judge.on_restore(self.name, [(r.key, r.value, r.revision) for r in page.rows], await inner.revision())
        self.answers = {i: v for i, v in self.answers.items() if i in self.checker.outcomes}
        self.reborn = True


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test in its own event loop; a test that hangs fails with the place where it hung."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(bounded())


def scope_test(test: Callable[[Scope], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test on a populated scope."""

    def wrapper() -> None:
        async def run_test() -> None:
            scope = await populated_scope()
            try:
                await test(scope)
            finally:
                await scope.close()

        run(run_test())

    wrapper.__name__, wrapper.__doc__, wrapper.__module__ = test.__name__, test.__doc__, test.__module__
    return wrapper


# ------------------------------------------------------------------------------------------------------------ objects

OPERATOR = Actor("op", Role.OPERATOR)
USER = Actor("user", Role.USER)
LEASES = ("scheduler", "node-lifecycle", "repair", "rollout", "workloads", "endpoints", "budgets", "policy", "autoscaler")


def amounts(**counted: str | int) -> Amount:
    """Amounts in manifest notation; `gpu` counts devices."""
    written: dict[str, object] = {name: str(n) for name, n in counted.items() if name != "gpu"}
    return Amount.parse({**written, "devices": {"gpu": str(counted["gpu"])}} if "gpu" in counted else written)


def node(name: str, cpu: str = "4", zone: str = "a", gpus: int = 0, **more: Any) -> Node:
    labels = more.pop("labels", {})
    devices = tuple(Device(name=f"gpu-{i}", kind="gpu", model="A10") for i in range(gpus))
    capacity = amounts(cpu=cpu, memory="8Gi")
    spec = NodeSpec(region="r1", zone=zone, capacity=capacity, devices=devices, **more)
    return Node(metadata=Metadata(name=name, labels=labels), spec=spec)


def tenant(name: str, cpu: str = "16", gpu: int = 4, emergency: str = "2") -> Tenant:
    quota = amounts(cpu=cpu, memory="64Gi", gpu=gpu)
    return Tenant(metadata=Metadata(name=name), spec=TenantSpec(quota=quota, emergency_quota=amounts(cpu=emergency)))


def workload(
    name: str,
    cpu: str = "1",
    replicas: int = 3,
    *,
    owner: str = "t1",
    type_: Any = "service",
    gang: int = 0,
    devices: tuple[DeviceRequest, ...] = (),
    placement: Placement = Placement(),
    priority: str = "",
    labels: dict[str, str] | None = None,
    **more: Any,
) -> Workload:
    template = Template(command=("run",), resources=amounts(cpu=cpu), devices=devices)
    spec = WorkloadSpec(
        type=type_,
        template=template,
        replicas=replicas,
        placement=placement,
        gang=Gang(min=gang) if gang else None,
        priority_class=priority,
        rollout=Rollout() if type_ == "job" else Rollout(max_surge=0, max_unavailable=1),
        **more,
    )
    return Workload(metadata=Metadata(name=name, tenant=owner, labels=labels or {}), spec=spec)


def priority_class(name: str, value: int) -> PriorityClass:
    return PriorityClass(metadata=Metadata(name=name), spec=PriorityClassSpec(value=value))


TAINTED = Taint(key="dedicated", value="x", effect="NoSchedule")


async def populated_scope(
    name: str = "r1",
    clock: FakeClock | None = None,
    *,
    checked: bool = True,
    nodes: Sequence[AnyObject] | None = None,
    judge: Judge | None = None,
) -> Scope:
    """A scope with every lease held, two tenants, two priority classes, and two ready nodes, n1 with two GPUs."""
    scope = Scope(name, clock, checked=checked, judge=judge)
    await scope.take_over()
    objects = [node("n1", gpus=2), node("n2", zone="b")] if nodes is None else list(nodes)
    names = [obj.metadata.name for obj in objects if isinstance(obj, Node)]
    await scope.acquire(*LEASES, *(f"agent/{n}" for n in names))
    declared: list[AnyObject] = [tenant("t1"), tenant("t2"), priority_class("high", 100), priority_class("top", 1000), *objects]
    await scope.must(OPERATOR, *(Apply(obj) for obj in declared))
    page = await scope.store.inner.range("node/", limit=1_000)
    marks = [Mark(row.key.removeprefix("node/"), row.revision, NodeHealth.READY) for row in page.rows]
    await scope.must(scope.actors["node-lifecycle"], *marks)
    return scope


def ids_of(operations: Iterable[Operation]) -> list[OperationID]:
    return [operation.id for operation in operations]
