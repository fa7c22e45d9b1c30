"""Is real work held as it was ordered: its user, its streams, its limits, its sandbox, and above all its whole tree?"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from remit.world.clock import BootClock
from remit.world.interfaces import ExitStatus, Limits, NotStarted, ProcessHandle, ProcessSpec
from remit.world.process import runner as module
from remit.world.process.cgroup_discovery import find_cgroups, parse_mounts, try_hierarchy
from remit.world.process.cgroups import CgroupHierarchy, Cgroups, CgroupV1
from remit.world.process.runner import ProcessRunner
from tests.contracts.worlds import remove_groups

ENV = {"PATH": os.defpath}
MIB = 1 << 20
Scene = Callable[[ProcessRunner], Coroutine[Any, Any, None]]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
with_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt install bubblewrap")


@pytest.fixture
def parent() -> Iterator[str]:
    name = f"remit-tests/{os.getpid()}"
    yield name
    remove_groups(name)


@pytest.fixture
def grouped(parent: str) -> str:
    found = find_cgroups(parent)
    if "memory" not in found.controllers:
        pytest.skip(f"cgroups here: {found.name}; {found.reason}")
    return parent


def play(scene: Scene, parent: str) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scene(ProcessRunner(BootClock(), parent=parent))

    asyncio.run(bounded())


def shell(script: str) -> ProcessSpec:
    return ProcessSpec(("/bin/sh", "-c", script), ENV)


def python(script: str) -> ProcessSpec:
    return ProcessSpec((sys.executable, "-c", script), ENV)


async def text(path: Path) -> str:
    while not (path.exists() and path.read_text().endswith("\n")):  # noqa: ASYNC110, ASYNC240 - the work says nothing
        await asyncio.sleep(0.01)
    return path.read_text()  # noqa: ASYNC240


def listed(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@asynccontextmanager
async def started(one: ProcessRunner, order: ProcessSpec) -> AsyncIterator[ProcessHandle]:
    """Whatever the test finds, nothing is left."""
    running = await one.start(order)
    try:
        yield running
    finally:
        await one.stop(running, grace_ms=0)


# -- the whole tree ------------------------------------------------------------------------------------------------------------

ESCAPE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    time.sleep(600)
os.setsid()
if os.fork():
    os._exit(0)
open(sys.argv[1], "w").write(f"{os.getpid()}\\n")
time.sleep(600)
"""
"""A daemon as the books say: forked twice, in a session of its own, its parent gone, deaf to the request to end."""


@pytest.mark.smoke
@pytest.mark.parametrize("adopted", [False, True], ids=["own", "adopted"])
def test_a_daemon_that_left_its_group_its_session_and_its_parents_ends_all_the_same(
    grouped: str, tmp_path: Path, adopted: bool
) -> None:
    async def scene(one: ProcessRunner) -> None:
        order = python(ESCAPE)._replace(group="daemon")
        async with started(one, order._replace(argv=(*order.argv, str(tmp_path / "pid")))) as running:
            pid = int(await text(tmp_path / "pid"))
            assert os.getsid(pid) != running.pid
            assert os.getpgid(pid) != running.pid
            stopper = ProcessRunner(BootClock(), parent=grouped) if adopted else one
            await stopper.stop(ProcessHandle(*running), grace_ms=100)
            assert gone(pid)
            assert gone(running.pid)
            assert stopper.live_groups() == ()

    play(scene, grouped)


def test_what_a_leader_left_behind_ends_too_even_if_the_leader_was_reaped_long_ago(grouped: str, tmp_path: Path) -> None:
    async def scene(one: ProcessRunner) -> None:
        script = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' & while ! test -s {tmp_path}/pid; do :; done"
        async with started(one, shell(script)._replace(group="left")) as running:
            assert await one.wait(running) == ExitStatus(code=0)
            pid = int(await text(tmp_path / "pid"))
            assert not listed(running.pid), "a zombie lingers"
            assert not gone(pid)
            assert one.live_groups() == ("left",)
            await one.stop(running, grace_ms=5_000)
            assert gone(pid)
            assert one.live_groups() == ()

    play(scene, grouped)


def test_without_a_cgroup_those_who_left_the_group_end_while_their_parents_are_known(tmp_path: Path) -> None:
    async def scene(one: ProcessRunner) -> None:
        script = f"trap '' TERM; setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' & sleep 600"
        async with started(one, shell(script)) as running:
            pid = int(await text(tmp_path / "pid"))
            assert os.getpgid(pid) != running.pid
            await one.stop(running, grace_ms=100)
            assert gone(pid)

    play(scene, "unused")


def old_only(parent: str) -> list[CgroupHierarchy]:
    """What a machine with only version 1 has: no killing at a stroke."""
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text())
    tries = [try_hierarchy(mount, parent) for mount in mounts if mount.version == 1 and mount.controllers]
    return [one.hierarchy for one in tries if isinstance(one.hierarchy, CgroupV1)]


def test_where_nothing_kills_at_a_stroke_even_one_that_forks_without_end_is_killed(
    parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hierarchies = old_only(parent)
    if not any("pids" in one.controllers for one in hierarchies):
        pytest.skip("no version 1 that counts processes is mounted here, or it cannot be used")
    monkeypatch.setattr(module, "find_cgroups", lambda _: Cgroups(hierarchies))

    async def scene(one: ProcessRunner) -> None:
        assert one.isolation_support().cgroups == "v1"
        script = "import os, time\nwhile True:\n    if not os.fork():\n        time.sleep(0.02)"
        order = python(
            script.replace(
                "if not os.fork()", "try:\n        child = os.fork()\n    except OSError:\n        continue\n    if not child"
            )
        )
        async with started(one, order._replace(group="bomb", limits=Limits(pids=40))) as running:
            while one.usage(running).pids < 30:  # noqa: ASYNC110 - until it has spread
                await asyncio.sleep(0.01)
            assert one.usage(running).pids <= 40
            began_s = time.monotonic()
            await one.stop(running, grace_ms=0)
            assert time.monotonic() - began_s < 20
            assert one.live_groups() == ()

    play(scene, parent)


KEEPER = """
import asyncio, sys
from pathlib import Path
from remit.world.clock import BootClock
from remit.world.interfaces import ProcessSpec
from remit.world.process.runner import ProcessRunner

async def main():
    one = ProcessRunner(BootClock(), parent=sys.argv[1])
    for tied in (True, False):
        order = ProcessSpec(("/bin/sleep", "600"), with_parent=tied, group=f"tied-{tied}", user=sys.argv[2])
        running = await one.start(order)
        print(*running, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("user", ["", pytest.param("nobody", marks=as_root)])
def test_work_that_is_tied_to_its_starter_dies_with_it_and_other_work_does_not(grouped: str, user: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-c", KEEPER, grouped, user]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as keeper:
        assert keeper.stdout is not None
        lines = [keeper.stdout.readline().split() for _ in range(2)]
        keeper.kill()
    tied, free = (ProcessHandle(int(pid), began, group) for pid, began, group in lines)

    async def scene(one: ProcessRunner) -> None:
        assert await one.wait(tied) == ExitStatus()
        await asyncio.sleep(0.1)
        assert one.is_alive(free)
        assert one.live_groups() == ("tied-False",)
        await one.stop(free, grace_ms=1_000)

    play(scene, grouped)


TREE = "import os,time; os.fork() or os.setsid(); time.sleep(600)"

STARTER = """
import asyncio, os, sys
from remit.world.clock import BootClock
from remit.world.interfaces import ProcessSpec
from remit.world.process.runner import ProcessRunner

async def main():
    one = ProcessRunner(BootClock(), parent=sys.argv[1])
    first = await one.start(ProcessSpec(("/bin/true",), with_parent=True, group="over"))
    await one.wait(first)
    begun = []
    for tied in (True, False):
        order = ProcessSpec((sys.executable, "-c", sys.argv[2]), with_parent=tied, group=f"tree-{tied}")
        begun.append(await one.start(order))
    if sys.argv[3]:
        os.kill(one._reaper.pid, 9)
        await asyncio.sleep(1)
    for running in begun:
        print(*running, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("killed", ["", "its guard"])
def test_what_came_of_tied_work_dies_with_its_starter_too_also_if_nobody_comes_after_that(grouped: str, killed: str) -> None:
    """F36: an agent and its keeper are killed, and stay so."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-c", STARTER, grouped, TREE, killed]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as starter:
        assert starter.stdout is not None
        lines = [starter.stdout.readline().split() for _ in range(2)]
        groups = find_cgroups(grouped)
        until_s = time.monotonic() + 10
        trees = ("tree-True", "tree-False")
        while any(len(groups.members(tree)) < 2 for tree in trees) and time.monotonic() < until_s:
            time.sleep(0.02)
        assert [len(groups.members(tree)) for tree in trees] == [2, 2]
        starter.kill()
    free = ProcessHandle(int(lines[1][0]), *lines[1][1:])

    async def scene(one: ProcessRunner) -> None:
        while groups.members("tree-True"):  # noqa: ASYNC110 - it is looked at, and tells nobody
            await asyncio.sleep(0.02)
        assert len(groups.members("tree-False")) == 2
        await one.stop(free, grace_ms=1_000)
        assert one.live_groups() == ()

    play(scene, grouped)


# -- limits and what is taken --------------------------------------------------------------------------------------------------


def test_memory_that_a_child_takes_counts_and_its_end_is_named(grouped: str) -> None:
    async def scene(one: ProcessRunner) -> None:
        script = f"{sys.executable} -c 'held = bytearray(b\"x\") * (64 << 20)'; exit 5"
        async with started(one, shell(script)._replace(group="oom", limits=Limits(memory_bytes=24 * MIB))) as running:
            ended = await one.wait(running)
            assert ended.oom
            assert ended.code == 5 or ended.signal == signal.SIGKILL  # version 2 ends the whole group

    play(scene, grouped)


@pytest.mark.smoke
def test_the_limits_are_set_and_the_time_is_counted_also_that_of_children_who_have_ended(grouped: str) -> None:
    async def scene(one: ProcessRunner) -> None:
        limits = Limits(memory_bytes=256 * MIB, cpu_milli=500, pids=7)
        script = f"{sys.executable} -c 'x = sum(range(8_000_000))'; exec sleep 600"
        async with started(one, shell(script)._replace(group="spins", limits=limits)) as running:
            while one.usage(running).cpu_ms < 50:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert 0 < one.usage(running).memory_bytes < 256 * MIB
            assert 1 <= one.usage(running).pids <= 7
            held = Path("/sys/fs/cgroup/pids") / grouped / "spins" / "pids.max"
            if held.exists():
                assert held.read_text().strip() == "7"

    play(scene, grouped)


def test_without_a_cgroup_what_is_taken_is_read_of_the_tree() -> None:
    async def scene(one: ProcessRunner) -> None:
        work = 'held = bytearray(b"x") * (32 << 20); sum(range(3_000_000)); import time; time.sleep(600)'
        async with started(one, shell(f"{sys.executable} -c '{work}'; :")) as running:
            while (now := one.usage(running)).memory_bytes < 32 * MIB or now.cpu_ms < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert now.pids == 2

    play(scene, "unused")


# -- user and streams ----------------------------------------------------------------------------------------------------------


@as_root
def test_it_runs_as_the_user_with_no_group_of_ours_and_cannot_come_back(parent: str, tmp_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    said = tmp_path / "said"

    async def scene(one: ProcessRunner) -> None:
        script = "grep -E '^(Uid|Gid|Groups|CapEff):' /proc/self/status; echo again >> /dev/stdout"
        order = shell(script)._replace(user="nobody", stdout=said)
        assert await one.wait(await one.start(order)) == ExitStatus(code=0)

    play(scene, parent)
    uid, gid = nobody.pw_uid, nobody.pw_gid
    told = {line.split()[0]: line.split()[1:] for line in said.read_text().splitlines()}
    assert told["Uid:"] == [str(uid)] * 4
    assert told["Gid:"] == [str(gid)] * 4
    assert told["Groups:"] == [str(one) for one in os.getgrouplist("nobody", gid)]
    assert int(told["CapEff:"][0], 16) == 0
    assert "again" in told


def test_what_it_says_is_added_to_its_files_which_only_their_owner_reads(parent: str, tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"

    async def scene(one: ProcessRunner) -> None:
        for n in range(2):
            running = await one.start(shell(f"echo {n}; echo {n}! >&2")._replace(stdout=out, stderr=err))
            assert await one.wait(running) == ExitStatus(code=0)

    play(scene, parent)
    assert (out.read_text(), err.read_text()) == ("0\n1\n", "0!\n1!\n")
    assert {out.stat().st_mode & 0o777, err.stat().st_mode & 0o777} == {0o600}


@pytest.mark.parametrize("sort", ["link", "pipe", "directory", "nowhere"])
def test_nobody_can_have_it_write_elsewhere(parent: str, tmp_path: Path, sort: str) -> None:
    out = tmp_path / "no" / "out" if sort == "nowhere" else tmp_path / "out"
    if sort == "link":
        out.symlink_to(tmp_path / "victim")
    elif sort == "pipe":
        os.mkfifo(out)
    elif sort == "directory":
        out.mkdir()

    async def scene(one: ProcessRunner) -> None:
        with pytest.raises(NotStarted, match=str(out)):
            await one.start(shell("echo hello")._replace(stdout=out))

    play(scene, parent)
    assert not (tmp_path / "victim").exists()


# -- sandbox -------------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@with_bwrap
def test_a_sandbox_lets_it_write_where_it_may_and_nowhere_else(parent: str, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    elsewhere = Path("/var/tmp") / f"remit-{os.getpid()}"

    async def scene(one: ProcessRunner) -> None:
        script = f"echo a > here; echo b > {other}/x; echo c > {elsewhere}; echo d > /tmp/private; cat /tmp/private"
        script += "; echo $$; ls /proc"
        order = shell(script)._replace(sandbox="bwrap", directory=mine, writable=(mine,), stdout=tmp_path / "out")
        assert await one.wait(await one.start(order)) == ExitStatus(code=0)

    play(scene, parent)
    assert (mine / "here").read_text() == "a\n"
    assert not (other / "x").exists()
    assert not elsewhere.exists()
    assert not Path("/tmp/private").exists()
    said = (tmp_path / "out").read_text().split("\n")
    assert said[0] == "d"
    assert int(said[1]) < 10, "it sees the numbers of its own space"
    assert sum(word.isdigit() for word in said[2:]) < 5


@with_bwrap
def test_a_sandbox_shows_nothing_of_what_is_hidden_but_its_own(parent: str, tmp_path: Path) -> None:
    """The agent's directory has its token, its keeper's socket and everybody's rooms; as root, work could open them all."""

    with TemporaryDirectory(dir="/var/tmp") as there, socket.socket(socket.AF_UNIX) as keeper:  # /tmp is covered anyway
        mine = Path(there, "work", "mine")
        mine.mkdir(parents=True)
        Path(there, "work", "others").mkdir()
        Path(there, "token").write_text("a token")
        keeper.bind(str(Path(there, "keeper.sock")))
        script = f"cd {there}; find . | sort; touch x || echo no; echo y > work/mine/y && cat work/mine/y"
        order = shell(script)._replace(sandbox="bwrap", directory=mine, writable=(mine,), hidden=(Path(there),))

        async def scene(one: ProcessRunner) -> None:
            assert (await one.wait(await one.start(order._replace(stdout=tmp_path / "out")))).code == 0

        play(scene, parent)
    assert (tmp_path / "out").read_text().split() == [".", "./work", "./work/mine", "no", "y"]


@with_bwrap
@pytest.mark.parametrize("group", ["", "boxed"])
def test_a_sandbox_ends_gently_and_tells_how_and_a_deaf_one_is_killed(grouped: str, tmp_path: Path, group: str) -> None:
    async def scene(one: ProcessRunner) -> None:
        gentle = f"trap 'sleep 0.2; exit 7' TERM; echo up > {tmp_path}/up; while :; do sleep 0.05; done"
        order = shell(gentle)._replace(sandbox="bwrap", writable=(tmp_path,), group=group)
        async with started(one, order) as running:
            await text(tmp_path / "up")
            await one.stop(running, grace_ms=10_000)
            assert await one.wait(running) == ExitStatus(code=7)
        (tmp_path / "up").unlink()
        deaf = order._replace(argv=(*order.argv[:2], gentle.replace("'sleep 0.2; exit 7'", "''")))
        async with started(one, deaf) as running:
            await text(tmp_path / "up")
            await one.stop(running, grace_ms=100)
            assert await one.wait(running) in (ExitStatus(signal=signal.SIGKILL), ExitStatus(code=128 + signal.SIGKILL))
        assert one.live_groups() == ()

    play(scene, grouped)


@with_bwrap
@as_root
def test_a_sandbox_of_another_user_is_that_users(parent: str, tmp_path: Path) -> None:
    async def scene(one: ProcessRunner) -> None:
        order = shell("id -u")._replace(sandbox="bwrap", user="nobody", stdout=tmp_path / "out", stderr=tmp_path / "err")
        assert await one.wait(await one.start(order)) == ExitStatus(code=0), (tmp_path / "err").read_text()

    play(scene, parent)
    assert (tmp_path / "out").read_text() == f"{pwd.getpwnam('nobody').pw_uid}\n"


@with_bwrap
def test_a_program_that_is_not_there_does_not_start_in_a_sandbox_either(parent: str, tmp_path: Path) -> None:
    async def scene(one: ProcessRunner) -> None:
        with pytest.raises(NotStarted, match="no-such-program"):
            await one.start(ProcessSpec(("no-such-program",), ENV, sandbox="bwrap"))
        with pytest.raises(NotStarted, match="sandbox"):
            await one.start(ProcessSpec(("/bin/true",), ENV, sandbox="bwrap", writable=(tmp_path / "no",)))

    play(scene, parent)


# -- many ----------------------------------------------------------------------------------------------------------------------


def test_hundreds_at_once_are_waited_for_and_none_is_left_as_a_zombie(grouped: str) -> None:
    async def scene(one: ProcessRunner) -> None:
        runs = [await one.start(ProcessSpec(("/bin/sleep", "0.3"), group=f"many-{n}")) for n in range(200)]
        ends = await asyncio.gather(*(one.wait(running) for running in runs))
        assert ends == [ExitStatus(code=0)] * 200
        assert not [running for running in runs if listed(running.pid)]
        assert one.live_groups() == ()

    play(scene, grouped)
