"""Does a view show what was written, say what must be heard, and let go of what it only assumed?"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from remit.law.fit import PeerIndex
from remit.model.kinds import Affinity, DeviceRequest, NodeHealth, NodeStatus, Placement
from remit.model.metadata import RecordMetadata
from remit.model.objects import key
from remit.model.records import Grant, GrantPhase, GrantSpec, GrantStatus
from remit.observation.frozen_view import compare
from remit.observation.holds import ASSUMED_MS_MAX
from remit.observation.scheduler_view import SchedulerView
from remit.store.protocol import Corrupt, Head, RowChange
from tests.properties.authority_world import amounts
from tests.unit.observation.row_fixtures import HEAD_1, Told, ready, replica, tenant, work

FURNITURE = (ready("n1", gpus=1), ready("n2"), tenant("t1"))


def told(*names: str) -> Told:
    """Two nodes, one tenant, and a pending replica of one core for each name."""
    things = [thing for name in names for thing in (*work(name), replica(name))]
    return Told(*FURNITURE, *things)


def test_a_bound_replica_takes_room_and_quota_and_gives_them_back() -> None:
    t = told("a")
    t.tell(replica("a", phase="bound", on="n1"))
    assert (t.free("n1"), t.left()) == (3000, 15_000)
    t.tell(replica("a", phase="running", on="n1"))
    assert (t.free("n1"), t.left()) == (3000, 15_000)
    t.tell(replica("a", phase="released", on="n1", grants=()))
    assert (t.free("n1"), t.left()) == (4000, 16_000)


def test_a_thousand_binds_in_one_batch_are_posted_as_one_by_one() -> None:
    names = [f"w{i}" for i in range(40)]
    t = told(*names)
    t.tell(*(replica(name, phase="bound", on=f"n{i % 2 + 1}") for i, name in enumerate(names)))
    assert (t.free("n1"), t.free("n2"), t.left()) == (4000 - 20_000, 4000 - 20_000, 16_000 - 40_000)


def test_what_waits_and_what_no_longer_does_is_told_once() -> None:
    t = told("a")
    t.tell(*work("b"), replica("b"))
    news = t.view.changes.take()
    assert list(news.pending) == [t.slot("b-0")]
    t.tell(replica("b", phase="bound", on="n1"))
    news = t.view.changes.take()
    assert (list(news.pending), list(news.no_longer_pending)) == ([], [t.slot("b-0")])
    t.tell(replica("b", attempt=2))
    assert list(t.view.changes.take().pending) == [t.slot("b-0")]
    assert not t.view.changes.take()


def test_a_replica_that_waits_in_another_attempt_is_queued_anew() -> None:
    t = told("a")
    t.tell(replica("a", attempt=2))
    news = t.view.changes.take()
    assert list(news.no_longer_pending) == list(news.pending) == [t.slot("a-0")]


def test_freed_room_and_quota_are_cures() -> None:
    """L1: whoever waits for room or quota hears of it."""
    t = told("a")
    t.tell(replica("a", phase="bound", on="n2"))
    t.view.changes.take()
    t.tell(replica("a", phase="released", on="n2", grants=()))
    cures = t.view.changes.take().unblock_events
    assert ("room", t.view.columns.rows["n2"]) in cures
    assert ("quota", "tenant/t1") in cures


def test_a_raised_quota_is_a_cure_and_a_lowered_one_is_not() -> None:
    t = told("a")
    t.tell(tenant("t1", "20"))
    assert ("quota", "tenant/t1") in t.view.changes.take().unblock_events
    t.tell(tenant("t1", "2"))
    assert ("quota", "tenant/t1") not in t.view.changes.take().unblock_events


def test_a_node_that_becomes_better_is_a_cure_and_one_that_becomes_worse_is_not() -> None:
    t = told("a")
    row = t.view.columns.rows["n1"]
    t.tell(replace(ready("n1", gpus=1), status=NodeStatus(health=NodeHealth.SUSPECT)))
    assert ("node", row) not in t.view.changes.take().unblock_events
    t.tell(ready("n1", gpus=1))
    assert ("node", row) in t.view.changes.take().unblock_events
    t.tell(ready("n1", "8", gpus=1))
    assert ("node", row) in t.view.changes.take().unblock_events


def test_a_workload_that_is_being_deleted_is_closed() -> None:
    t = told("a")
    made, _ = work("a")
    found = t.view.shapes.find("t1", "a", 1)
    assert found is not None
    assert t.view.shapes.info(found).open
    t.tell(replace(made, metadata=replace(made.metadata, deleting=True)))
    assert not t.view.shapes.info(found).open
    assert ("workload", "t1", "a") in t.view.changes.take().unblock_events


# -- what is assumed ---------------------------------------------------------------------------------------------------------


def test_an_assumption_is_posted_as_if_it_were_bound_and_taken_back() -> None:
    """F03."""
    t = told("a")
    version = t.view.changes.version
    t.view.holds.assume(t.slot("a-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    assert (t.free("n2"), t.left()) == (3000, 15_000)
    assert t.view.changes.version > version
    t.checked()
    assert t.view.holds.forget(t.slot("a-0"))
    assert (t.free("n2"), t.left()) == (4000, 16_000)
    assert not t.view.holds.forget(t.slot("a-0"))


def test_an_assumption_that_comes_true_is_posted_once() -> None:
    t = told("a")
    t.view.holds.assume(t.slot("a-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    t.tell(replica("a", phase="bound", on="n2"))
    assert (t.free("n2"), t.left()) == (3000, 15_000)
    assert not t.view.assumed


@pytest.mark.parametrize("truth", [("bound", "n1"), ("pending", ""), ("reserved", "n2")])
def test_an_assumption_gives_way_to_whatever_is_true(truth: tuple[str, str]) -> None:
    """F03: another scheduler was quicker, or nothing came of it."""
    t = told("a")
    t.view.holds.assume(t.slot("a-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    t.tell(replica("a", phase=truth[0], on=truth[1], attempt=1))
    assert not t.view.assumed
    assert t.free("n2") == (3000 if truth[1] == "n2" else 4000)


def test_an_assumption_of_one_who_goes_is_taken_back() -> None:
    t = told("a", "b")
    t.view.holds.assume(t.slot("a-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    t.tell(drop=["replica/t1/a-0"])
    assert t.free("n2") == 4000


def test_an_assumption_on_a_node_that_goes_is_taken_back_and_told() -> None:
    t = told("a")
    slot = t.slot("a-0")
    t.view.holds.assume(slot, t.view.columns.rows["n2"], {}, ("tenant/t1",))
    t.tell(drop=["node/n2"])
    assert not t.view.assumed
    assert slot in t.view.changes.take().pending
    assert t.left() == 16_000


def test_an_assumption_without_a_word_is_dropped_in_time_and_the_replica_waits_again() -> None:
    t = told("a")
    slot = t.slot("a-0")
    t.view.holds.assume(slot, t.view.columns.rows["n2"], {}, ("tenant/t1",))
    assert t.view.holds.expire_assumed(t.clock.now_ms() + ASSUMED_MS_MAX - 1) == []
    assert t.view.holds.expire_assumed(t.clock.now_ms() + ASSUMED_MS_MAX) == [slot]
    assert t.free("n2") == 4000
    assert slot in t.view.changes.take().pending


def test_only_what_waits_may_be_assumed_and_only_once() -> None:
    t = told("a", "b")
    t.view.holds.assume(t.slot("a-0"), 0, {}, ("tenant/t1",))
    t.tell(replica("b", phase="bound", on="n1"))
    for name in ("a-0", "b-0"):
        with pytest.raises(ValueError, match="is not pending"):
            t.view.holds.assume(t.slot(name), 0, {}, ("tenant/t1",))


def test_assumed_devices_are_taken_and_given_back() -> None:
    t = Told(*FURNITURE, *work("g", devices=(DeviceRequest(kind="gpu", count=1),)), replica("g"))
    row = t.view.columns.rows["n1"]
    t.view.holds.assume(t.slot("g-0"), row, {"gpu-0": 1000}, ("tenant/t1",))
    assert t.view.columns.used[row] == {"gpu-0": 1000}
    t.tell(replica("g", phase="bound", on="n1", devices={"gpu-0": 1000}))
    assert t.view.columns.used[row] == {"gpu-0": 1000}
    t.tell(replica("g", phase="released", on="n1", grants=()))
    assert t.view.columns.used[row] == {}


# -- reservations ------------------------------------------------------------------------------------------------------------


def test_a_reservation_holds_what_its_victims_do_not_free_and_is_ready_when_they_are_gone() -> None:
    """F19 F24."""
    t = Told(*FURNITURE, *work("v", "3"), *work("p", "3"), replica("v", phase="running", on="n1"), replica("p"))
    victims = {"replica/t1/v-0": "uv0/1"}
    t.tell(replica("v", phase="draining", on="n1"), replica("p", phase="reserved", on="n1", victims=victims))
    assert (t.free("n1"), t.left()) == (1000, 13_000)
    assert not t.view.changes.take().ready
    t.tell(replica("v", phase="released", on="n1", grants=()))
    assert (t.free("n1"), t.left()) == (1000, 13_000)
    assert list(t.view.changes.take().ready) == [t.slot("p-0")]
    t.tell(replica("p", phase="bound", on="n1"))
    assert (t.free("n1"), t.left()) == (1000, 13_000)


def test_another_of_a_victims_name_frees_nothing_for_the_reservation() -> None:
    t = Told(*FURNITURE, *work("v", "3"), *work("p", "3"), replica("v", phase="draining", on="n1"))
    t.tell(replica("p", phase="reserved", on="n2", victims={"replica/t1/v-0": "uv0/1"}))
    assert t.free("n2") == 4000
    t.tell(replica("v", phase="running", on="n1", uid="another"))
    assert t.free("n2") == 1000


def test_a_reserved_replica_counts_among_its_kind() -> None:
    t = Told(*FURNITURE, *work("v", "3"), *work("p", "3"), replica("v", phase="running", on="n1"), replica("p"))
    kind = PeerIndex("t1", (("remit/workload", "p"),), "node")
    assert t.view.peers.total(kind) == 0
    victims = {"replica/t1/v-0": "uv0/1"}
    t.tell(replica("v", phase="draining", on="n1"), replica("p", phase="reserved", on="n1", victims=victims))
    assert t.view.peers.total(kind) == 1
    t.tell(replica("p"))
    assert t.view.peers.total(kind) == 0


# -- lists -------------------------------------------------------------------------------------------------------------------


def test_a_list_over_what_is_known_applies_what_differs() -> None:
    """F05 F07 F21: what came, changed and went while nobody looked."""
    t = told("a", "b")
    t.view.holds.assume(t.slot("a-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    t.write(replica("a", phase="bound", on="n1"), *work("c"), replica("c"), ready("n3"))
    gone = ["replica/t1/b-0", "generation/t1/b/00000001", "workload/t1/b"]
    t.write(tenant("t1", "8"), drop=gone)
    t.list()
    t.checked()
    fresh = SchedulerView(t.clock)
    other = Told()
    other.rows, other.revision, other.view = t.rows, t.revision, fresh
    other.list()
    assert not list(compare(t.view, fresh))
    assert (t.free("n1"), t.free("n2"), t.left()) == (3000, 4000, 7000)
    news = t.view.changes.take()
    assert not news.reset
    assert list(news.pending) == [t.slot("c-0")]


def test_another_incarnation_replaces_everything() -> None:
    """F10: revisions may be lower and names the same; nothing from before is trusted."""
    t = told("a")
    t.tell(replica("a", phase="bound", on="n1"))
    t.rows = {name: row for name, row in t.rows.items() if not name.startswith("replica/")}
    t.list(Head("two", 1, 1, "a", 0, ""))
    assert (t.free("n1"), t.left(), len(t.view.replicas)) == (4000, 16_000, 0)
    assert t.view.changes.take().reset
    assert not t.view.is_current


def test_a_list_that_broke_off_leaves_nothing_behind() -> None:
    t = told("a")
    view = SchedulerView(t.clock)
    view.begin_list(HEAD_1, 1)
    view.add_page([row for row in t.rows.values() if not row.key.startswith("replica/")])
    assert view.head is None
    t.view = view
    t.list()
    t.checked()
    assert len(view.columns) == 2


def test_a_view_is_sober_once_its_incarnation_was_doubted() -> None:
    t = told("a")
    assert not t.view.is_current
    event = t.write()
    t.view.apply(event._replace(changes=(RowChange("incarnation", b"one", 2),)))
    assert t.view.is_current


def test_a_generation_and_a_name_that_are_given_again_are_others() -> None:
    """In one folded event: the old one went, and one of its name came that asks for more."""
    t = told("a")
    t.tell(replica("a", phase="bound", on="n1"))
    made, made_generation = work("a", "3")
    t.tell(made, made_generation, replica("a", phase="bound", on="n2", uid="another"))
    assert (t.free("n1"), t.free("n2"), t.left()) == (4000, 1000, 13_000)


def test_a_generation_that_is_written_anew_is_posted_anew() -> None:
    t = told("a")
    t.tell(replica("a", phase="bound", on="n1"))
    t.tell(work("a", "3")[1])
    assert (t.free("n1"), t.left()) == (1000, 13_000)


def test_slots_and_ids_of_what_went_are_used_again() -> None:
    t = told("a")
    for round_ in range(50):
        name = f"j{round_}"
        t.tell(*work(name, labels={"n": name}), replica(name))
        t.tell(drop=[f"replica/t1/{name}-0", f"generation/t1/{name}/00000001", f"workload/t1/{name}"])
    view = t.view
    assert (view.replicas.size, view.shapes.size, view.shapes.workloads.size) == (2, 2, 2)
    assert (len(view.shapes.shapes), len(view.shapes.label_sets), len(view.replicas)) == (1, 1, 1)


# -- grants ------------------------------------------------------------------------------------------------------------------


def test_grants_burden_what_they_were_carved_out_of_in_whatever_order_they_are_told() -> None:
    def grant(name: str, parent: str, cpu: str) -> Grant:
        spec = GrantSpec(holder="scheduler", amount=amounts(cpu=cpu), parent=parent, tenant="t1")
        return Grant(metadata=RecordMetadata(name=name), spec=spec)

    t = told("a")
    child, parent = grant("child", "parent", "1"), grant("parent", "tenant/t1", "4")
    t.tell(child, parent)
    assert (t.left(), t.left("parent"), t.left("child")) == (12_000, 3000, 1000)
    closed = GrantStatus(phase=GrantPhase.CLOSED, returned=amounts(cpu="1"))
    t.tell(replace(child, status=closed))
    assert t.left("parent") == 4000
    assert ("quota", "parent") in t.view.changes.take().unblock_events
    t.tell(drop=[key(child), key(parent)])
    assert (t.left(), "parent" in t.view.quota_ledgers.ledgers) == (16_000, False)


# -- what must not be ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"{", b'{"metadata": {}, "spec": {"workload": 1}}'])
def test_a_row_that_does_not_decode_is_told(value: bytes) -> None:
    t = told("a")
    event = t.write()
    with pytest.raises(Corrupt, match="a-0 does not decode"):
        t.view.apply(event._replace(changes=(RowChange("replica/t1/a-0", value, 2),)))


def test_a_replica_on_nothing_is_told() -> None:
    t = told("a")
    with pytest.raises(Corrupt, match="n9, which does not exist"):
        t.tell(replica("a", phase="bound", on="n9"))
    with pytest.raises(Corrupt, match="generation that does not exist"):
        t.tell(replica("z"))


def test_whoever_waits_is_woken_by_every_event() -> None:
    t = told("a")
    wake = t.view.subscribe()
    t.tell(replica("a", phase="bound", on="n1"))
    assert wake.is_set()
    t.view.unsubscribe(wake)
    wake.clear()
    t.tell(replica("a", phase="running", on="n1"))
    assert not wake.is_set()


def test_counts_follow_their_replicas_and_nodes() -> None:
    t = told("a", "b")
    by_zone = PeerIndex("t1", (), "zone")
    assert t.view.peers.total(by_zone) == 0
    t.tell(replica("a", phase="bound", on="n1"))
    t.view.holds.assume(t.slot("b-0"), t.view.columns.rows["n2"], {}, ("tenant/t1",))
    assert int(t.view.peers.counts(by_zone)[t.view.columns.slots("zone")["a"]]) == 2
    t.tell(ready("n2", zone="b"))
    counts, slots = t.view.peers.counts(by_zone), t.view.columns.slots("zone")
    assert (int(counts[slots["a"]]), int(counts[slots["b"]])) == (1, 1)


def test_an_apart_generation_and_its_like_are_told_apart_in_the_news() -> None:
    t = told("a")
    apart = Placement(anti_affinity=(Affinity(label_selector={"remit/workload": "a"}, topology_key="node"),))
    t.tell(*work("x", placement=apart))
    news = t.view.changes.take()
    assert list(news.no_longer_pending) == list(news.pending) == [t.slot("a-0")]
