"""A hand-made watch cache, and the claims a controller makes on it. Time passes only when a test advances it."""

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
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Condition
from remit.model.objects import encode, key
from remit.model.records import Generation
from remit.observation.watch_cache import WatchCache
from remit.store.protocol import Head, Row, RowChange, WatchEvent
from tests.properties.authority_world import FakeClock, node, workload
from tests.unit.observation.row_fixtures import generation, replica

HEAD = Head("one", 1, 1, "a", 0, "")
TEMPO = Timing(2_000)

__all__ = ["HEAD", "TEMPO", "ControllerBench", "claim_words", "condition_reasons", "ready", "replica", "work"]


def ready(name: str, health: NodeHealth = NodeHealth.READY, **more: Any) -> Node:
    return replace(node(name, **more), status=NodeStatus(health=health))


def work(name: str, replicas: int = 3, *, at: int = 1, **more: Any) -> tuple[Workload, Generation]:
    """A workload with uid and generation, and that generation."""
    made = workload(name, replicas=replicas, **more)
    made = replace(made, metadata=replace(made.metadata, uid=f"uid-{name}", generation=at))
    return made, generation(made, at)


class ControllerBench:
    """A watch cache fed with rows as an authority would write them. `write` is one commit."""

    def __init__(self, *objects: AnyObject) -> None:
        self.clock = FakeClock()
        self.board = WatchCache(self.clock)
        self.revision = 1
        self.authority: Instant | None = None
        self.board.begin_list(HEAD, 1)
        self.board.add_page([Row(key(obj), encode(obj), 1) for obj in objects] + [Row("incarnation", b"one", 1)])
        self.board.end_list()

    def write(self, *objects: AnyObject, drop: Iterable[str] = ()) -> None:
        self.revision += 1
        changes = [RowChange(key(obj), encode(obj), self.revision) for obj in objects]
        changes += [RowChange(name, None, self.revision) for name in drop]
        self.board.apply(WatchEvent(self.revision - 1, self.revision, tuple(changes), 0, 0, None, HEAD))

    def times(self) -> ReconcileTime:
        return ReconcileTime(self.clock.now_ms(), "2026-01-01T00:00:00.000Z", TEMPO, self.authority)

    def reconcile(self, controller: Controller, at: str) -> list[AnyClaim]:
        """The claims of one reconcile."""
        return [result.claim for result in controller.reconcile(at, self.times()) if isinstance(result, Action)]

    def requeue_ms(self, controller: Controller, at: str) -> int | None:
        """The shortest requested delay until the next reconcile."""
        return min(
            (result.in_ms for result in controller.reconcile(at, self.times()) if isinstance(result, RequeueAfter)),
            default=None,
        )

    def observe(self, obj: Workload, claims: Sequence[AnyClaim]) -> Workload:
        """Return the workload with these conditions accepted, and write it."""
        found = {condition.type: condition for condition in obj.status.conditions}
        found |= {claim.condition.type: claim.condition for claim in claims if isinstance(claim, SetCondition)}
        after = replace(obj, status=WorkloadStatus(conditions=tuple(found.values())))
        self.write(after)
        return after


def condition_reasons(claims: Iterable[AnyClaim]) -> dict[str, tuple[str, str]]:
    """Conditions among the claims, by type: status and reason."""
    found: list[Condition] = [claim.condition for claim in claims if isinstance(claim, SetCondition)]
    return {one.type: (one.status, one.reason) for one in found}


def claim_words(claims: Iterable[AnyClaim]) -> list[str]:
    """All claims but conditions, in short form."""
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
