"""What would come of it if this were applied? The authority's own rulings on a copy, and the real kernel; nothing is written.

The manifests are judged one after another by the rules that judge them for good (`commitment.decide`), in the order in which
they would be applied, each on top of those before it. What the controllers would make of that (`correction.wanted`) is then
placed on a view of its own: first what may be made at once, then, where an older generation makes room, the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from remit.commitment.books import Books, Moment
from remit.commitment.decide import decide
from remit.commitment.draft import Draft
from remit.commitment.loading import FIRST
from remit.commitment.moving import spawn
from remit.correction.wanted import RUNS, Census, available, floor
from remit.model.answers import PlanAnswer, PlanItem, PlannedPlacement
from remit.model.claims import Actor, Apply, Operation, OperationID, Refused, Role, Spawn
from remit.model.fields import Metadata
from remit.model.judging import written
from remit.model.kinds import Workload
from remit.model.objects import TENANTED, AnyObject, encode, key, key_of
from remit.model.records import Phase
from remit.observation.board import Board, Kept
from remit.observation.replicas import PENDING
from remit.observation.view import View
from remit.proposal.explained import Waits
from remit.proposal.explaining import explain_waiting, work_of
from remit.serve.applying import in_order
from remit.serve.differing import differences
from remit.serve.failures import refused
from remit.serve.looking import Look, Seen
from remit.store.protocol import Change, Event, Row
from remit.world.promises import Clock

TRIED_MAX: Final = 20_000
"""For how many replicas of one plan a place is looked for."""

SPAWN_MAX: Final = 10_000
NODES_TOLD: Final = 1_000

_STUCK: Final = {
    "reason": "surge",
    "meaning": "replicas of the older generation stay until newer ones are ready, and none of these finds a place",
    "cure": "make room for one more, or allow spec.rollout.maxUnavailable",
}

_BY_NAME: Final = ("secret", "config", "workload", "generation", "allotment", "node")
"""Kinds of which there may be very many: only those that the manifests name are looked at."""


def plan(look: Look, things: Sequence[AnyObject], actor: Actor, clock: Clock) -> PlanAnswer:
    """`look` is of a view that nobody else uses: it is changed here."""
    draft = Draft(_books(look.seen, things, clock), _moment(look.seen, clock))
    ruled: dict[str, PlanItem] = {}
    for at in in_order(things):
        ruled[key(things[at])] = _judged(draft, look.seen, things[at], actor)
    placing = _Placing(look, draft, clock)
    for name, placement in placing.placements([name for name, item in ruled.items() if item.action in ("create", "replace")]):
        ruled[name] = replace(ruled[name], placement=placement)
    return PlanAnswer(revision=look.seen.revision, items=tuple(ruled[key(thing)] for thing in things))


# -- what the authority would say ----------------------------------------------------------------------------------------------


def _moment(seen: Seen, clock: Clock) -> Moment:
    now_ms = clock.now_ms()
    return Moment(now_ms, clock.boot(), {}, now_ms, seen.head.sequence + 1, seen.head.incarnation)


def _books(seen: Seen, things: Sequence[AnyObject], clock: Clock) -> Books:
    """What the rulings on these things look at; no replica is among it."""
    books, moment, named = Books(), _moment(seen, clock), _named(things)
    rows: dict[str, list[Kept]] = {}
    for name, kept in seen.rows.items():
        kind = name.partition("/")[0]
        wanted = kind != "replica" and (kind not in _BY_NAME or name in named or _family(name) in named)
        if wanted:
            rows.setdefault(kind, []).append(kept)
    first = [kind.lower() for kind in FIRST]
    for kind in sorted(rows, key=lambda kind: (first.index(kind) if kind in first else len(first), kind)):
        for kept in rows[kind]:
            draft = Draft(books, moment, takeover=True)
            draft.put(kept.thing)
            books.absorb(draft, kept.revision, {})
    return books


def _named(things: Sequence[AnyObject]) -> set[str]:
    """The keys of these, and of those that they say own them."""
    found = {key(thing) for thing in things}
    for thing in things:
        meta = thing.metadata
        owners = meta.owners if isinstance(meta, Metadata) else ()
        found.update(key_of(one.kind, one.name, meta.tenant if one.kind in TENANTED else "") for one in owners)
    return found


def _family(name: str) -> str:
    """Of a generation's key, that of its workload."""
    return f"workload/{name.removeprefix('generation/').rpartition('/')[0]}" if name.startswith("generation/") else ""


def _judged(draft: Draft, seen: Seen, thing: AnyObject, actor: Actor) -> PlanItem:
    kind, meta, name = type(thing).__name__, thing.metadata, key(thing)
    before: AnyObject | None = seen.get(name)
    item = PlanItem(kind=kind, name=meta.name, tenant=meta.tenant, action="unchanged")
    if before is not None and written(before) == written(thing) and not _going(before):
        return item
    trial = draft.fork()
    verdict = decide(trial, Operation(OperationID("plan"), actor, Apply(thing)))
    if isinstance(verdict, Refused):
        return replace(item, action="refused", problem=refused(verdict).document)
    draft.absorb(trial)
    found = draft.thing(name)
    after: AnyObject | None = None if found is None else found[0]
    if before is None:
        return replace(item, action="create", diff=differences(None, after))
    return replace(item, action="replace", diff=differences(before, after))


def _going(thing: AnyObject) -> bool:
    return isinstance(thing.metadata, Metadata) and thing.metadata.deleting


# -- where it would go ---------------------------------------------------------------------------------------------------------


class _Work(NamedTuple):
    """A workload that was declared anew, and what the controllers make of it."""

    workload: Workload
    first: list[int]
    """Indexes of those that may be made at once."""
    later: list[int]
    """Of those that come as older ones go."""
    away: list[Kept]
    old: list[Kept]
    stuck: bool
    """Can nothing older go before something newer stands?"""


class _Placing:
    def __init__(self, look: Look, draft: Draft, clock: Clock) -> None:
        self._seen, self._view, self._rules = look.seen, look.view, look.rules
        self._draft = draft
        self._clock = clock
        self._left = TRIED_MAX
        self._revision = look.seen.revision

    def placements(self, names: Sequence[str]) -> Iterator[tuple[str, PlannedPlacement]]:
        """Of those workloads that would come or change, the most urgent first; on top of each other."""
        changes = [(name, thing) for name, thing in self._draft.things.items() if thing is not None]
        self._write({name: encode(thing) for name, thing in changes})
        found = [self._draft.thing(name) for name in names]
        workloads = [one[0] for one in found if one is not None and isinstance(one[0], Workload)]
        if not workloads:
            return
        census = Census(self._board(workloads))
        works = [_work(census, workload) for workload in workloads if not workload.metadata.deleting]
        self._write({one.key: None for work in works for one in work.away})
        for work in sorted(works, key=lambda work: -self._priority(work.workload)):
            yield key(work.workload), self._placed(work)

    def _board(self, workloads: Sequence[Workload]) -> Board:
        """What the controllers look at for these, as it would be then."""
        named = {f"{one.metadata.tenant}/{one.metadata.name}" for one in workloads}
        rows = dict[str, Row]()
        for name, kept in self._seen.rows.items():
            kind, _, path = name.partition("/")
            mine = path.rpartition("-" if kind == "replica" else "/")[0] in named
            if kind in ("node", "policyrevision") or (kind in ("replica", "generation") and mine):
                rows[name] = Row(name, kept.value, kept.revision)
        for name, thing in self._draft.things.items():
            if thing is not None:
                rows[name] = Row(name, encode(thing), self._revision)
        board = Board(self._clock)
        board.begin(self._seen.head, self._revision)
        board.page(list(rows.values()))
        board.end()
        return board

    def _priority(self, workload: Workload) -> int:
        rank = self._view.things.classes.get(workload.spec.priority_class)
        return 0 if rank is None else rank.spec.value

    def _placed(self, work: _Work) -> PlannedPlacement:
        where, waits, stops, capped = Counter[str](), None, None, False
        ends = sum(one.thing.status.phase in RUNS for one in (*work.away, *work.old))
        for indexes, after in ((work.first, ()), (work.later, work.old)):
            if after and work.stuck and work.first and not where:
                stops = _STUCK
                break
            self._write({one.key: None for one in after})
            tried = indexes[: max(0, self._left)]
            self._left -= len(tried)
            capped = capped or len(tried) < len(indexes)
            if tried and (priority := self._spawned(work.workload, tried)) is not None:
                found, why = self._run(work.workload, priority, len(tried))
                where.update(found)
                waits = waits or why
        nodes = dict(sorted(where.items(), key=lambda pair: (-pair[1], pair[0]))[:NODES_TOLD])
        wanted = len(work.first) + len(work.later)
        return PlannedPlacement(
            wanted=wanted, placed=where.total(), nodes=nodes, waits=waits, stops=stops, ends=ends, capped=capped
        )

    def _spawned(self, workload: Workload, indexes: Sequence[int]) -> int | None:
        """Make them, as the authority would; and what priority they get."""
        meta, draft, priority = workload.metadata, self._draft.fork(), None
        rows: dict[str, bytes | None] = {}
        for first, count in _runs(indexes):
            claim = Spawn(meta.tenant, meta.name, meta.generation, first, count)
            operation = Operation(OperationID("plan"), Actor("plan", Role.WORKLOADS), claim)
            if isinstance(spawn(draft, operation, claim), Refused):
                continue
        for name, replica in draft.replicas.items():
            if replica is not None and name not in self._draft.replicas:
                rows[name], priority = encode(replica), replica.spec.priority
        self._draft.absorb(draft)
        self._write(rows)
        return priority

    def _run(self, workload: Workload, priority: int, count: int) -> tuple[list[str], Waits | None]:
        view, meta = self._view, workload.metadata
        generation = view.shapes.find(meta.tenant, meta.name, meta.generation)
        if generation is None:
            return [], None
        work = work_of(view, generation, priority, self._rules)
        slots = [slot for slot in _pending(view, generation) if slot not in view.assumed][:count]
        able = 0 if work.key.paused or not view.shapes.open(generation) else len(slots)
        found = work.trial.tried(work.purse.covers(work.ask.charge.pairs, able))
        rows = found.rows if len(found.rows) >= work.least else []
        devices: Sequence[Mapping[str, int]] = found.devices or [{}] * len(rows)
        view.assume_run(zip(slots, rows, devices, strict=False), (work.purse.name,))
        waits = explain_waiting(view, generation, priority, self._rules) if len(rows) < count else None
        return [work.trial.kernel.name(row) for row in rows], waits

    def _write(self, rows: Mapping[str, bytes | None]) -> None:
        """Let the view see it as if it had been committed."""
        if rows:
            self._revision += 1
            changes = tuple(Change(name, value, self._revision) for name, value in rows.items())
            self._view.apply(Event(self._revision - 1, self._revision, changes, 0, 0, None, None))


def _work(census: Census, workload: Workload) -> _Work:
    members = census.board.of(workload.metadata.tenant, workload.metadata.name)
    wanted = census.wanted(workload)
    again = [one.thing.spec.index for one in wanted.again]
    first = [*again, *(index for start, count in wanted.spawn for index in range(start, start + count))]
    going = {one.key for one in wanted.away}
    live = [one for one in members if one.thing.status.phase is not Phase.RELEASED and one.key not in going]
    old = [one for one in live if workload.spec.type != "job" and not census.is_current(workload, one.thing)]
    many = census.many(workload) if workload.spec.type != "job" else 0
    short = many - (len(live) - len(old)) - len(first) if old else 0
    taken = {one.thing.spec.index for one in members} | set(first)
    later = [index for index in range(len(taken) + max(0, short)) if index not in taken][: max(0, short)]
    spare = len(available(workload, members)) - floor(workload.spec, many)
    away = [*wanted.away, *wanted.again, *wanted.forget]
    return _Work(workload, first, later, away, old, spare <= 0)


def _runs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours together."""
    start, count = -1, 0
    for index in sorted(indexes):
        if index == start + count and count < SPAWN_MAX:
            count += 1
            continue
        if count:
            yield start, count
        start, count = index, 1
    if count:
        yield start, count


def _pending(view: View, generation: int) -> list[int]:
    of, phase = view.replicas.column("generation"), view.replicas.column("phase")
    found: list[int] = np.flatnonzero((of == generation) & (phase == PENDING)).tolist()
    return found
