"""Planted bugs that keep everything safe but stop progress."""

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

MISSED_EVENT_CHECKS = (
    "placeable_replicas_are_bound",
    "placeable_gang_runs",
    "deletions_complete",
    "unknown_replicas_are_resolved",
    "returned_nodes_become_ready",
)
QUEUE_CHECKS = ("placeable_replicas_are_bound", "placeable_gang_runs")


def _asleep(patch: pytest.MonkeyPatch) -> None:
    """Waiting queues are neither woken nor retried."""
    patch.setattr(Backlog, "on_event", lambda self, cure, version, which=None: 0)
    for name in ("RETRY_MS_MIN", "RETRY_MS_MAX"):
        patch.setattr(backlog, name, 3_600_000)


@bug(32, scenario="poor", expects=("refused_requests_back_off",))
def refusals_are_retried_at_once(patch: pytest.MonkeyPatch) -> None:
    """A scheduler retries claims that exceed its quota without any pause."""
    patch.setattr(QuotaSource, "covers", lambda self, charge, count: count)
    for name in ("BACKOFF_MS_BASE", "BACKOFF_MS_MAX"):
        patch.setattr(backlog, name, 500)


@bug(15, 18, scenario="services", expects=("leader_is_stable",))
def standbys_take_over_too_early(patch: pytest.MonkeyPatch) -> None:
    """A standby takes over when the chain does not advance between two checks."""
    patch.setattr(Standby, "_silence_ms", lambda self, look_ms: 0)


# ------------------------------------------------------------------------------------------------------------ observers


@bug(4, 30, scenario="stale-observers", expects=("observed_revisions_never_go_back",))
def a_stale_list_is_trusted_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A restarted observer takes its first list from any store member."""
    patch.setattr(Reflector, "list_store", lambda self: self._store)


@bug(4, 6, scenario="stale-observers", expects=("observed_revisions_never_go_back",))
def an_older_list_is_accepted(patch: pytest.MonkeyPatch) -> None:
    """An observer accepts a list older than what it has seen."""
    patch.setattr(Reflector, "_is_new_enough", lambda self, head, revision: True)


@bug(5, 22, scenario="recovery", expects=(*MISSED_EVENT_CHECKS, "claims_fit_seen_state"))
def watch_gaps_are_not_detected(patch: pytest.MonkeyPatch) -> None:
    """An observer neither checks for missed events nor lists again."""
    original_init = Reflector.__init__

    def buggy_init(self: Reflector, *args: Any, **more: Any) -> None:
        original_init(self, *args, **{**more, "idle_ms": 3_600_000})

    patch.setattr(chain, "gap", lambda seen, event: None)
    patch.setattr(Reflector, "__init__", buggy_init)


@bug(3, 21, scenario="recovery", expects=("views_match_store",))
def a_deletion_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """An observer keeps deleted generations: the only effect is a wrong view."""
    original_set = WatchCache._set

    def buggy_set(self: WatchCache, key: str, value: bytes | None, revision: int) -> None:
        if value is not None or not key.startswith("generation/"):
            original_set(self, key, value, revision)

    patch.setattr(WatchCache, "_set", buggy_set)


@bug(5, 21, scenario="recovery", expects=("views_match_store",))
def a_change_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """An observer ignores changes of a tenant it already knows."""
    original_set = WatchCache._set

    def buggy_set(self: WatchCache, key: str, value: bytes | None, revision: int) -> None:
        if not (key.startswith("tenant/") and key in self.rows):
            original_set(self, key, value, revision)

    patch.setattr(WatchCache, "_set", buggy_set)


# ------------------------------------------------------------------------------------------------------------- schedulers


@bug(22, scenario="full-house", expects=(*QUEUE_CHECKS, "pending_replicas_are_tried"))
def a_wake_up_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """A replica without a place is tried neither when capacity is freed nor after a while."""
    _asleep(patch)


@bug(22, 23, scenario="unplaceable", expects=("pending_replicas_are_tried",))
def waiting_replicas_are_not_retried_by_time(patch: pytest.MonkeyPatch) -> None:
    """A replica without a place is retried on events, but never because time has passed."""
    for name in ("RETRY_MS_MIN", "RETRY_MS_MAX"):
        patch.setattr(backlog, name, 3_600_000)


@bug(22, 23, scenario="unplaceable", expects=("pending_replicas_have_a_reason",))
def late_members_get_no_waiting_reason(patch: pytest.MonkeyPatch) -> None:
    """The waiting reason is recorded for tried replicas, but not for those that join the queue later."""
    patch.setattr(Cycle, "_pending_records", lambda self, proposal, now_ms: ())


@bug(26, scenario="full-house", expects=("decision_counts_are_consistent",))
def excluded_nodes_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Nodes that the first filter excludes are not counted."""
    patch.setattr(Funnel, "pairs", lambda self: tuple((step.filter.name, step.refused) for step in self.steps[1:]))


@bug(22, scenario="much-is-asked", expects=("scheduling_latency_is_bounded",))
def some_attempts_are_skipped(patch: pytest.MonkeyPatch) -> None:
    """A scheduler skips one attempt in twenty for twenty seconds."""
    original_add_claims = Cycle._add_claims

    def buggy_add_claims(self: Cycle, proposal: Proposal, one: Attempt, where: dict[int, str], now_ms: int) -> None:
        if not one.placements.rows or one.gang or self._jitter(19):
            return original_add_claims(self, proposal, one, where, now_ms)
        self._attempts.undo(one)
        for slot in one.slots:
            self.backlog.return_member(slot)
        never = frozenset({("never",)})
        self.backlog.wait(one.queue, "later", never, since=one.since, now_ms=now_ms, until_ms=now_ms + 20_000)
        for explain in self._attempts.explain(one, dict.fromkeys(one.slots, ""), Word("waiting", "later", "", ("time",))):
            proposal.add(explain)
        return None

    patch.setattr(Cycle, "_add_claims", buggy_add_claims)


@bug(25, scenario="recovery", expects=("placeable_gang_runs",))
def gangs_are_never_scheduled(patch: pytest.MonkeyPatch) -> None:
    """A scheduler binds single replicas and leaves gangs for later."""
    patch.setattr(attempts, "gang_minimum", lambda view, key: 1_000 if key.gang else 0)


@bug(3, 19, scenario="full-house", expects=("reservations_do_not_leak",))
def a_reservation_is_leaked(patch: pytest.MonkeyPatch) -> None:
    """Reservations are neither bound nor reclaimed by repair."""
    original_repair_replica = RepairController._repair_replica

    def buggy_repair_replica(self: RepairController, kept: CachedRow, times: ReconcileTime) -> Iterator[ReconcileResult]:
        return iter(()) if kept.obj.status.phase is Phase.RESERVED else original_repair_replica(self, kept, times)

    patch.setattr(RepairController, "_repair_replica", buggy_repair_replica)
    patch.setattr(Cycle, "_bind_reservations", lambda self, proposal: None)


# ------------------------------------------------------------------------------------------------------------ controllers


@bug(20, 39, scenario="recovery", expects=("deletions_complete",))
def a_deletion_never_finishes(patch: pytest.MonkeyPatch) -> None:
    """A workload being deleted loses its replicas, but is never removed."""
    original_end_workload = WorkloadController._end_workload

    def buggy_end_workload(self: WorkloadController, *args: Any) -> Iterator[ReconcileResult]:
        return (
            wish
            for wish in original_end_workload(self, *args)
            if not (isinstance(wish, Action) and isinstance(wish.claim, Delete))
        )

    patch.setattr(WorkloadController, "_end_workload", buggy_end_workload)


def _marks(
    patch: pytest.MonkeyPatch, change: Callable[[NodeController, Node, int, list[ReconcileResult]], Iterable[ReconcileResult]]
) -> None:
    """Change the claims on a node's health."""
    original_update_health = NodeController._update_health

    def buggy_update_health(
        self: NodeController, node: Node, at: int, times: ReconcileTime, *, held: bool
    ) -> Iterator[ReconcileResult]:
        yield from change(self, node, at, list(original_update_health(self, node, at, times, held=held)))

    patch.setattr(NodeController, "_update_health", buggy_update_health)


@bug(34, scenario="recovery", expects=("returned_nodes_become_ready",))
def a_node_never_returns(patch: pytest.MonkeyPatch) -> None:
    """An unknown node stays unknown after its return."""

    def buggy_marks(self: NodeController, node: Node, at: int, wishes: list[ReconcileResult]) -> Iterable[ReconcileResult]:
        return (wish for wish in wishes if not (isinstance(wish, Action) and _health(wish) is NodeHealth.JOINING))

    _marks(patch, buggy_marks)


def _health(action: Action) -> NodeHealth | None:
    return action.claim.health if isinstance(action.claim, Mark) else None


@bug(34, scenario="a-core-is-left", expects=("silent_nodes_become_unknown",))
def silent_nodes_count_as_healthy(patch: pytest.MonkeyPatch) -> None:
    """Every node counts as healthy, however long it is silent."""
    patch.setattr(HeartbeatAges, "silent_ms", lambda self, node: 0)


@bug(34, 39, scenario="a-core-is-left", expects=("unknown_replicas_are_resolved", "deletions_complete"))
def unknown_replicas_stay_unknown(patch: pytest.MonkeyPatch) -> None:
    """Replicas on a silent node become unknown, and are never lost."""
    original_fail_replicas = NodeController._fail_replicas

    def buggy_fail_replicas(self: NodeController, node: str, times: ReconcileTime) -> Iterator[ReconcileResult]:
        return (
            wish
            for wish in original_fail_replicas(self, node, times)
            if not (isinstance(wish, Action) and _transition(wish) == "lose")
        )

    patch.setattr(NodeController, "_fail_replicas", buggy_fail_replicas)


def _transition(action: Action) -> str:
    return action.claim.transition if isinstance(action.claim, Move) else ""


@bug(32, scenario="services", expects=("writes_cease", "ready_replicas_become_serving", "last_endpoint_is_not_withdrawn"))
def two_controllers_undo_each_other(patch: pytest.MonkeyPatch) -> None:
    """An endpoint is published and withdrawn for ever."""
    original_reconcile = EndpointController.reconcile

    def buggy_reconcile(self: EndpointController, key: str, times: ReconcileTime) -> Iterator[ReconcileResult]:
        yield from original_reconcile(self, key, times)
        kept = self.cache.rows.get(key)
        first = min((key for key, _ in self.cache.of_kind("replica/")), default="")
        if kept is not None and key == first and kept.obj.status.phase is Phase.SERVING:
            yield Action(Move(key, kept.revision, "unserve", reason="its endpoint changes"))

    patch.setattr(EndpointController, "reconcile", buggy_reconcile)
    patch.setattr(UndoDetector, "is_held", lambda self, once, now_ms: False)


@bug(20, scenario="left-behind", expects=("desired_state_is_reached",))
def one_replica_is_never_spawned(patch: pytest.MonkeyPatch) -> None:
    """The first replica of every service is never spawned."""
    original_apply_diff = WorkloadController._apply_diff

    def buggy_apply_diff(self: WorkloadController, *args: Any) -> Iterator[ReconcileResult]:
        for wish in original_apply_diff(self, *args):
            if not (isinstance(wish, Action) and isinstance(wish.claim, Spawn) and wish.claim.first == 0):
                yield wish

    patch.setattr(WorkloadController, "_apply_diff", buggy_apply_diff)


@bug(20, 21, scenario="recovery", expects=("desired_state_is_reached",))
def failed_jobs_are_not_retried(patch: pytest.MonkeyPatch) -> None:
    """A failed job is not retried, even if it has attempts left."""
    patch.setattr(RepairController, "_requeue", lambda self, kept, times: iter(()))


@bug(32, scenario="services", expects=("ready_replicas_become_serving",))
def no_endpoint_is_published(patch: pytest.MonkeyPatch) -> None:
    """Ready replicas are never served."""
    patch.setattr(EndpointController, "reconcile", lambda self, key, times: iter(()))


@bug(32, 34, scenario="services", expects=("node_health_does_not_flap",))
def a_healthy_node_is_suspected(patch: pytest.MonkeyPatch) -> None:
    """A ready node that sends heartbeats is marked suspect now and then."""

    looks = count()

    def buggy_marks(self: NodeController, node: Node, at: int, wishes: list[ReconcileResult]) -> Iterable[ReconcileResult]:
        if node.status.health is NodeHealth.READY and next(looks) % 7 == 0:
            return (Action(Mark(node.metadata.name, at, NodeHealth.SUSPECT, reason="one never knows")),)
        return wishes

    patch.setattr(NodeController, "_keys_to_check", lambda self, times: [key for key, _ in self.cache.of_kind("node/")])
    _marks(patch, buggy_marks)


@bug(31, 36, scenario="left-behind", expects=("orphan_processes_end", "returned_nodes_become_ready"))
def orphan_processes_are_not_stopped(patch: pytest.MonkeyPatch) -> None:
    """An agent does not stop processes without an assignment."""
    original_reconcile = NodeReconciler.reconcile

    def buggy_reconcile(self: NodeReconciler, now_ms: int, orders: Any, kept: Any, **more: Any) -> list[AgentAction]:
        actions = original_reconcile(self, now_ms, orders, kept, **more)
        return [action for action in actions if not isinstance(action, StopAction) or self.is_assigned(orders, action.attempt)]

    patch.setattr(NodeReconciler, "reconcile", buggy_reconcile)


@bug(8, scenario="the-leader-dies", expects=("leader_exists",))
def no_standby_takes_over(patch: pytest.MonkeyPatch) -> None:
    """A standby waits for ever once there is a chain."""
    original_wait_for_silence = Standby.wait_for_silence

    async def buggy_wait_for_silence(self: Standby) -> None:
        while await chain.read_position(self.store) is not None:
            await self.clock.sleep_ms(60_000)
        await original_wait_for_silence(self)

    patch.setattr(Standby, "wait_for_silence", buggy_wait_for_silence)


@bug(8, 16, scenario="the-leader-dies", expects=("leader_exists",))
def a_takeover_never_finishes(patch: pytest.MonkeyPatch) -> None:
    """A new authority writes heartbeats, but never finishes its takeover."""
    original_load = recovery.load

    async def buggy_load(store: Store, place: chain.ChainPosition, *more: Any) -> Any:
        loaded = await original_load(store, place, *more)
        if place.head.epoch > 2:
            await asyncio.Event().wait()
        return loaded

    patch.setattr(authority, "load", buggy_load)
