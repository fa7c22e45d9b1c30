"""Desired replicas of a workload compared with the actual ones, shared by the workload, repair and rollout controllers.

From a workload's spec and its replicas it derives which replicas to create, retry, end and forget. The workload controller
creates and ends replicas, the repair controller retries released ones. Both use this module, so that neither creates what the
other is about to bring back. `DaemonNodes` finds the nodes of daemons by the scheduler's own rules, ignoring free capacity.
Writes nothing and reads no clock.
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
        requirements = self._requirements_of(workload)
        if requirements is None:
            return {}
        nodes: dict[str, bool] = {}
        for key, row in self._cache.of_kind("node/"):
            ledger = self._ledger_of(key.removeprefix("node/"), row.revision, row.obj)
            if cached_static_misfit(requirements, ledger) is None:
                nodes[ledger.node.metadata.name] = bool(ledger.ready and ledger.open)
        return dict(sorted(nodes.items()))

    def _ledger_of(self, name: str, revision: int, node: Node) -> NodeLedger:
        cached = self._ledgers.get(name)
        if cached is None or cached[0] != revision:
            cached = self._ledgers[name] = revision, NodeLedger(node)
        return cached[1]

    def _requirements_of(self, workload: Workload) -> Requirements | None:
        meta, latest = workload.metadata, self._current_policy()
        key, number = f"workload/{meta.tenant}/{meta.name}", 0 if latest is None else latest.spec.number
        cached = self._requirements.get(key)
        if cached is None or cached[:2] != (meta.generation, number):
            policies = () if latest is None else tuple(latest.spec.policies.values())
            requirements: Requirements | None
            try:
                requirements = compile_requirements(
                    meta.tenant, meta.name, meta.labels, workload.spec, policies, meta.generation
                )
            except ValueError:
                requirements = None  # no node satisfies them; the authority refuses such a workload when it is declared
            cached = self._requirements[key] = meta.generation, number, requirements
        return cached[2]

    def _current_policy(self) -> PolicyRevision | None:
        latest: PolicyRevision | None = None
        for _, row in self._cache.of_kind("policyrevision/"):
            if latest is None or row.obj.spec.number > latest.spec.number:
                latest = row.obj
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

    `spawn` lists (first index, count); the other fields are rows as observed. `remove` lists replicas that are no
    longer desired, in whatever phase.
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
        """Return the number as `desired_count` does, but only of nodes that accept new work: a daemon starts nowhere else."""
        return sum(self.daemon_nodes.nodes_for(workload).values()) if workload.spec.type == "daemon" else workload.spec.replicas

    def diff(self, workload: Workload) -> ReplicaDiff:
        """Return the difference for a workload that is not being deleted."""
        members = self.cache.replicas_of(workload.metadata.tenant, workload.metadata.name)
        settle = tuple(row for row in members if row.obj.status.phase is P.FINISHED)
        match workload.spec.type:
            case "job":
                job_diff = _job_diff(workload, members)
                return job_diff._replace(settle=settle) if settle else job_diff
            case "daemon":
                return self._daemon_diff(workload, members)._replace(settle=settle)
            case "service":
                return self._service_diff(workload, members)._replace(settle=settle)

    def is_current(self, workload: Workload, replica: Replica) -> bool:
        """Return whether the replica is of the desired generation, or of an equivalent one."""
        meta, number = workload.metadata, replica.spec.generation
        if number == meta.generation:
            return True
        rows, prefix = self.cache.rows, f"generation/{meta.tenant}/{meta.name}/"
        old, new = rows.get(f"{prefix}{number:08d}"), rows.get(f"{prefix}{meta.generation:08d}")
        if old is None or new is None:
            return False  # the generation's row arrives with the next commit
        # Keyed by the revisions of both rows. Numbers alone are not enough: after a restore the same number is used again.
        cache_key = meta.uid, old.revision, new.revision
        if cache_key not in self._equivalent:
            if len(self._equivalent) >= EQUIVALENCE_CACHE_MAX:
                self._equivalent.clear()
            self._equivalent[cache_key] = is_equivalent(old.obj.spec, new.obj.spec)
        return self._equivalent[cache_key]

    def _service_diff(self, workload: Workload, members: Sequence[CachedRow]) -> ReplicaDiff:
        desired = workload.spec.replicas
        live = [row for row in members if row.obj.status.phase is not P.RELEASED]
        current = [row for row in live if self.is_current(workload, row.obj)]
        old = [row for row in live if not self.is_current(workload, row.obj)]
        released = _by_index(row for row in members if row.obj.status.phase is P.RELEASED)
        retriable = [row for row in released if self.is_current(workload, row.obj)]
        missing = desired - len(current)
        allowed = desired + (workload.spec.rollout.max_surge if old else 0) - len(live)
        requeue = retriable[: max(0, min(missing, allowed))]
        reusable = retriable[: max(0, missing)]
        surplus = self._least_useful(current, -missing)
        return ReplicaDiff(
            spawn=_free_index_runs(members, min(missing, allowed) - len(reusable)),
            requeue=tuple(requeue),
            remove=(*(row for row in old if row.obj.status.phase in UNPLACED_PHASES), *surplus),
            forget=_excluding(released, reusable),
        )

    def _least_useful(self, current: Sequence[CachedRow], surplus: int) -> list[CachedRow]:
        """Return the replicas to remove so that `surplus` fewer remain.

        The order: replicas on unhealthy or draining nodes first, then those least far in their lifecycle, then those that
        share a node with other replicas of the workload, then the highest index. Replicas that are ending anyway count
        first, and so do unknown ones: if they return, they are surplus then.
        """
        if surplus <= 0:
            return []
        surplus -= sum(row.obj.status.phase in ENDING_PHASES or row.obj.status.phase is P.UNKNOWN for row in current)
        candidates = _by_index(row for row in current if row.obj.status.phase in USEFULNESS_ORDER)
        node_counts: dict[str, int] = {}
        ranked = list[tuple[tuple[int, int, int, int], CachedRow]]()
        for row in candidates:
            status = row.obj.status
            siblings = node_counts[status.node] = node_counts.get(status.node, -1) + 1 if status.node else 0
            rank = not self._is_healthy(status.node), USEFULNESS_ORDER.index(status.phase), siblings, row.obj.spec.index
            ranked.append(((-rank[0], rank[1], -rank[2], -rank[3]), row))
        ranked.sort(key=lambda pair: pair[0])
        return [row for _, row in ranked[: max(0, surplus)]]

    def _is_healthy(self, name: str) -> bool:
        node: Node | None = self.cache.get(f"node/{name}") if name else None
        if node is None:
            return not name
        return node.status.health is NodeHealth.READY and not node.spec.draining

    def _daemon_diff(self, workload: Workload, members: Sequence[CachedRow]) -> ReplicaDiff:
        """One replica on each suitable node. Replicas on unsuitable nodes are removed, and so are pending ones for which
        no suitable node is left.
        """
        nodes = self.daemon_nodes.nodes_for(workload)
        live = [row for row in members if row.obj.status.phase is not P.RELEASED]
        placed = [row for row in live if row.obj.status.node]
        unplaced = [row for row in live if not row.obj.status.node]
        occupied = {row.obj.status.node for row in placed}
        misplaced = [row for row in placed if row.obj.status.node not in nodes]
        stale = [row for row in unplaced if not self.is_current(workload, row.obj)]
        pending = _by_index(row for row in unplaced if self.is_current(workload, row.obj))
        uncovered = sum(accepts and node not in occupied for node, accepts in nodes.items())
        missing = uncovered - len(pending)
        released = _by_index(row for row in members if row.obj.status.phase is P.RELEASED)
        retriable = [row for row in released if self.is_current(workload, row.obj)][: max(0, missing)]
        return ReplicaDiff(
            spawn=_free_index_runs(members, missing - len(retriable)),
            requeue=tuple(retriable),
            remove=(*misplaced, *stale, *pending[max(0, uncovered) :]),
            forget=_excluding(released, retriable),
        )


def _job_diff(workload: Workload, members: Sequence[CachedRow]) -> ReplicaDiff:
    """`completions` in total, at most `replicas` at once; without `completions`, all replicas at once. Completed replicas are
    kept.
    """
    spec = workload.spec
    if spec.schedule and not members:
        # Schedules are not implemented, and the job must not run at another time. workload_status.py reports it.
        return ReplicaDiff()
    desired = spec.completions or spec.replicas
    released = _by_index(row for row in members if row.obj.status.phase is P.RELEASED)
    live = [row for row in members if row.obj.status.phase is not P.RELEASED]
    done = sum(row.obj.status.result == OK for row in members)
    incomplete = [row for row in released if row.obj.status.result != OK]
    failed = failure_reason(workload) or (
        RETRIES_EXHAUSTED if any(has_exhausted_retries(row.obj, spec) for row in incomplete) else ""
    )
    if failed or (desired and done >= desired):
        remove = tuple(row for row in live if row.obj.status.result != OK)
        return ReplicaDiff(remove=remove, complete=not failed, failed=failed)
    allowed = spec.replicas - len(live)
    requeue = incomplete[: max(0, allowed)]
    return ReplicaDiff(
        spawn=_free_index_runs(members, min(desired - len(members), allowed - len(incomplete))), requeue=tuple(requeue)
    )


def failure_reason(workload: Workload) -> str:
    """Return the reason why a job has failed, if it was recorded for this generation. A recorded failure is final."""
    condition = condition_of(workload.status.conditions, "Failed")
    is_current = condition is not None and condition.observed_generation == workload.metadata.generation
    return condition.reason if condition is not None and is_current and condition.status == "True" else ""


def condition_of(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == type_), None)


def available(workload: Workload, members: Iterable[CachedRow]) -> list[CachedRow]:
    """Return the replicas that serve their purpose: ready ones of a service, running ones of a job."""
    phases = (P.RUNNING, P.READY, P.SERVING) if workload.spec.type == "job" else (P.READY, P.SERVING)
    return [row for row in members if row.obj.status.phase in phases]


def available_min(spec: WorkloadSpec, desired: int) -> int:
    """Return how many replicas must stay available during a replacement.

    A node runs at most one replica of a daemon, so one must stop before its replacement can start.
    """
    unavailable = max(1, spec.rollout.max_unavailable) if spec.type == "daemon" else spec.rollout.max_unavailable
    return max(spec.disruption.min_available, desired - unavailable)


def has_exhausted_retries(replica: Replica, spec: WorkloadSpec) -> bool:
    """Return whether the replica has failed more often than its retries allow."""
    return replica.status.failures > spec.retries


def _excluding(rows: Iterable[CachedRow], excluded: Iterable[CachedRow]) -> tuple[CachedRow, ...]:
    keys = {row.key for row in excluded}
    return tuple(row for row in rows if row.key not in keys)


def _by_index(rows: Iterable[CachedRow]) -> list[CachedRow]:
    return sorted(rows, key=lambda row: row.obj.spec.index)


def _free_index_runs(members: Sequence[CachedRow], count: int) -> tuple[tuple[int, int], ...]:
    """Return the lowest `count` free indexes, as runs of (first, length)."""
    runs: list[tuple[int, int]] = []
    if count <= 0:
        return ()
    taken = {row.obj.spec.index for row in members}
    index = 0
    while count > 0:
        if index not in taken:
            count -= 1
            if runs and sum(runs[-1]) == index:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((index, 1))
        index += 1
    return tuple(runs)
