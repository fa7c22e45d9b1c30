"""What goes on when an agent or its keeper is killed, stopped or stalled? Real processes, by the commands that people use."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import pytest

from remit.agent.keeper.protocol import is_locked
from remit.agent.setup import build_secret_files
from remit.world.files.disk import FileDisk
from tests.integration.agent.control_plane import (
    BEAT_MS,
    REMIT,
    SLOW_MS,
    TEMPO,
    AgentProcess,
    Scope,
    fence,
    forever,
    gone,
    lines,
    play,
    shell,
    until,
)

SERVICE = {"type": "service", "replicas": 1}
FENCE_MS = 1_500
LONG_MS = 4_000
"""Longer than a lease: the node changes hands before its work is surely gone."""


async def two_of_a_kind(scope: Scope, fence_ms: int = FENCE_MS) -> tuple[Path, Path]:
    """A fenced job and an eager service, both running; where each says that it began."""
    job, web = scope.root / "job", scope.root / "web"
    await scope.run("job", *forever(job), spec=fence(fence_ms))
    await scope.run("web", *forever(web), spec=SERVICE)
    await scope.until("job-0", "running")
    await scope.until("web-0", "serving")
    return job, web


async def pid_in(path: Path) -> int:
    """Of whoever began last; it says so a moment after it is known to run."""
    await until(lambda: bool(lines(path)))
    return int(lines(path)[-1].split()[0])


@pytest.mark.smoke
def test_an_agent_that_was_killed_finds_its_work_again_and_starts_nothing_twice() -> None:
    """F36 F37."""

    async def scene(scope: Scope) -> None:
        first = scope.agent()
        job, web = await two_of_a_kind(scope, fence_ms=60_000)
        pids = await pid_in(job), await pid_in(web)
        keeper = first.keeper_pid
        first.kill()
        await asyncio.sleep(0.3)
        second = scope.agent()
        await until(lambda: len(second.kept()) == 2)
        await asyncio.sleep(4 * BEAT_MS / 1000)
        # What was ordered before is told again, whole: by a server that comes back.
        await scope.close()
        await asyncio.sleep(0.2)
        await scope.open()

        async def both_beat() -> bool:
            return {run.pid for run in (await scope.runs()).values()} == set(pids)

        await until(both_beat)
        assert second.keeper_pid == keeper, "it was not killed, so it goes on"
        assert (len(lines(job)), len(lines(web))) == (1, 1)
        for name in ("job-0", "web-0"):
            found = await scope.replica(name)
            assert found is not None
            assert found.status.attempt == 1
        assert not gone(pids[0])
        assert not gone(pids[1])

    play(scene, SLOW_MS)


@pytest.mark.smoke
def test_an_agent_that_is_stopped_for_ever_is_fenced_by_its_keeper_and_eager_work_runs_on() -> None:
    """F18 F34."""

    async def scene(scope: Scope) -> None:
        agent = scope.agent()
        job, web = await two_of_a_kind(scope)
        pid = await pid_in(job)
        agent.signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        await until(lambda: gone(pid))
        passed_s = time.monotonic() - stopped_s
        assert passed_s < (FENCE_MS + TEMPO.kill_grace_ms) / 1000 + 2
        assert passed_s > (FENCE_MS - 3 * BEAT_MS) / 1000
        await until(lambda: agent.kept()["job-0"].fenced)  # it is written down a moment after the end
        assert not gone(await pid_in(web)), "whoever would rather run twice than not at all is not ended"
        agent.signal(signal.SIGCONT)
        found = await scope.until("job-0", "failed", "released", "pending")
        assert found.status.attempt >= 1
        assert len(lines(web)) == 1

    play(scene)


def test_an_agent_whose_event_loop_stands_still_is_fenced_by_its_keeper() -> None:
    """F18."""

    async def scene(scope: Scope) -> None:
        stall = scope.root / "stall"
        agent = scope.agent(program=(sys.executable, "-m", "tests.integration.agent.stalling_agent_main", str(stall)))
        job, web = await two_of_a_kind(scope)
        pid = await pid_in(job)
        stall.touch()
        await until(lambda: gone(pid), FENCE_MS / 1000 + 3)
        assert agent.process.poll() is None
        assert not gone(await pid_in(web))

    play(scene)


def test_with_a_killed_keeper_dies_what_must_never_run_twice_and_the_next_one_adopts_the_rest() -> None:
    """F36."""

    async def scene(scope: Scope) -> None:
        agent = scope.agent()
        tree, web = scope.root / "tree", scope.root / "web"
        script = f"setsid sh -c 'echo $$ >> {tree}; exec sleep 600' & echo $$ >> {tree}; wait"
        await scope.run("job", *shell(script), spec=fence(60_000))
        await scope.run("web", *forever(web), spec=SERVICE)
        await scope.until("job-0", "running")
        await scope.until("web-0", "serving")
        await until(lambda: len(lines(tree)) == 2)
        pids, pid, keeper = [int(line) for line in lines(tree)], await pid_in(web), agent.keeper_pid
        os.kill(keeper, signal.SIGKILL)
        await until(lambda: all(gone(one) for one in pids))
        await until(lambda: agent.directory.keeper_pid.exists() and agent.keeper_pid != keeper)
        found = await scope.until("job-0", "failed", "released")
        assert found.status.result == "gone"
        await until(lambda: "web-0" in agent.kept())
        await asyncio.sleep(3 * BEAT_MS / 1000)
        assert not gone(pid)
        assert len(lines(web)) == 1
        state = await scope.until("web-0", "serving")
        assert state.status.attempt == 1
        # And it is watched: its end is seen although it is nobody's child any more.
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(lines(web)) == 2)

    play(scene, SLOW_MS)


def test_a_keeper_that_is_stopped_is_not_doubled_and_holds_up_no_beat() -> None:
    """F18."""

    async def scene(scope: Scope) -> None:
        agent = scope.agent()
        web = scope.root / "web"
        await scope.run("web", *forever(web), spec=SERVICE)
        await scope.until("web-0", "serving")
        keeper = agent.keeper_pid
        os.kill(keeper, signal.SIGSTOP)
        await asyncio.sleep(2 * TEMPO.suspect_ms / 1000)
        row = await scope.store.get("node/n1")
        assert row is not None
        assert b'"health":"ready"' in row.value
        await scope.run("more", *forever(scope.root / "more"), spec=SERVICE)
        await scope.until("more-0", "bound")
        await asyncio.sleep(4 * BEAT_MS / 1000)
        more = await scope.replica("more-0")
        assert more is not None
        assert more.status.phase == "bound", "nothing is said to start that nobody could start"
        assert "the keeper does not answer" in agent.said()
        assert agent.keeper_pid == keeper
        os.kill(keeper, signal.SIGCONT)
        await scope.until("more-0", "serving")
        assert agent.keeper_pid == keeper
        assert len(lines(web)) == 1

    play(scene)


def test_whoever_is_killed_together_with_its_keeper_finds_what_is_left_and_says_what_is_not() -> None:
    """F36."""

    async def scene(scope: Scope) -> None:
        agent = scope.agent()
        job, web = await two_of_a_kind(scope, fence_ms=60_000)
        pid, fenced = await pid_in(web), await pid_in(job)
        agent.kill()
        os.kill(agent.keeper_pid, signal.SIGKILL)
        await until(lambda: gone(fenced))
        assert not gone(pid)
        scope.agent()
        found = await scope.until("job-0", "failed", "released")
        assert found.status.result == "gone"
        await until(lambda: _beats(scope, pid))
        assert len(lines(web)) == 1

    play(scene, SLOW_MS)


async def _beats(scope: Scope, pid: int) -> bool:
    return pid in {run.pid for run in (await scope.runs()).values()}


def test_a_second_agent_on_a_directory_says_so_and_work_outlives_an_agent_that_was_asked_to_end() -> None:
    async def scene(scope: Scope) -> None:
        agent = scope.agent()
        web = scope.root / "web"
        await scope.run("web", *forever(web), spec={**SERVICE, "replicas": 2})
        await scope.until("web-1", "serving")
        other = scope.agent(name="n2")
        assert other.process.wait(10) == 1
        assert f"another agent (process {agent.process.pid}) runs on" in other.said()
        early = _remit("keeper", "--end", "--data", str(agent.directory.root))
        assert early.returncode == 1
        assert "an agent runs on" in early.stderr
        keeper, pids = agent.keeper_pid, [int(line.split()[0]) for line in lines(web)]
        agent.signal(signal.SIGTERM)
        assert agent.process.wait(10) == 0
        assert "2 replicas and the keeper continue" in agent.said()
        assert not any(gone(pid) for pid in (*pids, keeper))
        kept = _keeps_something_in_memory(agent)
        done = await asyncio.to_thread(_remit, "keeper", "--end", "--data", str(agent.directory.root))
        assert done.returncode == 0, done.stderr
        assert all(gone(pid) for pid in (*pids, keeper)) and not kept.exists()
        kept.mkdir()  # empty, as one of an earlier version may have left it
        assert "no keeper runs" in _remit("keeper", "--end", "--data", str(agent.directory.root)).stdout
        assert not kept.exists()
        again = scope.agent("--end-work")
        await until(lambda: len(lines(web)) == 4)  # services come again where they were
        keeper, pids = again.keeper_pid, [int(line.split()[0]) for line in lines(web)[2:]]
        assert _keeps_something_in_memory(again) == kept
        again.signal(signal.SIGTERM)
        assert again.process.wait(15) == 0
        assert all(gone(pid) for pid in (*pids, keeper)) and not kept.exists()

    play(scene, SLOW_MS)


def _keeps_something_in_memory(agent: AgentProcess) -> Path:
    """As for work that reads a secret; the directory of all such."""
    return build_secret_files(agent.directory).put("left.1", {PurePosixPath("key"): b"secret"}, "").parent


def _remit(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([REMIT, *words], capture_output=True, text=True, check=False, timeout=30)


def test_what_ran_under_a_name_that_is_not_hosted_any_more_is_ended() -> None:
    async def scene(scope: Scope) -> None:
        agent = scope.agent(name="old")
        job, web = await two_of_a_kind(scope)
        pids = await pid_in(job), await pid_in(web)
        agent.kill()
        scope.agent(name="new")
        await until(lambda: all(gone(pid) for pid in pids))
        assert "node old is no longer hosted" in agent.said()

    play(scene)


def test_an_agent_without_the_data_of_the_one_before_says_that_nothing_runs_only_when_that_is_sure() -> None:
    """F34."""

    async def scene(scope: Scope) -> None:
        agent = scope.agent(data="a")
        job = scope.root / "job"
        await scope.run("job", *forever(job), spec=fence(LONG_MS))
        await scope.until("job-0", "running")
        pid = await pid_in(job)
        agent.kill()
        killed_s = time.monotonic()
        other = scope.agent(data="b")  # the same node; but its keeper knows nothing of the job
        gone_s = none_s = 0.0
        for _ in range(1_000):
            gone_s = gone_s or (time.monotonic() if gone(pid) else 0.0)
            found = await scope.replica("job-0")
            if found is None or found.status.phase in ("failed", "released", "pending"):
                none_s = time.monotonic()
                break
            await asyncio.sleep(0.01)
        assert gone_s, "the first keeper fences it"
        assert none_s > gone_s, "nobody says that it is gone while it runs"
        assert none_s - killed_s > LONG_MS / 1000 - 0.5
        assert "is held by" in other.said()

    play(scene)


def test_a_scope_whose_store_is_another_one_is_obeyed_and_what_it_does_not_know_ends() -> None:
    """A new store begins at its first revision again."""

    async def scene(scope: Scope) -> None:
        agent = scope.agent()
        job, web = await two_of_a_kind(scope)
        pids, port = (await pid_in(job), await pid_in(web)), scope.url.rsplit(":", 1)[1]
        await scope.close()

        async def anew(other: Scope) -> None:
            other._port = int(port)
            await other.close()
            await other.open()
            await until(lambda: all(gone(pid) for pid in pids), 15)
            await other.run("next", *forever(scope.root / "next"), spec=SERVICE)
            await other.until("next-0", "serving")
            assert agent.process.poll() is None

        from tests.integration.agent.control_plane import scope as made

        async with made(SLOW_MS) as other:
            await anew(other)

    play(scene, SLOW_MS)


def test_a_token_that_is_wrong_and_a_beat_that_is_another_are_told_with_their_cure(tmp_path: Path) -> None:
    async def scene(scope: Scope) -> None:
        agent = scope.agent("--beat", "7s")
        assert await asyncio.to_thread(agent.process.wait, 10) == 1
        assert "leave out --beat" in agent.said()
        deep = scope.agent(data="d" * 100)
        assert await asyncio.to_thread(deep.process.wait, 10) == 1
        assert "use a shorter --data" in deep.said()
        wrong = scope.agent(data="w", token="wrong")
        await until(lambda: "the token is not right" in wrong.said())

    play(scene)


def test_work_of_an_agent_and_a_keeper_that_were_killed_can_be_ended_and_none_of_it_is_left() -> None:
    async def scene(scope: Scope) -> None:
        agent, web = scope.agent(), scope.root / "web"
        await scope.run("web", *forever(web), spec={**SERVICE, "replicas": 2})
        await scope.until("web-1", "serving")
        keeper, pids = agent.keeper_pid, [int(line.split()[0]) for line in lines(web)]
        agent.kill()
        assert not gone(keeper), agent.said()
        os.kill(keeper, signal.SIGKILL)
        assert not any(gone(pid) for pid in pids)
        kept = _keeps_something_in_memory(agent)
        done = await asyncio.to_thread(_remit, "keeper", "--end", "--data", str(agent.directory.root))
        assert done.returncode == 0, done.stderr
        assert "replicas left by an earlier one are stopped" in done.stdout
        assert all(gone(pid) for pid in pids) and not kept.exists()
        again = _remit("keeper", "--end", "--data", str(agent.directory.root))
        assert again.stdout == f"no keeper runs on {agent.directory.root}\n"

    play(scene, SLOW_MS)


def test_an_agent_and_a_keeper_that_were_killed_come_back_on_a_full_disk() -> None:
    """F14: what runs there is not lost for want of a file that only people read."""

    async def scene(scope: Scope) -> None:
        first, web = scope.agent(), scope.root / "web"
        await scope.run("web", *forever(web), spec=SERVICE)
        await scope.until("web-0", "serving")
        run, pid = first.directory.run, await pid_in(web)
        keeper = first.keeper_pid
        first.kill()
        os.kill(keeper, signal.SIGKILL)
        for name in ("agent.pid", "keeper.pid"):
            (run / name).unlink()
            (run / f".{name}.writing").mkdir()  # as a full disk does: nothing new can be written under that name
        second = scope.agent()
        await until(lambda: is_locked(FileDisk(), first.directory.keeper_lock))
        await scope.until("web-0", "serving")
        await asyncio.sleep(4 * BEAT_MS / 1000)
        assert second.process.poll() is None, second.said()
        assert not (run / "agent.pid").exists()
        assert not gone(pid)
        assert len(lines(web)) == 1

    play(scene, SLOW_MS)
