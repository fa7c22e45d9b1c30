"""Scheduler view: follows written rows, reports changes, and drops assumptions that are not confirmed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from remit.law.fit import PeerIndex
from remit.model.kinds import Affinity, DeviceRequest, NodeHealth, NodeStatus, Placement
from remit.model.metadata import RecordMetadata
from remit.model.objects import key
from remit.model.records import Grant, GrantPhase, GrantSpec, GrantStatus
from remit.observation.frozen_view import compare
from remit.observation.scheduler_view import ASSUMED_MS_MAX, SchedulerView
from remit.store.protocol import Corrupt, Head, RowChange
from tests.properties.authority_world import amounts
from tests.unit.observation.row_fixtures import HEAD_1, ViewFixture, ready, replica, tenant, work

BASE_OBJECTS = (ready("n1", gpus=1), ready("n2"), tenant("t1"))


def view_with_pending(*names: str) -> ViewFixture:
    """Two nodes, one tenant, and a pending replica of one core for each name."""
    objects = [obj for name in names for obj in (*work(name), replica(name))]
    return ViewFixture(*BASE_OBJECTS, *objects)


def test_bound_replica_charges_node_and_quota_until_released() -> None:
    t = view_with_pending("a")
    t.apply(replica("a", phase="bound", on="n1"))
    assert (t.free("n1"), t.left()) == (3000, 15_000)
    t.apply(replica("a", phase="running", on="n1"))
    assert (t.free("n1"), t.left()) == (3000, 15_000)
    t.apply(replica("a", phase="released", on="n1", grants=()))
    assert (t.free("n1"), t.left()) == (4000, 16_000)


def test_binds_of_one_batch_are_posted_like_single_binds() -> None:
    names = [f"w{i}" for i in range(40)]
    t = view_with_pending(*names)
    t.apply(*(replica(name, phase="bound", on=f"n{i % 2 + 1}") for i, name in enumerate(names)))
    assert (t.free("n1"), t.free("n2"), t.left()) == (4000 - 20_000, 4000 - 20_000, 16_000 - 40_000)


def test_pending_and_no_longer_pending_are_reported_once() -> None:
    t = view_with_pending("a")
    t.apply(*work("b"), replica("b"))
    changes = t.view.take_changes()
    assert list(changes.pending) == [t.slot("b-0")]
    t.apply(replica("b", phase="bound", on="n1"))
    changes = t.view.take_changes()
    assert (list(changes.pending), list(changes.no_longer_pending)) == ([], [t.slot("b-0")])
    t.apply(replica("b", attempt=2))
    assert list(t.view.take_changes().pending) == [t.slot("b-0")]
    assert not t.view.take_changes()


def test_replica_pending_in_new_attempt_is_requeued() -> None:
    t = view_with_pending("a")
    t.apply(replica("a", attempt=2))
    changes = t.view.take_changes()
    assert list(changes.no_longer_pending) == list(changes.pending) == [t.slot("a-0")]


def test_freed_capacity_and_quota_are_unblock_events() -> None:
    """L1: replicas that wait for capacity or quota are woken."""
    t = view_with_pending("a")
    t.apply(replica("a", phase="bound", on="n2"))
    t.view.take_changes()
    t.apply(replica("a", phase="released", on="n2", grants=()))
    events = t.view.take_changes().unblock_events
    assert ("room", t.view.columns.rows["n2"]) in events
    assert ("quota", "tenant/t1") in events


def test_raised_quota_is_unblock_event_and_lowered_is_not() -> None:
    t = view_with_pending("a")
    t.apply(tenant("t1", "20"))
    assert ("quota", "tenant/t1") in t.view.take_changes().unblock_events
    t.apply(tenant("t1", "2"))
    assert ("quota", "tenant/t1") not in t.view.take_changes().unblock_events


def test_improved_node_is_unblock_event_and_degraded_is_not() -> None:
    t = view_with_pending("a")
    row = t.view.columns.rows["n1"]
    t.apply(replace(ready("n1", gpus=1), status=NodeStatus(health=NodeHealth.SUSPECT)))
    assert ("node", row) not in t.view.take_changes().unblock_events
    t.apply(ready("n1", gpus=1))
    assert ("node", row) in t.view.take_changes().unblock_events
    t.apply(ready("n1", "8", gpus=1))
    assert ("node", row) in t.view.take_changes().unblock_events


def test_workload_being_deleted_is_closed() -> None:
    t = view_with_pending("a")
    made, _ = work("a")
    found = t.view.shapes.find("t1", "a", 1)
    assert found is not None
    assert t.view.shapes.info(found).open
    t.apply(replace(made, metadata=replace(made.metadata, deleting=True)))
    assert not t.view.shapes.info(found).open
    assert ("workload", "t1", "a") in t.view.take_changes().unblock_events
    assert not t.view.shapes.open_mask()[found]


# -- assumed placements ------------------------------------------------------------------------------------------------------


def test_assumed_replica_is_charged_like_bound_until_forgotten() -> None:
    """F03."""
    t = view_with_pending("a")
    version = t.view.version
    t.view.assume(t.slot("a-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    assert (t.free("n2"), t.left()) == (3000, 15_000)
    assert t.view.version > version
    t.assert_consistent()
    assert t.view.forget(t.slot("a-0"))
    assert (t.free("n2"), t.left()) == (4000, 16_000)
    assert not t.view.forget(t.slot("a-0"))


def test_confirmed_assumption_is_charged_once() -> None:
    t = view_with_pending("a")
    t.view.assume(t.slot("a-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    t.apply(replica("a", phase="bound", on="n2"))
    assert (t.free("n2"), t.left()) == (3000, 15_000)
    assert not t.view.assumed


@pytest.mark.parametrize("committed", [("bound", "n1"), ("pending", ""), ("reserved", "n2")])
def test_assumption_gives_way_to_committed_state(committed: tuple[str, str]) -> None:
    """F03: another scheduler committed first, or the bind did not happen."""
    t = view_with_pending("a")
    t.view.assume(t.slot("a-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    t.apply(replica("a", phase=committed[0], on=committed[1], attempt=1))
    assert not t.view.assumed
    assert t.free("n2") == (3000 if committed[1] == "n2" else 4000)


def test_assumption_of_deleted_replica_is_dropped() -> None:
    t = view_with_pending("a", "b")
    t.view.assume(t.slot("a-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    t.apply(drop=["replica/t1/a-0"])
    assert t.free("n2") == 4000


def test_assumption_on_deleted_node_is_dropped_and_replica_pending_again() -> None:
    t = view_with_pending("a")
    slot = t.slot("a-0")
    t.view.assume(slot, t.view.columns.rows["n2"], {}, ("tenant/t1",))
    t.apply(drop=["node/n2"])
    assert not t.view.assumed
    assert slot in t.view.take_changes().pending
    assert t.left() == 16_000


def test_unconfirmed_assumption_expires_and_replica_is_pending_again() -> None:
    t = view_with_pending("a")
    slot = t.slot("a-0")
    t.view.assume(slot, t.view.columns.rows["n2"], {}, ("tenant/t1",))
    assert t.view.expire_assumed(t.clock.now_ms() + ASSUMED_MS_MAX - 1) == []
    assert t.view.expire_assumed(t.clock.now_ms() + ASSUMED_MS_MAX) == [slot]
    assert t.free("n2") == 4000
    assert slot in t.view.take_changes().pending


def test_assume_is_refused_for_assumed_or_bound_replica() -> None:
    t = view_with_pending("a", "b")
    t.view.assume(t.slot("a-0"), 0, {}, ("tenant/t1",))
    t.apply(replica("b", phase="bound", on="n1"))
    for name in ("a-0", "b-0"):
        with pytest.raises(ValueError, match="is not pending"):
            t.view.assume(t.slot(name), 0, {}, ("tenant/t1",))


def test_assumed_devices_are_charged_and_freed() -> None:
    t = ViewFixture(*BASE_OBJECTS, *work("g", devices=(DeviceRequest(kind="gpu", count=1),)), replica("g"))
    row = t.view.columns.rows["n1"]
    t.view.assume(t.slot("g-0"), row, {"gpu-0": 1000}, ("tenant/t1",))
    assert t.view.columns.used[row] == {"gpu-0": 1000}
    t.apply(replica("g", phase="bound", on="n1", devices={"gpu-0": 1000}))
    assert t.view.columns.used[row] == {"gpu-0": 1000}
    t.apply(replica("g", phase="released", on="n1", grants=()))
    assert t.view.columns.used[row] == {}


# -- reservations ------------------------------------------------------------------------------------------------------------


def test_reservation_charges_beyond_victims_and_is_ready_when_they_are_gone() -> None:
    """F19 F24."""
    t = ViewFixture(*BASE_OBJECTS, *work("v", "3"), *work("p", "3"), replica("v", phase="running", on="n1"), replica("p"))
    victims = {"replica/t1/v-0": "uv0/1"}
    t.apply(replica("v", phase="draining", on="n1"), replica("p", phase="reserved", on="n1", victims=victims))
    assert (t.free("n1"), t.left()) == (1000, 13_000)
    assert not t.view.take_changes().ready
    t.apply(replica("v", phase="released", on="n1", grants=()))
    assert (t.free("n1"), t.left()) == (1000, 13_000)
    assert list(t.view.take_changes().ready) == [t.slot("p-0")]
    t.apply(replica("p", phase="bound", on="n1"))
    assert (t.free("n1"), t.left()) == (1000, 13_000)


def test_other_replica_with_victims_name_frees_nothing_for_reservation() -> None:
    t = ViewFixture(*BASE_OBJECTS, *work("v", "3"), *work("p", "3"), replica("v", phase="draining", on="n1"))
    t.apply(replica("p", phase="reserved", on="n2", victims={"replica/t1/v-0": "uv0/1"}))
    assert t.free("n2") == 4000
    t.apply(replica("v", phase="running", on="n1", uid="another"))
    assert t.free("n2") == 1000


def test_reserved_replica_counts_as_peer() -> None:
    t = ViewFixture(*BASE_OBJECTS, *work("v", "3"), *work("p", "3"), replica("v", phase="running", on="n1"), replica("p"))
    kind = PeerIndex("t1", (("remit/workload", "p"),), "node")
    assert t.view.peers.total(kind) == 0
    victims = {"replica/t1/v-0": "uv0/1"}
    t.apply(replica("v", phase="draining", on="n1"), replica("p", phase="reserved", on="n1", victims=victims))
    assert t.view.peers.total(kind) == 1
    t.apply(replica("p"))
    assert t.view.peers.total(kind) == 0


# -- lists -------------------------------------------------------------------------------------------------------------------


def test_relist_applies_differences_to_known_rows() -> None:
    """F05 F07 F21: rows created, changed and deleted while the watch was down."""
    t = view_with_pending("a", "b")
    t.view.assume(t.slot("a-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    t.write(replica("a", phase="bound", on="n1"), *work("c"), replica("c"), ready("n3"))
    gone = ["replica/t1/b-0", "generation/t1/b/00000001", "workload/t1/b"]
    t.write(tenant("t1", "8"), drop=gone)
    t.list()
    t.assert_consistent()
    fresh = SchedulerView(t.clock)
    relisted = ViewFixture()
    relisted.rows, relisted.revision, relisted.view = t.rows, t.revision, fresh
    relisted.list()
    assert not list(compare(t.view, fresh))
    assert (t.free("n1"), t.free("n2"), t.left()) == (3000, 4000, 7000)
    changes = t.view.take_changes()
    assert not changes.reset
    assert list(changes.pending) == [t.slot("c-0")]


def test_new_incarnation_replaces_whole_view() -> None:
    """F10: revisions may be lower and names the same; nothing of the previous incarnation is kept."""
    t = view_with_pending("a")
    t.apply(replica("a", phase="bound", on="n1"))
    t.rows = {name: row for name, row in t.rows.items() if not name.startswith("replica/")}
    t.list(Head("two", 1, 1, "a", 0, ""))
    assert (t.free("n1"), t.left(), len(t.view.replicas)) == (4000, 16_000, 0)
    assert t.view.take_changes().reset
    assert not t.view.is_current


def test_interrupted_list_leaves_nothing_behind() -> None:
    t = view_with_pending("a")
    view = SchedulerView(t.clock)
    view.begin_list(HEAD_1, 1)
    view.add_page([row for row in t.rows.values() if not row.key.startswith("replica/")])
    assert view.head is None
    t.view = view
    t.list()
    t.assert_consistent()
    assert len(view.columns) == 2


def test_view_is_current_after_incarnation_row_is_written() -> None:
    t = view_with_pending("a")
    assert not t.view.is_current
    event = t.write()
    t.view.apply(event._replace(changes=(RowChange("incarnation", b"one", 2),)))
    assert t.view.is_current


def test_reused_workload_name_with_new_generation_replaces_old_charges() -> None:
    """One folded event: the old workload was deleted, and one with the same name and larger requests was created."""
    t = view_with_pending("a")
    t.apply(replica("a", phase="bound", on="n1"))
    made, made_generation = work("a", "3")
    t.apply(made, made_generation, replica("a", phase="bound", on="n2", uid="another"))
    assert (t.free("n1"), t.free("n2"), t.left()) == (4000, 1000, 13_000)


def test_rewritten_generation_is_charged_again() -> None:
    t = view_with_pending("a")
    t.apply(replica("a", phase="bound", on="n1"))
    t.apply(work("a", "3")[1])
    assert (t.free("n1"), t.left()) == (1000, 13_000)


def test_slots_and_ids_of_deleted_rows_are_reused() -> None:
    t = view_with_pending("a")
    for round_ in range(50):
        name = f"j{round_}"
        t.apply(*work(name, labels={"n": name}), replica(name))
        t.apply(drop=[f"replica/t1/{name}-0", f"generation/t1/{name}/00000001", f"workload/t1/{name}"])
    view = t.view
    assert (view.replicas.size, view.shapes.size, view.shapes.workloads.size) == (2, 2, 2)
    assert (len(view.shapes.shapes), len(view.shapes.label_sets), len(view.replicas)) == (1, 1, 1)


# -- grants ------------------------------------------------------------------------------------------------------------------


def test_child_grants_charge_parent_in_any_arrival_order() -> None:
    def grant(name: str, parent: str, cpu: str) -> Grant:
        spec = GrantSpec(holder="scheduler", amount=amounts(cpu=cpu), parent=parent, tenant="t1")
        return Grant(metadata=RecordMetadata(name=name), spec=spec)

    t = view_with_pending("a")
    child, parent = grant("child", "parent", "1"), grant("parent", "tenant/t1", "4")
    t.apply(child, parent)
    assert (t.left(), t.left("parent"), t.left("child")) == (12_000, 3000, 1000)
    closed = GrantStatus(phase=GrantPhase.CLOSED, returned=amounts(cpu="1"))
    t.apply(replace(child, status=closed))
    assert t.left("parent") == 4000
    assert ("quota", "parent") in t.view.take_changes().unblock_events
    t.apply(drop=[key(child), key(parent)])
    assert (t.left(), "parent" in t.view.ledgers) == (16_000, False)


# -- corrupt rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"{", b'{"metadata": {}, "spec": {"workload": 1}}'])
def test_undecodable_row_raises_corrupt(value: bytes) -> None:
    t = view_with_pending("a")
    event = t.write()
    with pytest.raises(Corrupt, match="a-0 does not decode"):
        t.view.apply(event._replace(changes=(RowChange("replica/t1/a-0", value, 2),)))


def test_replica_with_missing_node_or_generation_raises_corrupt() -> None:
    t = view_with_pending("a")
    with pytest.raises(Corrupt, match="n9, which does not exist"):
        t.apply(replica("a", phase="bound", on="n9"))
    with pytest.raises(Corrupt, match="generation that does not exist"):
        t.apply(replica("z"))


def test_subscriber_is_woken_by_every_event_until_unsubscribed() -> None:
    t = view_with_pending("a")
    wake = t.view.subscribe()
    t.apply(replica("a", phase="bound", on="n1"))
    assert wake.is_set()
    t.view.unsubscribe(wake)
    wake.clear()
    t.apply(replica("a", phase="running", on="n1"))
    assert not wake.is_set()


def test_peer_counts_follow_replicas_and_nodes() -> None:
    t = view_with_pending("a", "b")
    by_zone = PeerIndex("t1", (), "zone")
    assert t.view.peers.total(by_zone) == 0
    t.apply(replica("a", phase="bound", on="n1"))
    t.view.assume(t.slot("b-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    assert int(t.view.peers.counts(by_zone)[t.view.columns.slots("zone")["a"]]) == 2
    t.apply(ready("n2", zone="b"))
    counts, slots = t.view.peers.counts(by_zone), t.view.columns.slots("zone")
    assert (int(counts[slots["a"]]), int(counts[slots["b"]])) == (1, 1)


def test_split_of_shape_by_anti_affinity_requeues_pending_replica() -> None:
    t = view_with_pending("a")
    anti_affinity = Placement(anti_affinity=(Affinity(label_selector={"remit/workload": "a"}, topology_key="node"),))
    t.apply(*work("x", placement=anti_affinity))
    changes = t.view.take_changes()
    assert list(changes.no_longer_pending) == list(changes.pending) == [t.slot("a-0")]
