"""Liveness within bounds after faults end.

Each check yields what is waiting *now* inside a healthy core. This module tracks since when each item has been waiting
without a break over successive ticks, and reports items past their bound. A check that the history cannot decide yields a
reason; it is never skipped silently. Safety is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from remit.simulate.checkers.capacity_checks import grant_is_dead
from remit.simulate.checkers.process_checks import Runs
from remit.simulate.checkers.progress_checks import LIFE_WRITES, WAITS_MIN, Quiet, Tries, Waits, lacks
from remit.simulate.checkers.reference.feasibility import (
    all_fit,
    clock,
    fits_on,
    gang_fits,
    held_back,
    keeps_to_itself,
    lent_abroad,
)
from remit.simulate.checkers.reference.history import History, Step
from remit.simulate.checkers.reference.ledger_sums import victims_left
from remit.simulate.checkers.reference.lifecycle import HOUSED, MASS_SILENCE
from remit.simulate.checkers.reference.rows import Shape, attempt_of, health_of, owner_of, phase_of

HEALTH_CHANGES: Final = 6
"""How often the health of a healthy node may change within `health_window_ms`."""

MEDDLER: Final = "meddler"
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
    """The bounds of FAULTS.md section 2. `pace` scales all of them for scenarios with a heartbeat longer than two seconds."""

    pace: float = 1.0
    bound_ms: int = 60_000
    bound_soon_ms: int = 5_000
    """Bound of the 99th percentile, while work is requested and nothing is broken."""
    tried_ms: int = 60_000
    reason_ms: int = 5_000
    told_slack_ms: int = 5_000
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
    beat_ms: int = 2_000
    call_ms: int = 10_000
    call_slack_ms: int = 1_000
    """Allowance for a slow clock of the client, and for the delay until it reports that it stopped waiting."""


class Waiting(NamedTuple):
    """An item that is waiting, and how long it may; a negative bound means that it has already waited too long."""

    scope: str
    key: str
    may_ms: float
    why: str


Look = Callable[["Liveness", History, Core], Iterator[Waiting]]
LOOKS: Final[dict[str, tuple[str, Look]]] = {}


def look(property_: str) -> Callable[[Look], Look]:
    def register(one: Look) -> Look:
        LOOKS[one.__name__] = (property_, one)
        return one

    return register


class Liveness:
    """Runs the liveness checks, from when a healthy core is set (`heal`)."""

    def __init__(self, histories: Mapping[str, History], runs: Runs, now_ms: Callable[[], int], bounds: Bounds) -> None:
        self.histories, self.runs, self.now_ms, self.bounds = histories, runs, now_ms, bounds
        self.core: Core | None = None
        self.since: dict[tuple[str, str, str], int] = {}
        self.told: set[tuple[str, str, str]] = set()
        self.undecided: dict[str, None] = {}
        self.looked_ms: int | None = None
        self.quiet: dict[str, Quiet] = {}
        self.calls: dict[tuple[str, str], int] = {}
        self.healths: dict[tuple[str, str], list[int]] = {}
        """Times at which a node's health changed, by scope and node."""
        self.waits: dict[str, Waits] = {}
        """Waiting times of placeable work, by scope."""
        self.tries: dict[str, Tries] = {}
        """Scheduling attempts, by scope."""

    def heal(self, core: Core) -> None:
        """Set the healthy core. It may be set again, when no more new work is requested."""
        if core.calm:
            self._close_waits()
        else:
            self.waits = {scope: Waits() for scope in sorted(core.scopes) if core.nodes.get(scope)}
        self.core = core

    def _close_waits(self) -> None:
        for waits in self.waits.values():
            waits.close(self.now_ms(), self.bounds.bound_soon_ms * self.bounds.pace)

    def tick(self) -> Iterator[tuple[str, str, Waiting]]:
        """Yield everything that has waited too long by now, once each: check, property, and the item."""
        core, now = self.core, self.now_ms()
        if core is None:
            return
        self.looked_ms = now
        seen: dict[tuple[str, str, str], None] = {}
        for check, (property_, one) in LOOKS.items():
            for scope in sorted(core.scopes):
                if scope not in self.histories:
                    continue
                for waiting in one(self, self.histories[scope], core):
                    mark = check, waiting.scope, waiting.key
                    seen[mark] = None
                    since = self.since.setdefault(mark, max(now, core.since_ms))
                    if now - since > waiting.may_ms * self.bounds.pace and mark not in self.told:
                        self.told.add(mark)
                        yield check, property_, waiting._replace(why=f"{waiting.why}, for {now - since} ms")
        self.since = {mark: since for mark, since in self.since.items() if mark in seen}

    def absorb(self, step: Step, at_ms: int) -> None:
        """Record events that later rows do not show."""
        self.tries.setdefault(step.history.scope, Tries()).absorb(step, at_ms)
        if self.core is not None:
            self.quiet.setdefault(step.history.scope, Quiet()).absorb(step, at_ms)
        if self.core is not None and not self.core.calm and step.history.scope in self.waits:
            self.waits[step.history.scope].absorb(step, at_ms)
        for key, old, new in step.of_kind("node") if self.core is not None else ():
            if old is not None and new is not None and health_of(old) != health_of(new):
                self.healths.setdefault((step.history.scope, key), []).append(at_ms)

    def mass_silence(self, scope: str, core: Core) -> bool:
        silent, nodes = core.silent.get(scope, frozenset()), self.histories[scope].kind("node")
        return bool(nodes) and len(silent) >= MASS_SILENCE * len(nodes)

    def conclude(self) -> Iterator[tuple[str, str, Waiting]]:
        """Yield what is overdue at the end of the run. Items that were not observed for long enough are recorded as undecided.
        """
        yield from self.tick()
        now = self.now_ms()
        for (check, scope, key), since in sorted(self.since.items()):
            if (check, scope, key) not in self.told:
                self.undecided[f"{check} in {scope}: {key} has been waiting for {now - since} ms at the end of the run"] = None
        if self.core is not None:
            yield from self._is_quiet(self.core, now)
        self._close_waits()
        for scope, waits in self.waits.items():
            yield from self._is_bound_soon(scope, waits)

    def _is_bound_soon(self, scope: str, waits: Waits) -> Iterator[tuple[str, str, Waiting]]:
        """L1: placeable work is bound within a short bound, except for one percent of it."""
        may, late = self.bounds.bound_soon_ms * self.bounds.pace, waits.percentile()
        if late is None:
            self.undecided[f"work_is_bound_soon in {scope}: {len(waits.ended)} waits were measured, of {WAITS_MIN} needed"] = None
        elif late.ms > may:
            slow = sum(wait.ms > may for wait in waits.ended)
            why = f"it waited for {late.ms} ms, bound {may:.0f}, as did {slow} of {len(waits.ended)} placeable replicas"
            yield "work_is_bound_soon", "L1", Waiting(scope, late.key, 0, why)

    def _is_quiet(self, core: Core, now: int) -> Iterator[tuple[str, str, Waiting]]:
        """L10: without new requests, writes and repeated refusals cease."""
        bounds = self.bounds
        window = bounds.quiet_window_ms * bounds.pace
        for scope, quiet in sorted(self.quiet.items()):
            if scope not in core.scopes:
                continue
            if not core.calm:
                self.undecided[f"writes_cease in {scope}: work was still being requested"] = None
            elif now - core.since_ms < bounds.quiet_ms * bounds.pace + window:
                self.undecided[f"writes_cease in {scope}: the run ended {now - core.since_ms} ms after it was healed"] = None
            else:
                ended = sum(one.process.scope == scope and one.ended_ms > now - window for one in self.runs.past)
                may = bounds.quiet_window_ms / bounds.beat_ms
                for key, why in quiet.writes_cease(now - window, may + ended * LIFE_WRITES):
                    yield "writes_cease", "L10", Waiting(scope, key, 0, why)
                for key, why in quiet.refusals_back_off(now - window, may):
                    yield "refusals_back_off", "L10", Waiting(scope, key, 0, why)

    # -- calls -------------------------------------------------------------------------------------------------------

    def asked(self, scope: str, operation: str) -> None:
        self.calls.setdefault((scope, operation), self.now_ms())

    def settled(self, scope: str, operation: str) -> Iterator[Waiting]:
        """L14: every call is answered or abandoned in time."""
        since = self.calls.pop((scope, operation), None)
        if since is not None:
            yield from self._slow(scope, operation, since)

    def unsettled(self) -> Iterator[Waiting]:
        for (scope, operation), since in sorted(self.calls.items()):
            yield from self._slow(scope, operation, since)

    def _slow(self, scope: str, operation: str, since: int) -> Iterator[Waiting]:
        may = self.bounds.call_ms * self.bounds.pace + self.bounds.call_slack_ms
        if self.now_ms() - since > may:
            yield Waiting(scope, operation, may, f"neither answered nor abandoned for {self.now_ms() - since} ms, bound {may:.0f}")


# ---------------------------------------------------------------------------------------------------------------- checks


@look("L1")
def eligible_work_is_bound(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """Pending work outside of gangs is bound if a node in the core would accept it and quota covers it.

    If capacity does not suffice for all of them, the scheduler chooses the order: then one of them must be bound, and the
    wait starts again.
    """
    if "scheduler" not in core.roles:
        return
    waiting: dict[str, tuple[Shape, str]] = {}
    now, nodes = live.now_ms(), core.nodes.get(history.scope, frozenset())
    for shape, alike in history.alike("pending"):
        if shape.gang and _stands(history, shape) < shape.gang:
            continue
        if held_back(history, next(iter(alike.values())), now):
            continue
        if node := fits_on(history, shape, nodes, now):
            waiting |= dict.fromkeys(alike, (shape, node))
    able = all_fit(history, [shape for shape, _ in waiting.values()], nodes, now)
    if history.scope in live.waits:
        live.waits[history.scope].saw(history, waiting if able else (), now)
    crowd = "" if able else f" ({len(history.homes)} placed)"
    for key, (_, node) in list(waiting.items())[: 1 if crowd else None]:
        others = f" with {len(waiting) - 1} others, more than fit" if crowd else ""
        why = f"it is pending{others}, and {node} would accept it"
        yield Waiting(history.scope, f"{'replica' if crowd else key}{crowd}", live.bounds.bound_ms, why)


@look("L7")
def one_gang_runs(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    if "scheduler" not in core.roles:
        return
    able = []
    for shape, alike in history.alike("pending"):
        if not shape.gang or len(alike) < shape.gang or _stands(history, shape) >= shape.gang:
            continue
        if held_back(history, next(iter(alike.values())), live.now_ms()):
            continue
        if not keeps_to_itself(history, shape):
            live.undecided[f"one_gang_runs in {history.scope}: {shape.key} has terms towards other replicas"] = None
        elif gang_fits(history, shape, shape.gang, core.nodes.get(history.scope, frozenset()), live.now_ms()):
            able.append(shape.key)
    if able:
        # The capacity may suffice for any one gang but not for all, so the scope as a whole is waiting, not a particular gang.
        yield Waiting(history.scope, "gangs", live.bounds.gang_ms, f"{able} are pending, and there is capacity for one of them")


def _stands(history: History, shape: Shape) -> int:
    members = [history.row(key) for key in history.members.get((shape.tenant, shape.workload), ())]
    return sum(phase_of(one) in ("bound", "starting", "running", "ready", "serving") for one in members)


@look("L3")
def reservations_do_not_leak(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """A reservation whose victims are gone is bound or released."""
    for key, replica in history.replicas("reserved"):
        if not victims_left(history.rows, replica) and "repair" in core.roles:
            yield Waiting(history.scope, key, live.bounds.reservation_ms, f"it is reserved on {replica['status']['node']}")


@look("L4")
def grants_return(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """Expired grants held in this scope are closed. Grants held by another scope can only be returned by that scope."""
    if "repair" not in core.roles:
        return
    boot, on_boot = clock(history, live.now_ms())
    for key, grant in history.kind("grant").items():
        status = grant.get("status", {})
        if grant["spec"].get("issuer") or lent_abroad(grant) or status.get("phase", "live") != "live":
            continue
        fresh = history.rows[key][0] < history.seized_at
        if why := grant_is_dead(history, key, grant, boot, on_boot, fresh=fresh):
            yield Waiting(history.scope, key, live.bounds.grant_ms, f"{why}, and it was not closed")


@look("L4")
def orphans_end(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """On a healthy node no process runs whose attempt is over."""
    for process in live.runs.alive.values():
        if process.scope != history.scope or process.node not in core.nodes.get(history.scope, frozenset()):
            continue
        key, uid, attempt = process.run
        replica = history.row(key)
        current = (
            replica is not None
            and (replica["metadata"]["uid"], attempt_of(replica), replica.get("status", {}).get("node"))
            == (uid, attempt, process.node)
            and phase_of(replica) in HOUSED - {"failed", "finished"}
        )
        if not current:
            name = f"{key} attempt {attempt} of {uid} on {process.node}"
            yield Waiting(history.scope, name, live.bounds.orphan_ms, f"process {process.pid} still runs although its attempt is over")


@look("L10")
def what_is_said_to_run_runs(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """Rows and running processes agree on healthy nodes before long."""
    nodes = core.nodes.get(history.scope, frozenset())
    for key, replica in history.replicas("running", "ready", "serving"):
        status = replica.get("status", {})
        if status.get("node") not in nodes:
            continue
        copies = live.runs.copies.get((history.scope, key, replica["metadata"]["uid"]), {})
        if not any(p.run[2] == attempt_of(replica) and p.node == status["node"] for p in copies.values()):
            yield Waiting(history.scope, key, live.bounds.quiet_ms, f"it is {phase_of(replica)}, but no process of it runs")


@look("L5")
def silence_is_noticed(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    if "node-lifecycle" not in core.roles:
        return
    may = live.bounds.unknown_ms + live.bounds.suspect_ms
    noticed = ("unknown", "lost", "suspect") if live.mass_silence(history.scope, core) else ("unknown", "lost")
    for name in sorted(core.silent.get(history.scope, ())):
        row = history.row(f"node/{name}")
        if row is not None and health_of(row) not in noticed:
            yield Waiting(history.scope, f"node/{name}", may, f"it is silent, but {health_of(row)}")


@look("L5")
def returned_nodes_are_ready(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    if "node-lifecycle" not in core.roles:
        return
    for name in sorted(core.nodes.get(history.scope, ())):
        row = history.row(f"node/{name}")
        if row is not None and health_of(row) != "ready":
            yield Waiting(history.scope, f"node/{name}", live.bounds.ready_ms, f"it is healthy, but {health_of(row)}")


@look("L5")
def unknown_resolves(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """Unknown replicas are resolved, except during a mass silence, when nothing is declared lost."""
    if "node-lifecycle" not in core.roles:
        return
    well, silent = core.nodes.get(history.scope, frozenset()), core.silent.get(history.scope, frozenset())
    for key, replica in history.replicas("unknown"):
        node, shape = replica["status"].get("node", ""), history.shape(replica)
        if node in silent and live.mass_silence(history.scope, core):
            live.undecided[f"unknown_resolves in {history.scope}: {key} is on hold because of a mass silence"] = None
        elif node in well or node in silent:
            lost_after = shape.lost_after_ms if shape is not None and node in silent else 0
            may = lost_after + live.bounds.deletion_ms
            yield Waiting(history.scope, key, may, f"it is unknown; before, it was {replica['status'].get('before')} on {node}")


@look("L6")
def deletion_completes(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """Deletions complete within the stop grace period, or once silent nodes are declared lost."""
    if "workloads" not in core.roles:
        return
    well, silent = core.nodes.get(history.scope, frozenset()), core.silent.get(history.scope, frozenset())
    for key, workload in history.kind("workload").items():
        if not workload["metadata"].get("deleting"):
            continue
        may, members = 0, history.members.get((workload["metadata"]["tenant"], workload["metadata"]["name"]), {})
        for member in members:
            replica = history.row(member)
            node, shape = replica.get("status", {}).get("node", ""), history.shape(replica)
            if shape is None:
                continue
            if phase_of(replica) in HOUSED and node not in well:
                may = max(may, shape.lost_after_ms) if node in silent else -1
            elif may >= 0:
                may = max(may, shape.grace_ms)
            if may < 0 or (node in silent and live.mass_silence(history.scope, core)):
                live.undecided[f"deletion_completes in {history.scope}: {member} is on {node}, outside the core"] = None
                may = -1
                break
        if may >= 0:
            yield Waiting(history.scope, key, may + live.bounds.deletion_ms, f"it is being deleted, and still has {sorted(members)}")


@look("L10")
def desire_is_met(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """There is a replica for each desired one; services have no surplus and no outdated replicas that could be removed.

    A replica that fits nowhere is pending but exists. Daemons have one replica per eligible node, which is not checked.
    """
    if not core.calm or "workloads" not in core.roles:
        return
    well = core.nodes.get(history.scope, frozenset())
    for key, workload in history.kind("workload").items():
        meta, spec = workload["metadata"], workload["spec"]
        if meta.get("deleting") or meta["tenant"] == MEDDLER or spec["type"] == "daemon":
            continue
        members = {member: history.row(member) for member in history.members.get((meta["tenant"], meta["name"]), ())}
        away = [one for one in members.values() if phase_of(one) in HOUSED and one["status"]["node"] not in well]
        if away:
            live.undecided[f"desire_is_met in {history.scope}: {key} has replicas outside the core"] = None
            continue
        for one, why in lacks(history, key, members):
            yield Waiting(history.scope, one, live.bounds.desire_ms, why)


@look("L10")
def what_is_ready_is_served(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """Ready replicas of services on healthy nodes become serving; jobs do not serve.

    A replica may be served and fail its probe between two ticks, so the check uses the time of its row's last change.
    """
    if "endpoints" not in core.roles:
        return
    may, well = live.bounds.serving_ms * live.bounds.pace, core.nodes.get(history.scope, frozenset())
    for key, replica in history.replicas("ready"):
        if replica["status"]["node"] not in well:
            continue
        workload = history.row(owner_of(replica))
        if workload is not None and workload["spec"]["type"] == "service" and replica["metadata"]["tenant"] != MEDDLER:
            since = max(core.since_ms, history.stories[key][-1].at_ms)
            if live.now_ms() - since > may:
                why = f"it is ready on {replica['status']['node']} since {since} ms, but not serving"
                yield Waiting(history.scope, key, -1, why)


@look("L10")
def health_does_not_flap(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """The recorded health of a healthy node does not keep changing."""
    if not core.calm:
        return
    window_ms = live.bounds.health_window_ms * live.bounds.pace
    for name in sorted(core.nodes.get(history.scope, ())):
        key = f"node/{name}"
        late = [at for at in live.healths.get((history.scope, key), ()) if at > live.now_ms() - window_ms]
        if len(late) > HEALTH_CHANGES:
            yield Waiting(history.scope, key, -1, f"its health changed {len(late)} times in {window_ms:.0f} ms")
