"""`plan`: field differences and trial placement of an apply, without writing.

A flat list of paths, each with what stands there and what would; it decides nothing.

Told is what was said: a field that has its default is not there. What the authority stamps, and what is observed, is not
compared; what is secret is not shown.

The authority's own rulings on a copy, and the real kernel; nothing is written.

The manifests are judged one after another by the rules that judge them for good (`commitment.decide`), in the order in which
they would be applied, each on top of those before it. What the controllers would make of that (`correction.wanted`) is then
placed on a view of its own: first what may be made at once, then, where an older generation makes room, the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from remit.commitment.books import Books, Moment
from remit.commitment.decide import decide
from remit.commitment.draft import Draft
from remit.commitment.recovery import FIRST
from remit.commitment.rulings.transitions import spawn
from remit.correction.controllers.desired_replicas import RUNS, Census, available, floor
from remit.law.admission import settled
from remit.model.claims import Actor, Apply, Operation, OperationID, Refused, Role, Spawn
from remit.model.kinds import Workload
from remit.model.manifests.validation import written
from remit.model.metadata import Metadata
from remit.model.objects import TENANTED, AnyObject, encode, key, key_of
from remit.model.problems import Path, path_text
from remit.model.records import Phase
from remit.model.secrets import Secret
from remit.model.wire.api_types import Difference, PlanAnswer, PlanItem, PlannedPlacement
from remit.observation.replica_table import PENDING
from remit.observation.scheduler_view import View
from remit.observation.watch_cache import Board, Kept
from remit.proposal.explain.pending import explain_waiting, work_of
from remit.proposal.explain.result_types import Waits
from remit.serve.diagnostics.view_snapshots import Look, Seen
from remit.serve.http.replies import refused
from remit.serve.objects.writes import in_order
from remit.store.protocol import Change, Event, Row
from remit.world.interfaces import Clock

DIFFERENCES_MAX: Final = 1_000
TEXT_MAX: Final = 4_096

_STAMPED: Final = ("name", "tenant", "uid", "generation", "revision", "deleting")
"""And what it is called, which is told beside."""
_HIDDEN: Final = "(hidden)"


def differences(before: AnyObject | None, after: AnyObject | None) -> tuple[Difference, ...]:
    """In the order of the fields; of very many, the first."""
    secret = isinstance(before, Secret) or isinstance(after, Secret)
    found: list[Difference] = []
    for path, old, new in _differ((), _said(before), _said(after)):
        if len(found) == DIFFERENCES_MAX:
            break
        if secret and path[:2] == ("spec", "data"):
            old, new = None if old is None else _HIDDEN, None if new is None else _HIDDEN
        found.append(Difference(path=path_text(path), before=_short(old), after=_short(new)))
    return tuple(found)


def _said(thing: AnyObject | None) -> dict[str, Any]:
    """What a manifest would say of it."""
    if thing is None:
        return {}
    written = msgspec.json.decode(encode(thing))
    kept = {name: written[name] for name in ("metadata", "spec") if name in written}
    kept["metadata"] = {name: value for name, value in kept["metadata"].items() if name not in _STAMPED}
    for owner in kept["metadata"].get("owners", ()):
        owner.pop("uid", None)
    return kept


def _differ(path: Path, before: Any, after: Any) -> Iterator[tuple[Path, Any, Any]]:
    if before == after or not (_said_of(before) or _said_of(after)):
        return
    if isinstance(before, dict | None) and isinstance(after, dict | None):
        old, new = before or {}, after or {}
        for name in dict.fromkeys((*old, *new)):
            yield from _differ((*path, name), old.get(name), new.get(name))
    elif _listed(before) and _listed(after) and (_deep(before) or _deep(after)):
        for at, (one, other) in enumerate(zip_longest(before or (), after or ())):
            yield from _differ((*path, at), one, other)
    else:
        yield path, before, after


def _listed(value: Any) -> bool:
    return value is None or isinstance(value, list | tuple)


def _deep(value: Any) -> bool:
    """A list of plain values is told whole: its places mean nothing alone."""
    return any(isinstance(one, dict) for one in value or ())


def _short(value: Any) -> Any:
    if value is None:
        return UNSET
    return value[:TEXT_MAX] + "…" if isinstance(value, str) and len(value) > TEXT_MAX else value


def _said_of(value: Any) -> bool:
    """An empty table or list says nothing."""
    return value is not None and value != {} and value != []


TRIED_MAX: Final = 20_000
"""For how many replicas of one plan a place is looked for."""

BATCH_MAX: Final = 512
"""After so many changes what was judged counts as committed."""

PLACING_MS: Final = 5_000
"""For how long places are looked for; of those that it did not come to, no placement is told."""

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
    judging = _Judging(look.seen, things, actor, clock)
    ruled = {key(things[at]): judging.ruled(things[at]) for at in in_order(things)}
    placing = _Placing(look, judging, clock)
    for name, placement in placing.placements([name for name, item in ruled.items() if item.action in ("create", "replace")]):
        ruled[name] = replace(ruled[name], placement=placement)
    return PlanAnswer(revision=look.seen.revision, items=tuple(ruled[key(thing)] for thing in things))


# -- what the authority would say ----------------------------------------------------------------------------------------------


class _Judging:
    """One after another, each on top of those before it. `written` is what would stand then, by key."""

    def __init__(self, seen: Seen, things: Sequence[AnyObject], actor: Actor, clock: Clock) -> None:
        now_ms = clock.now_ms()
        self._seen, self._actor = seen, actor
        self._moment = Moment(now_ms, clock.boot(), {}, now_ms, seen.head.sequence + 1, seen.head.incarnation)
        self._books = _books(seen, things, self._moment)
        self.draft = Draft(self._books, self._moment)
        self.written: dict[str, AnyObject] = {}

    def ruled(self, thing: AnyObject) -> PlanItem:
        if len(self.draft.things) >= BATCH_MAX:
            self._turn()
        kind, meta, name = type(thing).__name__, thing.metadata, key(thing)
        before: AnyObject | None = self._seen.get(name)
        item = PlanItem(kind=kind, name=meta.name, tenant=meta.tenant, action="unchanged")
        if before is not None and written(before) == written(thing) and not _going(before):
            return item
        # Refused, it leaves the draft as it was.
        verdict = decide(self.draft, Operation(OperationID("plan"), self._actor, Apply(thing)))
        if isinstance(verdict, Refused):
            return replace(item, action="refused", problem=refused(verdict).document)
        found = self.draft.thing(name)
        after: AnyObject | None = None if found is None else found[0]
        self.written |= {key_: one for key_, one in self.draft.things.items() if one is not None and key_ not in self.written}
        return replace(item, action="create" if before is None else "replace", diff=differences(before, after))

    def _turn(self) -> None:
        """As if so far were committed: what is looked for in a draft is looked for in all of it."""
        born = self.draft.born
        self._books.absorb(self.draft, self._seen.revision, {})
        self.draft = Draft(self._books, self._moment)
        self.draft.born = born


def _books(seen: Seen, things: Sequence[AnyObject], moment: Moment) -> Books:
    """What the rulings on these things look at; no replica is among it."""
    books, named = Books(), _named(things)
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
    def __init__(self, look: Look, judging: _Judging, clock: Clock) -> None:
        self._seen, self._view, self._rules = look.seen, look.view, look.rules
        self._draft, self._written = judging.draft, judging.written
        self._clock = clock
        self._left = TRIED_MAX
        self._revision = look.seen.revision

    def placements(self, names: Sequence[str]) -> Iterator[tuple[str, PlannedPlacement]]:
        """Of those workloads that would come or change, the most urgent first; on top of each other."""
        self._write({name: encode(thing) for name, thing in self._written.items()})
        workloads = [thing for name in names if isinstance(thing := self._written.get(name), Workload)]
        if not workloads:
            return
        census = Census(self._board(workloads))
        works = [_work(census, workload) for workload in workloads if not workload.metadata.deleting]
        self._write({one.key: None for work in works for one in work.away})
        until_ms = self._clock.now_ms() + PLACING_MS
        for work in sorted(works, key=lambda work: -self._priority(work.workload)):
            if self._clock.now_ms() >= until_ms:
                break
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
        for name, thing in self._written.items():
            rows[name] = Row(name, encode(thing), self._revision)
        board = Board(self._clock)
        board.begin(self._seen.head, self._revision)
        board.page(list(rows.values()))
        board.end()
        return board

    def _priority(self, workload: Workload) -> int:
        meta = workload.metadata
        terms = self._draft.asks_now().admission.terms(meta.tenant, meta.name, meta.labels)
        rank = self._view.things.classes.get(settled(workload.spec, terms)[0].priority_class)
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
        meta, draft, priority = workload.metadata, self._draft, None
        rows: dict[str, bytes | None] = {}
        for first, count in _runs(indexes):
            claim = Spawn(meta.tenant, meta.name, meta.generation, first, count)
            if isinstance(spawn(draft, Operation(OperationID("plan"), Actor("plan", Role.WORKLOADS), claim), claim), Refused):
                continue
            for index in range(first, first + count):
                name = key_of("Replica", f"{meta.name}-{index}", meta.tenant)
                replica = draft.replicas[name]
                if replica is not None:
                    rows[name], priority = encode(replica), replica.spec.priority
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
