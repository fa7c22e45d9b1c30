"""Node columns: ids into distinct values, built on demand, with a last slot for "no domain"."""

from __future__ import annotations

import msgspec
import numpy as np

from remit.law import fit, requirements
from remit.model.kinds import Device, Placement, Spread, Taint
from remit.model.metadata import Metadata
from remit.observation.column_table import CHANGES_MAX, ChangeLog
from remit.observation.node_columns import NodeColumns, NodeFree, translate_requirements
from remit.observation.topology_counts import ColumnPeerCounts
from tests.unit.law.fit_fixtures import node, requirements_of


def three_nodes() -> list[NodeFree]:
    return [
        node("n1", zone="a", models="AAB", rack="r1"),
        node("n2", zone="b", models="-", taints=(Taint(key="t", effect="NoSchedule"),)),
        node("n3", zone="a", rack="r2"),
    ]


def as_node_view(columns: NodeColumns) -> fit.NodeView:
    return columns


def as_peer_counts(peers: ColumnPeerCounts) -> fit.PeerCounts:
    return peers


def test_columns_implement_node_view_and_peer_counts() -> None:
    columns = NodeColumns(three_nodes())
    peers = ColumnPeerCounts(columns, {})
    assert as_node_view(columns) is columns and as_peer_counts(peers) is peers


def test_columns_hold_ids_into_distinct_values() -> None:
    columns = NodeColumns(three_nodes())
    assert (columns.zone.tolist(), columns.zones) == ([0, 1, 0], ["a", "b"])
    assert (columns.region.tolist(), columns.regions) == ([0, 0, 0], ["north"])
    assert (columns.pool.tolist(), columns.pools) == ([0, 0, 0], ["default"])
    assert columns.taints.tolist() == [0, 1, 0]
    assert columns.taint_sets == [(), (Taint(key="t", effect="NoSchedule"),)]


def test_domain_is_place_or_label_and_minus_one_where_absent() -> None:
    columns = NodeColumns(three_nodes())
    for key, ids, values in (
        ("node", [0, 1, 2], ["n1", "n2", "n3"]),
        ("zone", [0, 1, 0], ["a", "b"]),
        ("rack", [0, -1, 1], ["r1", "r2"]),
        ("nowhere", [-1, -1, -1], []),
    ):
        known, found = columns.domain(key)
        assert found.tolist() == ids
        assert known.tolist() == [slot >= 0 for slot in ids]
        assert list(columns.domains(key).values) == values


def test_label_with_empty_value_is_present_but_names_no_domain() -> None:
    columns = NodeColumns([node("n1", rack=""), node("n2", rack="r")])
    assert columns.label("rack").ids.tolist() == [0, 1]
    assert columns.domain("rack")[0].tolist() == [False, True]


def test_label_named_like_place_does_not_replace_place() -> None:
    left = node("n1", zone="a")
    mislabelled = msgspec.structs.replace(left.node, metadata=Metadata(name="n1", labels={"zone": "b"}))
    columns = NodeColumns([left._replace(node=mislabelled), node("n2", zone="b")])
    assert columns.label("zone").values == ["b"]
    assert columns.label("zone").ids.tolist() == [0, -1]
    assert columns.domain("zone")[1].tolist() == [0, 1]


def test_label_column_is_built_once_and_follows_node_changes() -> None:
    columns = NodeColumns(three_nodes())
    assert columns.label("rack").values is columns.label("rack").values
    columns.drop("n1")
    columns.put(node("n4", rack="r9").node)
    columns.put(node("n3", rack="r1").node)
    assert columns.label("rack").ids.tolist() == [2, -1, 0]
    assert columns.label("rack").values == ["r1", "r2", "r9"]


def test_removed_node_row_fits_nothing_until_next_node_reuses_it() -> None:
    columns = NodeColumns(three_nodes())
    columns.label("rack")
    columns.drop("n3")
    ask = translate_requirements(requirements_of(), columns)
    assert fit.mask(ask, columns, ColumnPeerCounts(columns, {})).tolist() == [True, False, False]
    assert fit.mask(ask, columns, ColumnPeerCounts(columns, {}), fit.STATIC_RULES).tolist() == [True, False, False]
    assert columns.put(node("n4").node) == 2
    assert fit.mask(ask, columns, ColumnPeerCounts(columns, {})).tolist() == [True, False, True]


def test_changes_since_lists_changed_rows_until_history_is_exceeded() -> None:
    columns = NodeColumns(three_nodes())
    before, attributes_before = columns.changed.count, columns.attributes_changed.count
    columns.post(1, [("cpu", 1)])
    columns.post_many(np.array([0, 2]), np.array([1, 1]), [("cpu", 1)])
    found = columns.changed.since(before)
    assert found is not None and found.tolist() == [1, 0, 2]
    assert columns.attributes_changed.count == attributes_before
    for _ in range(2 * CHANGES_MAX):
        columns.changed.add(0)
    assert columns.changed.since(before) is None
    last = columns.changed.since(columns.changed.count - 3)
    assert last is not None and last.tolist() == [0, 0, 0]


def test_frozen_columns_accept_writes_and_log_own_changes() -> None:
    columns = NodeColumns(three_nodes())
    twin = columns.freeze()
    before = twin.changed.count
    twin.post(1, [("cpu", 1)])
    twin.post_many(np.array([0, 2]), np.array([1, 2]), [("cpu", 1)])
    assert columns.changed.count == before
    found = twin.changed.since(before)
    assert found is not None and found.tolist() == [1, 0, 2]
    assert twin.changed.since(before - 1) is None


def test_extend_beyond_change_log_limit_forgets_all_changes() -> None:
    """Returning a part of them would look complete: rows missing from it would keep stale answers."""
    changes = ChangeLog()
    changes.add(7)
    before = changes.count
    changes.extend(np.arange(CHANGES_MAX + 1))
    assert changes.count == before + CHANGES_MAX + 1
    assert changes.since(before) is None
    changes.add(3)
    last = changes.since(changes.count - 1)
    assert last is not None and last.tolist() == [3]
    changes.extend(np.arange(CHANGES_MAX))
    changes.extend(np.arange(CHANGES_MAX))
    found = changes.since(changes.count - CHANGES_MAX - 1)
    assert found is not None and found.tolist() == [CHANGES_MAX - 1, *range(CHANGES_MAX)]


def test_new_domain_extends_existing_peer_counts() -> None:
    columns = NodeColumns(three_nodes())
    index = fit.PeerIndex("risk", (("app", "api"),), "zone")
    peers = ColumnPeerCounts(columns, {index: {"a": 5, "b": 1}})
    assert peers.counts(index).tolist() == [5, 1, 0]
    columns.put(node("n4", zone="c").node)
    peers.add(index, "c")
    assert peers.counts(index).tolist() == [5, 1, 1, 0]


def test_amounts_keep_all_63_bits() -> None:
    huge = (1 << 63) - 1
    columns = NodeColumns([node()._replace(free={"cpu": huge})])
    assert columns.free["cpu"].dtype == np.int64
    assert columns.free["cpu"].tolist() == [huge]


def test_resource_absent_from_capacity_has_no_column() -> None:
    columns = NodeColumns([node()._replace(free={"cpu": 1, "@gpu-0": 1000})])
    assert list(columns.free) == ["cpu"]


def test_devices_are_counted_by_model_and_kind() -> None:
    columns = NodeColumns(three_nodes())
    assert columns.whole_devices["gpu", "A"].tolist() == [2, 0, 0]
    assert columns.whole_devices["gpu", "B"].tolist() == [1, 0, 0]
    assert columns.whole_devices["gpu", fit.ANY_MODEL].tolist() == [3, 1, 0]
    assert columns.largest_shares["gpu", fit.ANY_MODEL].tolist() == [1000, 1000, 0]


def test_device_without_model_is_counted_once() -> None:
    free, room = fit.free_devices([Device(name="d", kind="gpu")], {})
    assert free == {("gpu", fit.ANY_MODEL): 1}
    assert room == {("gpu", fit.ANY_MODEL): 1000}


def test_largest_share_is_maximum_free_on_one_device_in_any_order() -> None:
    devices = [Device(name=name, kind="gpu", model="A") for name in ("d0", "d1", "d2")]
    free, room = fit.free_devices(devices, {"d0": 900, "d1": 300, "d2": 1000})
    assert (free["gpu", "A"], room["gpu", "A"]) == (0, 700)


def test_overcommitted_device_has_zero_free_share() -> None:
    assert fit.free_devices([Device(name="d", kind="gpu")], {"d": 1500}) == (
        {("gpu", fit.ANY_MODEL): 0},
        {("gpu", fit.ANY_MODEL): 0},
    )


def test_exhausted_resource_keeps_column_for_freed_amounts() -> None:
    columns = NodeColumns([node()._replace(free={})])
    assert columns.free["cpu"].tolist() == [0]
    columns.post(0, [("cpu", 700)], sign=-1)
    assert columns.free["cpu"].tolist() == [700]


def test_columns_without_nodes_fit_nothing_and_do_not_fail() -> None:
    columns = NodeColumns([])
    placement = Placement(topology_spread=(Spread(topology_key="zone"),), regions=("north",))
    requirements_ = translate_requirements(requirements_of(placement=placement, cpu=1), columns)
    assert fit.mask(requirements_, columns, ColumnPeerCounts(columns, {})).tolist() == []


def test_counts_have_slot_for_no_domain_and_keep_lost_domains_in_total() -> None:
    columns = NodeColumns(three_nodes())
    index = fit.PeerIndex("risk", (("app", "api"),), "rack")
    peers = ColumnPeerCounts(columns, {index: {"r2": 4, "gone": 3}})
    assert peers.counts(index).tolist() == [0, 4, 0]
    assert peers.counts(index)[columns.domain("rack")[1]].tolist() == [0, 0, 4]
    assert peers.total(index) == 7


def test_uncounted_index_is_empty() -> None:
    columns = NodeColumns(three_nodes())
    index = fit.PeerIndex("risk", (("app", "api"),), "zone")
    peers = ColumnPeerCounts(columns, {})
    assert peers.counts(index).tolist() == [0, 0, 0]
    assert peers.total(index) == 0


def test_min_count_considers_only_domains_where_replica_could_run() -> None:
    columns = NodeColumns(three_nodes())
    index = fit.PeerIndex("risk", ((requirements.WORKLOAD_LABEL, "api"),), "zone")
    peers = ColumnPeerCounts(columns, {index: {"a": 5, "b": 0}})
    anywhere, only_a = requirements_of(placement=Placement()), requirements_of(placement=Placement(zones=("a",)))
    nowhere = requirements_of(placement=Placement(zones=("z",)))
    # The node in b is tainted, so b does not lower the minimum either.
    assert [peers.min_count(translate_requirements(ask, columns), index) for ask in (anywhere, only_a, nowhere)] == [5, 5, 0]


def test_node_outside_every_domain_does_not_lower_min_count() -> None:
    columns = NodeColumns([node("n1", rack="r1"), node("n2")])
    index = fit.PeerIndex("risk", ((requirements.WORKLOAD_LABEL, "api"),), "rack")
    assert (
        ColumnPeerCounts(columns, {index: {"r1": 3}}).min_count(translate_requirements(requirements_of(), columns), index) == 3
    )


def test_only_owners_of_same_tenant_whose_term_selects_replica_block_it() -> None:
    columns = NodeColumns(three_nodes())
    picks = fit.PeerIndex("risk", (("app", "api"),), "zone", owners=True)
    counted = {
        picks: {"a": 1},
        picks._replace(tenant="web"): {"a": 1},
        picks._replace(selector=(("app", "db"),)): {"a": 1},
        picks._replace(owners=False): {"a": 1},
    }
    peers = ColumnPeerCounts(columns, counted)
    requirements_ = translate_requirements(requirements_of(), columns)
    assert list(peers.anti_affinity_owners(requirements_)) == [picks]
    assert fit.symmetric_anti_affinity(requirements_, columns, peers).tolist() == [False, True, False]


def test_placement_in_same_run_updates_counts_of_new_owners() -> None:
    columns = NodeColumns(three_nodes())
    peers = ColumnPeerCounts(columns, {})
    requirements_ = translate_requirements(requirements_of(), columns)
    carriers = fit.PeerIndex("risk", (("app", "api"),), "node", owners=True)
    assert list(peers.anti_affinity_owners(requirements_)) == []
    peers.add(carriers, "n2")
    assert fit.symmetric_anti_affinity(requirements_, columns, peers).tolist() == [True, False, True]
    peers.add(carriers, "n2", -1)
    assert fit.symmetric_anti_affinity(requirements_, columns, peers).tolist() == [True, True, True]
    assert peers.total(carriers) == 0


def test_requirements_of_one_run_do_not_share_cached_min_counts() -> None:
    """`min_count` caches where the last requirements could run; other requirements must not get that answer."""
    columns = NodeColumns([node("n1", zone="a"), node("n2", zone="b")])
    index = fit.PeerIndex("risk", ((requirements.WORKLOAD_LABEL, "api"),), "zone")
    peers = ColumnPeerCounts(columns, {index: {"a": 5, "b": 2}})
    in_a, in_b = (translate_requirements(requirements_of(placement=Placement(zones=(zone,))), columns) for zone in "ab")
    assert [peers.min_count(ask, index) for ask in (in_a, in_b, in_a)] == [5, 2, 5]


def test_frozen_copy_of_two_nodes_accepts_writes_without_changing_original() -> None:
    columns = NodeColumns([node("n1"), node("n2")])
    twin = columns.freeze()
    before = twin.changed.count
    twin.post(1, [("cpu", 500)])
    twin.post_many(np.array([0]), np.array([2]), [("cpu", 100)])
    found = twin.changed.since(before)
    assert found is not None and found.tolist() == [1, 0]
    assert twin.changed.since(before - 1) is None
    assert columns.free["cpu"].tolist() != twin.free["cpu"].tolist()


def test_changes_since_before_overflow_is_unknown_and_later_ones_are_listed() -> None:
    changes = ChangeLog()
    changes.add(5)
    before = changes.count
    changes.extend(np.arange(CHANGES_MAX + 1))
    assert changes.since(before) is None
    after = changes.count
    changes.add(7)
    found = changes.since(after)
    assert found is not None and found.tolist() == [7]
