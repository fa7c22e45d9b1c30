"""Desired replicas of a workload compared with the actual ones, shared by the workload, repair and rollout controllers.

From a workload's spec and its replicas it derives which replicas to create, retry, end and forget. The workload controller
creates and ends replicas, the repair controller retries released ones. Both ask here, so that neither creates what the other
is about to bring back. `DaemonNodes` finds the nodes of daemons by the scheduler's own rules, ignoring free capacity. Writes
nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from remit.law.fit import Requirements, cached_static_misfit
from remit.law.ledgers import NodeLedger
from remit.law.requirements import compile_requirements
from remit.law.workload_rules import is_equivalent
from remit.model.kinds import Node, NodeHealth, Workload, WorkloadSpec
from remit.model.metadata import Condition
from remit.model.records import Phase, PolicyRevision, Replica
from remit.observation.watch_cache import Board, Kept


class Sites:
    """Nodes of a watch cache, and compiled requirements of the daemons that were looked up."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._sites: dict[str, tuple[int, NodeLedger]] = {}
        self._asks: dict[str, tuple[int, int, Requirements | None]] = {}
        board.subscribe(self)

    def changed(self, key: str, old: Any, new: Any) -> None:
        """Forget cached entries of deleted objects, also when another object takes the name."""
        if isinstance(old, Node | Workload) and (new is None or new.metadata.uid != old.metadata.uid):
            self._sites.pop(key.removeprefix("node/"), None)
            self._asks.pop(key, None)

    def reached(self) -> None:
        pass

    def fits(self, workload: Workload) -> dict[str, bool]:
        """Return the nodes that the daemon should run on, by name, and whether each accepts new work now."""
        ask = self._ask(workload)
        if ask is None:
            return {}
        found: dict[str, bool] = {}
        for key, kept in self._board.kind("node/"):
            site = self._site(key.removeprefix("node/"), kept.revision, kept.thing)
            if cached_static_misfit(ask, site) is None:
                found[site.node.metadata.name] = bool(site.ready and site.open)
        return dict(sorted(found.items()))

    def _site(self, name: str, revision: int, node: Node) -> NodeLedger:
        known = self._sites.get(name)
        if known is None or known[0] != revision:
            known = self._sites[name] = revision, NodeLedger(node)
        return known[1]

    def _ask(self, workload: Workload) -> Requirements | None:
        meta, latest = workload.metadata, self._policies()
        key, number = f"workload/{meta.tenant}/{meta.name}", 0 if latest is None else latest.spec.number
        known = self._asks.get(key)
        if known is None or known[:2] != (meta.generation, number):
            policies = () if latest is None else tuple(latest.spec.policies.values())
            ask: Requirements | None
            try:
                ask = compile_requirements(meta.tenant, meta.name, meta.labels, workload.spec, policies, meta.generation)
            except ValueError:
                ask = None  # no node satisfies them; the authority refuses such a workload when it is declared
            known = self._asks[key] = meta.generation, number, ask
        return known[2]

    def _policies(self) -> PolicyRevision | None:
        latest: PolicyRevision | None = None
        for _, kept in self._board.kind("policyrevision/"):
            if latest is None or kept.thing.spec.number > latest.spec.number:
                latest = kept.thing
        return latest


P = Phase
RUNS: Final = frozenset({P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING})
UNPLACED: Final = frozenset({P.PENDING, P.RESERVED})
ON_ITS_WAY: Final = frozenset({*UNPLACED, P.BOUND, P.STARTING, P.RUNNING})
"""Phases of a job's replica that need no action: it is not finished, and nothing has failed."""
LEAVES: Final = frozenset({P.DRAINING, P.STOPPING, P.FAILED, P.FINISHED})
"""Phases that lead to released without further action."""

USEFUL: Final = (P.PENDING, P.RESERVED, P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING)
"""Phases from least to most useful. Scaling down removes the least useful replicas first."""

RETRIES_EXHAUSTED: Final = "RetriesExhausted"
DEADLINE_EXCEEDED: Final = "DeadlineExceeded"
OK: Final = "ok"

ALIKE_MAX: Final = 100_000


class Wanted(NamedTuple):
    """Difference between desired and actual replicas.

    `spawn` lists (first index, count); the other fields are rows as observed. `away` lists replicas that are no longer
    desired, in whatever phase.
    """

    spawn: tuple[tuple[int, int], ...] = ()
    again: tuple[Kept, ...] = ()
    away: tuple[Kept, ...] = ()
    forget: tuple[Kept, ...] = ()
    settle: tuple[Kept, ...] = ()
    complete: bool = False
    failed: str = ""


class Census:
    """Computes the difference for every workload in a watch cache."""

    def __init__(self, board: Board) -> None:
        self.board, self.sites = board, Sites(board)
        self._alike: dict[tuple[str, int, int], bool] = {}

    def many(self, workload: Workload) -> int:
        """Return the desired number of replicas of a service or daemon."""
        return len(self.sites.fits(workload)) if workload.spec.type == "daemon" else workload.spec.replicas

    def taken(self, workload: Workload) -> int:
        """Return the number as `many` does, counting only nodes that accept new work: a daemon cannot start elsewhere."""
        return sum(self.sites.fits(workload).values()) if workload.spec.type == "daemon" else workload.spec.replicas

    def wanted(self, workload: Workload) -> Wanted:
        """Return the difference for a workload that is not being deleted."""
        members = self.board.of(workload.metadata.tenant, workload.metadata.name)
        settle = tuple(one for one in members if one.thing.status.phase is P.FINISHED)
        match workload.spec.type:
            case "job":
                found = _job(workload, members)
                return found._replace(settle=settle) if settle else found
            case "daemon":
                return self._daemon(workload, members)._replace(settle=settle)
            case "service":
                return self._service(workload, members)._replace(settle=settle)

    def is_current(self, workload: Workload, replica: Replica) -> bool:
        """Return whether the replica is of the desired generation, or of an equivalent one."""
        meta, number = workload.metadata, replica.spec.generation
        if number == meta.generation:
            return True
        rows, whose = self.board.rows, f"generation/{meta.tenant}/{meta.name}/"
        old, new = rows.get(f"{whose}{number:08d}"), rows.get(f"{whose}{meta.generation:08d}")
        if old is None or new is None:
            return False  # the generation's row arrives with the next commit
        # Keyed by the revisions of both rows. Numbers alone are not enough: after a restore the same number is used again.
        at = meta.uid, old.revision, new.revision
        if at not in self._alike:
            if len(self._alike) >= ALIKE_MAX:
                self._alike.clear()
            self._alike[at] = is_equivalent(old.thing.spec, new.thing.spec)
        return self._alike[at]

    def _service(self, workload: Workload, members: Sequence[Kept]) -> Wanted:
        wanted = workload.spec.replicas
        live = [one for one in members if one.thing.status.phase is not P.RELEASED]
        current = [one for one in live if self.is_current(workload, one.thing)]
        old = [one for one in live if not self.is_current(workload, one.thing)]
        over = _in_order(one for one in members if one.thing.status.phase is P.RELEASED)
        good = [one for one in over if self.is_current(workload, one.thing)]
        short = wanted - len(current)
        room = wanted + (workload.spec.rollout.max_surge if old else 0) - len(live)
        again = good[: max(0, min(short, room))]
        kept = good[: max(0, short)]
        spares = self._least_useful(current, -short)
        return Wanted(
            spawn=_runs(members, min(short, room) - len(kept)),
            again=tuple(again),
            away=(*(one for one in old if one.thing.status.phase in UNPLACED), *spares),
            forget=_without(over, kept),
        )

    def _least_useful(self, current: Sequence[Kept], spare: int) -> list[Kept]:
        """Return the replicas to remove so that `spare` fewer remain.

        The order: replicas on unhealthy or draining nodes first, then those least far in their lifecycle, then those that
        share a node with other replicas of the workload, then the highest index. Replicas that are ending anyway count
        first, and so do unknown ones: if they return, they are surplus then.
        """
        if spare <= 0:
            return []
        spare -= sum(one.thing.status.phase in LEAVES or one.thing.status.phase is P.UNKNOWN for one in current)
        able = _in_order(one for one in current if one.thing.status.phase in USEFUL)
        crowd: dict[str, int] = {}
        ranked = list[tuple[tuple[int, int, int, int], Kept]]()
        for one in able:
            status = one.thing.status
            beside = crowd[status.node] = crowd.get(status.node, -1) + 1 if status.node else 0
            rank = not self._is_sound(status.node), USEFUL.index(status.phase), beside, one.thing.spec.index
            ranked.append(((-rank[0], rank[1], -rank[2], -rank[3]), one))
        ranked.sort(key=lambda pair: pair[0])
        return [one for _, one in ranked[: max(0, spare)]]

    def _is_sound(self, name: str) -> bool:
        node: Node | None = self.board.get(f"node/{name}") if name else None
        if node is None:
            return not name
        return node.status.health is NodeHealth.READY and not node.spec.draining

    def _daemon(self, workload: Workload, members: Sequence[Kept]) -> Wanted:
        """One replica on each suitable node. Replicas on unsuitable nodes are removed, and so are pending ones without a node
        left.
        """
        fits = self.sites.fits(workload)
        live = [one for one in members if one.thing.status.phase is not P.RELEASED]
        placed = [one for one in live if one.thing.status.node]
        unplaced = [one for one in live if not one.thing.status.node]
        there = {one.thing.status.node for one in placed}
        astray = [one for one in placed if one.thing.status.node not in fits]
        stale = [one for one in unplaced if not self.is_current(workload, one.thing)]
        fresh = _in_order(one for one in unplaced if self.is_current(workload, one.thing))
        bare = sum(takes and node not in there for node, takes in fits.items())
        short = bare - len(fresh)
        over = _in_order(one for one in members if one.thing.status.phase is P.RELEASED)
        good = [one for one in over if self.is_current(workload, one.thing)][: max(0, short)]
        return Wanted(
            spawn=_runs(members, short - len(good)),
            again=tuple(good),
            away=(*astray, *stale, *fresh[max(0, bare) :]),
            forget=_without(over, good),
        )


def _job(workload: Workload, members: Sequence[Kept]) -> Wanted:
    """`completions` in total, at most `replicas` at once; without `completions`, all replicas at once. Completed replicas are
    kept.
    """
    spec = workload.spec
    if spec.schedule and not members:
        return (
            Wanted()
        )  # schedules are not implemented, and the job must not run at another time; workload_status.py reports it
    wanted = spec.completions or spec.replicas
    over = _in_order(one for one in members if one.thing.status.phase is P.RELEASED)
    live = [one for one in members if one.thing.status.phase is not P.RELEASED]
    done = sum(one.thing.status.result == OK for one in members)
    undone = [one for one in over if one.thing.status.result != OK]
    failed = failure(workload) or (RETRIES_EXHAUSTED if any(is_spent(one.thing, spec) for one in undone) else "")
    if failed or (wanted and done >= wanted):
        away = tuple(one for one in live if one.thing.status.result != OK)
        return Wanted(away=away, complete=not failed, failed=failed)
    room = spec.replicas - len(live)
    again = undone[: max(0, room)]
    return Wanted(spawn=_runs(members, min(wanted - len(members), room - len(undone))), again=tuple(again))


def failure(workload: Workload) -> str:
    """Return the reason why a job has failed, if it was recorded for this generation. A recorded failure is final."""
    said = condition_of(workload.status.conditions, "Failed")
    current = said is not None and said.observed_generation == workload.metadata.generation
    return said.reason if said is not None and current and said.status == "True" else ""


def condition_of(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((one for one in conditions if one.type == type_), None)


def available(workload: Workload, members: Iterable[Kept]) -> list[Kept]:
    """Return the replicas that serve their purpose: ready ones of a service, running ones of a job."""
    phases = (P.RUNNING, P.READY, P.SERVING) if workload.spec.type == "job" else (P.READY, P.SERVING)
    return [one for one in members if one.thing.status.phase in phases]


def floor(spec: WorkloadSpec, wanted: int) -> int:
    """Return how many replicas must stay available during a replacement.

    A node runs at most one replica of a daemon, so one must stop before its replacement can start.
    """
    unavailable = max(1, spec.rollout.max_unavailable) if spec.type == "daemon" else spec.rollout.max_unavailable
    return max(spec.disruption.min_available, wanted - unavailable)


def is_spent(replica: Replica, spec: WorkloadSpec) -> bool:
    """Return whether the replica has failed more often than its retries allow."""
    return replica.status.failures > spec.retries


def _without(rows: Iterable[Kept], some: Iterable[Kept]) -> tuple[Kept, ...]:
    keys = {one.key for one in some}
    return tuple(one for one in rows if one.key not in keys)


def _in_order(rows: Iterable[Kept]) -> list[Kept]:
    return sorted(rows, key=lambda one: one.thing.spec.index)


def _runs(members: Sequence[Kept], count: int) -> tuple[tuple[int, int], ...]:
    """Return the lowest `count` free indexes, as runs of (first, length)."""
    found: list[tuple[int, int]] = []
    if count <= 0:
        return ()
    taken = {one.thing.spec.index for one in members}
    index = 0
    while count > 0:
        if index not in taken:
            count -= 1
            if found and sum(found[-1]) == index:
                found[-1] = found[-1][0], found[-1][1] + 1
            else:
                found.append((index, 1))
        index += 1
    return tuple(found)
