"""A board laid out by hand, and what a controller wishes for when it looks at it. Time passes when told. No test is in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from remit.correction.framework.actions import Action, RequeueAfter
from remit.correction.framework.loop import Controller, ReconcileTime
from remit.law.overrides import Instant
from remit.law.timing import Timing
from remit.model.claims import AnyClaim, Delete, Forget, Mark, Move, SetCondition, Spawn
from remit.model.kinds import Node, NodeHealth, NodeStatus, Workload, WorkloadStatus
from remit.model.metadata import Condition
from remit.model.objects import AnyObject, encode, key
from remit.model.records import Generation
from remit.observation.watch_cache import WatchCache
from remit.store.protocol import Head, Row, RowChange, WatchEvent
from tests.properties.authority_world import FakeClock, node, workload
from tests.unit.observation.row_fixtures import generation, replica

HEAD = Head("one", 1, 1, "a", 0, "")
TEMPO = Timing(2_000)

__all__ = ["HEAD", "TEMPO", "Table", "ready", "replica", "said", "short", "work"]


def ready(name: str, health: NodeHealth = NodeHealth.READY, **more: Any) -> Node:
    return replace(node(name, **more), status=NodeStatus(health=health))


def work(name: str, replicas: int = 3, *, at: int = 1, **more: Any) -> tuple[Workload, Generation]:
    """A workload with its uid, at a generation, and that generation."""
    made = workload(name, replicas=replicas, **more)
    made = replace(made, metadata=replace(made.metadata, uid=f"uid-{name}", generation=at))
    return made, generation(made, at)


class Table:
    """A board, told what an authority might have written. `write` is one commit."""

    def __init__(self, *things: AnyObject) -> None:
        self.clock = FakeClock()
        self.board = WatchCache(self.clock)
        self.revision = 1
        self.authority: Instant | None = None
        self.board.begin_list(HEAD, 1)
        self.board.add_page([Row(key(thing), encode(thing), 1) for thing in things] + [Row("incarnation", b"one", 1)])
        self.board.end_list()

    def write(self, *things: AnyObject, drop: Iterable[str] = ()) -> None:
        self.revision += 1
        changes = [RowChange(key(thing), encode(thing), self.revision) for thing in things]
        changes += [RowChange(name, None, self.revision) for name in drop]
        self.board.apply(WatchEvent(self.revision - 1, self.revision, tuple(changes), 0, 0, None, HEAD))

    def times(self) -> ReconcileTime:
        return ReconcileTime(self.clock.now_ms(), "2026-01-01T00:00:00.000Z", TEMPO, self.authority)

    def look(self, controller: Controller, at: str) -> list[AnyClaim]:
        """What is asked for now."""
        return [wish.claim for wish in controller.reconcile(at, self.times()) if isinstance(wish, Action)]

    def again_in(self, controller: Controller, at: str) -> int | None:
        """After how long it wants to look again, at the latest."""
        return min(
            (wish.in_ms for wish in controller.reconcile(at, self.times()) if isinstance(wish, RequeueAfter)), default=None
        )

    def observe(self, thing: Workload, claims: Sequence[AnyClaim]) -> Workload:
        """As it stands once these conditions were accepted; written down too."""
        found = {one.type: one for one in thing.status.conditions}
        found |= {claim.condition.type: claim.condition for claim in claims if isinstance(claim, SetCondition)}
        after = replace(thing, status=WorkloadStatus(conditions=tuple(found.values())))
        self.write(after)
        return after


def said(claims: Iterable[AnyClaim]) -> dict[str, tuple[str, str]]:
    """The conditions among them, by type: status and reason."""
    found: list[Condition] = [claim.condition for claim in claims if isinstance(claim, SetCondition)]
    return {one.type: (one.status, one.reason) for one in found}


def short(claims: Iterable[AnyClaim]) -> list[str]:
    """All but the conditions, in a word each."""
    return [_word(claim) for claim in claims if not isinstance(claim, SetCondition)]


def _word(claim: AnyClaim) -> str:
    match claim:
        case Spawn(first=first, count=count):
            return f"spawn {first}+{count}"
        case Move(replica=name, transition=transition):
            return f"{transition} {name.rpartition('/')[2]}"
        case Forget(replica=name):
            return f"forget {name.rpartition('/')[2]}"
        case Delete(kind=kind, name=name):
            return f"delete {kind} {name}"
        case Mark(node=name, health=health):
            return f"mark {name} {health}"
        case _:
            return type(claim).__name__.lower()
