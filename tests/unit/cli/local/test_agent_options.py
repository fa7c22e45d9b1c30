"""Does an agent declare what was said on the command line, and what was found where nothing was?"""

from __future__ import annotations

import click
import pytest

from remit.cli.local.agent_options import NodeOptions, build_nodes, startup_line
from remit.world.interfaces import Gpu, HostInventory, IsolationSupport

FOUND = HostInventory("Host_7.example", "Linux", "boot", 4_000, 8 << 30, (Gpu("gpu-0", "NVIDIA A10 (24 GB)"), Gpu("gpu-1")))
WHOLE = IsolationSupport("v2", ("cpu", "kill", "memory", "pids"), "", sandbox=True)
NOTHING = IsolationSupport("none", (), "no cgroups are mounted", sandbox=False)


def test_one_node_is_the_machine_as_it_was_found() -> None:
    [node] = build_nodes(NodeOptions(), FOUND, 5_000)
    assert node.metadata.name == "host-7-example"
    assert dict(node.spec.capacity.pairs) == {"cpu": 4_000, "memory": 8 << 30}
    assert [(one.name, one.kind, one.model) for one in node.spec.devices] == [
        ("gpu-0", "gpu", "NVIDIA-A10-24-GB"), ("gpu-1", "gpu", "")
    ]  # fmt: skip
    assert (node.spec.region, node.spec.zone, node.spec.address, node.spec.port) == ("local", "local-a", "127.0.0.1", 5_000)


def test_several_nodes_are_dealt_out_over_regions_and_zones_and_share_what_is_there_once() -> None:
    nodes = build_nodes(NodeOptions("m", 4, regions=("eu", "us"), zones=("x", "y")), FOUND, 1)
    assert [(one.metadata.name, one.spec.region, one.spec.zone) for one in nodes] == [
        ("m-1", "eu", "x"), ("m-2", "us", "x"), ("m-3", "eu", "y"), ("m-4", "us", "y")
    ]  # fmt: skip
    assert [len(one.spec.devices) for one in nodes] == [1, 1, 0, 0]


def test_what_is_said_comes_before_what_was_found() -> None:
    labels, taints = ("disk=ssd",), ("gpu=yes:NoSchedule", "old:NoExecute")
    said = NodeOptions("m", cpu="8", memory="16Gi", devices=("gpu=2:A10", "fpga=1"), labels=labels, taints=taints)
    [node] = build_nodes(said, FOUND, 1)
    assert dict(node.spec.capacity.pairs) == {"cpu": 8_000, "memory": 16 << 30}
    assert [one.name for one in node.spec.devices] == ["gpu-0", "gpu-1", "fpga-0"]
    assert node.metadata.labels == {"disk": "ssd"}
    assert [(one.key, one.value, one.effect) for one in node.spec.taints] == [
        ("gpu", "yes", "NoSchedule"), ("old", "", "NoExecute")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "words"),
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
def test_what_is_wrong_is_named_with_its_cure(wrong: NodeOptions, words: str) -> None:
    with pytest.raises(click.UsageError, match=words):
        build_nodes(wrong, FOUND, 1)


def test_one_line_says_what_is_registered_and_what_is_missing() -> None:
    nodes = build_nodes(NodeOptions("m", 3), FOUND, 1)
    told = startup_line(nodes, WHOLE, sandbox=True, servers=["http://h:1"])
    assert told == (
        "agent: nodes m-1 to m-3 (4 cpu, 8Gi memory, 1 devices each) at http://h:1; "
        "cgroups v2 limit cpu, memory, pids; work is sandboxed (bubblewrap)"
    )
    told = startup_line(nodes[:1], NOTHING, sandbox=False, servers=["http://h:1"])
    assert "no limits (no cgroups are mounted; run it as root" in told
    assert "no sandbox (apt-get install bubblewrap)" in told
