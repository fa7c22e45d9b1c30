"""Agents and keepers that are killed, stopped or stalled. Real processes, started by the commands that operators use."""

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
    TIMING,
    AgentProcess,
    Scope,
    fence,
    has_exited,
    lines,
    record_and_sleep,
    run_scenario,
    shell,
    until,
)

SERVICE = {"type": "service", "replicas": 1}
FENCE_MS = 1_500
LONG_MS = 4_000
"""Longer than a lease: the node changes hands before its work is surely gone."""


async def run_job_and_service(scope: Scope, fence_ms: int = FENCE_MS) -> tuple[Path, Path]:
    """A fenced job and an eager service, both running; where each says that it began."""
    job, web = scope.root / "job", scope.root / "web"
    await scope.run("job", *record_and_sleep(job), spec=fence(fence_ms))
    await scope.run("web", *record_and_sleep(web), spec=SERVICE)
    await scope.until("job-0", "running")
    await scope.until("web-0", "serving")
    return job, web


async def pid_in(path: Path) -> int:
    """Pid of the latest start, which is recorded shortly after the process runs."""
    await until(lambda: bool(lines(path)))
    return int(lines(path)[-1].split()[0])


@pytest.mark.smoke
def test_killed_agent_finds_its_work_and_starts_nothing_twice() -> None:
    """F36 F37."""

    async def scenario(scope: Scope) -> None:
        first = scope.agent()
        job, web = await run_job_and_service(scope, fence_ms=60_000)
        pids = await pid_in(job), await pid_in(web)
        keeper = first.keeper_pid
        first.kill()
        await asyncio.sleep(0.3)
        second = scope.agent()
        await until(lambda: len(second.journal()) == 2)
        await asyncio.sleep(4 * BEAT_MS / 1000)
        # A server that comes back sends the assignments whole.
        await scope.close()
        await asyncio.sleep(0.2)
        await scope.open()

        async def both_reported() -> bool:
            return {run.pid for run in (await scope.runs()).values()} == set(pids)

        await until(both_reported)
        assert second.keeper_pid == keeper, "the keeper was not killed"
        assert (len(lines(job)), len(lines(web))) == (1, 1)
        for name in ("job-0", "web-0"):
            found = await scope.replica(name)
            assert found is not None
            assert found.status.attempt == 1
        assert not has_exited(pids[0])
        assert not has_exited(pids[1])

    run_scenario(scenario, SLOW_MS)


@pytest.mark.smoke
def test_stopped_agent_is_fenced_by_keeper_while_eager_work_runs_on() -> None:
    """F18 F34."""

    async def scenario(scope: Scope) -> None:
        agent = scope.agent()
        job, web = await run_job_and_service(scope)
        pid = await pid_in(job)
        agent.signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        await until(lambda: has_exited(pid))
        passed_s = time.monotonic() - stopped_s
        assert passed_s < (FENCE_MS + TIMING.kill_grace_ms) / 1000 + 2
        assert passed_s > (FENCE_MS - 3 * BEAT_MS) / 1000
        await until(lambda: agent.journal()["job-0"].fenced)  # it is recorded shortly after the process ends
        assert not has_exited(await pid_in(web)), "eager work is not stopped"
        agent.signal(signal.SIGCONT)
        found = await scope.until("job-0", "failed", "released", "pending")
        assert found.status.attempt >= 1
        assert len(lines(web)) == 1

    run_scenario(scenario)


def test_agent_with_blocked_event_loop_is_fenced_by_keeper() -> None:
    """F18."""

    async def scenario(scope: Scope) -> None:
        stall = scope.root / "stall"
        agent = scope.agent(program=(sys.executable, "-m", "tests.integration.agent.stalling_agent_main", str(stall)))
        job, web = await run_job_and_service(scope)
        pid = await pid_in(job)
        stall.touch()
        await until(lambda: has_exited(pid), FENCE_MS / 1000 + 3)
        assert agent.process.poll() is None
        assert not has_exited(await pid_in(web))

    run_scenario(scenario)


def test_killed_keeper_takes_fenced_work_along_and_successor_adopts_the_rest() -> None:
    """F36."""

    async def scenario(scope: Scope) -> None:
        agent = scope.agent()
        tree, web = scope.root / "tree", scope.root / "web"
        script = f"setsid sh -c 'echo $$ >> {tree}; exec sleep 600' & echo $$ >> {tree}; wait"
        await scope.run("job", *shell(script), spec=fence(60_000))
        await scope.run("web", *record_and_sleep(web), spec=SERVICE)
        await scope.until("job-0", "running")
        await scope.until("web-0", "serving")
        await until(lambda: len(lines(tree)) == 2)
        pids, pid, keeper = [int(line) for line in lines(tree)], await pid_in(web), agent.keeper_pid
        os.kill(keeper, signal.SIGKILL)
        await until(lambda: all(has_exited(one) for one in pids))
        await until(lambda: agent.directory.keeper_pid.exists() and agent.keeper_pid != keeper)
        found = await scope.until("job-0", "failed", "released")
        assert found.status.result == "gone"
        await until(lambda: "web-0" in agent.journal())
        await asyncio.sleep(3 * BEAT_MS / 1000)
        assert not has_exited(pid)
        assert len(lines(web)) == 1
        state = await scope.until("web-0", "serving")
        assert state.status.attempt == 1
        # And it is watched: its end is noticed although it is no child of the keeper.
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(lines(web)) == 2)

    run_scenario(scenario, SLOW_MS)


def test_stopped_keeper_is_not_duplicated_and_delays_no_heartbeat() -> None:
    """F18."""

    async def scenario(scope: Scope) -> None:
        agent = scope.agent()
        web = scope.root / "web"
        await scope.run("web", *record_and_sleep(web), spec=SERVICE)
        await scope.until("web-0", "serving")
        keeper = agent.keeper_pid
        os.kill(keeper, signal.SIGSTOP)
        await asyncio.sleep(2 * TIMING.suspect_ms / 1000)
        row = await scope.store.get("node/n1")
        assert row is not None
        assert b'"health":"ready"' in row.value
        await scope.run("more", *record_and_sleep(scope.root / "more"), spec=SERVICE)
        await scope.until("more-0", "bound")
        await asyncio.sleep(4 * BEAT_MS / 1000)
        more = await scope.replica("more-0")
        assert more is not None
        assert more.status.phase == "bound", "nothing is reported starting while the keeper is stopped"
        assert "the keeper does not answer" in agent.log_text()
        assert agent.keeper_pid == keeper
        os.kill(keeper, signal.SIGCONT)
        await scope.until("more-0", "serving")
        assert agent.keeper_pid == keeper
        assert len(lines(web)) == 1

    run_scenario(scenario)


def test_agent_killed_with_its_keeper_finds_remaining_work_and_reports_lost() -> None:
    """F36."""

    async def scenario(scope: Scope) -> None:
        agent = scope.agent()
        job, web = await run_job_and_service(scope, fence_ms=60_000)
        pid, fenced = await pid_in(web), await pid_in(job)
        agent.kill()
        os.kill(agent.keeper_pid, signal.SIGKILL)
        await until(lambda: has_exited(fenced))
        assert not has_exited(pid)
        scope.agent()
        found = await scope.until("job-0", "failed", "released")
        assert found.status.result == "gone"
        await until(lambda: _is_reported(scope, pid))
        assert len(lines(web)) == 1

    run_scenario(scenario, SLOW_MS)


async def _is_reported(scope: Scope, pid: int) -> bool:
    return pid in {run.pid for run in (await scope.runs()).values()}


def test_second_agent_on_directory_exits_and_work_outlives_terminated_agent() -> None:
    async def scenario(scope: Scope) -> None:
        agent = scope.agent()
        web = scope.root / "web"
        await scope.run("web", *record_and_sleep(web), spec={**SERVICE, "replicas": 2})
        await scope.until("web-1", "serving")
        other = scope.agent(name="n2")
        assert other.process.wait(10) == 1
        assert f"another agent (process {agent.process.pid}) runs on" in other.log_text()
        early = _remit("keeper", "--end", "--data", str(agent.directory.root))
        assert early.returncode == 1
        assert "an agent runs on" in early.stderr
        keeper, pids = agent.keeper_pid, [int(line.split()[0]) for line in lines(web)]
        agent.signal(signal.SIGTERM)
        assert agent.process.wait(10) == 0
        assert "2 replicas and the keeper continue" in agent.log_text()
        assert not any(has_exited(pid) for pid in (*pids, keeper))
        secret_dir = _put_secret_file(agent)
        done = await asyncio.to_thread(_remit, "keeper", "--end", "--data", str(agent.directory.root))
        assert done.returncode == 0, done.stderr
        assert all(has_exited(pid) for pid in (*pids, keeper)) and not secret_dir.exists()
        secret_dir.mkdir()  # empty, as an earlier version may have left it
        assert "no keeper runs" in _remit("keeper", "--end", "--data", str(agent.directory.root)).stdout
        assert not secret_dir.exists()
        again = scope.agent("--end-work")
        await until(lambda: len(lines(web)) == 4)  # services restart where they were
        keeper, pids = again.keeper_pid, [int(line.split()[0]) for line in lines(web)[2:]]
        assert _put_secret_file(again) == secret_dir
        again.signal(signal.SIGTERM)
        assert again.process.wait(15) == 0
        assert all(has_exited(pid) for pid in (*pids, keeper)) and not secret_dir.exists()

    run_scenario(scenario, SLOW_MS)


def _put_secret_file(agent: AgentProcess) -> Path:
    """Put a secret file as for work that reads one; return the directory of all of them."""
    return build_secret_files(agent.directory).put("left.1", {PurePosixPath("key"): b"secret"}, "").parent


def _remit(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([REMIT, *words], capture_output=True, text=True, check=False, timeout=30)


def test_work_of_node_name_no_longer_hosted_is_ended() -> None:
    async def scenario(scope: Scope) -> None:
        agent = scope.agent(name="old")
        job, web = await run_job_and_service(scope)
        pids = await pid_in(job), await pid_in(web)
        agent.kill()
        scope.agent(name="new")
        await until(lambda: all(has_exited(pid) for pid in pids))
        assert "node old is no longer hosted" in agent.log_text()

    run_scenario(scenario)


def test_agent_without_predecessors_data_reports_work_gone_only_when_sure() -> None:
    """F34."""

    async def scenario(scope: Scope) -> None:
        agent = scope.agent(data="a")
        job = scope.root / "job"
        await scope.run("job", *record_and_sleep(job), spec=fence(LONG_MS))
        await scope.until("job-0", "running")
        pid = await pid_in(job)
        agent.kill()
        killed_s = time.monotonic()
        other = scope.agent(data="b")  # the same node, but its keeper does not know the job
        gone_s = none_s = 0.0
        for _ in range(1_000):
            gone_s = gone_s or (time.monotonic() if has_exited(pid) else 0.0)
            found = await scope.replica("job-0")
            if found is None or found.status.phase in ("failed", "released", "pending"):
                none_s = time.monotonic()
                break
            await asyncio.sleep(0.01)
        assert gone_s, "the first keeper fences the job"
        assert none_s > gone_s, "the job is not reported gone while it runs"
        assert none_s - killed_s > LONG_MS / 1000 - 0.5
        assert "is held by" in other.log_text()

    run_scenario(scenario)


def test_agent_follows_replaced_store_and_ends_unknown_work() -> None:
    """A new store starts at its first revision again."""

    async def scenario(scope: Scope) -> None:
        agent = scope.agent()
        job, web = await run_job_and_service(scope)
        pids, port = (await pid_in(job), await pid_in(web)), scope.url.rsplit(":", 1)[1]
        await scope.close()

        async def replace_scope(other: Scope) -> None:
            other._port = int(port)
            await other.close()
            await other.open()
            await until(lambda: all(has_exited(pid) for pid in pids), 15)
            await other.run("next", *record_and_sleep(scope.root / "next"), spec=SERVICE)
            await other.until("next-0", "serving")
            assert agent.process.poll() is None

        from tests.integration.agent.control_plane import scope as made

        async with made(SLOW_MS) as other:
            await replace_scope(other)

    run_scenario(scenario, SLOW_MS)


def test_wrong_token_or_heartbeat_is_reported_with_fix(tmp_path: Path) -> None:
    async def scenario(scope: Scope) -> None:
        agent = scope.agent("--beat", "7s")
        assert await asyncio.to_thread(agent.process.wait, 10) == 1
        assert "leave out --beat" in agent.log_text()
        deep = scope.agent(data="d" * 100)
        assert await asyncio.to_thread(deep.process.wait, 10) == 1
        assert "use a shorter --data" in deep.log_text()
        wrong = scope.agent(data="w", token="wrong")
        await until(lambda: "the token is not right" in wrong.log_text())

    run_scenario(scenario)


def test_work_of_killed_agent_and_keeper_is_ended_by_command() -> None:
    async def scenario(scope: Scope) -> None:
        agent, web = scope.agent(), scope.root / "web"
        await scope.run("web", *record_and_sleep(web), spec={**SERVICE, "replicas": 2})
        await scope.until("web-1", "serving")
        keeper, pids = agent.keeper_pid, [int(line.split()[0]) for line in lines(web)]
        agent.kill()
        assert not has_exited(keeper), agent.log_text()
        os.kill(keeper, signal.SIGKILL)
        assert not any(has_exited(pid) for pid in pids)
        secret_dir = _put_secret_file(agent)
        done = await asyncio.to_thread(_remit, "keeper", "--end", "--data", str(agent.directory.root))
        assert done.returncode == 0, done.stderr
        assert "replicas left by an earlier one are stopped" in done.stdout
        assert all(has_exited(pid) for pid in pids) and not secret_dir.exists()
        again = _remit("keeper", "--end", "--data", str(agent.directory.root))
        assert again.stdout == f"no keeper runs on {agent.directory.root}\n"

    run_scenario(scenario, SLOW_MS)


def test_killed_agent_and_keeper_restart_on_full_disk() -> None:
    """F14: work there is not lost for want of a file that only operators read."""

    async def scenario(scope: Scope) -> None:
        first, web = scope.agent(), scope.root / "web"
        await scope.run("web", *record_and_sleep(web), spec=SERVICE)
        await scope.until("web-0", "serving")
        run, pid = first.directory.run, await pid_in(web)
        keeper = first.keeper_pid
        first.kill()
        os.kill(keeper, signal.SIGKILL)
        for name in ("agent.pid", "keeper.pid"):
            (run / name).unlink()
            (run / f".{name}.writing").mkdir()  # as a full disk does: no new file of that name can be written
        second = scope.agent()
        await until(lambda: is_locked(FileDisk(), first.directory.keeper_lock))
        await scope.until("web-0", "serving")
        await asyncio.sleep(4 * BEAT_MS / 1000)
        assert second.process.poll() is None, second.log_text()
        assert not (run / "agent.pid").exists()
        assert not has_exited(pid)
        assert len(lines(web)) == 1

    run_scenario(scenario, SLOW_MS)
