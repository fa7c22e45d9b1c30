"""Hypothesis strategies for clusters and workloads: small worlds, in which names collide and every rule applies.

Only a few groups of rules are active in a case. With all of them active a replica would hardly fit anywhere, and a rule
that is never the only one to refuse would hardly be tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from hypothesis import strategies as st

from remit.model.kinds import (
    Affinity,
    Device,
    DeviceRequest,
    Node,
    NodeExpression,
    NodeHealth,
    NodeSpec,
    NodeStatus,
    Placement,
    PolicySpec,
    Spread,
    Taint,
    Template,
    Toleration,
    WorkloadSpec,
)
from remit.model.metadata import Metadata
from remit.model.policies import PolicyAllow, PolicyMatch, PolicyRule
from remit.model.resources import Amount
from remit.observation.node_columns import NodeFree
from tests.unit.law.fit_oracle import PlacementCase, Work

T = TypeVar("T")
Loud = frozenset[str]

GROUPS = ("health", "place", "policy", "taints", "labels", "resources", "devices", "peers")
REGIONS, ZONES, POOLS = ("north", "south"), ("north-a", "north-b", "south-a"), ("default", "gpu")
LABEL_KEYS, LABEL_VALUES = ("disk", "rack", "size"), ("", "ssd", "hdd", "1", "2", "10", "007", "1_0")
MODELS = ("A", "B", "C")
KINDS = ("gpu", "fpga")
TENANTS = ("risk", "risk", "web")
TOPOLOGY_KEYS = ("node", "zone", "region", "pool", "rack", "nowhere")
EFFECTS: tuple[Literal["NoSchedule", "PreferNoSchedule", "NoExecute"], ...] = ("NoSchedule", "PreferNoSchedule", "NoExecute")
OPERATORS: tuple[Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"], ...] = (
    *("In", "NotIn", "Exists"),
    *("DoesNotExist", "Gt", "Lt"),
)


def one_of(values: Sequence[T]) -> st.SearchStrategy[T]:
    return st.sampled_from(values)


def few(values: st.SearchStrategy[T], most: int = 2) -> st.SearchStrategy[tuple[T, ...]]:
    return st.lists(values, max_size=most).map(tuple)


labels = st.dictionaries(one_of(LABEL_KEYS), one_of(LABEL_VALUES), max_size=3)
expressions = st.builds(
    NodeExpression,
    key=one_of((*LABEL_KEYS, "nowhere")),
    operator=one_of(OPERATORS),
    values=st.lists(one_of(LABEL_VALUES), max_size=3).map(tuple),
)
taints = st.builds(Taint, key=one_of(("a", "b")), value=one_of(("", "x", "y")), effect=one_of(EFFECTS))
tolerations = st.builds(
    Toleration,
    key=one_of(("", "a", "b")),
    operator=one_of(("Equal", "Exists")),
    value=one_of(("", "x")),
    effect=one_of((*EFFECTS, "")),
)
selectors = st.dictionaries(one_of(("app", "tier", "remit/workload")), one_of(("x", "y")), min_size=1, max_size=2)
affinities = st.builds(Affinity, label_selector=selectors, topology_key=one_of(TOPOLOGY_KEYS))
spreads = st.builds(
    Spread,
    topology_key=one_of(TOPOLOGY_KEYS),
    max_skew=st.integers(1, 2),
    when_unsatisfiable=one_of(("DoNotSchedule", "DoNotSchedule", "ScheduleAnyway")),
    label_selector=st.just({}) | selectors,
)
rules = st.builds(
    PolicyRule,
    match=st.builds(PolicyMatch, tenants=few(one_of(TENANTS), 1), labels=one_of(({}, {"app": "x"}, {"remit/workload": "y"}))),
    allow=st.builds(PolicyAllow, regions=few(one_of(REGIONS)), zones=few(one_of(ZONES)), pools=few(one_of(POOLS), 1)),
)
policies = st.builds(PolicySpec, rules=st.lists(rules, min_size=1, max_size=2).map(tuple))
amounts = st.builds(lambda cpu, memory: {"cpu": cpu, "memory": memory}, st.integers(0, 4), st.integers(0, 4))


@st.composite
def shelves(draw: st.DrawFn) -> tuple[tuple[Device, ...], dict[str, int]]:
    """Devices of a node, and the used share of each."""
    kinds = draw(st.lists(st.tuples(one_of(KINDS), one_of((*MODELS, ""))), max_size=4))
    devices = tuple(Device(name=f"d{n}", kind=kind, model=model) for n, (kind, model) in enumerate(kinds))
    return devices, {device.name: draw(one_of((0, 0, 250, 750, 1000))) for device in devices}


@st.composite
def nodes_left(draw: st.DrawFn, row: int, loud: Loud = frozenset(GROUPS)) -> NodeFree:
    devices, used = draw(shelves()) if "devices" in loud else ((), {})
    spec = NodeSpec(
        region=draw(one_of(REGIONS)),
        zone=draw(one_of(ZONES)),
        pool=draw(one_of(POOLS)),
        capacity=Amount({"cpu": 4, "memory": 4}),
        devices=devices,
        taints=draw(few(taints)) if "taints" in loud else (),
        unschedulable="health" in loud and draw(one_of((False, False, True))),
        draining="health" in loud and draw(one_of((False, False, True))),
    )
    health = draw(one_of((NodeHealth.READY, NodeHealth.READY, *NodeHealth))) if "health" in loud else NodeHealth.READY
    marks = draw(labels) if loud & {"labels", "peers"} else {}
    node = Node(metadata=Metadata(name=f"node-{row}", labels=marks), spec=spec, status=NodeStatus(health=health))
    free = draw(amounts) if "resources" in loud else {"cpu": 4, "memory": 4}
    if draw(st.booleans()):  # an Amount omits zeros, so ledgers may or may not list them
        free = {name: count for name, count in free.items() if count}
        used = {name: count for name, count in used.items() if count}
    return NodeFree(node, free, used)


@st.composite
def device_asks(draw: st.DrawFn) -> tuple[DeviceRequest, ...]:
    """Any number of requests for whole devices of a kind, or one share of it: other mixtures are invalid."""
    found = []
    models = st.lists(one_of(MODELS), max_size=2).map(tuple)
    for kind in KINDS:
        match draw(one_of(("none", "whole", "share"))):
            case "whole":
                asks = st.builds(DeviceRequest, kind=st.just(kind), count=st.integers(0, 2), models=models)
                found += draw(st.lists(asks, max_size=3))
            case "share":
                share: Any = draw(one_of(("250m", 0.25, "500m", "999m", "1m", "0.75")))
                found.append(DeviceRequest(kind=kind, share=share, models=draw(models)))
    return tuple(draw(st.permutations(found)))


@st.composite
def works(draw: st.DrawFn, loud: Loud = frozenset(GROUPS)) -> Work:
    def maybe(group: str, values: st.SearchStrategy[T], most: int = 2) -> tuple[T, ...]:
        return draw(few(values, most)) if group in loud else ()

    placement = Placement(
        regions=maybe("place", one_of(REGIONS), 1),
        zones=maybe("place", one_of(ZONES)),
        pools=maybe("place", one_of(POOLS), 1),
        node_selector=dict(maybe("labels", st.tuples(one_of(LABEL_KEYS), one_of(LABEL_VALUES)), 1)),
        expressions=maybe("labels", expressions),
        tolerations=maybe("taints", tolerations),
        topology_spread=maybe("peers", spreads),
        affinity=maybe("peers", affinities, 1),
        anti_affinity=maybe("peers", affinities),
    )
    template = Template(
        command=("run",),
        resources=Amount(draw(amounts)) if "resources" in loud else Amount(),
        devices=draw(device_asks()) if "devices" in loud else (),
    )
    return Work(
        tenant=draw(one_of(TENANTS)),
        name=draw(one_of(("x", "y"))),
        labels=draw(st.dictionaries(one_of(("app", "tier")), one_of(("x", "y")), max_size=2)),
        spec=WorkloadSpec(type="service", template=template, placement=placement),
    )


@st.composite
def scenes(draw: st.DrawFn, most: int = 4, loud: Loud = frozenset()) -> PlacementCase:
    loud = loud or frozenset(draw(st.lists(one_of(GROUPS), min_size=1, max_size=3))) | draw(one_of((Loud(), Loud({"peers"}))))
    left = [draw(nodes_left(row, loud)) for row in range(draw(st.integers(1, most)))]
    work = draw(works(loud))
    others = st.just(work) | works(loud & {"peers"})  # mostly replicas of the same workload
    standing = draw(st.lists(st.tuples(others, st.integers(0, len(left) - 1)), max_size=4))
    published = draw(st.lists(policies, min_size=1, max_size=2)) if "policy" in loud else []
    return PlacementCase(left, standing, published, work)
