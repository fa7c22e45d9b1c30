"""`remit explain` and `remit capacity` on a store written by an authority and a scheduler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from remit.cli.main import remit
from remit.store.sqlite.database_file import FILE_NAME
from tests.integration.cli.scope_data import CLUSTER, MORE, ROOT, scope, write_scope


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workload web with 4 of 6 replicas bound, a gang without enough quota and GPUs, and a job that fits on no node."""
    return write_scope(tmp_path_factory.mktemp("scope") / "data")


@pytest.fixture(scope="module")
def deviceless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same cluster without the node that has devices."""
    directory = tmp_path_factory.mktemp("deviceless")
    manifests = [text for text in CLUSTER.read_text().split("---\n") if "name: gpu-0" not in text]
    assert len(manifests) == CLUSTER.read_text().count("---\n")
    (directory / "cluster.yaml").write_text("---\n".join(manifests))
    return write_scope(directory / "data", directory / "cluster.yaml")


@pytest.fixture(scope="module")
def running_scope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    directory = tmp_path_factory.mktemp("owned") / "data"
    owner = scope(directory, "--stay")
    assert owner.stdout is not None and owner.stdout.readline().startswith("settled at")
    yield directory, owner
    owner.kill()
    owner.communicate()


def invoke(*args: str) -> Result:
    return CliRunner().invoke(remit, args, prog_name="remit")


def output_of(*args: str, code: int = 0) -> str:
    result = invoke(*args)
    assert result.exit_code == code, result.output
    return result.output


def as_json(*args: str) -> Any:
    return json.loads(output_of(*args, "-o", "json"))


@pytest.mark.smoke
def test_workload_without_capacity_is_explained_with_remedies(data: Path) -> None:
    text = output_of("explain", "workload/web", "--data", str(data))
    assert "queued 2, bound 4 of 6 desired" in text
    assert "reason=no_room  verdict=not-now (a single replica would fit an empty node)" in text
    assert "4 nodes -> 3 schedulable -> 2 with only tolerated taints -> 0 with enough free capacity" in text
    assert "nearest fit:  n1, short by cpu 1" in text
    assert "if node n1 grows by cpu 1 (then it fits 1 node: n1)" in text
    assert "or if there is 1 more node like n1" in text
    assert "or if it tolerates the taint" in text
    assert "\n              0 of 4 nodes fit: 1 cordoned or draining, 1 taint not tolerated, 2 too little free cpu" in text
    assert "\npreemption:   no replica of lower priority runs" in text
    assert "earlier after: a change of nodes, freed capacity" in text
    assert "UTC at the latest" in text or "check that a scheduler is running" in text
    assert all(len(line) < 200 for line in text.splitlines())


def test_gang_explanation_counts_fitting_replicas(data: Path) -> None:
    text = output_of("explain", "workload/train", "-n", "lab", "--data", str(data))
    assert "reason=over_quota" in text
    assert "quota for 2 of 3 replicas" in " ".join(text.split())
    assert "3 must be bound at once: 1 of 3 pending ones fit now, 0 are placed" in text
    assert "if quota tenant/lab grows by gpu 1, and there are 2 more nodes like g1" in text


def test_replica_larger_than_every_node_has_verdict_never(data: Path) -> None:
    explanation = as_json("explain", "replica/big-0", "--data", str(data))
    assert (explanation["waits"]["verdict"], explanation["waits"]["reason"]) == ("never", "no_room")
    funnel = explanation["waits"]["passage"]
    assert funnel["nodes"] == funnel["fits"] + sum(step["refused"] for step in funnel["steps"]) == 4
    assert explanation["waits"]["unblocks"][0]["changes"] == [{"kind": "grow", "what": "n1", "amount": {"cpu": "22"}}]


@pytest.mark.smoke
def test_bound_replica_explains_its_node_and_another(data: Path) -> None:
    text = output_of("explain", "replica/web-0", "--node", "g1", "--data", str(data), "-v")
    assert "bound on n" in text
    assert "one of 2 nodes that fit; scores when its batch began" in text
    assert "4 nodes -> 3 schedulable -> 2 with only tolerated taints" in text
    assert "fragmentation" in text and "least-allocated" not in text, "with devices in the cluster, fragmentation decides"
    assert "bind accepted at revision" in text
    assert "it violates 1 rule there now" in text
    assert "taints: the node has a taint that is not tolerated (passes after: taint removed, or toleration added)" in text
    assert "times out after 1m in phase bound; then the repair controller aborts this attempt" in text
    assert "tenant/shop had" in text
    assert "recorded:" in text
    explanation = as_json("explain", "replica/web-0", "--node", "n3", "--data", str(data))
    assert [rule["reason"] for rule in explanation["there"]["broken"]] == ["draining", "selector"]
    assert explanation["chosen"]["passage"]["fits"] == 2
    assert explanation["chosen"]["candidates"][0]["score"] == sum(explanation["chosen"]["candidates"][0]["parts"].values())
    assert explanation["evidence"]["revision"] >= explanation["chosen"]["revision"] > explanation["chosen"]["seen"]


def test_cluster_without_devices_scores_by_least_allocated(deviceless: Path) -> None:
    text = output_of("explain", "replica/web-0", "--data", str(deviceless), "-v")
    assert "one of 2 nodes that fit; scores when its batch began" in text
    assert "3 nodes -> 2 schedulable" in text
    assert "least-allocated" in text and "fragmentation" not in text


@pytest.mark.smoke
def test_json_fields_are_stable(data: Path) -> None:
    workload = as_json("explain", "workload/web", "--data", str(data))
    assert list(workload) == [
        *(
            "kind",
            "tenant",
            "name",
            "wanted",
            "stages",
            "missing",
            "since",
            "evidence",
            "groups",
            "limit",
            "there",
            "history",
            "detail",
            "unattended",
        )
    ]
    waits = workload["groups"][0]["waits"]
    assert list(waits) == [
        *("verdict", "reason", "meaning", "cure", "detail", "cures", "passage", "quota", "nearest", "gang", "preemption"),
        *("unblocks", "candidates"),
    ]
    replica = as_json("explain", "replica/web-0", "--data", str(data))
    assert list(replica) == [
        *("kind", "tenant", "name", "workload", "generation", "phase", "attempt", "priority", "node", "since", "evidence"),
        *("waits", "chosen", "grants", "devices", "victims", "there", "here", "history", "result", "reason", "said"),
    ]
    capacity = as_json("capacity", "-f", str(MORE), "--data", str(data))
    assert list(capacity) == [
        *("tenant", "workload", "priority", "charge", "most", "capped", "revision", "nodes", "hard", "reclaimable", "soft"),
        "stop",
    ]


@pytest.mark.smoke
def test_capacity_counts_hard_reclaimable_and_soft(data: Path) -> None:
    text = output_of("capacity", "-f", str(MORE), "--data", str(data))
    assert "4 fit now: capacity for 4, quota for 52" in text
    assert "12 more within quota, capacity for 12, by preempting 4 replicas" in text
    assert "16 on cordoned nodes" in text
    assert "blocked by no_room" in text
    output_of("capacity", "-f", str(MORE), "--data", str(data), "--count", "4")
    output_of("capacity", "-f", str(MORE), "--data", str(data), "--count", "5", code=1)


def test_capacity_of_cluster_manifests_needs_no_server() -> None:
    explanation = as_json("capacity", "-f", str(MORE), "--cluster", str(CLUSTER), "--count", "3")
    assert (explanation["hard"]["replicas"], explanation["capped"], explanation["stop"]) == (3, True, None)


def test_reading_the_data_directory_does_not_disturb_its_server(running_scope: tuple[Path, subprocess.Popen[str]]) -> None:
    directory, owner = running_scope
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    before = sorted(path.name for path in directory.iterdir())
    for _ in range(3):
        command = [sys.executable, "-m", "remit.cli", "explain", "workload/web", "--data", str(directory)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "reason=no_room" in done.stdout
    assert sorted(path.name for path in directory.iterdir()) == before
    assert owner.poll() is None
    _, _ = owner.communicate("", timeout=30)
    assert owner.returncode == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["workload/wbe"], "did you mean web?"),
        (["workload/zzz"], "there are big, train or web"),
        (["web"], "write workload/web or replica/web"),
        (["pod/web"], "cannot be explained; use workload or replica"),
        (["replica/"], "write replica/NAME"),
        (["node/n1"], "--node NODE"),
        (["workload/lab/web"], "shop has; use --tenant shop"),
        (["workload/shop/web", "-n", "lab"], "give one"),
        (["workload/web", "--node", "n9"], "there are g1, n1, n2 or n3"),
        (["workload/\x1b[31mweb"], "there are big, train or web"),
    ],
)
def test_unknown_target_gets_a_suggestion(data: Path, args: list[str], message: str) -> None:
    output = output_of("explain", *args, "--data", str(data), code=2)
    assert message in output
    assert "\x1b" not in output


@pytest.mark.parametrize("content", ["nothing", "directory", "text"])
def test_invalid_data_directory_is_an_error(tmp_path: Path, content: str) -> None:
    directory = tmp_path / "data"
    if content != "nothing":
        directory.mkdir()
    if content == "text":
        (directory / FILE_NAME).write_text("x" * 200)
    for args in (["explain", "workload/web"], ["capacity", "-f", str(MORE)]):
        output = output_of(*args, "--data", str(directory), code=2)
        assert "Error: " in output and "data" in output


def test_damaged_store_is_reported_with_the_original_path(data: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    shutil.copytree(data, directory)
    with (directory / FILE_NAME).open("r+b") as file:
        file.truncate(30_000)
    for args in (["explain", "workload/web"], ["capacity", "-f", str(MORE)]):
        output = output_of(*args, "--data", str(directory), code=2)
        assert f"{directory / FILE_NAME}: " in output and "remit-look" not in output


@pytest.mark.parametrize("form", ["text", "json"])
def test_full_output_is_not_reported_as_damaged_data(data: Path, form: str) -> None:
    command = [sys.executable, "-m", "remit.cli", "explain", "workload/web", "--data", str(data), "-o", form]
    with Path("/dev/full").open("w") as full:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "remit: No space left on device\n"


def test_invalid_manifest_is_reported_as_by_validate(data: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(MORE.read_text().replace("replicas: 1", "replicas: -1"))
    output = output_of("capacity", "-f", str(bad), "--data", str(data), code=2)
    assert output.splitlines()[0] == output_of("validate", str(bad), code=1).splitlines()[0]
    output_of("capacity", "-f", str(tmp_path / "none.yaml"), "--data", str(data), code=2)
    assert "3 workloads" in output_of("capacity", "-f", str(CLUSTER), "--data", str(data), code=2)
    assert "declares no Node" in output_of("capacity", "-f", str(MORE), "--cluster", str(MORE), code=2)
    assert "but not both" in output_of("capacity", "-f", str(MORE), "--data", str(data), "--cluster", str(MORE), code=2)
    missing = tmp_path / "missing.yaml"
    missing.write_text(MORE.read_text().replace("urgent", "absent"))
    assert "there is no priority class absent" in output_of("capacity", "-f", str(missing), "--data", str(data), code=2)
