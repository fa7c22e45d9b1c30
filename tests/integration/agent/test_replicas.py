"""Does work run on a real node as its manifest says: its words, its place, its ports, its limits, its probes, its end?"""

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
from tests.integration.agent.control_plane import Scope, forever, gone, lines, play, shell, until

SERVICE = {"type": "service", "replicas": 1}
LIMITED = "memory" in ProcessRunner(BootClock()).isolation_support().controllers


def once(**more: object) -> dict[str, object]:
    return {"type": "job", "retries": 0, **more}


@pytest.mark.smoke
def test_words_environment_directory_and_ports_are_as_the_manifest_says_and_nothing_is_left() -> None:
    async def scene(scope: Scope) -> None:
        agent = scope.agent("--name", "n1")
        said = scope.root / "said"
        script = (
            "import os, sys, time\n"
            f'out = open({str(said)!r}, "w")\n'
            'print(sys.argv[1:], os.getcwd(), os.environ["COLOUR"], os.environ["PORT_http"], os.environ["PORT_fixed"], '
            'os.environ["REMIT_TOKEN"], os.environ.get("REMIT_SECRET"), sorted(os.listdir(".")), sep="\\n", file=out)\n'
            'open("scratch", "w").write("x"); out.close(); time.sleep(0.7)\n'
        )
        words = ("$HOME", "; rm -rf /", "$(COLOUR)", "$$(COLOUR)", "a b")
        await scope.run(
            "job", "python3", "-c", script, *words, spec=once(),
            env={"COLOUR": "blue", "REMIT_SECRET": "mine"},
            ports=(PortRequest(name="http"), PortRequest(name="fixed", port=31999)),
        )  # fmt: skip
        ports = (await scope.until("job-0", "running")).status.ports
        found = await scope.until("job-0", "finished", "released")
        assert found.status.result == "ok"
        told = lines(said)
        assert told[0] == repr(["$HOME", "; rm -rf /", "blue", "$(COLOUR)", "a b"]), (
            "no shell sees it, and $(NAME) stands for one"
        )
        assert Path(told[1]) == agent.directory.work / f"{found.metadata.uid}.1"
        assert told[2] == "blue"
        assert 1024 <= int(told[3]) < 65536
        assert told[4] == "31999"
        assert told[5] == f"{found.metadata.uid}.1"
        assert told[6] == "None", "names of the agent's own are not work's to set"
        assert told[7] == "[]"
        assert ports == {"http": int(told[3]), "fixed": 31999}
        await until(lambda: not list(agent.directory.work.iterdir()))
        assert "job-0" not in agent.kept()
        assert agent.directory.run.stat().st_mode & 0o777 == 0o700
        assert agent.directory.logs.stat().st_mode & 0o777 == 0o700

    play(scene)


def test_each_end_is_told_with_its_result_and_its_reason() -> None:
    """Exit codes, signals, programs that are not there, timeouts, and memory that is used up."""

    async def scene(scope: Scope) -> None:
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

    play(scene)


def test_whoever_is_stopped_is_asked_first_and_given_its_grace_and_its_whole_tree_ends() -> None:
    async def scene(scope: Scope) -> None:
        scope.agent()
        polite, deaf = scope.root / "polite", scope.root / "deaf"
        await scope.run("polite", *shell(f"trap 'sleep 0.3; echo bye >> {polite}; exit 0' TERM; echo $$ >> {polite}; "
                                         "while :; do sleep 0.05; done"), spec=SERVICE, stop_grace=Duration(5_000))  # fmt: skip
        script = f"setsid sh -c 'trap \"\" TERM; echo $$ >> {deaf}; while :; do sleep 1; done' & trap '' TERM; wait; sleep 60"
        await scope.run("deaf", *shell(script), spec=SERVICE, stop_grace=Duration(400))
        await scope.until("polite-0", "serving")
        await scope.until("deaf-0", "serving")
        await until(lambda: bool(lines(deaf)))
        child = int(lines(deaf)[0])
        for name in ("polite", "deaf"):
            await scope.run(name, *forever(scope.root / "unused"), spec={"type": "service", "replicas": 0})
        await until(lambda: _is_gone(scope, "polite-0"))
        assert lines(polite)[-1] == "bye"
        await until(lambda: _is_gone(scope, "deaf-0"))
        assert gone(child)

    play(scene)


async def _is_gone(scope: Scope, name: str) -> bool:
    found = await scope.replica(name)
    return found is None or found.status.phase == "released"


@pytest.mark.smoke
def test_a_service_is_started_again_within_its_attempt_and_probes_say_when_it_is_ready_and_when_not_alive() -> None:
    async def scene(scope: Scope) -> None:
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
        assert found.status.phase == "running", "what its probe says is not ready is not served"
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

    play(scene)


def test_beats_say_what_each_replica_takes() -> None:
    async def scene(scope: Scope) -> None:
        scope.agent("--nodes", "3", "--name", "m")
        await scope.run("busy", "python3", "-c", "x = bytearray(30 << 20)\nwhile True: pass", spec=once(),
                        resources={"cpu": "500m", "memory": "128Mi"})  # fmt: skip

        async def told() -> bool:
            runs = await scope.runs()
            return any(run.cpu_milli > 200 and run.memory_bytes > 20 << 20 for run in runs.values())

        await until(told)
        states = {state.node: state for state in await scope.states()}
        assert sorted(states) == ["m-1", "m-2", "m-3"], "one agent, and one keeper, for all of its nodes"
        assert sum(state.cpu_milli > 200 for state in states.values()) == 1

    play(scene)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_work_of_another_user_owns_its_directory_and_can_write_nowhere_else() -> None:
    async def scene(scope: Scope) -> None:
        scope.root.chmod(0o711)  # as a data directory's parents are
        agent = scope.agent()
        script = "id -un; echo hello > mine && cat $HOME/mine; ls ../../run 2>&1 | tail -1; echo again >> /dev/stdout"
        await scope.run("job", *shell(script), spec=once(), user="nobody")
        found = await scope.until("job-0", "finished", "released", "failed")
        said = lines(agent.directory.logs / "n1" / f"{found.metadata.uid}.1.out")
        assert found.status.result == "ok", (found.status, said)
        assert said[0] == pwd.getpwnam("nobody").pw_name
        assert said[1] == "hello"
        assert "denied" in said[2]

    play(scene)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run anything as another user")
@pytest.mark.parametrize(
    ("words", "number"),
    [
        ((), tenant_user("t")[1:]),
        (("--work-user", "daemon"), str(pwd.getpwnam("daemon").pw_uid)),
        (("--work-user", "root"), "0"),
    ],
)
def test_an_agent_that_is_root_makes_nobody_root_who_names_no_user(words: tuple[str, ...], number: str) -> None:
    """Also where a directory above its own is closed, as root's home is: work finds its room all the same."""

    async def scene(scope: Scope) -> None:
        scope.root.chmod(0o700)
        agent = scope.agent(*words)
        script = "id -u; echo hello > mine && cat $HOME/mine; touch made/by-it && ls -nd made | cut -d' ' -f3"
        await scope.run("job", *shell(script), spec=once(), volumes=(Volume(name="v", path="made", scratch=Scratch()),))
        found = await scope.until("job-0", "finished", "released", "failed")
        said = lines(agent.directory.logs / "n1" / f"{found.metadata.uid}.1.out")
        assert found.status.result == "ok", (found.status, said)
        assert said == [number, "hello", number]

    play(scene)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run anything as another user")
def test_work_of_two_tenants_on_one_node_cannot_look_at_each_other__also_without_a_sandbox() -> None:
    async def scene(scope: Scope) -> None:
        agent = scope.agent("--sandbox", "none")
        canary = "canary-that-no-neighbour-may-see"
        await scope.apply(
            Tenant(metadata=Metadata(name="spy"), spec=TenantSpec(quota=Amount.parse({"cpu": "9", "memory": "9Gi"})))
        )
        await scope.run("mine", *shell("echo $SECRET > kept; echo $$; exec sleep 600"), spec=SERVICE, env={"SECRET": canary})
        mine = await scope.until("mine-0", "serving", "ready", "running")
        said = agent.directory.logs / "n1" / f"{mine.metadata.uid}.1.out"
        await until(lambda: bool(lines(said)))
        pid = lines(said)[0]
        room = next(agent.directory.work.iterdir())
        script = f"cat /proc/{pid}/environ /proc/{pid}/cwd/kept {room}/kept; ls {room}; kill -0 {pid} && echo reached; echo end"
        made = Template(command=shell(script), resources=Amount.parse({"cpu": "10m", "memory": "32Mi"}))
        spy = WorkloadSpec(type="job", retries=0, template=made)
        await scope.apply(Workload(metadata=Metadata(name="job", tenant="spy"), spec=spy))
        out = agent.directory.logs / "n1"
        await until(lambda: any("end" in lines(file) for file in out.glob("*.out")))
        told = "".join(file.read_text() for file in out.iterdir())
        assert canary not in told and "reached" not in told
        assert told.lower().count("denied") + told.lower().count("not permitted") >= 4, told

    play(scene)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt install bubblewrap")
def test_a_sandbox_lets_work_change_nothing_but_its_own_directory() -> None:
    async def scene(scope: Scope) -> None:
        agent = scope.agent("--sandbox", "auto")
        assert (await asyncio.to_thread(agent.process.poll)) is None
        target = scope.root / "target"
        target.write_text("as it was")
        await scope.run("job", *shell(f"echo x > {target}; echo y > mine; cat mine; ps -e | wc -l"), spec=once())
        found = await scope.until("job-0", "finished", "released", "failed")
        assert found.status.result == "ok", found.status
        said = lines(agent.directory.logs / "n1" / f"{found.metadata.uid}.1.out")
        assert said[0] == "y"
        assert int(said[1]) < 8, "it sees only its own processes"
        assert target.read_text() == "as it was"
        assert "sandbox: bubblewrap" in agent.said()

    play(scene)
