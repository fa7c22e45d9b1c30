"""Replicas on a real node run as their manifest says: arguments, directory, ports, limits, probes and stop."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from remit.model.artifacts import Scratch, Volume
from remit.model.kinds import (
    ExecProbe,
    HttpProbe,
    PortRequest,
    Probe,
    Probes,
    Restart,
    TcpProbe,
    Template,
    Tenant,
    TenantSpec,
    Workload,
    WorkloadSpec,
)
from remit.model.metadata import Metadata
from remit.model.resources import Amount, Duration
from remit.world.clock import BootClock
from remit.world.process.isolation import tenant_user
from remit.world.process.runner import ProcessRunner
from tests.integration.agent.control_plane import Scope, has_exited, lines, record_and_sleep, run_scenario, shell, until

SERVICE = {"type": "service", "replicas": 1}
LIMITED = "memory" in ProcessRunner(BootClock()).isolation_support().controllers


def once(**more: object) -> dict[str, object]:
    return {"type": "job", "retries": 0, **more}


@pytest.mark.smoke
def test_arguments_environment_directory_and_ports_match_manifest() -> None:
    async def scenario(scope: Scope) -> None:
        agent = scope.agent("--name", "n1")
        output = scope.root / "said"
        script = (
            "import os, sys, time\n"
            f'out = open({str(output)!r}, "w")\n'
            'print(sys.argv[1:], os.getcwd(), os.environ["COLOUR"], os.environ["PORT_http"], os.environ["PORT_fixed"], '
            'os.environ["REMIT_TOKEN"], os.environ.get("REMIT_SECRET"), sorted(os.listdir(".")), sep="\\n", file=out)\n'
            'open("scratch", "w").write("x"); out.close(); time.sleep(0.7)\n'
        )
        arguments = ("$HOME", "; rm -rf /", "$(COLOUR)", "$$(COLOUR)", "a b")
        await scope.run(
            "job", "python3", "-c", script, *arguments, spec=once(),
            env={"COLOUR": "blue", "REMIT_SECRET": "mine"},
            ports=(PortRequest(name="http"), PortRequest(name="fixed", port=31999)),
        )  # fmt: skip
        ports = (await scope.until("job-0", "running")).status.ports
        found = await scope.until("job-0", "finished", "released")
        assert found.status.result == "ok"
        values = lines(output)
        assert values[0] == repr(["$HOME", "; rm -rf /", "blue", "$(COLOUR)", "a b"]), (
            "no shell expands it, and $(NAME) is substituted"
        )
        assert Path(values[1]) == agent.directory.work / f"{found.metadata.uid}.1"
        assert values[2] == "blue"
        assert 1024 <= int(values[3]) < 65536
        assert values[4] == "31999"
        assert values[5] == f"{found.metadata.uid}.1"
        assert values[6] == "None", "reserved names cannot be set by work"
        assert values[7] == "[]"
        assert ports == {"http": int(values[3]), "fixed": 31999}
        await until(lambda: not list(agent.directory.work.iterdir()))
        assert "job-0" not in agent.journal()
        assert agent.directory.run.stat().st_mode & 0o777 == 0o700
        assert agent.directory.logs.stat().st_mode & 0o777 == 0o700

    run_scenario(scenario)


def test_each_end_is_reported_with_result_and_reason() -> None:
    """Exit codes, signals, missing programs, timeouts, and exceeded memory."""

    async def scenario(scope: Scope) -> None:
        scope.agent()
        eat = "x = bytearray(200 << 20); import time; time.sleep(60)"
        await scope.run("exits", *shell("exit 3"), spec=once())
        await scope.run("dies", *shell("kill -9 $$"), spec=once())
        await scope.run("absent", "/no/such/program", spec=once())
        await scope.run("late", *shell("trap '' TERM; while :; do sleep 1; done"), spec=once(timeout=Duration(300)),
                        stop_grace=Duration(300))  # fmt: skip
        if LIMITED:
            await scope.run("eats", "python3", "-c", eat, spec=once(), resources={"cpu": "10m", "memory": "48Mi"})
        expected = {"exits": "exit 3", "dies": "signal 9", "absent": "not started", "late": "timeout"}
        expected |= {"eats": "oom"} if LIMITED else {}
        for name, result in expected.items():
            found = await scope.until(f"{name}-0", "failed", "released")
            assert found.status.result == result, (name, found.status)
            match result:
                case "not started":
                    assert "install it, or give its path" in found.status.reason
                case "timeout":
                    assert "its timeout of 300ms" in found.status.reason
                case "oom":
                    assert "exceeded its memory limit (48Mi)" in found.status.reason

    run_scenario(scenario)


def test_stopped_process_gets_term_and_grace_and_whole_tree_ends() -> None:
    async def scenario(scope: Scope) -> None:
        scope.agent()
        polite, ignoring = scope.root / "polite", scope.root / "deaf"
        await scope.run("polite", *shell(f"trap 'sleep 0.3; echo bye >> {polite}; exit 0' TERM; echo $$ >> {polite}; "
                                         "while :; do sleep 0.05; done"), spec=SERVICE, stop_grace=Duration(5_000))  # fmt: skip
        script = (
            f"setsid sh -c 'trap \"\" TERM; echo $$ >> {ignoring}; while :; do sleep 1; done' & trap '' TERM; wait; sleep 60"
        )
        await scope.run("deaf", *shell(script), spec=SERVICE, stop_grace=Duration(400))
        await scope.until("polite-0", "serving")
        await scope.until("deaf-0", "serving")
        await until(lambda: bool(lines(ignoring)))
        child = int(lines(ignoring)[0])
        for name in ("polite", "deaf"):
            await scope.run(name, *record_and_sleep(scope.root / "unused"), spec={"type": "service", "replicas": 0})
        await until(lambda: _is_gone(scope, "polite-0"))
        assert lines(polite)[-1] == "bye"
        await until(lambda: _is_gone(scope, "deaf-0"))
        assert has_exited(child)

    run_scenario(scenario)


async def _is_gone(scope: Scope, name: str) -> bool:
    found = await scope.replica(name)
    return found is None or found.status.phase == "released"


@pytest.mark.smoke
def test_service_restarts_within_attempt_and_probes_control_serving() -> None:
    async def scenario(scope: Scope) -> None:
        scope.agent()
        began, well, alive = scope.root / "began", scope.root / "well", scope.root / "alive"
        every: dict[str, Any] = {"period": Duration(100), "timeout": Duration(1_000), "failures": 2}
        probes = Probes(
            start=Probe(tcp=TcpProbe(port="http"), **{**every, "failures": 100}),
            ready=Probe(http=HttpProbe(port="http", path="/well"), **every),
            live=Probe(exec=ExecProbe(command=("test", "-e", str(alive))), **every),
        )
        alive.touch()
        serve = f"echo $$ >> {began}; cd {scope.root}; exec python3 -m http.server --bind 127.0.0.1 $PORT_http"
        again = Restart(backoff=Duration(200), backoff_max=Duration(1_000))
        await scope.run("web", *shell(serve), spec=SERVICE, ports=(PortRequest(name="http"),), probes=probes, restart=again,
                        stop_grace=Duration(200), resources={"cpu": "10m", "memory": "64Mi"})  # fmt: skip
        await scope.until("web-0", "running")
        await asyncio.sleep(0.5)
        found = await scope.replica("web-0")
        assert found is not None
        assert found.status.phase == "running", "a replica that is not ready is not served"
        assert "ready probe failed" in next(iter((await scope.runs()).values())).said
        well.touch()
        await scope.until("web-0", "serving")
        well.unlink()
        await scope.until("web-0", "running")
        well.touch()
        await scope.until("web-0", "serving")
        alive.unlink()
        await until(lambda: len(lines(began)) >= 2)
        alive.touch()
        await scope.until("web-0", "serving")
        before = len(lines(began))
        os.kill(int(lines(began)[-1]), signal.SIGKILL)
        await until(lambda: len(lines(began)) > before)
        found = await scope.until("web-0", "serving")
        assert found.status.attempt == 1

        async def counted() -> bool:
            return [run.restarts for run in (await scope.runs()).values()] == [len(lines(began)) - 1]

        await until(counted)

    run_scenario(scenario)


def test_heartbeats_report_resource_use_per_replica() -> None:
    async def scenario(scope: Scope) -> None:
        scope.agent("--nodes", "3", "--name", "m")
        await scope.run("busy", "python3", "-c", "x = bytearray(30 << 20)\nwhile True: pass", spec=once(),
                        resources={"cpu": "500m", "memory": "128Mi"})  # fmt: skip

        async def usage_reported() -> bool:
            runs = await scope.runs()
            return any(run.cpu_milli > 200 and run.memory_bytes > 20 << 20 for run in runs.values())

        await until(usage_reported)
        states = {state.node: state for state in await scope.states()}
        assert sorted(states) == ["m-1", "m-2", "m-3"], "one agent and one keeper serve all nodes"
        assert sum(state.cpu_milli > 200 for state in states.values()) == 1

    run_scenario(scenario)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_work_of_other_user_owns_its_directory_and_writes_nowhere_else() -> None:
    async def scenario(scope: Scope) -> None:
        scope.root.chmod(0o711)  # as the parents of a data directory are
        agent = scope.agent()
        script = "id -un; echo hello > mine && cat $HOME/mine; ls ../../run 2>&1 | tail -1; echo again >> /dev/stdout"
        await scope.run("job", *shell(script), spec=once(), user="nobody")
        found = await scope.until("job-0", "finished", "released", "failed")
        output = lines(agent.directory.logs / "n1" / f"{found.metadata.uid}.1.out")
        assert found.status.result == "ok", (found.status, output)
        assert output[0] == pwd.getpwnam("nobody").pw_name
        assert output[1] == "hello"
        assert "denied" in output[2]

    run_scenario(scenario)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run anything as another user")
@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ((), tenant_user("t")[1:]),
        (("--work-user", "daemon"), str(pwd.getpwnam("daemon").pw_uid)),
        (("--work-user", "root"), "0"),
    ],
)
def test_root_agent_runs_work_as_unprivileged_user_by_default(arguments: tuple[str, ...], number: str) -> None:
    """Also where a parent directory is closed, like root's home: work can reach its directory all the same."""

    async def scenario(scope: Scope) -> None:
        scope.root.chmod(0o700)
        agent = scope.agent(*arguments)
        script = "id -u; echo hello > mine && cat $HOME/mine; touch made/by-it && ls -nd made | cut -d' ' -f3"
        await scope.run("job", *shell(script), spec=once(), volumes=(Volume(name="v", path="made", scratch=Scratch()),))
        found = await scope.until("job-0", "finished", "released", "failed")
        output = lines(agent.directory.logs / "n1" / f"{found.metadata.uid}.1.out")
        assert found.status.result == "ok", (found.status, output)
        assert output == [number, "hello", number]

    run_scenario(scenario)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run anything as another user")
def test_work_of_two_tenants_cannot_see_each_other_without_sandbox() -> None:
    async def scenario(scope: Scope) -> None:
        agent = scope.agent("--sandbox", "none")
        canary = "canary-that-no-neighbour-may-see"
        await scope.apply(
            Tenant(metadata=Metadata(name="spy"), spec=TenantSpec(quota=Amount.parse({"cpu": "9", "memory": "9Gi"})))
        )
        await scope.run("mine", *shell("echo $SECRET > kept; echo $$; exec sleep 600"), spec=SERVICE, env={"SECRET": canary})
        mine = await scope.until("mine-0", "serving", "ready", "running")
        log = agent.directory.logs / "n1" / f"{mine.metadata.uid}.1.out"
        await until(lambda: bool(lines(log)))
        pid = lines(log)[0]
        work_dir = next(agent.directory.work.iterdir())
        script = f"cat /proc/{pid}/environ /proc/{pid}/cwd/kept {work_dir}/kept; ls {work_dir}; "
        script += f"kill -0 {pid} && echo reached; echo end"
        made = Template(command=shell(script), resources=Amount.parse({"cpu": "10m", "memory": "32Mi"}))
        spy = WorkloadSpec(type="job", retries=0, template=made)
        await scope.apply(Workload(metadata=Metadata(name="job", tenant="spy"), spec=spy))
        out = agent.directory.logs / "n1"
        await until(lambda: any("end" in lines(file) for file in out.glob("*.out")))
        values = "".join(file.read_text() for file in out.iterdir())
        assert canary not in values and "reached" not in values
        assert values.lower().count("denied") + values.lower().count("not permitted") >= 4, values

    run_scenario(scenario)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt install bubblewrap")
def test_sandboxed_work_changes_only_its_own_directory() -> None:
    async def scenario(scope: Scope) -> None:
        agent = scope.agent("--sandbox", "auto")
        assert (await asyncio.to_thread(agent.process.poll)) is None
        target = scope.root / "target"
        target.write_text("as it was")
        await scope.run("job", *shell(f"echo x > {target}; echo y > mine; cat mine; ps -e | wc -l"), spec=once())
        found = await scope.until("job-0", "finished", "released", "failed")
        assert found.status.result == "ok", found.status
        output = lines(agent.directory.logs / "n1" / f"{found.metadata.uid}.1.out")
        assert output[0] == "y"
        assert int(output[1]) < 8, "only its own processes are visible"
        assert target.read_text() == "as it was"
        assert "sandbox: bubblewrap" in agent.log_text()

    run_scenario(scenario)
