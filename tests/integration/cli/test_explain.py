"""What do `remit explain` and `remit capacity` print of a scope that a real authority and a real scheduler wrote?"""

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

ROOT = Path(__file__).parents[3]
CLUSTER = Path(__file__).with_name("cluster.yaml")
MORE = Path(__file__).with_name("more.yaml")


def scope(data: Path, *words: str, cluster: Path = CLUSTER) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "tests.integration.stored_scope", str(data), str(cluster), *words]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def settled(data: Path, cluster: Path = CLUSTER) -> Path:
    owner = scope(data, cluster=cluster)
    out, _ = owner.communicate(timeout=60)
    assert owner.returncode == 0 and out.startswith("settled at"), out
    return data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six of web, of which four found room; a gang that lacks quota and GPUs; a job that is too large."""
    return settled(tmp_path_factory.mktemp("scope") / "data")


@pytest.fixture(scope="module")
def deviceless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without the node that has devices."""
    place = tmp_path_factory.mktemp("deviceless")
    left = [text for text in CLUSTER.read_text().split("---\n") if "name: gpu-0" not in text]
    assert len(left) == CLUSTER.read_text().count("---\n")
    (place / "cluster.yaml").write_text("---\n".join(left))
    return settled(place / "data", place / "cluster.yaml")


@pytest.fixture(scope="module")
def run_by_its_owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    place = tmp_path_factory.mktemp("owned") / "data"
    owner = scope(place, "--stay")
    assert owner.stdout is not None and owner.stdout.readline().startswith("settled at")
    yield place, owner
    owner.kill()
    owner.communicate()


def invoke(*words: str) -> Result:
    return CliRunner().invoke(remit, words, prog_name="remit")


def told(*words: str, code: int = 0) -> str:
    result = invoke(*words)
    assert result.exit_code == code, result.output
    return result.output


def as_json(*words: str) -> Any:
    return json.loads(told(*words, "-o", "json"))


@pytest.mark.smoke
def test_a_workload_that_waits_for_room(data: Path) -> None:
    text = told("explain", "workload/web", "--data", str(data))
    assert "queued 2, bound 4 of 6 wanted" in text
    assert 'reason=no_room  verdict=not-now (not "never")' in text
    assert "nodes 4 -> open 3 -> tolerated 2 -> room 0" in text
    assert "nearest fit:  n1, short by cpu 1" in text
    assert "if node n1 grows by cpu 1 (then it fits 1 node: n1)" in text
    assert "or if there is 1 more node like n1" in text
    assert "or if it tolerates the taint" in text
    assert "sooner when this changes: node, room" in text
    assert "UTC at the latest" in text or "is a scheduler running?" in text
    assert all(len(line) < 200 for line in text.splitlines())


def test_a_gang_says_how_many_fit(data: Path) -> None:
    text = told("explain", "workload/train", "-n", "lab", "--data", str(data))
    assert "reason=over_quota" in text
    assert "quota 2 of 3" in text
    assert "3 must be bound at once: 1 of 3 that wait would fit now, 0 stand" in text
    assert "if the quota tenant/lab grows by gpu 1, and there are 2 more nodes like g1" in text


def test_work_that_fits_on_no_node_is_never(data: Path) -> None:
    found = as_json("explain", "replica/big-0", "--data", str(data))
    assert (found["waits"]["verdict"], found["waits"]["reason"]) == ("never", "no_room")
    funnel = found["waits"]["passage"]
    assert funnel["nodes"] == funnel["fits"] + sum(step["refused"] for step in funnel["steps"]) == 4
    assert found["waits"]["unblocks"][0]["changes"] == [{"kind": "grow", "what": "n1", "amount": {"cpu": "22"}}]


@pytest.mark.smoke
def test_bound_work_is_told_why_it_is_there_and_why_not_elsewhere(data: Path) -> None:
    text = told("explain", "replica/web-0", "--node", "g1", "--data", str(data), "-v")
    assert "bound on n" in text
    assert "the best of 2 nodes that fit" in text
    assert "nodes 4 -> open 3 -> tolerated 2" in text
    assert "fragmentation" in text and "least-allocated" not in text, "where nodes have devices, what spoils the least is best"
    assert "bind accepted at revision" in text
    assert "it breaks 1 rule there now" in text
    assert "taints: the node has a taint that is not tolerated" in text
    assert "tenant/shop had" in text
    assert "recorded:" in text
    found = as_json("explain", "replica/web-0", "--node", "n3", "--data", str(data))
    assert [one["reason"] for one in found["there"]["broken"]] == ["draining", "selector"]
    assert found["chosen"]["passage"]["fits"] == 2
    assert found["chosen"]["candidates"][0]["score"] == sum(found["chosen"]["candidates"][0]["parts"].values())
    assert found["evidence"]["revision"] >= found["chosen"]["revision"] > found["chosen"]["seen"]


def test_where_no_node_has_devices_bound_work_is_where_most_is_left(deviceless: Path) -> None:
    text = told("explain", "replica/web-0", "--data", str(deviceless), "-v")
    assert "the best of 2 nodes that fit" in text
    assert "nodes 3 -> open 2" in text
    assert "least-allocated" in text and "fragmentation" not in text


@pytest.mark.smoke
def test_the_shape_of_the_json_is_stable(data: Path) -> None:
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
def test_capacity_of_a_scope(data: Path) -> None:
    text = told("capacity", "-f", str(MORE), "--data", str(data))
    assert "4 fit now: room for 4, quota for 52" in text
    assert "12 more within quota, room for 12, if 4 lower replicas went" in text
    assert "16 on cordoned nodes" in text
    assert "stopped by no_room" in text
    told("capacity", "-f", str(MORE), "--data", str(data), "--count", "4")
    told("capacity", "-f", str(MORE), "--data", str(data), "--count", "5", code=1)


def test_capacity_of_a_cluster_that_is_only_written_down() -> None:
    found = as_json("capacity", "-f", str(MORE), "--cluster", str(CLUSTER), "--count", "3")
    assert (found["hard"]["replicas"], found["capped"], found["stop"]) == (3, True, None)


def test_a_running_owner_is_not_disturbed(run_by_its_owner: tuple[Path, subprocess.Popen[str]]) -> None:
    place, owner = run_by_its_owner
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    before = sorted(path.name for path in place.iterdir())
    for _ in range(3):
        command = [sys.executable, "-m", "remit.cli", "explain", "workload/web", "--data", str(place)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "reason=no_room" in done.stdout
    assert sorted(path.name for path in place.iterdir()) == before
    assert owner.poll() is None
    _, _ = owner.communicate("", timeout=30)
    assert owner.returncode == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["workload/wbe"], "did you mean web?"),
        (["workload/zzz"], "there are big, train or web"),
        (["web"], "write workload/web or replica/web"),
        (["pod/web"], "explained are workload or replica"),
        (["replica/"], "write replica/NAME"),
        (["node/n1"], "--node NODE"),
        (["workload/lab/web"], "shop has; say --tenant shop"),
        (["workload/shop/web", "-n", "lab"], "name one"),
        (["workload/web", "--node", "n9"], "there are g1, n1, n2 or n3"),
        (["workload/\x1b[31mweb"], "there are big, train or web"),
    ],
)
def test_what_is_not_there_is_said_with_what_is_near(data: Path, words: list[str], says: str) -> None:
    output = told("explain", *words, "--data", str(data), code=2)
    assert says in output
    assert "\x1b" not in output


@pytest.mark.parametrize("made", ["nothing", "directory", "text"])
def test_a_directory_that_is_none_is_said_to_be_none(tmp_path: Path, made: str) -> None:
    place = tmp_path / "data"
    if made != "nothing":
        place.mkdir()
    if made == "text":
        (place / FILE_NAME).write_text("x" * 200)
    for words in (["explain", "workload/web"], ["capacity", "-f", str(MORE)]):
        output = told(*words, "--data", str(place), code=2)
        assert "Error: " in output and "data" in output


def test_damage_is_told_of_the_file_that_has_it(data: Path, tmp_path: Path) -> None:
    place = tmp_path / "data"
    shutil.copytree(data, place)
    with (place / FILE_NAME).open("r+b") as file:
        file.truncate(30_000)
    for words in (["explain", "workload/web"], ["capacity", "-f", str(MORE)]):
        output = told(*words, "--data", str(place), code=2)
        assert f"{place / FILE_NAME}: " in output and "remit-look" not in output


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_output_that_is_full_is_no_fault_of_the_data(data: Path, form: str) -> None:
    command = [sys.executable, "-m", "remit.cli", "explain", "workload/web", "--data", str(data), "-o", form]
    with Path("/dev/full").open("w") as full:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "remit: No space left on device\n"


def test_a_bad_manifest_is_judged_as_validate_does(data: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(MORE.read_text().replace("replicas: 1", "replicas: -1"))
    output = told("capacity", "-f", str(bad), "--data", str(data), code=2)
    assert output.splitlines()[0] == told("validate", str(bad), code=1).splitlines()[0]
    told("capacity", "-f", str(tmp_path / "none.yaml"), "--data", str(data), code=2)
    assert "3 workloads" in told("capacity", "-f", str(CLUSTER), "--data", str(data), code=2)
    assert "declares no Node" in told("capacity", "-f", str(MORE), "--cluster", str(MORE), code=2)
    assert "and not both" in told("capacity", "-f", str(MORE), "--data", str(data), "--cluster", str(MORE), code=2)
    missing = tmp_path / "missing.yaml"
    missing.write_text(MORE.read_text().replace("urgent", "absent"))
    assert "there is no priority class absent" in told("capacity", "-f", str(missing), "--data", str(data), code=2)
