"""Which wrong turns leave everything safe, and work standing still?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import pytest

from remit.agent.reconciler import AgentAction, NodeReconciler, StopAction
from remit.commitment import authority, recovery
from remit.commitment.standby import Standby
from remit.correction.controllers.endpoints import EndpointController
from remit.correction.controllers.node_lifecycle import NodeController
from remit.correction.controllers.repair import RepairController
from remit.correction.controllers.workloads import WorkloadController
from remit.correction.framework.actions import Action, ReconcileResult
from remit.correction.framework.loop import ReconcileTime
from remit.correction.framework.work_queue import UndoDetector
from remit.model.claims import Delete, Mark, Move, Spawn
from remit.model.kinds import Node, NodeHealth
from remit.model.records import Phase
from remit.observation.health import HeartbeatAges
from remit.observation.reflector import Reflector
from remit.observation.watch_cache import CachedRow, WatchCache
from remit.proposal import attempts
from remit.proposal.attempts import Attempt
from remit.proposal.cycle import Cycle
from remit.proposal.placement.funnel import Funnel
from remit.proposal.proposals import DecisionOutcome as Word
from remit.proposal.proposals import Proposal
from remit.proposal.queue import backlog
from remit.proposal.queue.backlog import Backlog
from remit.proposal.quota import QuotaSource
from remit.store import chain
from remit.store.protocol import Store
from tests.planted.planted_bug import bug

MISSED = ("eligible_work_is_bound", "one_gang_runs", "deletion_completes", "unknown_resolves", "returned_nodes_are_ready")
STUCK = ("eligible_work_is_bound", "one_gang_runs")


def _asleep(patch: pytest.MonkeyPatch) -> None:
    """No line that waits is woken, nor tried again by itself."""
    patch.setattr(Backlog, "on_event", lambda self, cure, version, which=None: 0)
    for name in ("RETRY_MS_MIN", "RETRY_MS_MAX"):
        patch.setattr(backlog, name, 3_600_000)


@bug(32, scenario="poor", expects=("refusals_back_off",))
def what_is_refused_is_asked_again_at_once(patch: pytest.MonkeyPatch) -> None:
    """A scheduler asks for what its quota does not cover, and lets no time pass between a refusal and its next try."""
    patch.setattr(QuotaSource, "covers", lambda self, charge, count: count)
    for name in ("BACKOFF_MS_BASE", "BACKOFF_MS_MAX"):
        patch.setattr(backlog, name, 500)


@bug(15, 18, scenario="services", expects=("leaders_stay",))
def standbys_are_impatient(patch: pytest.MonkeyPatch) -> None:
    """Whoever does not see the chain advance between two looks takes over."""
    patch.setattr(Standby, "_silence_ms", lambda self, look_ms: 0)


# ------------------------------------------------------------------------------------------------------------ observers


@bug(4, 30, scenario="stale-observers", expects=("observers_never_go_back",))
def a_stale_list_is_trusted_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """An observer that has just begun asks any member for its first list."""
    patch.setattr(Reflector, "list_store", lambda self: self._store)


@bug(4, 6, scenario="stale-observers", expects=("observers_never_go_back",))
def an_older_list_is_taken(patch: pytest.MonkeyPatch) -> None:
    """An observer takes a list that is older than what it has seen."""
    patch.setattr(Reflector, "_is_new_enough", lambda self, head, revision: True)


@bug(5, 22, scenario="recovery", expects=(*MISSED, "claims_fit_what_was_seen"))
def gaps_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """An observer does not check whether it missed an event, and does not list anew either."""
    make = Reflector.__init__

    def patient(self: Reflector, *args: Any, **more: Any) -> None:
        make(self, *args, **{**more, "idle_ms": 3_600_000})

    patch.setattr(chain, "gap", lambda seen, event: None)
    patch.setattr(Reflector, "__init__", patient)


@bug(3, 21, scenario="recovery", expects=("views_show_what_stands",))
def a_deletion_is_not_noted(patch: pytest.MonkeyPatch) -> None:
    """An observer keeps generations that are gone: nobody misses their end, so nothing comes of it but a wrong view."""
    note = WatchCache._set

    def keep(self: WatchCache, key: str, value: bytes | None, revision: int) -> None:
        if value is not None or not key.startswith("generation/"):
            note(self, key, value, revision)

    patch.setattr(WatchCache, "_set", keep)


@bug(5, 21, scenario="recovery", expects=("views_show_what_stands",))
def a_change_is_not_noted(patch: pytest.MonkeyPatch) -> None:
    """What an observer knows of a tenant already it takes for the last word."""
    note = WatchCache._set

    def keep(self: WatchCache, key: str, value: bytes | None, revision: int) -> None:
        if not (key.startswith("tenant/") and key in self.rows):
            note(self, key, value, revision)

    patch.setattr(WatchCache, "_set", keep)


# ------------------------------------------------------------------------------------------------------------- schedulers


@bug(22, scenario="full-house", expects=(*STUCK, "pending_work_is_tried"))
def a_wake_up_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """What found no place is not tried again when room is freed, nor after a while."""
    _asleep(patch)


@bug(22, 23, scenario="unplaceable", expects=("pending_work_is_tried",))
def what_waits_is_tried_once(patch: pytest.MonkeyPatch) -> None:
    """What found no place is tried again when something may have cured it, and never just because time has passed."""
    for name in ("RETRY_MS_MIN", "RETRY_MS_MAX"):
        patch.setattr(backlog, name, 3_600_000)


@bug(22, 23, scenario="unplaceable", expects=("waiting_has_a_reason",))
def who_joins_those_that_wait_is_told_nothing(patch: pytest.MonkeyPatch) -> None:
    """Why a line waits is written down of those who were tried, and not of those who came to it since."""
    patch.setattr(Cycle, "_pending_records", lambda self, now_ms: ())


@bug(26, scenario="full-house", expects=("decisions_add_up",))
def a_node_is_lost_in_the_funnel(patch: pytest.MonkeyPatch) -> None:
    """What the first filter leaves out is not counted."""
    patch.setattr(Funnel, "pairs", lambda self: tuple((step.filter.name, step.refused) for step in self.steps[1:]))


@bug(22, scenario="much-is-asked", expects=("work_is_bound_soon",))
def now_and_then_one_is_left_for_a_while(patch: pytest.MonkeyPatch) -> None:
    """Of all that a scheduler could place it leaves one turn in twenty for twenty seconds."""
    claim = Cycle._add_claims

    def leave(self: Cycle, proposal: Proposal, one: Attempt, where: dict[int, str], now_ms: int) -> None:
        if not one.placements.rows or one.gang or self._jitter(19):
            return claim(self, proposal, one, where, now_ms)
        self._attempts.undo(one)
        for slot in one.slots:
            self.backlog.return_member(slot)
        never = frozenset({("never",)})
        self.backlog.wait(one.queue, "later", never, since=one.since, now_ms=now_ms, until_ms=now_ms + 20_000)
        for explain in self._attempts.explain(one, dict.fromkeys(one.slots, ""), Word("waiting", "later", "", ("time",))):
            proposal.add(explain)
        return None

    patch.setattr(Cycle, "_add_claims", leave)


@bug(25, scenario="recovery", expects=("one_gang_runs",))
def gangs_are_never_tried(patch: pytest.MonkeyPatch) -> None:
    """A scheduler binds what stands alone, and leaves gangs for later."""
    patch.setattr(attempts, "gang_minimum", lambda view, key: 1_000 if key.gang else 0)


@bug(3, 19, scenario="full-house", expects=("reservations_do_not_leak",))
def a_reservation_is_leaked(patch: pytest.MonkeyPatch) -> None:
    """Nobody binds what is reserved, and repair does not take it back."""
    mend = RepairController._repair_replica

    def leave(self: RepairController, kept: CachedRow, times: ReconcileTime) -> Iterator[ReconcileResult]:
        return iter(()) if kept.obj.status.phase is Phase.RESERVED else mend(self, kept, times)

    patch.setattr(RepairController, "_repair_replica", leave)
    patch.setattr(Cycle, "_bind_reservations", lambda self, proposal: None)


# ------------------------------------------------------------------------------------------------------------ controllers


@bug(20, 39, scenario="recovery", expects=("deletion_completes",))
def a_deletion_never_finishes(patch: pytest.MonkeyPatch) -> None:
    """What is being deleted is emptied, and never goes."""
    clear = WorkloadController._end_workload

    def leave(self: WorkloadController, *args: Any) -> Iterator[ReconcileResult]:
        return (wish for wish in clear(self, *args) if not (isinstance(wish, Action) and isinstance(wish.claim, Delete)))

    patch.setattr(WorkloadController, "_end_workload", leave)


def _marks(
    patch: pytest.MonkeyPatch, change: Callable[[NodeController, Node, int, list[ReconcileResult]], Iterable[ReconcileResult]]
) -> None:
    """What is said of a node's health, changed."""
    ladder = NodeController._update_health

    def other(self: NodeController, node: Node, at: int, times: ReconcileTime, *, held: bool) -> Iterator[ReconcileResult]:
        yield from change(self, node, at, list(ladder(self, node, at, times, held=held)))

    patch.setattr(NodeController, "_update_health", other)


@bug(34, scenario="recovery", expects=("returned_nodes_are_ready",))
def a_node_never_returns(patch: pytest.MonkeyPatch) -> None:
    """A node that was unknown stays so when it is back."""

    def never(self: NodeController, node: Node, at: int, wishes: list[ReconcileResult]) -> Iterable[ReconcileResult]:
        return (wish for wish in wishes if not (isinstance(wish, Action) and _health(wish) is NodeHealth.JOINING))

    _marks(patch, never)


def _health(deed: Action) -> NodeHealth | None:
    return deed.claim.health if isinstance(deed.claim, Mark) else None


@bug(34, scenario="a-core-is-left", expects=("silence_is_noticed",))
def silence_goes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """Every node is taken for well, however long nothing was heard of it."""
    patch.setattr(HeartbeatAges, "silent_ms", lambda self, node: 0)


@bug(34, 39, scenario="a-core-is-left", expects=("unknown_resolves", "deletion_completes"))
def what_is_unknown_stays_so(patch: pytest.MonkeyPatch) -> None:
    """What a silent node ran is doubted, and never given up."""
    give_up = NodeController._fail_replicas

    def doubt(self: NodeController, node: str, times: ReconcileTime) -> Iterator[ReconcileResult]:
        return (wish for wish in give_up(self, node, times) if not (isinstance(wish, Action) and _transition(wish) == "lose"))

    patch.setattr(NodeController, "_fail_replicas", doubt)


def _transition(deed: Action) -> str:
    return deed.claim.transition if isinstance(deed.claim, Move) else ""


@bug(32, scenario="services", expects=("writes_cease", "what_is_ready_is_served", "the_last_endpoint_is_not_withdrawn"))
def two_controllers_undo_each_other(patch: pytest.MonkeyPatch) -> None:
    """What is published of one replica is withdrawn again at once, for ever."""
    look = EndpointController.reconcile

    def toggle(self: EndpointController, key: str, times: ReconcileTime) -> Iterator[ReconcileResult]:
        yield from look(self, key, times)
        kept = self.cache.rows.get(key)
        first = min((key for key, _ in self.cache.of_kind("replica/")), default="")
        if kept is not None and key == first and kept.obj.status.phase is Phase.SERVING:
            yield Action(Move(key, kept.revision, "unserve", reason="its endpoint changes"))

    patch.setattr(EndpointController, "reconcile", toggle)
    patch.setattr(UndoDetector, "is_held", lambda self, once, now_ms: False)


@bug(20, scenario="left-behind", expects=("desire_is_met",))
def one_replica_is_never_made(patch: pytest.MonkeyPatch) -> None:
    """Of every service the first replica is left out."""
    fill = WorkloadController._apply_diff

    def short(self: WorkloadController, *args: Any) -> Iterator[ReconcileResult]:
        for wish in fill(self, *args):
            if not (isinstance(wish, Action) and isinstance(wish.claim, Spawn) and wish.claim.first == 0):
                yield wish

    patch.setattr(WorkloadController, "_apply_diff", short)


@bug(20, 21, scenario="recovery", expects=("desire_is_met",))
def what_failed_is_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    """A job that ended badly is left so, whatever attempts it has."""
    patch.setattr(RepairController, "_requeue", lambda self, kept, times: iter(()))


@bug(32, scenario="services", expects=("what_is_ready_is_served",))
def nothing_is_published(patch: pytest.MonkeyPatch) -> None:
    """What is ready is never served."""
    patch.setattr(EndpointController, "reconcile", lambda self, key, times: iter(()))


@bug(32, 34, scenario="services", expects=("health_does_not_flap",))
def a_node_is_suspected_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """A node that is ready and beats is called suspect now and then."""

    looks = count()

    def doubt(self: NodeController, node: Node, at: int, wishes: list[ReconcileResult]) -> Iterable[ReconcileResult]:
        if node.status.health is NodeHealth.READY and next(looks) % 7 == 0:
            return (Action(Mark(node.metadata.name, at, NodeHealth.SUSPECT, reason="one never knows")),)
        return wishes

    patch.setattr(NodeController, "_keys_to_check", lambda self, times: [key for key, _ in self.cache.of_kind("node/")])
    _marks(patch, doubt)


@bug(31, 36, scenario="left-behind", expects=("orphans_end", "returned_nodes_are_ready"))
def orphans_are_left(patch: pytest.MonkeyPatch) -> None:
    """An agent does not stop what is no longer ordered."""
    look = NodeReconciler.reconcile

    def keep(self: NodeReconciler, now_ms: int, orders: Any, kept: Any, **more: Any) -> list[AgentAction]:
        deeds = look(self, now_ms, orders, kept, **more)
        return [one for one in deeds if not isinstance(one, StopAction) or self.is_assigned(orders, one.attempt)]

    patch.setattr(NodeReconciler, "reconcile", keep)


@bug(8, scenario="the-leader-dies", expects=("somebody_leads",))
def nobody_takes_over(patch: pytest.MonkeyPatch) -> None:
    """A standby waits for ever once there is a chain."""
    wait = Standby.wait_for_silence

    async def for_ever(self: Standby) -> None:
        while await chain.read_position(self.store) is not None:
            await self.clock.sleep_ms(60_000)
        await wait(self)

    patch.setattr(Standby, "wait_for_silence", for_ever)


@bug(8, 16, scenario="the-leader-dies", expects=("somebody_leads",))
def whoever_takes_over_reads_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A new authority shows that it lives, and never comes to lead."""
    load = recovery.load

    async def for_ever(store: Store, place: chain.ChainPosition, *more: Any) -> Any:
        loaded = await load(store, place, *more)
        if place.head.epoch > 2:
            await asyncio.Event().wait()
        return loaded

    patch.setattr(authority, "load", for_ever)
