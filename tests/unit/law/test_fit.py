"""What does an ask become, and what does the law refuse on one node? The cases that a reader would ask about, one by one."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any, Literal, get_args

import pytest

from remit.law import fit, requirements
from remit.model.claims import Code
from remit.model.kinds import (
    Affinity,
    Device,
    DeviceRequest,
    Node,
    NodeHealth,
    NodeSpec,
    NodeStatus,
    Placement,
    PolicyAllow,
    PolicyMatch,
    PolicyRule,
    PolicySpec,
    Spread,
    Taint,
    TaintEffect,
    Template,
    Toleration,
    WorkloadSpec,
)
from remit.model.metadata import Metadata
from remit.model.resources import Amount
from remit.observation.node_columns import NodeFree
from tests.unit.law.scalar_fit import OneNode, PlainPeers


def ask_for(
    *devices: DeviceRequest, placement: Placement = Placement(), policies: tuple[PolicySpec, ...] = (), **resources: int
) -> fit.Requirements:
    template = Template(command=("run",), resources=Amount(resources), devices=devices)
    spec = WorkloadSpec(type="service", template=template, placement=placement)
    return requirements.compile_requirements("risk", "api", {"app": "api"}, spec, policies)


def node(name: str = "n", zone: str = "a", models: str = "", taints: tuple[Taint, ...] = (), **labels: str) -> NodeFree:
    """`models` are the models of its GPUs, a letter each; `-` is one without a model."""
    devices = tuple(Device(name=f"gpu-{n}", kind="gpu", model=m.strip("-")) for n, m in enumerate(models))
    spec = NodeSpec(region="north", zone=zone, capacity=Amount({"cpu": 1000}), devices=devices, taints=taints)
    made = Node(metadata=Metadata(name=name, labels=labels), spec=spec, status=NodeStatus(health=NodeHealth.READY))
    return NodeFree(made, {"cpu": 1000}, {})


def misfits(
    ask: fit.Requirements, *left: NodeFree, standing: tuple[tuple[fit.Requirements, int], ...] = ()
) -> list[tuple[Code, ...]]:
    sites = [OneNode(one) for one in left]
    peers = PlainPeers(sites, [(other, left[row].node) for other, row in standing])
    return [fit.misfits(ask, site, peers) for site in sites]


FITS: tuple[Code, ...] = ()


# --------------------------------------------------------------------------------------------------------- the ask itself


def test_the_charge_is_resources_and_devices_in_thousandths() -> None:
    ask = ask_for(DeviceRequest(kind="gpu", count=2), DeviceRequest(kind="fpga", share="250m"), cpu=500)
    assert ask.charge == Amount({"cpu": 500, "devices/gpu": 2000, "devices/fpga": 250})


def test_overlapping_models_are_charged_once() -> None:
    ask = ask_for(DeviceRequest(kind="gpu", count=1, models=("A", "B")), DeviceRequest(kind="gpu", count=2, models=("B", "C")))
    assert ask.charge == Amount({"devices/gpu": 3000})


def test_every_replica_carries_the_name_of_its_workload__whatever_its_labels_say() -> None:
    spec = WorkloadSpec(type="job", template=Template(command=("run",)))
    ask = requirements.compile_requirements("risk", "api", {requirements.WORKLOAD_LABEL: "forged"}, spec, ())
    assert ask.labels[requirements.WORKLOAD_LABEL] == "api"


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ([DeviceRequest(kind="gpu", share="250m"), DeviceRequest(kind="gpu", share="250m")], "two shares of gpu"),
        ([DeviceRequest(kind="gpu", share="250m"), DeviceRequest(kind="gpu", count=1)], "a share and whole devices of gpu"),
        ([DeviceRequest(kind="gpu", share="lots")], "not a quantity"),
        ([DeviceRequest(kind="gpu", share="0")], "between 1m and 999m"),
        ([DeviceRequest(kind="gpu", share="1000m")], "between 1m and 999m"),
        ([DeviceRequest(kind="gpu", count=1, models=("A", ""))], "without a name"),
    ],
)
def test_an_ask_that_no_node_can_ever_meet_is_refused_with_its_reason(devices: list[DeviceRequest], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ask_for(*devices)


def test_model_sets_that_overlap_in_exponentially_many_ways_are_refused__not_enumerated() -> None:
    around = [DeviceRequest(kind="gpu", count=1, models=("hub", f"m{n}")) for n in range(40)]
    with pytest.raises(ValueError, match="too many ways"):
        ask_for(*around)


def test_many_disjoint_or_nested_model_sets_are_no_trouble() -> None:
    apart = [DeviceRequest(kind="gpu", count=1, models=(f"m{n}",)) for n in range(63)]
    assert len(ask_for(*apart, DeviceRequest(kind="gpu", count=1)).whole_devices) == 64


# -------------------------------------------------------------------------------------------------------------- resources


def test_what_is_left_may_be_taken_to_the_last__and_not_beyond() -> None:
    asks = ask_for(), ask_for(cpu=1000), ask_for(cpu=1001), ask_for(licences=1)
    assert [misfits(ask, node())[0] for ask in asks] == [FITS, FITS, (Code.NO_ROOM,), (Code.NO_ROOM,)]


# ---------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("models", "asks", "fits"),
    [
        ("A", [(1, "A")], True),
        ("B", [(1, "A")], False),
        ("-", [(1, "")], True),
        ("-", [(1, "A")], False),
        ("AB", [(1, "A"), (1, "")], True),
        ("A", [(1, "A"), (1, "")], False),
        ("AAB", [(2, "A"), (1, "AB")], True),
        ("AAC", [(2, "A"), (1, "AB")], False),
        # One device of B meets each of the two alone, but not both: nested sets never do this.
        ("B", [(1, "AB"), (1, "BC")], False),
        ("BB", [(1, "AB"), (1, "BC")], True),
        ("AC", [(1, "AB"), (1, "BC")], True),
        ("BD", [(1, "AB"), (1, "BC"), (1, "CD")], False),
        ("BCD", [(1, "AB"), (1, "BC"), (1, "CD")], True),
    ],
)
def test_whole_devices_by_model(models: str, asks: list[tuple[int, str]], fits: bool) -> None:
    ask = ask_for(*(DeviceRequest(kind="gpu", count=count, models=tuple(named)) for count, named in asks))
    assert misfits(ask, node(models=models)) == [FITS if fits else (Code.DEVICE_TAKEN,)]


@pytest.mark.parametrize(
    ("used", "fits"),
    [({}, True), ({"gpu-0": 750}, True), ({"gpu-0": 751}, False), ({"gpu-0": 1000}, False)],
)
def test_a_share_goes_onto_one_device_that_has_that_much_left(used: dict[str, int], fits: bool) -> None:
    ask = ask_for(DeviceRequest(kind="gpu", share="250m"))
    assert misfits(ask, node(models="A")._replace(used=used)) == [FITS if fits else (Code.DEVICE_TAKEN,)]


def test_shares_left_on_two_devices_do_not_add_up() -> None:
    ask = ask_for(DeviceRequest(kind="gpu", share="500m"))
    left = node(models="AA")._replace(used={"gpu-0": 700, "gpu-1": 700})
    assert misfits(ask, left) == [(Code.DEVICE_TAKEN,)]


# ------------------------------------------------------------------------------------------------------------ tolerations


EFFECTS: tuple[TaintEffect, ...] = get_args(TaintEffect)
Operator = Literal["Equal", "Exists"]


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        (Toleration(key="a", value="x"), True),
        (Toleration(key="a", value="y"), False),
        (Toleration(key="a"), False),
        (Toleration(key="b", value="x"), False),
        (Toleration(key="a", operator="Exists"), True),
        (Toleration(key="b", operator="Exists"), False),
        (Toleration(operator="Exists"), True),
        (Toleration(value="x"), True),
    ],
)
def test_a_toleration_covers_by_key_and_value(toleration: Toleration, covers: bool, effect: TaintEffect) -> None:
    taint = Taint(key="a", value="x", effect=effect)
    assert requirements.is_tolerated(taint, [toleration]) == (covers or effect == "PreferNoSchedule")


@pytest.mark.parametrize(("taint", "toleration"), list(product(EFFECTS, ("", *EFFECTS))))
def test_a_toleration_with_an_effect_covers_that_effect_alone(taint: TaintEffect, toleration: Any) -> None:
    covers = toleration in ("", taint) or taint == "PreferNoSchedule"
    asked = [Toleration(key="a", operator="Exists", effect=toleration)]
    assert requirements.is_tolerated(Taint(key="a", effect=taint), asked) == covers


@pytest.mark.parametrize(("one", "other"), list(combinations(("a", "b", "c"), 2)))
def test_every_taint_must_be_tolerated__by_whichever_toleration(one: str, other: str) -> None:
    left = node(taints=(Taint(key=one, effect="NoSchedule"), Taint(key=other, effect="NoExecute")))
    both = tuple(Toleration(key=key, operator="Exists") for key in (one, other))
    assert misfits(ask_for(placement=Placement(tolerations=both[:1])), left) == [(Code.TAINT,)]
    assert misfits(ask_for(placement=Placement(tolerations=both)), left) == [FITS]


# --------------------------------------------------------------------------------------------------- policies and places


def test_every_policy_that_matches_must_allow_the_place() -> None:
    north = PolicySpec(rules=(PolicyRule(allow=PolicyAllow(regions=("north",))),))
    zone_b = PolicySpec(rules=(PolicyRule(match=PolicyMatch(tenants=("risk",)), allow=PolicyAllow(zones=("b",))),))
    others = PolicySpec(rules=(PolicyRule(match=PolicyMatch(tenants=("web",)), allow=PolicyAllow(zones=("c",))),))
    nodes = node("n1", zone="a"), node("n2", zone="b")
    assert misfits(ask_for(policies=(north, others)), *nodes) == [FITS, FITS]
    assert misfits(ask_for(policies=(north, zone_b, others)), *nodes) == [(Code.POLICY,), FITS]


def test_two_policies_that_agree_on_no_place_allow_none() -> None:
    rules = tuple(PolicyRule(allow=PolicyAllow(zones=(zone,))) for zone in "ab")
    ask = ask_for(policies=(PolicySpec(rules=rules),))
    assert misfits(ask, node(zone="a"), node(zone="b")) == [(Code.POLICY,), (Code.POLICY,)]


# ------------------------------------------------------------------------------------------------------------------ peers


def test_spread_fills_the_emptiest_zone_first() -> None:
    ask = ask_for(placement=Placement(topology_spread=(Spread(topology_key="zone"),)))
    nodes = node("n1", zone="a"), node("n2", zone="b")
    assert misfits(ask, *nodes) == [FITS, FITS]
    assert misfits(ask, *nodes, standing=((ask, 0),)) == [(Code.SPREAD,), FITS]
    assert misfits(ask, *nodes, standing=((ask, 0), (ask, 1))) == [FITS, FITS]


def test_a_zone_where_it_may_not_stand_does_not_hold_the_spread_back() -> None:
    spread = (Spread(topology_key="zone"),)
    everywhere = ask_for(placement=Placement(topology_spread=spread))
    only_a = ask_for(placement=Placement(topology_spread=spread, zones=("a",)))
    nodes = node("n1", zone="a"), node("n2", zone="b")
    standing = ((only_a, 0), (only_a, 0))
    assert misfits(everywhere, *nodes, standing=standing)[0] == (Code.SPREAD,)
    assert misfits(only_a, *nodes, standing=standing)[0] == FITS


def test_a_node_outside_every_domain_cannot_keep_a_spread() -> None:
    ask = ask_for(placement=Placement(topology_spread=(Spread(topology_key="rack"),)))
    assert misfits(ask, node("n1"), node("n2", rack="r1")) == [(Code.SPREAD,), FITS]


def test_the_first_of_a_group_that_must_be_together_may_stand_anywhere__the_next_stands_there() -> None:
    ask = ask_for(placement=Placement(affinity=(Affinity(label_selector={"app": "api"}, topology_key="zone"),)))
    nodes = node("n1", zone="a"), node("n2", zone="b")
    assert misfits(ask, *nodes) == [FITS, FITS]
    assert misfits(ask, *nodes, standing=((ask, 1),)) == [(Code.AFFINITY,), FITS]


def test_what_must_be_near_another_kind_waits_until_that_is_there() -> None:
    ask = ask_for(placement=Placement(affinity=(Affinity(label_selector={"app": "db"}, topology_key="zone"),)))
    assert misfits(ask, node()) == [(Code.AFFINITY,)]


def test_anti_affinity_is_respected_by_those_that_do_not_ask_for_it() -> None:
    shy = ask_for(placement=Placement(anti_affinity=(Affinity(label_selector={"app": "api"}, topology_key="node"),)))
    plain = ask_for()
    nodes = node("n1"), node("n2")
    assert misfits(plain, *nodes, standing=((shy, 0),)) == [(Code.ANTI_AFFINITY,), FITS]
    assert misfits(shy, *nodes, standing=((plain, 0),)) == [(Code.ANTI_AFFINITY,), FITS]
    assert misfits(plain, *nodes, standing=((plain, 0),)) == [FITS, FITS]


def test_a_node_outside_every_domain_keeps_any_distance() -> None:
    shy = ask_for(placement=Placement(anti_affinity=(Affinity(label_selector={"app": "api"}, topology_key="rack"),)))
    nodes = node("n1"), node("n2", rack="r1"), node("n3", rack="r2")
    assert misfits(shy, *nodes, standing=((shy, 0), (shy, 1))) == [FITS, (Code.ANTI_AFFINITY,), FITS]


# -------------------------------------------------------------------------------------------------------------- the words


def test_the_words_of_every_rule_say_what_it_is() -> None:
    assert [rule.check.__name__ for rule in fit.RULES if rule.static] == ["place", "policy", "taints", "labels"]
    assert len({rule.check for rule in fit.RULES}) == len(fit.RULES)
