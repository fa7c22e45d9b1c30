"""Tests of the nodes that an agent registers."""

from __future__ import annotations

import click
import pytest

from remit.cli.local.agent_options import NodeOptions, build_nodes, startup_line
from remit.world.interfaces import Gpu, HostInventory, IsolationSupport

INVENTORY = HostInventory("Host_7.example", "Linux", "boot", 4_000, 8 << 30, (Gpu("gpu-0", "NVIDIA A10 (24 GB)"), Gpu("gpu-1")))
ISOLATED = IsolationSupport("v2", ("cpu", "kill", "memory", "pids"), "", sandbox=True)
NOT_ISOLATED = IsolationSupport("none", (), "no cgroups are mounted", sandbox=False)


def test_single_node_has_the_hardware_of_the_machine() -> None:
    [node] = build_nodes(NodeOptions(), INVENTORY, 5_000)
    assert node.metadata.name == "host-7-example"
    assert dict(node.spec.capacity.pairs) == {"cpu": 4_000, "memory": 8 << 30}
    assert [(one.name, one.kind, one.model) for one in node.spec.devices] == [
        ("gpu-0", "gpu", "NVIDIA-A10-24-GB"), ("gpu-1", "gpu", "")
    ]  # fmt: skip
    assert (node.spec.region, node.spec.zone, node.spec.address, node.spec.port) == ("local", "local-a", "127.0.0.1", 5_000)


def test_several_nodes_alternate_regions_and_divide_the_devices() -> None:
    nodes = build_nodes(NodeOptions("m", 4, regions=("eu", "us"), zones=("x", "y")), INVENTORY, 1)
    assert [(one.metadata.name, one.spec.region, one.spec.zone) for one in nodes] == [
        ("m-1", "eu", "x"), ("m-2", "us", "x"), ("m-3", "eu", "y"), ("m-4", "us", "y")
    ]  # fmt: skip
    assert [len(one.spec.devices) for one in nodes] == [1, 1, 0, 0]


def test_options_override_the_inventory() -> None:
    labels, taints = ("disk=ssd",), ("gpu=yes:NoSchedule", "old:NoExecute")
    options = NodeOptions("m", cpu="8", memory="16Gi", devices=("gpu=2:A10", "fpga=1"), labels=labels, taints=taints)
    [node] = build_nodes(options, INVENTORY, 1)
    assert dict(node.spec.capacity.pairs) == {"cpu": 8_000, "memory": 16 << 30}
    assert [one.name for one in node.spec.devices] == ["gpu-0", "gpu-1", "fpga-0"]
    assert node.metadata.labels == {"disk": "ssd"}
    assert [(one.key, one.value, one.effect) for one in node.spec.taints] == [
        ("gpu", "yes", "NoSchedule"), ("old", "", "NoExecute")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (NodeOptions("Not_A_Name"), "metadata.name"),
        (NodeOptions("m", cpu="many"), "--cpu"),
        (NodeOptions("m", memory="-1"), "memory"),
        (NodeOptions("m", labels=("x",)), "write KEY=VALUE"),
        (NodeOptions("m", devices=("gpu",)), "write gpu=2"),
        (NodeOptions("m", taints=("x",)), "write KEY:NoSchedule"),
        (NodeOptions("m", taints=("x:Sometimes",)), "effect"),
        (NodeOptions("m", regions=("EU!",)), "region"),
        (NodeOptions("x" * 70, 2), "metadata.name"),
    ],
)
def test_invalid_option_is_named_with_a_fix(options: NodeOptions, message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        build_nodes(options, INVENTORY, 1)


def test_startup_line_shows_nodes_limits_and_missing_isolation() -> None:
    nodes = build_nodes(NodeOptions("m", 3), INVENTORY, 1)
    line = startup_line(nodes, ISOLATED, sandbox=True, servers=["http://h:1"])
    assert line == (
        "agent: nodes m-1 to m-3 (4 cpu, 8Gi memory, 1 devices each) at http://h:1; "
        "cgroups v2 limit cpu, memory, pids; sandbox: bubblewrap"
    )
    line = startup_line(nodes[:1], NOT_ISOLATED, sandbox=False, servers=["http://h:1"])
    assert "no resource limits (no cgroups are mounted; run as root" in line
    assert "no sandbox (apt-get install bubblewrap)" in line
