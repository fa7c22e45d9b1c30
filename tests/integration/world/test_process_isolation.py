"""Real processes run as specified: user, streams, limits and sandbox, and they end with their whole tree."""

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


def run(scenario: Scene, parent: str) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario(ProcessRunner(BootClock(), parent=parent))

    asyncio.run(bounded())


def shell(script: str) -> ProcessSpec:
    return ProcessSpec(("/bin/sh", "-c", script), ENV)


def python(script: str) -> ProcessSpec:
    return ProcessSpec((sys.executable, "-c", script), ENV)


async def text(path: Path) -> str:
    while not (path.exists() and path.read_text().endswith("\n")):  # noqa: ASYNC110, ASYNC240 - no event to wait for
        await asyncio.sleep(0.01)
    return path.read_text()  # noqa: ASYNC240


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def has_exited(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@asynccontextmanager
async def started(one: ProcessRunner, order: ProcessSpec) -> AsyncIterator[ProcessHandle]:
    """The process is stopped whatever the test finds."""
    running = await one.start(order)
    try:
        yield running
    finally:
        await one.stop(running, grace_ms=0)


# -- process tree --------------------------------------------------------------------------------------------------------------

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
"""A classic daemon: forked twice, in its own session, its parent gone, ignoring SIGTERM."""


@pytest.mark.smoke
@pytest.mark.parametrize("adopted", [False, True], ids=["own", "adopted"])
def test_daemonised_process_ends_with_its_group(grouped: str, tmp_path: Path, adopted: bool) -> None:
    async def scenario(one: ProcessRunner) -> None:
        order = python(ESCAPE)._replace(group="daemon")
        async with started(one, order._replace(argv=(*order.argv, str(tmp_path / "pid")))) as running:
            pid = int(await text(tmp_path / "pid"))
            assert os.getsid(pid) != running.pid
            assert os.getpgid(pid) != running.pid
            stopper = ProcessRunner(BootClock(), parent=grouped) if adopted else one
            await stopper.stop(ProcessHandle(*running), grace_ms=100)
            assert has_exited(pid)
            assert has_exited(running.pid)
            assert stopper.live_groups() == ()

    run(scenario, grouped)


def test_orphans_end_even_if_leader_was_reaped_long_ago(grouped: str, tmp_path: Path) -> None:
    async def scenario(one: ProcessRunner) -> None:
        script = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' & while ! test -s {tmp_path}/pid; do :; done"
        async with started(one, shell(script)._replace(group="left")) as running:
            assert await one.wait(running) == ExitStatus(code=0)
            pid = int(await text(tmp_path / "pid"))
            assert not exists(running.pid), "the leader must not remain as a zombie"
            assert not has_exited(pid)
            assert one.live_groups() == ("left",)
            await one.stop(running, grace_ms=5_000)
            assert has_exited(pid)
            assert one.live_groups() == ()

    run(scenario, grouped)


def test_descendants_in_other_sessions_end_without_cgroup_while_parents_live(tmp_path: Path) -> None:
    async def scenario(one: ProcessRunner) -> None:
        script = f"trap '' TERM; setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' & sleep 600"
        async with started(one, shell(script)) as running:
            pid = int(await text(tmp_path / "pid"))
            assert os.getpgid(pid) != running.pid
            await one.stop(running, grace_ms=100)
            assert has_exited(pid)

    run(scenario, "unused")


def v1_hierarchies(parent: str) -> list[CgroupHierarchy]:
    """The hierarchies of a machine with only version 1, which has no atomic kill."""
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text())
    tries = [try_hierarchy(mount, parent) for mount in mounts if mount.version == 1 and mount.controllers]
    return [one.hierarchy for one in tries if isinstance(one.hierarchy, CgroupV1)]


def test_fork_bomb_is_killed_without_atomic_kill(parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchies = v1_hierarchies(parent)
    if not any("pids" in one.controllers for one in hierarchies):
        pytest.skip("no version 1 that counts processes is mounted here, or it cannot be used")
    monkeypatch.setattr(module, "find_cgroups", lambda _: Cgroups(hierarchies))

    async def scenario(one: ProcessRunner) -> None:
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

    run(scenario, parent)


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
def test_work_tied_to_starter_dies_with_it_and_other_work_does_not(grouped: str, user: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", KEEPER, grouped, user]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as keeper:
        assert keeper.stdout is not None
        lines = [keeper.stdout.readline().split() for _ in range(2)]
        keeper.kill()
    tied, free = (ProcessHandle(int(pid), began, group) for pid, began, group in lines)

    async def scenario(one: ProcessRunner) -> None:
        assert await one.wait(tied) == ExitStatus()
        await asyncio.sleep(0.1)
        assert one.is_alive(free)
        assert one.live_groups() == ("tied-False",)
        await one.stop(free, grace_ms=1_000)

    run(scenario, grouped)


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


@pytest.mark.parametrize("killed", ["", "reaper"])
def test_children_of_tied_work_die_with_killed_starter(grouped: str, killed: str) -> None:
    """F36: an agent and its keeper are killed and not restarted."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", STARTER, grouped, TREE, killed]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as starter:
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

    async def scenario(one: ProcessRunner) -> None:
        while groups.members("tree-True"):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.02)
        assert len(groups.members("tree-False")) == 2
        await one.stop(free, grace_ms=1_000)
        assert one.live_groups() == ()

    run(scenario, grouped)


# -- limits and usage ----------------------------------------------------------------------------------------------------------


def test_memory_of_child_counts_and_oom_is_reported(grouped: str) -> None:
    async def scenario(one: ProcessRunner) -> None:
        script = f"{sys.executable} -c 'held = bytearray(b\"x\") * (64 << 20)'; exit 5"
        async with started(one, shell(script)._replace(group="oom", limits=Limits(memory_bytes=24 * MIB))) as running:
            ended = await one.wait(running)
            assert ended.oom
            assert ended.code == 5 or ended.signal == signal.SIGKILL  # version 2 kills the whole group

    run(scenario, grouped)


@pytest.mark.smoke
def test_limits_are_set_and_cpu_time_includes_ended_children(grouped: str) -> None:
    async def scenario(one: ProcessRunner) -> None:
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

    run(scenario, grouped)


def test_usage_without_cgroup_is_summed_over_tree() -> None:
    async def scenario(one: ProcessRunner) -> None:
        work = 'held = bytearray(b"x") * (32 << 20); sum(range(3_000_000)); import time; time.sleep(600)'
        async with started(one, shell(f"{sys.executable} -c '{work}'; :")) as running:
            while (now := one.usage(running)).memory_bytes < 32 * MIB or now.cpu_ms < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert now.pids == 2

    run(scenario, "unused")


# -- user and streams ----------------------------------------------------------------------------------------------------------


@as_root
def test_process_of_other_user_has_no_own_groups_or_capabilities(parent: str, tmp_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    output = tmp_path / "said"

    async def scenario(one: ProcessRunner) -> None:
        script = "grep -E '^(Uid|Gid|Groups|CapEff):' /proc/self/status; echo again >> /dev/stdout"
        order = shell(script)._replace(user="nobody", stdout=output)
        assert await one.wait(await one.start(order)) == ExitStatus(code=0)

    run(scenario, parent)
    uid, gid = nobody.pw_uid, nobody.pw_gid
    fields = {line.split()[0]: line.split()[1:] for line in output.read_text().splitlines()}
    assert fields["Uid:"] == [str(uid)] * 4
    assert fields["Gid:"] == [str(gid)] * 4
    assert fields["Groups:"] == [str(one) for one in os.getgrouplist("nobody", gid)]
    assert int(fields["CapEff:"][0], 16) == 0
    assert "again" in fields


def test_output_is_appended_to_private_files(parent: str, tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"

    async def scenario(one: ProcessRunner) -> None:
        for n in range(2):
            running = await one.start(shell(f"echo {n}; echo {n}! >&2")._replace(stdout=out, stderr=err))
            assert await one.wait(running) == ExitStatus(code=0)

    run(scenario, parent)
    assert (out.read_text(), err.read_text()) == ("0\n1\n", "0!\n1!\n")
    assert {out.stat().st_mode & 0o777, err.stat().st_mode & 0o777} == {0o600}


@pytest.mark.parametrize("sort", ["link", "pipe", "directory", "nowhere"])
def test_output_file_must_be_regular_file(parent: str, tmp_path: Path, sort: str) -> None:
    out = tmp_path / "no" / "out" if sort == "nowhere" else tmp_path / "out"
    if sort == "link":
        out.symlink_to(tmp_path / "victim")
    elif sort == "pipe":
        os.mkfifo(out)
    elif sort == "directory":
        out.mkdir()

    async def scenario(one: ProcessRunner) -> None:
        with pytest.raises(NotStarted, match=str(out)):
            await one.start(shell("echo hello")._replace(stdout=out))

    run(scenario, parent)
    assert not (tmp_path / "victim").exists()


# -- sandbox -------------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@with_bwrap
def test_sandboxed_process_writes_only_where_permitted(parent: str, tmp_path: Path) -> None:
    own, other = tmp_path / "mine", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    elsewhere = Path("/var/tmp") / f"remit-{os.getpid()}"

    async def scenario(one: ProcessRunner) -> None:
        script = f"echo a > here; echo b > {other}/x; echo c > {elsewhere}; echo d > /tmp/private; cat /tmp/private"
        script += "; echo $$; ls /proc"
        order = shell(script)._replace(sandbox="bwrap", directory=own, writable=(own,), stdout=tmp_path / "out")
        assert await one.wait(await one.start(order)) == ExitStatus(code=0)

    run(scenario, parent)
    assert (own / "here").read_text() == "a\n"
    assert not (other / "x").exists()
    assert not elsewhere.exists()
    assert not Path("/tmp/private").exists()
    output = (tmp_path / "out").read_text().split("\n")
    assert output[0] == "d"
    assert int(output[1]) < 10, "pids are those of its own namespace"
    assert sum(name_.isdigit() for name_ in output[2:]) < 5


@with_bwrap
def test_sandbox_hides_agent_directory_except_own_work(parent: str, tmp_path: Path) -> None:
    """The agent's directory has its token, its keeper's socket and all work directories; as root, work could open them."""

    with TemporaryDirectory(dir="/var/tmp") as agent_dir, socket.socket(socket.AF_UNIX) as keeper:  # /tmp is covered anyway
        own = Path(agent_dir, "work", "mine")
        own.mkdir(parents=True)
        Path(agent_dir, "work", "others").mkdir()
        Path(agent_dir, "token").write_text("a token")
        keeper.bind(str(Path(agent_dir, "keeper.sock")))
        script = f"cd {agent_dir}; find . | sort; touch x || echo no; echo y > work/mine/y && cat work/mine/y"
        order = shell(script)._replace(sandbox="bwrap", directory=own, writable=(own,), hidden=(Path(agent_dir),))

        async def scenario(one: ProcessRunner) -> None:
            assert (await one.wait(await one.start(order._replace(stdout=tmp_path / "out")))).code == 0

        run(scenario, parent)
    assert (tmp_path / "out").read_text().split() == [".", "./work", "./work/mine", "no", "y"]


@with_bwrap
@pytest.mark.parametrize("group", ["", "boxed"])
def test_sandboxed_process_stops_gracefully_or_is_killed(grouped: str, tmp_path: Path, group: str) -> None:
    async def scenario(one: ProcessRunner) -> None:
        gentle = f"trap 'sleep 0.2; exit 7' TERM; echo up > {tmp_path}/up; while :; do sleep 0.05; done"
        order = shell(gentle)._replace(sandbox="bwrap", writable=(tmp_path,), group=group)
        async with started(one, order) as running:
            await text(tmp_path / "up")
            await one.stop(running, grace_ms=10_000)
            assert await one.wait(running) == ExitStatus(code=7)
        (tmp_path / "up").unlink()
        ignoring = order._replace(argv=(*order.argv[:2], gentle.replace("'sleep 0.2; exit 7'", "''")))
        async with started(one, ignoring) as running:
            await text(tmp_path / "up")
            await one.stop(running, grace_ms=100)
            assert await one.wait(running) in (ExitStatus(signal=signal.SIGKILL), ExitStatus(code=128 + signal.SIGKILL))
        assert one.live_groups() == ()

    run(scenario, grouped)


@with_bwrap
@as_root
def test_sandbox_runs_as_specified_user(parent: str, tmp_path: Path) -> None:
    async def scenario(one: ProcessRunner) -> None:
        order = shell("id -u")._replace(sandbox="bwrap", user="nobody", stdout=tmp_path / "out", stderr=tmp_path / "err")
        assert await one.wait(await one.start(order)) == ExitStatus(code=0), (tmp_path / "err").read_text()

    run(scenario, parent)
    assert (tmp_path / "out").read_text() == f"{pwd.getpwnam('nobody').pw_uid}\n"


@with_bwrap
def test_missing_program_is_reported_in_sandbox(parent: str, tmp_path: Path) -> None:
    async def scenario(one: ProcessRunner) -> None:
        with pytest.raises(NotStarted, match="no-such-program"):
            await one.start(ProcessSpec(("no-such-program",), ENV, sandbox="bwrap"))
        with pytest.raises(NotStarted, match="sandbox"):
            await one.start(ProcessSpec(("/bin/true",), ENV, sandbox="bwrap", writable=(tmp_path / "no",)))

    run(scenario, parent)


# -- many processes ------------------------------------------------------------------------------------------------------------


def test_hundreds_of_processes_are_reaped(grouped: str) -> None:
    async def scenario(one: ProcessRunner) -> None:
        runs = [await one.start(ProcessSpec(("/bin/sleep", "0.3"), group=f"many-{n}")) for n in range(200)]
        ends = await asyncio.gather(*(one.wait(running) for running in runs))
        assert ends == [ExitStatus(code=0)] * 200
        assert not [running for running in runs if exists(running.pid)]
        assert one.live_groups() == ()

    run(scenario, grouped)
