"""Cgroups v1 and v2: both formats and the choice between them, on plain files. Real ones are tested in tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from remit.world.interfaces import Limits, NotStarted, ProcessSpec, Usage
from remit.world.process import spawn
from remit.world.process.cgroup_discovery import CgroupMount, find_cgroups, parse_mounts
from remit.world.process.cgroups import (
    CgroupHierarchy,
    Cgroups,
    CgroupV1,
    CgroupV2,
    GroupId,
    cpu_shares,
    cpu_weight,
    parse_group_id,
)

HYBRID = """
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
37 31 0:34 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /mnt/a\\040b rw,relatime - cgroup2 cgroup2 rw
"""
LIMITS = Limits(memory_bytes=1 << 30, cpu_milli=1500, pids=64)


def file_contents(place: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in place.iterdir()}


def group(parent: Path, **files: str) -> str:
    (parent / "g").mkdir(parents=True)
    for name, text in files.items():
        (parent / "g" / name.replace("_DOT_", ".")).write_text(text)
    return "g"


def test_mounts_are_parsed_with_controllers() -> None:
    assert parse_mounts(HYBRID) == [
        CgroupMount(1, Path("/sys/fs/cgroup/cpu,cpuacct"), ("cpu", "cpuacct")),
        CgroupMount(1, Path("/sys/fs/cgroup/freezer"), ()),
        CgroupMount(1, Path("/sys/fs/cgroup/systemd"), ()),
        CgroupMount(2, Path("/mnt/a b"), ()),
    ]


@pytest.mark.parametrize(
    ("milli", "as_shares", "as_weight"), [(1, 2, 1), (1000, 1024, 39), (2000, 2048, 79), (10**6, 262_144, 10_000)]
)
def test_cpu_shares_and_weight_follow_usual_scale(milli: int, as_shares: int, as_weight: int) -> None:
    assert (cpu_shares(milli), cpu_weight(milli)) == (as_shares, as_weight)


def test_limits_in_version_1(tmp_path: Path) -> None:
    for sort in ("memory", "cpu", "pids"):
        CgroupV1(tmp_path / sort, [sort]).limit(group(tmp_path / sort), LIMITS)
    assert file_contents(tmp_path / "memory" / "g") == {
        "memory.limit_in_bytes": "1073741824",
        "memory.memsw.limit_in_bytes": "1073741824",
    }
    assert file_contents(tmp_path / "cpu" / "g") == {"cpu.shares": "1536"}
    assert file_contents(tmp_path / "pids" / "g") == {"pids.max": "64"}


def test_limits_in_version_2(tmp_path: Path) -> None:
    CgroupV2(tmp_path, ["memory", "cpu", "pids"]).limit(group(tmp_path), LIMITS)
    assert file_contents(tmp_path / "g") == {
        "memory.max": "1073741824",
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "cpu.weight": str(cpu_weight(1500)),
        "pids.max": "64",
    }


@pytest.mark.parametrize("dialect", [CgroupV1, CgroupV2])
def test_missing_limit_writes_nothing(tmp_path: Path, dialect: type[CgroupHierarchy]) -> None:
    dialect(tmp_path, ["memory", "cpu", "pids"]).limit(group(tmp_path), Limits())
    assert file_contents(tmp_path / "g") == {}


def test_usage_in_version_1_excludes_reclaimable_memory(tmp_path: Path) -> None:
    name = group(tmp_path / "memory", memory_DOT_usage_in_bytes="5000\n", memory_DOT_stat="cache 9\ntotal_inactive_file 1000\n")
    group(tmp_path / "cpuacct", cpuacct_DOT_usage="1234567890\n")
    group(tmp_path / "pids", pids_DOT_current="3\n")
    found = Cgroups([CgroupV1(tmp_path / sort, [sort]) for sort in ("memory", "cpuacct", "pids")])
    assert found.usage(name) == Usage(1234, 4000, 3)


def test_usage_in_version_2(tmp_path: Path) -> None:
    name = group(
        tmp_path,
        memory_DOT_current="5000\n",
        memory_DOT_stat="anon 9\ninactive_file 1000\n",
        cpu_DOT_stat="usage_usec 1234567\nuser_usec 5\n",
        pids_DOT_current="3\n",
    )
    assert Cgroups([CgroupV2(tmp_path, ["memory", "cpu", "pids"])]).usage(name) == Usage(1234, 4000, 3)
    assert Cgroups([CgroupV2(tmp_path, ["memory", "cpu", "pids"])]).usage("gone") == Usage()


@pytest.mark.parametrize(("count", "oom"), [("0", False), ("2", True)])
def test_oom_kill_is_recognised_in_every_format(tmp_path: Path, count: str, oom: bool) -> None:
    group(tmp_path / "new", memory_DOT_events=f"low 0\nmax 17\noom 1\noom_kill {count}\n")
    group(
        tmp_path / "old", memory_DOT_oom_control=f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n", memory_DOT_failcnt="9"
    )
    group(tmp_path / "older", memory_DOT_oom_control="oom_kill_disable 0\nunder_oom 0\n", memory_DOT_failcnt=f"{count}\n")
    one = [
        CgroupV2(tmp_path / "new", ["memory"]),
        CgroupV1(tmp_path / "old", ["memory"]),
        CgroupV1(tmp_path / "older", ["memory"]),
    ]
    assert [Cgroups([each]).had_oom_kill("g") for each in one] == [oom] * 3


def test_reported_version_is_that_of_limiting_hierarchy(tmp_path: Path) -> None:
    kills = CgroupV2(tmp_path / "unified", [], supports_kill=True)
    assert Cgroups([]).name == "none"
    assert Cgroups([kills]).name == "v2"
    hybrid = Cgroups([CgroupV1(tmp_path / "memory", ["memory"]), kills])
    assert (hybrid.name, hybrid.controllers) == ("v1", ("kill", "memory"))
    assert Cgroups([CgroupV2(tmp_path, ["memory"], supports_kill=True)]).name == "v2"


def test_without_mounts_there_are_no_cgroups_and_reason() -> None:
    found = find_cgroups(mounts="")
    assert (found.name, found.controllers) == ("none", ())
    assert found.reason == "no limit on cpu, memory, pids: no cgroups are mounted"
    assert (found.names(), found.members("x"), found.is_current(GroupId("x", 1))) == ((), [], False)


def test_unwritable_cgroup_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "parent").write_text("a file")
    found = find_cgroups("parent", mounts=f"1 2 3 / {tmp_path} rw - cgroup cgroup rw,memory,pids,cpu,cpuacct")
    assert found.name == "none"
    assert f"{tmp_path}/parent cannot be used" in found.reason


@pytest.mark.parametrize(
    ("text", "group_id"), [("a.b#12", GroupId("a.b", 12)), ("a", None), ("#1", None), ("a#", None), ("a#x", None)]
)
def test_group_id_round_trip_or_none(text: str, group_id: GroupId | None) -> None:
    assert parse_group_id(text) == group_id
    assert group_id is None or str(group_id) == text


def test_starting_as_other_user_without_root_is_refused_with_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1)
    with pytest.raises(NotStarted) as caught:
        spawn.spawn(ProcessSpec(("/bin/true",), user="nobody"))
    assert "has no permission to run processes as 'nobody'" in caught.value.cause
    assert "run the agent as root" in caught.value.cure
