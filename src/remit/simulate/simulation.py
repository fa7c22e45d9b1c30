"""One simulated run: fault phase, heal, liveness phase.

A run is determined by scenario and seed. In the first phase faults are injected as scheduled, and only safety properties are
checked. Then all faults end, except for a few outside of a healthy core if the scenario sets `core`; users submit nothing new,
and liveness properties are checked too. `Simulation` receives every event of the run and passes it to the judge.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from remit.model.claims import Accepted, Code, Operation, Refused, Verdict, payload
from remit.model.roles import Role
from remit.observation.frozen_view import recompute
from remit.simulate.actors.role import VIEW_PREFIXES, RecordedSchedulerView
from remit.simulate.behavior_digest import BehaviorDigest
from remit.simulate.checkers.judge import Judge
from remit.simulate.checkers.liveness_checks import Bounds, Core
from remit.simulate.checkers.reference.past_states import CommitTimes
from remit.simulate.checkers.registry import Violation
from remit.simulate.cluster import RunObserver, SimCluster
from remit.simulate.faults.fault_schedule import draw_faults, draw_shape
from remit.simulate.faults.kinds import KINDS, Heal
from remit.simulate.scenario_types import Injection, Scenario
from remit.simulate.world import random_streams
from remit.simulate.world.event_loop import ExecutionUnit, SimLoop
from remit.simulate.world.network import Network
from remit.simulate.world.processes import SimProcess
from remit.simulate.world.random_streams import Random
from remit.simulate.world.store import CommitOrigin, StoreService, run_sync
from remit.store.chain import decode_head
from remit.store.memory import MemoryBackup, MemoryStore
from remit.store.protocol import HEAD, PAGE_ROWS_MAX, Commit, Compacted, Corrupt
from remit.world.interfaces import ProcessSpec
from remit.world.randomness import SeededRandomness

BACKUP_EVERY_S: Final = 45.0
BACKUPS_MAX: Final = 4
BOOTSTRAP_HEARTBEATS: Final = 10
"""By then a scope without faults has a leader, its nodes and its tenants."""

PROCESS_ENDED_CHECK: Final = "processes_do_not_end_by_themselves"
"""Name of the violation that is reported when a process ends by itself. The event loop finds it, not a check."""

CHECKS_PER_HEARTBEAT: Final = 2
"""How often the liveness checks run per heartbeat interval."""


class RunResult(Struct, frozen=True):
    """The result of one run. `digest` covers every event and commit with its virtual time."""

    scenario: str
    seed: int
    digest: str
    simulated_s: float
    events: int
    commits: int
    decided: int
    """Commits that decided at least one operation; takeovers and heartbeats are not counted."""
    faults: dict[str, int]
    missed: dict[str, int]
    """Faults without a victim: no process to kill, or no backup to restore."""
    violations: tuple[Violation, ...]
    unknown: tuple[str, ...]
    plan: tuple[Injection, ...]
    effective_scenario: Scenario
    """The scenario, with the cluster shape that was drawn for this seed."""
    codes: dict[str, int]
    operations: dict[str, int]
    edges: tuple[tuple[str | None, str | None, str], ...]
    scheduler_paths: dict[str, int]
    reasons: dict[str, int]
    """Reasons that schedulers recorded for pending work."""
    rare_events: dict[str, int] = {}
    story: str = ""
    trace: tuple[str, ...] = ()
    behavior: str = ""
    """Digest without texts for people (behavior_digest.py), if it was requested."""


class Simulation(RunObserver):
    """One run from start to end. It implements `FaultTarget` for the faults and receives all events of the run."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        *,
        plan: tuple[Injection, ...] | None = None,
        until_s: float | None = None,
        trace: bool = False,
        behavior: bool = False,
    ) -> None:
        if plan is None:
            scenario = draw_shape(scenario, seed)
            plan = draw_faults(scenario, seed)
        self.scenario = scenario
        self.seed = seed
        self.plan = plan
        self.until_s = until_s
        self.lines: list[str] | None = [] if trace else None
        self.behavior = BehaviorDigest() if behavior else None
        self.faults: dict[str, int] = {}
        self.missed: dict[str, int] = {}
        self.commits = self.decided = 0
        name = random_streams.run_name(scenario.name, seed)
        self.loop = SimLoop.seeded(name)
        self.loop.on_failure = self._on_loop_failure
        self.network = Network(self.loop, name)
        self.judge = Judge(lambda: round(self.loop.time() * 1000), _bounds(scenario))
        self.judge.on_violation = lambda _: self.loop.stop()
        self._run_name = name
        self._last_origin: dict[str, CommitOrigin] = {}
        self._pids: dict[tuple[str, int], str] = {}
        self._leaders: dict[str, str] = {}
        self._backups: dict[str, list[int]] = {}
        self._heals: dict[int, Heal] = {}
        self._in_flight: dict[str, dict[tuple[str, str], None]] = {}
        self._reservation_callbacks: dict[str, list[Callable[[], None]]] = {}
        self.cluster = SimCluster(scenario, name, self.loop, self.network, self)

    # -- one run ---------------------------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        collecting = gc.isenabled()
        gc.disable()  # when the collector runs depends on addresses; garbage is kept until the end of the run
        try:
            self._run()
            return self._result()
        finally:
            self.loop.finish()
            self.cluster.end()
            if collecting:
                gc.enable()

    def _run(self) -> None:
        root = self.loop.root.context
        until_s = self.scenario.duration_s + self.scenario.heal_s
        if self.until_s is not None:
            until_s = min(until_s, self.until_s)
        for scope in self.cluster.stores if self.scenario.cluster.store == "memory" else ():
            root.run(self.loop.call_later, BACKUP_EVERY_S, self._take_periodic_backup, scope)
        for injection in self.plan:
            root.run(self.loop.call_at, injection.at_s, self._inject, injection)
        root.run(self.loop.call_soon, self.cluster.start)
        if not self.scenario.faults and not self.scenario.swarm and self.scenario.holds.liveness:
            # This scenario has no faults, so liveness is checked without waiting for the heal phase.
            self.loop.run(min(BOOTSTRAP_HEARTBEATS * self.scenario.cluster.heartbeat_ms / 1000, until_s))
            self.judge.heal(self._core([], calm=False))
            self._tick_until(min(self.scenario.duration_s, until_s))
        if not self.judge.violations:
            self.loop.run(min(self.scenario.duration_s, until_s))
        if until_s > self.scenario.duration_s and not self.judge.violations:
            self._heal_all()
            self._tick_until(until_s)
        if not self.judge.violations:
            self._check_views()
            self.judge.conclude()

    def _check_views(self) -> None:
        for (name, scope), context in self.cluster.contexts.items():
            if context.process.alive and context.world is context.process.world:
                if context.assignments is not None:
                    assignments, nodes = context.assignments, context.agent_nodes
                    rows = {key: row.revision for node in nodes for key, row in assignments.on_node(node)}
                    self.judge.on_view(name, scope, assignments.revision, rows, ("replica/",), nodes=frozenset(nodes))
                elif isinstance(context.scheduler_view, RecordedSchedulerView):
                    view = context.scheduler_view
                    wrong = list(recompute(view)) if view.head is not None else []
                    self.judge.on_view(name, scope, view.revision, view.revisions(), VIEW_PREFIXES, wrong)
                else:
                    rows = {key: row.revision for key, row in context.view.rows.items()}
                    self.judge.on_view(name, scope, context.view.revision, rows)

    def _tick_until(self, until_s: float) -> None:
        tick_s = self.scenario.cluster.heartbeat_ms / 1000 / CHECKS_PER_HEARTBEAT
        while self.loop.time() < until_s and not self.judge.violations:
            self.loop.run(min(until_s, self.loop.time() + tick_s))
            self.judge.tick()

    def _result(self) -> RunResult:
        judge = self.judge
        first = judge.violations[0] if judge.violations else None
        return RunResult(
            scenario=self.scenario.name,
            seed=self.seed,
            digest=self.loop.digest(),
            simulated_s=self.loop.time(),
            events=self.loop.events,
            commits=self.commits,
            decided=self.decided,
            faults=dict(sorted(self.faults.items())),
            missed=dict(sorted(self.missed.items())),
            violations=tuple(judge.violations),
            unknown=tuple(judge.undecided),
            plan=self.plan,
            effective_scenario=self.scenario,
            codes=dict(sorted(judge.codes_seen.items())),
            operations=dict(sorted(judge.accepted_operations.items())),
            edges=tuple(sorted(judge.edges_seen, key=str)),
            scheduler_paths=dict(sorted(self.cluster.scheduler_paths.items())),
            reasons=dict(sorted(judge.reasons_seen.items())),
            rare_events=dict(sorted(judge.rare_events.seen.items())),
            story=judge.story(first.scope, first.key) if first is not None and first.key else "",
            trace=tuple(self.lines or ()),
            behavior="" if self.behavior is None else self.behavior.hexdigest(),
        )

    # -- faults ----------------------------------------------------------------------------------------------------------

    def _inject(self, injection: Injection) -> None:
        kind = KINDS[injection.kind]
        rng = random_streams.stream(random_streams.fault(self._run_name, injection.number))
        self._record_event(f"fault {injection.kind}")
        self.log(f"fault {injection.kind} for {injection.lasts_s:.1f} s")
        heal = kind.inject(self, rng, injection)
        counts = self.missed if heal is None else self.faults
        counts[injection.kind] = counts.get(injection.kind, 0) + 1
        if heal is not None:
            self._heals[injection.number] = heal
            self.later(injection.lasts_s, lambda: self._heal(injection.number))

    def _heal(self, number: int) -> None:
        heal = self._heals.pop(number, None)
        if heal is not None:
            self.loop.add_to_digest(f"heal {number}".encode())
            heal()

    def _heal_all(self) -> None:
        """End all faults. The processes that stay down for good are chosen among those that are not needed."""
        for number in sorted(self._heals):
            self.loop.root.context.run(self._heal, number)
        stopped_for_good = self._choose_permanent_faults() if self.scenario.holds.core else []
        for process in self.cluster.processes.values():
            if process in stopped_for_good:
                process.kill()
            else:
                process.start()
        self.cluster.start_quiet_phase()
        self.log("all faults ended")
        if self.scenario.holds.liveness:
            self.judge.heal(self._core(stopped_for_good))

    def _choose_permanent_faults(self) -> list[SimProcess]:
        """One server and one agent of each scope: they stay down for good, outside of the healthy core."""
        rng = random_streams.stream(random_streams.permanent_faults(self._run_name))
        chosen = []
        for scope in self.scenario.cluster.scopes:
            for kind in ("server", "agent"):
                candidates = self.cluster.processes_of_kind(kind, scope)
                if len(candidates) > 1:
                    chosen.append(rng.choice(candidates))
        return chosen

    def _core(self, stopped_for_good: list[SimProcess], *, calm: bool = True) -> Core:
        """Return the healthy core: everything that must work from now on. It contains all roles, because a role is held by
        lease, which any live process of its kind can acquire.
        """
        placing = self.scenario.cluster.scopes_with_nodes
        dead = {
            node
            for process in stopped_for_good
            if process.name.startswith("agent-")
            for node in self.cluster.nodes_of_agent(process.name)
        }
        return Core(
            scopes=frozenset(self.scenario.cluster.scopes),
            nodes={scope: frozenset(self.cluster.nodes(scope)) - dead for scope in placing},
            roles=frozenset(role.value for role in Role),
            since_ms=self.judge.now_ms(),
            silent={scope: frozenset(self.cluster.nodes(scope)) & dead for scope in placing},
            calm=calm,
        )

    # -- FaultTarget -----------------------------------------------------------------------------------------------------

    def stores(self, where: str) -> list[StoreService]:
        return [store for scope, store in self.cluster.stores.items() if where in ("", scope)]

    def processes(self, kind: str, where: str) -> list[SimProcess]:
        return self.cluster.processes_of_kind(kind, where)

    def all_processes(self, where: str) -> list[SimProcess]:
        return [process for process in self.cluster.processes.values() if where in ("", process.name.split("-")[1])]

    def leader(self, scope: str) -> SimProcess | None:
        return self.cluster.processes.get(self._leaders.get(scope, ""))

    def peers(self, process: SimProcess) -> list[str]:
        scope = process.name.split("-")[1]
        parent = self.scenario.cluster.scopes[0]
        names = {f"store/{scope}": None} | dict.fromkeys(self.cluster.servers(scope))
        if process.name.startswith("controllers-") and parent != scope:
            names |= {f"store/{parent}": None} | dict.fromkeys(self.cluster.servers(parent))
        for kind in ("agent", "controllers"):
            if not process.name.startswith(f"{kind}-"):
                names |= {other.name: None for other in self.cluster.processes_of_kind(kind, scope)}
        names.pop(process.name, None)
        return list(names)

    def cut(self, source: str, target: str) -> None:
        self.log(f"cut {source} > {target}")
        self.network.cut(source, target)

    def heal_cut(self, source: str, target: str) -> None:
        self.network.heal(source, target)

    def clog(self, source: str, target: str) -> None:
        self.log(f"clogged {source} > {target}")
        self.network.clog(source, target)

    def unclog(self, source: str, target: str) -> None:
        self.network.unclog(source, target)

    def slow(self, source: str, target: str, by_s: float) -> None:
        if by_s > 0:
            self.log(f"slowed {source} > {target} by up to {by_s:.1f} s")
        self.network.path(source, target).slow_s += by_s

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.loop.call_later(delay_s, action, context=self.loop.root.context.copy())

    def on_next_reservation(self, scope: str, action: Callable[[], None]) -> Heal:
        waiting = self._reservation_callbacks.setdefault(scope, [])
        waiting.append(action)
        return lambda: waiting.remove(action) if action in waiting else None

    def degrade_network(self, **changes: float) -> Heal:
        return self.network.degrade(changes)

    def power_cut(self, process: SimProcess) -> None:
        """Kill all processes and programs of its machine, lose unsynced disk writes, and restart its clock."""
        machine = process.machine
        for other in self.all_processes(""):
            if other.machine is machine:
                other.kill()
        machine.processes.power_cut()
        machine.disk.crash(SeededRandomness(random_streams.machine_crash(self._run_name, machine.name, self.loop.time())))
        machine.clock.reboot()
        machine.pipes.clear()

    def backup(self, scope: str) -> None:
        """Record a backup. The store keeps its history, so a revision is enough until the backup is restored."""
        if self.cluster.stores[scope].faults.damaged:
            return
        revisions = self._backups.setdefault(scope, [])
        revisions.append(run_sync(self.cluster.stores[scope].store.revision()))
        del revisions[:-BACKUPS_MAX]

    def set_plugin_broken(self, broken: bool, /) -> None:
        self.cluster.plugin.broken = broken

    def declare_lost(self, scope: str) -> None:
        self.cluster.declare_lost(scope)

    def restore(self, scope: str) -> bool:
        """Restore an old backup as an operator would: stop the servers, replace the store, start the servers."""
        store = self.cluster.stores[scope]
        rng = random_streams.stream(random_streams.restore(self._run_name, self.loop.time()))
        backup = self._old_backup(store, rng)
        if backup is None:
            return False
        for server in self.cluster.processes_of_kind("server", scope):
            server.kill()
        store.restore(backup, f"restored{round(self.loop.time())}")
        self._backups.pop(scope)
        for server in self.cluster.processes_of_kind("server", scope):
            self.later(0.5 + 2 * rng.random(), server.start)
        return True

    def _old_backup(self, store: StoreService, rng: Random) -> MemoryBackup | None:
        revisions = self._backups.get(store.scope, [])
        for revision in rng.sample(revisions, len(revisions)):
            try:
                page = run_sync(store.store.range("", limit=PAGE_ROWS_MAX, revision=revision))
            except Compacted:
                continue
            rows = list(page.rows)
            while page.more:
                page = run_sync(store.store.range("", after=rows[-1].key, limit=PAGE_ROWS_MAX, revision=revision))
                rows += page.rows
            return MemoryBackup(revision, tuple(rows))
        return None

    def _take_periodic_backup(self, scope: str) -> None:
        self.backup(scope)
        self.later(BACKUP_EVERY_S, lambda: self._take_periodic_backup(scope))

    # -- RunObserver -----------------------------------------------------------------------------------------------------

    def log(self, line: str) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.loop.time():10.3f}  {line}")

    def _record_event(self, name: str) -> None:
        self.loop.add_to_digest(name.encode())
        if self.behavior is not None:
            self.behavior.event(self.loop.time(), name)

    def commit_applied(self, scope: str, commit: Commit, revision: int, origin: CommitOrigin | None) -> None:
        self.commits += 1
        head = next((value for key, value in commit.puts if key == HEAD), b"")
        self.decided += len(commit.puts) > 2
        if self.behavior is not None:
            self.behavior.commit(self.loop.time(), scope, revision, commit.puts, commit.deletes)
        self.loop.add_to_digest(b"commit %b %d %b" % (scope.encode(), revision, head))
        self._leaders[scope] = decode_head(head).holder
        step = self.judge.on_commit(scope, commit.puts, commit.deletes, revision, self._clock_bounds(scope, origin))
        if self._reservation_callbacks.get(scope) and any(step.placed("reserved")):
            for action in self._reservation_callbacks.pop(scope):
                action()
        if self.lines is not None:
            self.log(f"{scope} commit {revision} by {decode_head(head).holder}: {_keys(commit)}")

    def _clock_bounds(self, scope: str, origin: CommitOrigin | None) -> CommitTimes:
        if origin is None:
            return CommitTimes("", 0, 0, 0)
        before = self._last_origin.get(scope)
        same = before is not None and before.boot == origin.boot and before.process == origin.process
        decided_ms = before.clock_ms if same and before is not None else origin.clock_ms
        self._last_origin[scope] = origin
        applied_ms = origin.clock_ms + round((self.loop.time() - origin.at_s) * 1000 * origin.rate)
        return CommitTimes(origin.boot, decided_ms, origin.clock_ms, applied_ms)

    def store_restored(self, scope: str, store: MemoryStore, backup: MemoryBackup) -> None:
        self._last_origin.pop(scope, None)
        now = run_sync(store.backup())
        self.log(f"{scope} was restored to revision {backup.revision}")
        self.judge.on_restore(scope, [(row.key, row.value, row.revision) for row in now.rows], now.revision)

    def operation_sent(self, client: str, scope: str, operation: str) -> None:
        self._in_flight.setdefault(client, {})[scope, operation] = None
        self.judge.on_submit(scope, operation)

    def operation_answered(self, client: str, scope: str, operation: Operation, verdict: Verdict) -> None:
        self._in_flight.get(client, {}).pop((scope, operation.id), None)
        code, seen = verdict.code.value if isinstance(verdict, Refused) else "", operation.evidence.revision
        request_payload = b"" if code == Code.INVALID else payload(operation)
        if operation.actor.role is Role.SCHEDULER and request_payload:
            self.judge.on_scheduler_claim(scope, operation.actor.lease, seen, request_payload)
        number = verdict.number if isinstance(verdict, Accepted) else 0
        digest = (
            request_payload and blake2b(request_payload, digest_size=8).hexdigest()
        )  # as the authority stores it with the id
        self.judge.on_answer(scope, operation.id, code, number, verdict.revision, digest or "", request_payload, seen)

    def operation_abandoned(self, client: str, scope: str, operation: str) -> None:
        self._in_flight.get(client, {}).pop((scope, operation), None)
        self.judge.on_abandoned(scope, operation)

    def lease_renewed(self, client: str, scope: str, lease: str, epoch: int, sent_s: float) -> None:
        self.judge.on_lease_renewed(scope, lease, epoch, int(sent_s * 1000))

    def process_silenced(self, process: SimProcess) -> None:
        self.log(f"{process.name} {'was frozen' if process.alive else 'was killed'}")
        for scope, operation in self._in_flight.pop(process.name, {}):
            self.judge.on_abandoned(scope, operation)

    def revision_observed(self, observer: str, scope: str, incarnation: str, revision: int) -> None:
        self.judge.on_observed(observer, scope, incarnation, revision)

    def program_started(self, machine: str, order: ProcessSpec, pid: int) -> None:
        env = order.env
        self._pids[machine, pid] = env["REMIT_NODE"]
        self._record_event(f"started {machine} {pid}")
        self.log(f"{env['REMIT_NODE']} starts {env['REMIT_REPLICA']} attempt {env['REMIT_ATTEMPT']} as {pid}")
        self.judge.on_process_started(
            env["REMIT_NODE"], env["REMIT_SCOPE"], env["REMIT_REPLICA"], env["REMIT_UID"], int(env["REMIT_ATTEMPT"]), pid,
            unrecorded=self.cluster.machines[machine].disk.rejects_writes,
        )  # fmt: skip

    def program_stop_requested(self, machine: str, pid: int, by: str) -> None:
        node = self._pids[machine, pid]
        self.log(f"{node} stops {pid}, requested by {by}")
        self.judge.on_stop_requested(node, pid, by)

    def program_ended(self, machine: str, pid: int) -> None:
        node = self._pids.pop((machine, pid))
        self._record_event(f"ended {machine} {pid}")
        self.log(f"{pid} ended on {node}")
        self.judge.on_process_ended(node, pid)

    def process_ended(self, process: SimProcess, failure: BaseException | None) -> None:
        """A process that ends by itself has failed, except for a server that halts because its store is corrupt."""
        if isinstance(failure, Corrupt) and self.cluster.stores[process.name.split("-")[1]].faults.damaged:
            self.log(f"{process.name} halted: {failure}")
            return
        message = f"{process.name} ended by itself: {failure!r}"
        self.log(message)
        self._report_crash(process.name, message)

    def _on_loop_failure(self, unit: ExecutionUnit, error: BaseException | None, message: str) -> None:
        self._report_crash(unit.name, f"{unit.name}: {message}: {error!r}")

    def _report_crash(self, name: str, message: str) -> None:
        self.judge.violations.append(Violation(PROCESS_ENDED_CHECK, "crash", "", "", message, self.judge.now_ms()))
        self.loop.stop()


def _bounds(scenario: Scenario) -> Bounds:
    beat_ms = scenario.cluster.heartbeat_ms
    return Bounds(pace=max(1.0, beat_ms / 2_000), heartbeat_ms=beat_ms)


def _keys(commit: Commit) -> str:
    keys = [key for key, _ in commit.puts if key != HEAD and not key.startswith("batch/")]
    return ", ".join([*keys, *(f"-{key}" for key in commit.deletes if not key.startswith("batch/"))]) or "nothing"


def simulate(
    scenario: Scenario,
    seed: int,
    *,
    plan: tuple[Injection, ...] | None = None,
    until_s: float | None = None,
    trace: bool = False,
    behavior: bool = False,
) -> RunResult:
    """Run a scenario once."""
    return Simulation(scenario, seed, plan=plan, until_s=until_s, trace=trace, behavior=behavior).run()
