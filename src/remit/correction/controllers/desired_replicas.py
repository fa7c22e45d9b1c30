"""Desired replica set of a workload, shared by the workload, repair and rollout controllers.

By what each node is, with the scheduler's own rules; what is free there is not asked.

From its spec and those that stand: whom to make, to try again, to end, to forget.

One answer for two controllers: `workloads` makes and ends, `repair` tries again what was released. Both ask here, so neither
makes what the other is about to bring back. Nothing is written, and no clock is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from remit.law.fit import Ask, static_answer
from remit.law.ledgers import NodeLedger
from remit.law.requirements import make_ask
from remit.law.workload_rules import as_good
from remit.model.kinds import Node, NodeHealth, Workload, WorkloadSpec
from remit.model.metadata import Condition
from remit.model.records import Phase, PolicyRevision, Replica
from remit.observation.watch_cache import Board, Kept


class Sites:
    """Every node of a board, and the asks of those workloads that were asked about."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._sites: dict[str, tuple[int, NodeLedger]] = {}
        self._asks: dict[str, tuple[int, int, Ask | None]] = {}
        board.subscribe(self)

    def changed(self, key: str, old: Any, new: Any) -> None:
        """What is gone is forgotten, also if another has its name."""
        if isinstance(old, Node | Workload) and (new is None or new.metadata.uid != old.metadata.uid):
            self._sites.pop(key.removeprefix("node/"), None)
            self._asks.pop(key, None)

    def reached(self) -> None:
        pass

    def fits(self, workload: Workload) -> dict[str, bool]:
        """The nodes that are for it, in order of name; and whether each takes new work now."""
        ask = self._ask(workload)
        if ask is None:
            return {}
        found: dict[str, bool] = {}
        for key, kept in self._board.kind("node/"):
            site = self._site(key.removeprefix("node/"), kept.revision, kept.thing)
            if static_answer(ask, site) is None:
                found[site.node.metadata.name] = bool(site.ready and site.open)
        return dict(sorted(found.items()))

    def _site(self, name: str, revision: int, node: Node) -> NodeLedger:
        known = self._sites.get(name)
        if known is None or known[0] != revision:
            known = self._sites[name] = revision, NodeLedger(node)
        return known[1]

    def _ask(self, workload: Workload) -> Ask | None:
        meta, latest = workload.metadata, self._policies()
        key, number = f"workload/{meta.tenant}/{meta.name}", 0 if latest is None else latest.spec.number
        known = self._asks.get(key)
        if known is None or known[:2] != (meta.generation, number):
            policies = () if latest is None else tuple(latest.spec.policies.values())
            ask: Ask | None
            try:
                ask = make_ask(meta.tenant, meta.name, meta.labels, workload.spec, policies, meta.generation)
            except ValueError:
                ask = None  # what cannot be asked for is for no node; the authority says so when it is declared
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
"""Nothing is to be done about a job's: it is not over, and nothing went wrong."""
LEAVES: Final = frozenset({P.DRAINING, P.STOPPING, P.FAILED, P.FINISHED})
"""Released before long, whatever is done."""

USEFUL: Final = (P.PENDING, P.RESERVED, P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING)
"""The least useful first: it is the first to go."""

RETRIES_EXHAUSTED: Final = "RetriesExhausted"
DEADLINE_EXCEEDED: Final = "DeadlineExceeded"
OK: Final = "ok"

ALIKE_MAX: Final = 100_000


class Wanted(NamedTuple):
    """`spawn` are first indexes with counts; the rest are rows as seen. `away`: not wanted any more, wherever it stands."""

    spawn: tuple[tuple[int, int], ...] = ()
    again: tuple[Kept, ...] = ()
    away: tuple[Kept, ...] = ()
    forget: tuple[Kept, ...] = ()
    settle: tuple[Kept, ...] = ()
    complete: bool = False
    failed: str = ""


class Census:
    """Answers for every workload on a board."""

    def __init__(self, board: Board) -> None:
        self.board, self.sites = board, Sites(board)
        self._alike: dict[tuple[str, int, int], bool] = {}

    def many(self, workload: Workload) -> int:
        """How many of a service or daemon there are to be."""
        return len(self.sites.fits(workload)) if workload.spec.type == "daemon" else workload.spec.replicas

    def taken(self, workload: Workload) -> int:
        """As `many`, of a daemon only on nodes that take new work now: none can come elsewhere."""
        return sum(self.sites.fits(workload).values()) if workload.spec.type == "daemon" else workload.spec.replicas

    def wanted(self, workload: Workload) -> Wanted:
        """Of one that is not being deleted."""
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
        """Is it of the generation that is wanted, or as good as one?"""
        meta, number = workload.metadata, replica.spec.generation
        if number == meta.generation:
            return True
        rows, whose = self.board.rows, f"generation/{meta.tenant}/{meta.name}/"
        old, new = rows.get(f"{whose}{number:08d}"), rows.get(f"{whose}{meta.generation:08d}")
        if old is None or new is None:
            return False  # the new one comes with the next commit
        # By when both were written, since their numbers are not enough: after a restore the same number is given once more.
        at = meta.uid, old.revision, new.revision
        if at not in self._alike:
            if len(self._alike) >= ALIKE_MAX:
                self._alike.clear()
            self._alike[at] = as_good(old.thing.spec, new.thing.spec)
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
        """Whom to end so that `spare` fewer are left: first what stands on a node that is not well or is to be emptied; then
        what has come least far; then what shares its node with others; and of equals the last that was made. Those who leave
        anyway count first, and so does what is not known to run at all: should it come back, it is one too many then.
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
        """One on each node that takes it. What is placed where it does not belong goes, and so does what can go nowhere."""
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
    """`completions` in all, at most `replicas` at once; without completions all replicas at once. What is done is kept."""
    spec = workload.spec
    if spec.schedule and not members:
        return Wanted()  # nobody keeps its times yet: it is not run at another one. See faring.py, which says so.
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
    """Why a job has failed, if that was said of this generation; what was said stays true."""
    said = condition_of(workload.status.conditions, "Failed")
    current = said is not None and said.observed_generation == workload.metadata.generation
    return said.reason if said is not None and current and said.status == "True" else ""


def condition_of(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((one for one in conditions if one.type == type_), None)


def available(workload: Workload, members: Iterable[Kept]) -> list[Kept]:
    """Those that do what the workload is for: a service's are ready, a job's run."""
    phases = (P.RUNNING, P.READY, P.SERVING) if workload.spec.type == "job" else (P.READY, P.SERVING)
    return [one for one in members if one.thing.status.phase in phases]


def floor(spec: WorkloadSpec, wanted: int) -> int:
    """How many are to be available while some are being replaced. Two of a daemon do not stand on one node, so nothing can come
    before something has gone.
    """
    unavailable = max(1, spec.rollout.max_unavailable) if spec.type == "daemon" else spec.rollout.max_unavailable
    return max(spec.disruption.min_available, wanted - unavailable)


def is_spent(replica: Replica, spec: WorkloadSpec) -> bool:
    """Has it failed more often than its retries allow?"""
    return replica.status.failures > spec.retries


def _without(rows: Iterable[Kept], some: Iterable[Kept]) -> tuple[Kept, ...]:
    keys = {one.key for one in some}
    return tuple(one for one in rows if one.key not in keys)


def _in_order(rows: Iterable[Kept]) -> list[Kept]:
    return sorted(rows, key=lambda one: one.thing.spec.index)


def _runs(members: Sequence[Kept], count: int) -> tuple[tuple[int, int], ...]:
    """The lowest indexes that nobody has, `count` of them, as runs of neighbours."""
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
