"""Liveness within bounds after faults end.

Each check yields what is waiting *now* inside a healthy core. This module tracks since when each item has been waiting
without a break over successive ticks, and reports items past their bound. A check that the history cannot decide yields a
reason; it is never skipped silently. Safety is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from remit.simulate.checkers.capacity_checks import grant_dead_reason
from remit.simulate.checkers.process_checks import ProcessRecords
from remit.simulate.checkers.progress_checks import (
    DELAYS_MIN,
    WRITES_PER_EXIT,
    Quiescence,
    SchedulingAttempts,
    SchedulingDelays,
    missing_replicas,
)
from remit.simulate.checkers.reference.feasibility import (
    all_fit,
    authority_clock,
    blocked_reason,
    feasible_node,
    gang_fits,
    granted_to_other_scope,
    is_independent,
)
from remit.simulate.checkers.reference.history import CommitStep, History
from remit.simulate.checkers.reference.ledger_sums import remaining_victims
from remit.simulate.checkers.reference.lifecycle import ASSIGNED, MASS_SILENCE
from remit.simulate.checkers.reference.rows import ReferenceShape, attempt_of, health_of, owner_of, phase_of

HEALTH_CHANGES: Final = 6
"""How often the health of a healthy node may change within `health_window_ms`."""

ADVERSARY_TENANT: Final = "meddler"
"""Tenant of the adversary, which undoes what controllers do."""


class Core(NamedTuple):
    """The healthy part of the system from `since_ms` on, in virtual time.

    `silent` are nodes that stay unreachable for the rest of the run; nodes in neither set are not checked. `calm` means that
    no new work is requested, so writes must cease.
    """

    scopes: frozenset[str]
    nodes: Mapping[str, frozenset[str]]
    """Healthy nodes, by scope."""
    roles: frozenset[str]
    since_ms: int
    silent: Mapping[str, frozenset[str]] = {}
    calm: bool = False


class Bounds(NamedTuple):
    """The bounds of the liveness properties (docs/faults.md). `pace` scales all of them for scenarios with a heartbeat longer
    than two seconds.
    """

    pace: float = 1.0
    bound_ms: int = 60_000
    bound_soon_ms: int = 5_000
    """Bound of the 99th percentile, while work is requested and nothing is broken."""
    tried_ms: int = 60_000
    reason_ms: int = 5_000
    record_slack_ms: int = 5_000
    """Additional time until an attempt is recorded in the store."""
    reservation_ms: int = 120_000
    grant_ms: int = 120_000
    orphan_ms: int = 120_000
    unknown_ms: int = 15_000
    suspect_ms: int = 6_000
    ready_ms: int = 15_000
    deletion_ms: int = 30_000
    gang_ms: int = 60_000
    leader_ttl_ms: int = 6_000
    leader_ms: int = 5_000
    desire_ms: int = 120_000
    serving_ms: int = 60_000
    health_window_ms: int = 120_000
    quiet_ms: int = 60_000
    quiet_window_ms: int = 30_000
    view_ms: int = 60_000
    heartbeat_ms: int = 2_000
    call_ms: int = 10_000
    call_slack_ms: int = 1_000
    """Allowance for a slow clock of the client, and for the delay until it reports that it stopped waiting."""


class WaitingItem(NamedTuple):
    """An item that is waiting, and how long it may; a negative bound means that it has already waited too long."""

    scope: str
    key: str
    bound_ms: float
    reason: str


LivenessCheck = Callable[["Liveness", History, Core], Iterator[WaitingItem]]
LIVENESS_CHECKS: Final[dict[str, tuple[str, LivenessCheck]]] = {}


def liveness_check(property_: str) -> Callable[[LivenessCheck], LivenessCheck]:
    def register(check: LivenessCheck) -> LivenessCheck:
        LIVENESS_CHECKS[check.__name__] = (property_, check)
        return check

    return register


class Liveness:
    """Runs the liveness checks, from when a healthy core is set (`heal`)."""

    def __init__(
        self, histories: Mapping[str, History], processes: ProcessRecords, now_ms: Callable[[], int], bounds: Bounds
    ) -> None:
        self.histories, self.processes, self.now_ms, self.bounds = histories, processes, now_ms, bounds
        self.core: Core | None = None
        self.since: dict[tuple[str, str, str], int] = {}
        self.reported: set[tuple[str, str, str]] = set()
        self.undecided: dict[str, None] = {}
        self.quiescence: dict[str, Quiescence] = {}
        self.calls: dict[tuple[str, str], int] = {}
        self.health_changes: dict[tuple[str, str], list[int]] = {}
        """Times at which a node's health changed, by scope and node."""
        self.delays: dict[str, SchedulingDelays] = {}
        """Waiting times of placeable work, by scope."""
        self.attempts: dict[str, SchedulingAttempts] = {}
        """Scheduling attempts, by scope."""

    def heal(self, core: Core) -> None:
        """Set the healthy core, from which on liveness is checked. It is set again, with `calm`, once users request no more
        work.
        """
        if core.calm:
            self._close_delays()
        else:
            self.delays = {scope: SchedulingDelays() for scope in sorted(core.scopes) if core.nodes.get(scope)}
        self.core = core

    def _close_delays(self) -> None:
        for delays in self.delays.values():
            delays.close(self.now_ms(), self.bounds.bound_soon_ms * self.bounds.pace)

    def tick(self) -> Iterator[tuple[str, str, WaitingItem]]:
        """Yield everything that has waited too long by now, once each: check, property, and the item."""
        core, now = self.core, self.now_ms()
        if core is None:
            return
        still_waiting: dict[tuple[str, str, str], None] = {}
        for check, (property_, find_waiting) in LIVENESS_CHECKS.items():
            for scope in sorted(core.scopes):
                if scope not in self.histories:
                    continue
                for waiting in find_waiting(self, self.histories[scope], core):
                    item = check, waiting.scope, waiting.key
                    still_waiting[item] = None
                    since = self.since.setdefault(item, max(now, core.since_ms))
                    if now - since > waiting.bound_ms * self.bounds.pace and item not in self.reported:
                        self.reported.add(item)
                        yield check, property_, waiting._replace(reason=f"{waiting.reason}, for {now - since} ms")
        self.since = {item: since for item, since in self.since.items() if item in still_waiting}

    def on_commit(self, step: CommitStep, at_ms: int) -> None:
        """Record events that later rows do not show."""
        self.attempts.setdefault(step.history.scope, SchedulingAttempts()).on_commit(step, at_ms)
        if self.core is not None:
            self.quiescence.setdefault(step.history.scope, Quiescence()).on_commit(step, at_ms)
        if self.core is not None and not self.core.calm and step.history.scope in self.delays:
            self.delays[step.history.scope].on_commit(step, at_ms)
        for key, old, new in step.of_kind("node") if self.core is not None else ():
            if old is not None and new is not None and health_of(old) != health_of(new):
                self.health_changes.setdefault((step.history.scope, key), []).append(at_ms)

    def mass_silence(self, scope: str, core: Core) -> bool:
        silent, nodes = core.silent.get(scope, frozenset()), self.histories[scope].kind("node")
        return bool(nodes) and len(silent) >= MASS_SILENCE * len(nodes)

    def conclude(self) -> Iterator[tuple[str, str, WaitingItem]]:
        """Yield what is overdue at the end of the run. Items not observed for long enough are recorded as undecided."""
        yield from self.tick()
        now = self.now_ms()
        for (check, scope, key), since in sorted(self.since.items()):
            if (check, scope, key) not in self.reported:
                self.undecided[f"{check} in {scope}: {key} has been waiting for {now - since} ms at the end of the run"] = None
        if self.core is not None:
            yield from self._check_quiescence(self.core, now)
        self._close_delays()
        for scope, delays in self.delays.items():
            yield from self._check_delays(scope, delays)

    def _check_delays(self, scope: str, delays: SchedulingDelays) -> Iterator[tuple[str, str, WaitingItem]]:
        """L1: placeable work is bound within a short bound, except for one percent of it."""
        bound, late = self.bounds.bound_soon_ms * self.bounds.pace, delays.percentile()
        if late is None:
            self.undecided[
                f"scheduling_latency_is_bounded in {scope}: {len(delays.ended)} waits were measured, of {DELAYS_MIN} needed"
            ] = None
        elif late.ms > bound:
            slow = sum(delay.ms > bound for delay in delays.ended)
            reason = f"it waited for {late.ms} ms, bound {bound:.0f}, as did {slow} of {len(delays.ended)} placeable replicas"
            yield "scheduling_latency_is_bounded", "L1", WaitingItem(scope, late.key, 0, reason)

    def _check_quiescence(self, core: Core, now: int) -> Iterator[tuple[str, str, WaitingItem]]:
        """L10: without new requests, writes and repeated refusals cease."""
        bounds = self.bounds
        window = bounds.quiet_window_ms * bounds.pace
        for scope, quiescence in sorted(self.quiescence.items()):
            if scope not in core.scopes:
                continue
            if not core.calm:
                self.undecided[f"writes_cease in {scope}: work was still being requested"] = None
            elif now - core.since_ms < bounds.quiet_ms * bounds.pace + window:
                self.undecided[f"writes_cease in {scope}: the run ended {now - core.since_ms} ms after it was healed"] = None
            else:
                ended = sum(record.process.scope == scope and record.ended_ms > now - window for record in self.processes.ended)
                limit = bounds.quiet_window_ms / bounds.heartbeat_ms
                for key, reason in quiescence.writes_cease(now - window, limit + ended * WRITES_PER_EXIT):
                    yield "writes_cease", "L10", WaitingItem(scope, key, 0, reason)
                for key, reason in quiescence.refused_requests_back_off(now - window, limit):
                    yield "refused_requests_back_off", "L10", WaitingItem(scope, key, 0, reason)

    # -- calls -------------------------------------------------------------------------------------------------------

    def on_submit(self, scope: str, operation: str) -> None:
        self.calls.setdefault((scope, operation), self.now_ms())

    def on_settled(self, scope: str, operation: str) -> Iterator[WaitingItem]:
        """L14: every call is answered or abandoned in time."""
        since = self.calls.pop((scope, operation), None)
        if since is not None:
            yield from self._check_call(scope, operation, since)

    def open_calls(self) -> Iterator[WaitingItem]:
        for (scope, operation), since in sorted(self.calls.items()):
            yield from self._check_call(scope, operation, since)

    def _check_call(self, scope: str, operation: str, since: int) -> Iterator[WaitingItem]:
        bound = self.bounds.call_ms * self.bounds.pace + self.bounds.call_slack_ms
        if self.now_ms() - since > bound:
            yield WaitingItem(
                scope, operation, bound, f"neither answered nor abandoned for {self.now_ms() - since} ms, bound {bound:.0f}"
            )


# ---------------------------------------------------------------------------------------------------------------- checks


@liveness_check("L1")
def placeable_replicas_are_bound(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """Pending work outside of gangs is bound if a node in the core would accept it and quota covers it.

    If capacity does not suffice for all of them, the scheduler chooses the order: then one of them must be bound, and the
    wait starts again.
    """
    if "scheduler" not in core.roles:
        return
    waiting: dict[str, tuple[ReferenceShape, str]] = {}
    now, nodes = live.now_ms(), core.nodes.get(history.scope, frozenset())
    for shape, group in history.grouped_by_shape("pending"):
        if shape.gang and _active_members(history, shape) < shape.gang:
            continue
        if blocked_reason(history, next(iter(group.values())), now):
            continue
        if node := feasible_node(history, shape, nodes, now):
            waiting |= dict.fromkeys(group, (shape, node))
    all_placeable = all_fit(history, [shape for shape, _ in waiting.values()], nodes, now)
    if history.scope in live.delays:
        live.delays[history.scope].on_tick(history, waiting if all_placeable else (), now)
    crowded = "" if all_placeable else f" ({len(history.attempt_nodes)} placed)"
    for key, (_, node) in list(waiting.items())[: 1 if crowded else None]:
        others = f" with {len(waiting) - 1} others, more than fit" if crowded else ""
        reason = f"it is pending{others}, and {node} would accept it"
        yield WaitingItem(history.scope, f"{'replica' if crowded else key}{crowded}", live.bounds.bound_ms, reason)


@liveness_check("L7")
def placeable_gang_runs(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    if "scheduler" not in core.roles:
        return
    placeable = []
    for shape, group in history.grouped_by_shape("pending"):
        if not shape.gang or len(group) < shape.gang or _active_members(history, shape) >= shape.gang:
            continue
        if blocked_reason(history, next(iter(group.values())), live.now_ms()):
            continue
        if not is_independent(history, shape):
            live.undecided[f"placeable_gang_runs in {history.scope}: {shape.key} has terms towards other replicas"] = None
        elif gang_fits(history, shape, shape.gang, core.nodes.get(history.scope, frozenset()), live.now_ms()):
            placeable.append(shape.key)
    if placeable:
        # The capacity may suffice for any one gang but not for all, so the scope as a whole is waiting, not a particular gang.
        yield WaitingItem(
            history.scope, "gangs", live.bounds.gang_ms, f"{placeable} are pending, and there is capacity for one of them"
        )


def _active_members(history: History, shape: ReferenceShape) -> int:
    members = [history.row(key) for key in history.members.get((shape.tenant, shape.workload), ())]
    return sum(phase_of(member) in ("bound", "starting", "running", "ready", "serving") for member in members)


@liveness_check("L3")
def reservations_do_not_leak(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """A reservation whose victims are gone is bound or released."""
    for key, replica in history.replicas("reserved"):
        if not remaining_victims(history.rows, replica) and "repair" in core.roles:
            yield WaitingItem(history.scope, key, live.bounds.reservation_ms, f"it is reserved on {replica['status']['node']}")


@liveness_check("L4")
def expired_grants_are_closed(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """Expired grants held in this scope are closed. Grants held by another scope can only be returned by that scope."""
    if "repair" not in core.roles:
        return
    boot, on_boot = authority_clock(history, live.now_ms())
    for key, grant in history.kind("grant").items():
        status = grant.get("status", {})
        if grant["spec"].get("issuer") or granted_to_other_scope(grant) or status.get("phase", "live") != "live":
            continue
        fresh = history.rows[key][0] < history.takeover_revision
        if reason := grant_dead_reason(history, key, grant, boot, on_boot, fresh=fresh):
            yield WaitingItem(history.scope, key, live.bounds.grant_ms, f"{reason}, and it was not closed")


@liveness_check("L4")
def orphan_processes_end(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """On a healthy node no process runs whose attempt is over."""
    for process in live.processes.alive.values():
        if process.scope != history.scope or process.node not in core.nodes.get(history.scope, frozenset()):
            continue
        key, uid, attempt = process.run
        replica = history.row(key)
        current = (
            replica is not None
            and (replica["metadata"]["uid"], attempt_of(replica), replica.get("status", {}).get("node"))
            == (uid, attempt, process.node)
            and phase_of(replica) in ASSIGNED - {"failed", "finished"}
        )
        if not current:
            name = f"{key} attempt {attempt} of {uid} on {process.node}"
            yield WaitingItem(
                history.scope, name, live.bounds.orphan_ms, f"process {process.pid} still runs although its attempt is over"
            )


@liveness_check("L10")
def running_replicas_have_processes(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """On a healthy node, every replica in a running phase has a process after a bounded time."""
    nodes = core.nodes.get(history.scope, frozenset())
    for key, replica in history.replicas("running", "ready", "serving"):
        status = replica.get("status", {})
        if status.get("node") not in nodes:
            continue
        copies = live.processes.copies.get((history.scope, key, replica["metadata"]["uid"]), {})
        if not any(p.run[2] == attempt_of(replica) and p.node == status["node"] for p in copies.values()):
            yield WaitingItem(history.scope, key, live.bounds.quiet_ms, f"it is {phase_of(replica)}, but no process of it runs")


@liveness_check("L5")
def silent_nodes_become_unknown(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    if "node-lifecycle" not in core.roles:
        return
    bound = live.bounds.unknown_ms + live.bounds.suspect_ms
    noticed = ("unknown", "lost", "suspect") if live.mass_silence(history.scope, core) else ("unknown", "lost")
    for name in sorted(core.silent.get(history.scope, ())):
        row = history.row(f"node/{name}")
        if row is not None and health_of(row) not in noticed:
            yield WaitingItem(history.scope, f"node/{name}", bound, f"it is silent, but {health_of(row)}")


@liveness_check("L5")
def returned_nodes_become_ready(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    if "node-lifecycle" not in core.roles:
        return
    for name in sorted(core.nodes.get(history.scope, ())):
        row = history.row(f"node/{name}")
        if row is not None and health_of(row) != "ready":
            yield WaitingItem(history.scope, f"node/{name}", live.bounds.ready_ms, f"it is healthy, but {health_of(row)}")


@liveness_check("L5")
def unknown_replicas_are_resolved(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """Unknown replicas are resolved, except during a mass silence, when nothing is declared lost."""
    if "node-lifecycle" not in core.roles:
        return
    healthy, silent = core.nodes.get(history.scope, frozenset()), core.silent.get(history.scope, frozenset())
    for key, replica in history.replicas("unknown"):
        node, shape = replica["status"].get("node", ""), history.shape(replica)
        if node in silent and live.mass_silence(history.scope, core):
            live.undecided[f"unknown_replicas_are_resolved in {history.scope}: {key} is on hold because of a mass silence"] = (
                None
            )
        elif node in healthy or node in silent:
            lost_after = shape.lost_after_ms if shape is not None and node in silent else 0
            bound = lost_after + live.bounds.deletion_ms
            yield WaitingItem(
                history.scope, key, bound, f"it is unknown; before, it was {replica['status'].get('before')} on {node}"
            )


@liveness_check("L6")
def deletions_complete(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """Deletions complete within the stop grace period, or once silent nodes are declared lost."""
    if "workloads" not in core.roles:
        return
    healthy, silent = core.nodes.get(history.scope, frozenset()), core.silent.get(history.scope, frozenset())
    for key, workload in history.kind("workload").items():
        if not workload["metadata"].get("deleting"):
            continue
        bound, members = 0, history.members.get((workload["metadata"]["tenant"], workload["metadata"]["name"]), {})
        for member in members:
            replica = history.row(member)
            node, shape = replica.get("status", {}).get("node", ""), history.shape(replica)
            if shape is None:
                continue
            if phase_of(replica) in ASSIGNED and node not in healthy:
                bound = max(bound, shape.lost_after_ms) if node in silent else -1
            elif bound >= 0:
                bound = max(bound, shape.grace_ms)
            if bound < 0 or (node in silent and live.mass_silence(history.scope, core)):
                live.undecided[f"deletions_complete in {history.scope}: {member} is on {node}, outside the core"] = None
                bound = -1
                break
        if bound >= 0:
            yield WaitingItem(
                history.scope, key, bound + live.bounds.deletion_ms, f"it is being deleted, and still has {sorted(members)}"
            )


@liveness_check("L10")
def desired_state_is_reached(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """There is a replica for each desired one; services have no surplus and no outdated replicas that could be removed.

    A replica that fits nowhere is pending but exists. Daemons have one replica per eligible node, which is not checked.
    """
    if not core.calm or "workloads" not in core.roles:
        return
    healthy = core.nodes.get(history.scope, frozenset())
    for key, workload in history.kind("workload").items():
        meta, spec = workload["metadata"], workload["spec"]
        if meta.get("deleting") or meta["tenant"] == ADVERSARY_TENANT or spec["type"] == "daemon":
            continue
        members = {member: history.row(member) for member in history.members.get((meta["tenant"], meta["name"]), ())}
        away = [item for item in members.values() if phase_of(item) in ASSIGNED and item["status"]["node"] not in healthy]
        if away:
            live.undecided[f"desired_state_is_reached in {history.scope}: {key} has replicas outside the core"] = None
            continue
        for item, reason in missing_replicas(history, key, members):
            yield WaitingItem(history.scope, item, live.bounds.desire_ms, reason)


@liveness_check("L10")
def ready_replicas_become_serving(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """Ready replicas of services on healthy nodes become serving; jobs do not serve.

    A replica may be served and fail its probe between two ticks, so the check uses the time of its row's last change.
    """
    if "endpoints" not in core.roles:
        return
    bound, healthy = live.bounds.serving_ms * live.bounds.pace, core.nodes.get(history.scope, frozenset())
    for key, replica in history.replicas("ready"):
        if replica["status"]["node"] not in healthy:
            continue
        workload = history.row(owner_of(replica))
        if workload is not None and workload["spec"]["type"] == "service" and replica["metadata"]["tenant"] != ADVERSARY_TENANT:
            since = max(core.since_ms, history.versions[key][-1].at_ms)
            if live.now_ms() - since > bound:
                reason = f"it is ready on {replica['status']['node']} since {since} ms, but not serving"
                yield WaitingItem(history.scope, key, -1, reason)


@liveness_check("L10")
def node_health_does_not_flap(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """The recorded health of a healthy node does not keep changing."""
    if not core.calm:
        return
    window_ms = live.bounds.health_window_ms * live.bounds.pace
    for name in sorted(core.nodes.get(history.scope, ())):
        key = f"node/{name}"
        late = [at for at in live.health_changes.get((history.scope, key), ()) if at > live.now_ms() - window_ms]
        if len(late) > HEALTH_CHANGES:
            yield WaitingItem(history.scope, key, -1, f"its health changed {len(late)} times in {window_ms:.0f} ms")
