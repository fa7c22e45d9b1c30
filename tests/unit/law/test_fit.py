"""Placement rules on single nodes: requirements compiled from a spec, and the refusals of each rule."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any, Literal, get_args

import pytest

from remit.law import fit, requirements
from remit.model.claims import Code
from remit.model.kinds import (
    Affinity,
    DeviceRequest,
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
from remit.model.resources import Amount
from remit.observation.node_columns import NodeFree
from tests.unit.law.fit_fixtures import node, requirements_of
from tests.unit.law.scalar_fit import OneNode, PlainPeers


def refusals_on(
    ask: fit.Requirements, *left: NodeFree, standing: tuple[tuple[fit.Requirements, int], ...] = ()
) -> list[tuple[Code, ...]]:
    sites = [OneNode(one) for one in left]
    peers = PlainPeers(sites, [(other, left[row].node) for other, row in standing])
    return [fit.misfits(ask, site, peers) for site in sites]


FITS: tuple[Code, ...] = ()


# --------------------------------------------------------------------------------------------------------- requirements


def test_charge_counts_resources_and_devices_in_thousandths() -> None:
    ask = requirements_of(DeviceRequest(kind="gpu", count=2), DeviceRequest(kind="fpga", share="250m"), cpu=500)
    assert ask.charge == Amount({"cpu": 500, "devices/gpu": 2000, "devices/fpga": 250})


def test_devices_of_overlapping_models_are_charged_once() -> None:
    ask = requirements_of(
        DeviceRequest(kind="gpu", count=1, models=("A", "B")), DeviceRequest(kind="gpu", count=2, models=("B", "C"))
    )
    assert ask.charge == Amount({"devices/gpu": 3000})


def test_workload_label_overrides_declared_label() -> None:
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
def test_unsatisfiable_device_request_is_refused_with_reason(devices: list[DeviceRequest], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        requirements_of(*devices)


def test_exponentially_overlapping_model_sets_are_refused() -> None:
    around = [DeviceRequest(kind="gpu", count=1, models=("hub", f"m{n}")) for n in range(40)]
    with pytest.raises(ValueError, match="too many ways"):
        requirements_of(*around)


def test_many_disjoint_or_nested_model_sets_are_accepted() -> None:
    apart = [DeviceRequest(kind="gpu", count=1, models=(f"m{n}",)) for n in range(63)]
    assert len(requirements_of(*apart, DeviceRequest(kind="gpu", count=1)).whole_devices) == 64


# -------------------------------------------------------------------------------------------------------------- resources


def test_resources_fit_exactly_up_to_free_amount() -> None:
    asks = requirements_of(), requirements_of(cpu=1000), requirements_of(cpu=1001), requirements_of(licences=1)
    assert [refusals_on(ask, node())[0] for ask in asks] == [FITS, FITS, (Code.NO_ROOM,), (Code.NO_ROOM,)]


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
        # One device of B satisfies each of the two alone, but not both: nested sets never do this.
        ("B", [(1, "AB"), (1, "BC")], False),
        ("BB", [(1, "AB"), (1, "BC")], True),
        ("AC", [(1, "AB"), (1, "BC")], True),
        ("BD", [(1, "AB"), (1, "BC"), (1, "CD")], False),
        ("BCD", [(1, "AB"), (1, "BC"), (1, "CD")], True),
    ],
)
def test_whole_devices_are_matched_by_model(models: str, asks: list[tuple[int, str]], fits: bool) -> None:
    ask = requirements_of(*(DeviceRequest(kind="gpu", count=count, models=tuple(named)) for count, named in asks))
    assert refusals_on(ask, node(models=models)) == [FITS if fits else (Code.DEVICE_TAKEN,)]


@pytest.mark.parametrize(
    ("used", "fits"),
    [({}, True), ({"gpu-0": 750}, True), ({"gpu-0": 751}, False), ({"gpu-0": 1000}, False)],
)
def test_share_needs_one_device_with_enough_left(used: dict[str, int], fits: bool) -> None:
    ask = requirements_of(DeviceRequest(kind="gpu", share="250m"))
    assert refusals_on(ask, node(models="A")._replace(used=used)) == [FITS if fits else (Code.DEVICE_TAKEN,)]


def test_free_shares_of_two_devices_do_not_add_up() -> None:
    ask = requirements_of(DeviceRequest(kind="gpu", share="500m"))
    left = node(models="AA")._replace(used={"gpu-0": 700, "gpu-1": 700})
    assert refusals_on(ask, left) == [(Code.DEVICE_TAKEN,)]


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
def test_toleration_matches_by_key_and_value(toleration: Toleration, covers: bool, effect: TaintEffect) -> None:
    taint = Taint(key="a", value="x", effect=effect)
    assert requirements.is_tolerated(taint, [toleration]) == (covers or effect == "PreferNoSchedule")


@pytest.mark.parametrize(("taint", "toleration"), list(product(EFFECTS, ("", *EFFECTS))))
def test_toleration_with_effect_matches_only_that_effect(taint: TaintEffect, toleration: Any) -> None:
    covers = toleration in ("", taint) or taint == "PreferNoSchedule"
    tolerations = [Toleration(key="a", operator="Exists", effect=toleration)]
    assert requirements.is_tolerated(Taint(key="a", effect=taint), tolerations) == covers


@pytest.mark.parametrize(("one", "other"), list(combinations(("a", "b", "c"), 2)))
def test_every_taint_needs_a_toleration(one: str, other: str) -> None:
    left = node(taints=(Taint(key=one, effect="NoSchedule"), Taint(key=other, effect="NoExecute")))
    both = tuple(Toleration(key=key, operator="Exists") for key in (one, other))
    assert refusals_on(requirements_of(placement=Placement(tolerations=both[:1])), left) == [(Code.TAINT,)]
    assert refusals_on(requirements_of(placement=Placement(tolerations=both)), left) == [FITS]


# --------------------------------------------------------------------------------------------------- policies and places


def test_every_matching_policy_must_allow_node() -> None:
    north = PolicySpec(rules=(PolicyRule(allow=PolicyAllow(regions=("north",))),))
    zone_b = PolicySpec(rules=(PolicyRule(match=PolicyMatch(tenants=("risk",)), allow=PolicyAllow(zones=("b",))),))
    others = PolicySpec(rules=(PolicyRule(match=PolicyMatch(tenants=("web",)), allow=PolicyAllow(zones=("c",))),))
    nodes = node("n1", zone="a"), node("n2", zone="b")
    assert refusals_on(requirements_of(policies=(north, others)), *nodes) == [FITS, FITS]
    assert refusals_on(requirements_of(policies=(north, zone_b, others)), *nodes) == [(Code.POLICY,), FITS]


def test_policies_without_common_place_allow_no_node() -> None:
    rules = tuple(PolicyRule(allow=PolicyAllow(zones=(zone,))) for zone in "ab")
    ask = requirements_of(policies=(PolicySpec(rules=rules),))
    assert refusals_on(ask, node(zone="a"), node(zone="b")) == [(Code.POLICY,), (Code.POLICY,)]


# ------------------------------------------------------------------------------------------------------------------ peers


def test_spread_fills_emptiest_zone_first() -> None:
    ask = requirements_of(placement=Placement(topology_spread=(Spread(topology_key="zone"),)))
    nodes = node("n1", zone="a"), node("n2", zone="b")
    assert refusals_on(ask, *nodes) == [FITS, FITS]
    assert refusals_on(ask, *nodes, standing=((ask, 0),)) == [(Code.SPREAD,), FITS]
    assert refusals_on(ask, *nodes, standing=((ask, 0), (ask, 1))) == [FITS, FITS]


def test_zone_excluded_by_placement_does_not_limit_spread() -> None:
    spread = (Spread(topology_key="zone"),)
    everywhere = requirements_of(placement=Placement(topology_spread=spread))
    only_a = requirements_of(placement=Placement(topology_spread=spread, zones=("a",)))
    nodes = node("n1", zone="a"), node("n2", zone="b")
    standing = ((only_a, 0), (only_a, 0))
    assert refusals_on(everywhere, *nodes, standing=standing)[0] == (Code.SPREAD,)
    assert refusals_on(only_a, *nodes, standing=standing)[0] == FITS


def test_node_without_domain_label_fails_spread() -> None:
    ask = requirements_of(placement=Placement(topology_spread=(Spread(topology_key="rack"),)))
    assert refusals_on(ask, node("n1"), node("n2", rack="r1")) == [(Code.SPREAD,), FITS]


def test_first_replica_of_self_affinity_is_free_and_next_follows() -> None:
    ask = requirements_of(placement=Placement(affinity=(Affinity(label_selector={"app": "api"}, topology_key="zone"),)))
    nodes = node("n1", zone="a"), node("n2", zone="b")
    assert refusals_on(ask, *nodes) == [FITS, FITS]
    assert refusals_on(ask, *nodes, standing=((ask, 1),)) == [(Code.AFFINITY,), FITS]


def test_affinity_to_absent_workload_is_refused() -> None:
    ask = requirements_of(placement=Placement(affinity=(Affinity(label_selector={"app": "db"}, topology_key="zone"),)))
    assert refusals_on(ask, node()) == [(Code.AFFINITY,)]


def test_anti_affinity_applies_in_both_directions() -> None:
    shy = requirements_of(placement=Placement(anti_affinity=(Affinity(label_selector={"app": "api"}, topology_key="node"),)))
    plain = requirements_of()
    nodes = node("n1"), node("n2")
    assert refusals_on(plain, *nodes, standing=((shy, 0),)) == [(Code.ANTI_AFFINITY,), FITS]
    assert refusals_on(shy, *nodes, standing=((plain, 0),)) == [(Code.ANTI_AFFINITY,), FITS]
    assert refusals_on(plain, *nodes, standing=((plain, 0),)) == [FITS, FITS]


def test_node_without_domain_label_satisfies_anti_affinity() -> None:
    shy = requirements_of(placement=Placement(anti_affinity=(Affinity(label_selector={"app": "api"}, topology_key="rack"),)))
    nodes = node("n1"), node("n2", rack="r1"), node("n3", rack="r2")
    assert refusals_on(shy, *nodes, standing=((shy, 0), (shy, 1))) == [FITS, (Code.ANTI_AFFINITY,), FITS]


# ------------------------------------------------------------------------------------------------------ table of rules


def test_static_rules_are_named_and_rules_are_unique() -> None:
    assert [rule.check.__name__ for rule in fit.RULES if rule.static] == ["place", "policy", "taints", "labels"]
    assert len({rule.check for rule in fit.RULES}) == len(fit.RULES)
