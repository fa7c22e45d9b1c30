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
from remit.observation.watch_cache import CachedRow, WatchCache


class DaemonNodes:
    """Nodes of a watch cache, and compiled requirements of the daemons that were looked up."""

    def __init__(self, cache: WatchCache) -> None:
        self._cache = cache
        self._ledgers: dict[str, tuple[int, NodeLedger]] = {}
        self._requirements: dict[str, tuple[int, int, Requirements | None]] = {}
        cache.subscribe(self)

    def on_change(self, key: str, old: Any, new: Any) -> None:
        """Forget cached entries of deleted objects, also when another object takes the name."""
        if isinstance(old, Node | Workload) and (new is None or new.metadata.uid != old.metadata.uid):
            self._ledgers.pop(key.removeprefix("node/"), None)
            self._requirements.pop(key, None)

    def on_commit(self) -> None:
        pass

    def nodes_for(self, workload: Workload) -> dict[str, bool]:
        """Return the nodes that the daemon should run on, by name, and whether each accepts new work now."""
        ask = self._requirements_of(workload)
        if ask is None:
            return {}
        found: dict[str, bool] = {}
        for key, kept in self._cache.of_kind("node/"):
            site = self._ledger_of(key.removeprefix("node/"), kept.revision, kept.obj)
            if cached_static_misfit(ask, site) is None:
                found[site.node.metadata.name] = bool(site.ready and site.open)
        return dict(sorted(found.items()))

    def _ledger_of(self, name: str, revision: int, node: Node) -> NodeLedger:
        known = self._ledgers.get(name)
        if known is None or known[0] != revision:
            known = self._ledgers[name] = revision, NodeLedger(node)
        return known[1]

    def _requirements_of(self, workload: Workload) -> Requirements | None:
        meta, latest = workload.metadata, self._current_policy()
        key, number = f"workload/{meta.tenant}/{meta.name}", 0 if latest is None else latest.spec.number
        known = self._requirements.get(key)
        if known is None or known[:2] != (meta.generation, number):
            policies = () if latest is None else tuple(latest.spec.policies.values())
            ask: Requirements | None
            try:
                ask = compile_requirements(meta.tenant, meta.name, meta.labels, workload.spec, policies, meta.generation)
            except ValueError:
                ask = None  # no node satisfies them; the authority refuses such a workload when it is declared
            known = self._requirements[key] = meta.generation, number, ask
        return known[2]

    def _current_policy(self) -> PolicyRevision | None:
        latest: PolicyRevision | None = None
        for _, kept in self._cache.of_kind("policyrevision/"):
            if latest is None or kept.obj.spec.number > latest.spec.number:
                latest = kept.obj
        return latest


P = Phase
RUNNING_PHASES: Final = frozenset({P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING})
UNPLACED_PHASES: Final = frozenset({P.PENDING, P.RESERVED})
PROGRESSING_PHASES: Final = frozenset({*UNPLACED_PHASES, P.BOUND, P.STARTING, P.RUNNING})
"""Phases of a job's replica that need no action: it is not finished, and nothing has failed."""
ENDING_PHASES: Final = frozenset({P.DRAINING, P.STOPPING, P.FAILED, P.FINISHED})
"""Phases that lead to released without further action."""

USEFULNESS_ORDER: Final = (P.PENDING, P.RESERVED, P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING)
"""Phases from least to most useful. Scaling down removes the least useful replicas first."""

RETRIES_EXHAUSTED: Final = "RetriesExhausted"
DEADLINE_EXCEEDED: Final = "DeadlineExceeded"
OK: Final = "ok"

EQUIVALENCE_CACHE_MAX: Final = 100_000


class ReplicaDiff(NamedTuple):
    """Difference between desired and actual replicas.

    `spawn` lists (first index, count); the other fields are rows as observed. `away` lists replicas that are no longer
    desired, in whatever phase.
    """

    spawn: tuple[tuple[int, int], ...] = ()
    requeue: tuple[CachedRow, ...] = ()
    remove: tuple[CachedRow, ...] = ()
    forget: tuple[CachedRow, ...] = ()
    settle: tuple[CachedRow, ...] = ()
    complete: bool = False
    failed: str = ""


class DesiredReplicas:
    """Computes the difference for every workload in a watch cache."""

    def __init__(self, cache: WatchCache) -> None:
        self.cache, self.daemon_nodes = cache, DaemonNodes(cache)
        self._equivalent: dict[tuple[str, int, int], bool] = {}

    def desired_count(self, workload: Workload) -> int:
        """Return the desired number of replicas of a service or daemon."""
        return len(self.daemon_nodes.nodes_for(workload)) if workload.spec.type == "daemon" else workload.spec.replicas

    def placeable_count(self, workload: Workload) -> int:
        """Return the number as `many` does, counting only nodes that accept new work: a daemon cannot start elsewhere."""
        return sum(self.daemon_nodes.nodes_for(workload).values()) if workload.spec.type == "daemon" else workload.spec.replicas

    def diff(self, workload: Workload) -> ReplicaDiff:
        """Return the difference for a workload that is not being deleted."""
        members = self.cache.replicas_of(workload.metadata.tenant, workload.metadata.name)
        settle = tuple(one for one in members if one.obj.status.phase is P.FINISHED)
        match workload.spec.type:
            case "job":
                found = _job_diff(workload, members)
                return found._replace(settle=settle) if settle else found
            case "daemon":
                return self._daemon_diff(workload, members)._replace(settle=settle)
            case "service":
                return self._service_diff(workload, members)._replace(settle=settle)

    def is_current(self, workload: Workload, replica: Replica) -> bool:
        """Return whether the replica is of the desired generation, or of an equivalent one."""
        meta, number = workload.metadata, replica.spec.generation
        if number == meta.generation:
            return True
        rows, whose = self.cache.rows, f"generation/{meta.tenant}/{meta.name}/"
        old, new = rows.get(f"{whose}{number:08d}"), rows.get(f"{whose}{meta.generation:08d}")
        if old is None or new is None:
            return False  # the generation's row arrives with the next commit
        # Keyed by the revisions of both rows. Numbers alone are not enough: after a restore the same number is used again.
        at = meta.uid, old.revision, new.revision
        if at not in self._equivalent:
            if len(self._equivalent) >= EQUIVALENCE_CACHE_MAX:
                self._equivalent.clear()
            self._equivalent[at] = is_equivalent(old.obj.spec, new.obj.spec)
        return self._equivalent[at]

    def _service_diff(self, workload: Workload, members: Sequence[CachedRow]) -> ReplicaDiff:
        wanted = workload.spec.replicas
        live = [one for one in members if one.obj.status.phase is not P.RELEASED]
        current = [one for one in live if self.is_current(workload, one.obj)]
        old = [one for one in live if not self.is_current(workload, one.obj)]
        over = _by_index(one for one in members if one.obj.status.phase is P.RELEASED)
        good = [one for one in over if self.is_current(workload, one.obj)]
        short = wanted - len(current)
        room = wanted + (workload.spec.rollout.max_surge if old else 0) - len(live)
        again = good[: max(0, min(short, room))]
        kept = good[: max(0, short)]
        spares = self._least_useful(current, -short)
        return ReplicaDiff(
            spawn=_free_index_runs(members, min(short, room) - len(kept)),
            requeue=tuple(again),
            remove=(*(one for one in old if one.obj.status.phase in UNPLACED_PHASES), *spares),
            forget=_excluding(over, kept),
        )

    def _least_useful(self, current: Sequence[CachedRow], spare: int) -> list[CachedRow]:
        """Return the replicas to remove so that `spare` fewer remain.

        The order: replicas on unhealthy or draining nodes first, then those least far in their lifecycle, then those that
        share a node with other replicas of the workload, then the highest index. Replicas that are ending anyway count
        first, and so do unknown ones: if they return, they are surplus then.
        """
        if spare <= 0:
            return []
        spare -= sum(one.obj.status.phase in ENDING_PHASES or one.obj.status.phase is P.UNKNOWN for one in current)
        able = _by_index(one for one in current if one.obj.status.phase in USEFULNESS_ORDER)
        crowd: dict[str, int] = {}
        ranked = list[tuple[tuple[int, int, int, int], CachedRow]]()
        for one in able:
            status = one.obj.status
            beside = crowd[status.node] = crowd.get(status.node, -1) + 1 if status.node else 0
            rank = not self._is_healthy(status.node), USEFULNESS_ORDER.index(status.phase), beside, one.obj.spec.index
            ranked.append(((-rank[0], rank[1], -rank[2], -rank[3]), one))
        ranked.sort(key=lambda pair: pair[0])
        return [one for _, one in ranked[: max(0, spare)]]

    def _is_healthy(self, name: str) -> bool:
        node: Node | None = self.cache.get(f"node/{name}") if name else None
        if node is None:
            return not name
        return node.status.health is NodeHealth.READY and not node.spec.draining

    def _daemon_diff(self, workload: Workload, members: Sequence[CachedRow]) -> ReplicaDiff:
        """One replica on each suitable node. Replicas on unsuitable nodes are removed, and so are pending ones without a node
        left.
        """
        fits = self.daemon_nodes.nodes_for(workload)
        live = [one for one in members if one.obj.status.phase is not P.RELEASED]
        placed = [one for one in live if one.obj.status.node]
        unplaced = [one for one in live if not one.obj.status.node]
        there = {one.obj.status.node for one in placed}
        astray = [one for one in placed if one.obj.status.node not in fits]
        stale = [one for one in unplaced if not self.is_current(workload, one.obj)]
        fresh = _by_index(one for one in unplaced if self.is_current(workload, one.obj))
        bare = sum(takes and node not in there for node, takes in fits.items())
        short = bare - len(fresh)
        over = _by_index(one for one in members if one.obj.status.phase is P.RELEASED)
        good = [one for one in over if self.is_current(workload, one.obj)][: max(0, short)]
        return ReplicaDiff(
            spawn=_free_index_runs(members, short - len(good)),
            requeue=tuple(good),
            remove=(*astray, *stale, *fresh[max(0, bare) :]),
            forget=_excluding(over, good),
        )


def _job_diff(workload: Workload, members: Sequence[CachedRow]) -> ReplicaDiff:
    """`completions` in total, at most `replicas` at once; without `completions`, all replicas at once. Completed replicas are
    kept.
    """
    spec = workload.spec
    if spec.schedule and not members:
        return (
            ReplicaDiff()
        )  # schedules are not implemented, and the job must not run at another time; workload_status.py reports it
    wanted = spec.completions or spec.replicas
    over = _by_index(one for one in members if one.obj.status.phase is P.RELEASED)
    live = [one for one in members if one.obj.status.phase is not P.RELEASED]
    done = sum(one.obj.status.result == OK for one in members)
    undone = [one for one in over if one.obj.status.result != OK]
    failed = failure_reason(workload) or (
        RETRIES_EXHAUSTED if any(has_exhausted_retries(one.obj, spec) for one in undone) else ""
    )
    if failed or (wanted and done >= wanted):
        away = tuple(one for one in live if one.obj.status.result != OK)
        return ReplicaDiff(remove=away, complete=not failed, failed=failed)
    room = spec.replicas - len(live)
    again = undone[: max(0, room)]
    return ReplicaDiff(spawn=_free_index_runs(members, min(wanted - len(members), room - len(undone))), requeue=tuple(again))


def failure_reason(workload: Workload) -> str:
    """Return the reason why a job has failed, if it was recorded for this generation. A recorded failure is final."""
    said = condition_of(workload.status.conditions, "Failed")
    current = said is not None and said.observed_generation == workload.metadata.generation
    return said.reason if said is not None and current and said.status == "True" else ""


def condition_of(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((one for one in conditions if one.type == type_), None)


def available(workload: Workload, members: Iterable[CachedRow]) -> list[CachedRow]:
    """Return the replicas that serve their purpose: ready ones of a service, running ones of a job."""
    phases = (P.RUNNING, P.READY, P.SERVING) if workload.spec.type == "job" else (P.READY, P.SERVING)
    return [one for one in members if one.obj.status.phase in phases]


def available_min(spec: WorkloadSpec, wanted: int) -> int:
    """Return how many replicas must stay available during a replacement.

    A node runs at most one replica of a daemon, so one must stop before its replacement can start.
    """
    unavailable = max(1, spec.rollout.max_unavailable) if spec.type == "daemon" else spec.rollout.max_unavailable
    return max(spec.disruption.min_available, wanted - unavailable)


def has_exhausted_retries(replica: Replica, spec: WorkloadSpec) -> bool:
    """Return whether the replica has failed more often than its retries allow."""
    return replica.status.failures > spec.retries


def _excluding(rows: Iterable[CachedRow], some: Iterable[CachedRow]) -> tuple[CachedRow, ...]:
    keys = {one.key for one in some}
    return tuple(one for one in rows if one.key not in keys)


def _by_index(rows: Iterable[CachedRow]) -> list[CachedRow]:
    return sorted(rows, key=lambda one: one.obj.spec.index)


def _free_index_runs(members: Sequence[CachedRow], count: int) -> tuple[tuple[int, int], ...]:
    """Return the lowest `count` free indexes, as runs of (first, length)."""
    found: list[tuple[int, int]] = []
    if count <= 0:
        return ()
    taken = {one.obj.spec.index for one in members}
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
