"""Secrets and configs reach real work as files and variables, and nothing else. A canary value is searched for."""

from __future__ import annotations

import hashlib
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from remit.agent.setup import build_secret_files
from remit.model.claims import Delete
from remit.model.kinds import ExecProbe, Mount, Probe, Probes, Restart
from remit.model.metadata import Metadata
from remit.model.resources import Duration
from remit.model.secrets import Config, DataSpec, Secret, SecretSpec
from remit.serve.auth.secrets import Keyring
from remit.world.files.disk import FileDisk
from remit.world.randomness import RandomIds
from tests.integration.agent.control_plane import AgentProcess, Scope, lines, run_scenario, shell, until

CANARY = "canary-51c0-that-nobody-may-see"
READ = (Mount(name="db", path="secrets/db"), Mount(name="api"))
CONFIGS = (Mount(name="app", path="settings"), Mount(name="mode"))
SERVICE = {"type": "service", "replicas": 1}
AGAIN = Restart(backoff=Duration(100))


async def declare(scope: Scope, suffix: str = "", *names: str) -> None:
    """Apply two secrets and two configs, stored as by a server's API."""
    seals = Keyring(FileDisk(), RandomIds(), scope.keys).sealing_keys
    secrets = {"db": {"password": CANARY + suffix, "user": "ann"}, "api": {"TOKEN": CANARY + "-token" + suffix}}
    configs = {"app": {"app.toml": "mode = 1\n"}, "mode": {"MODE": "live" + suffix}}
    for name, data in secrets.items():
        if not names or name in names:
            await scope.apply(seals.seal_object(Secret(metadata=Metadata(name=name, tenant="t"), spec=SecretSpec(data=data))))
    for name, data in configs.items():
        if not names or name in names:
            await scope.apply(Config(metadata=Metadata(name=name, tenant="t"), spec=DataSpec(data=data)))


def report_command(output: Path) -> tuple[str, ...]:
    """A command that reports what it reads, and of secrets only the digest."""
    return shell(
        "{ sha256sum < secrets/db/password; echo -n $TOKEN | sha256sum; cat secrets/db/user; echo; cat settings/app.toml;"
        f" echo $MODE $1; stat -Lc %a secrets/db/password; readlink secrets/db; echo end; }} >> {output}; exec sleep 600"
    )


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def reported(output: Path, times: int) -> list[str]:
    await until(lambda: lines(output).count("end") == times)
    found = [line.removesuffix("  -") for line in lines(output)]
    ends = [at for at, line in enumerate(found) if line == "end"]
    return found[ends[-2] + 1 if times > 1 else 0 : ends[-1]]


def assert_not_leaked(scope: Scope, agent: AgentProcess) -> None:
    """Assert that no file of the agent, the keeper or the scope and no command line has the canary."""
    assert CANARY not in agent.log_text()
    for directory, _, names in os.walk(scope.root):  # skips directories that vanish meanwhile
        for path in (Path(directory, name) for name in names):
            with suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    assert CANARY.encode() not in path.read_bytes(), path
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                arguments = (process / "cmdline").read_bytes()
            except OSError:
                continue
            assert CANARY.encode() not in arguments, arguments


@pytest.mark.smoke
def test_service_reads_secrets_gets_new_ones_at_restart_and_leaves_none() -> None:
    async def scenario(scope: Scope) -> None:
        agent, output = scope.agent("--name", "n1"), scope.root / "said"
        await declare(scope)
        reads = shell('test -n "$TOKEN" -a -r secrets/db/password')
        probes = Probes(ready=Probe(exec=ExecProbe(command=reads), period=Duration(100)))
        arguments = (*report_command(output), "word", "$(MODE) $(TOKEN)")
        await scope.run("web", *arguments, spec=SERVICE, secrets=READ, configs=CONFIGS, restart=AGAIN, probes=probes)
        found = await scope.until("web-0", "ready", "serving")
        first = await reported(output, 1)
        assert first[:5] == [digest(CANARY), digest(CANARY + "-token"), "ann", "mode = 1", "live live $(TOKEN)"]
        assert first[5] == "400"
        directory = build_secret_files(agent.directory).path_of(f"{found.metadata.uid}.1")
        assert first[6] == str(directory / "secrets/db") and first[6].startswith("/dev/shm/")
        assert_not_leaked(scope, agent)

        await declare(scope, "-2")
        assert (directory / "secrets/db/password").read_text() == CANARY, "a running replica keeps its files"
        os.kill(agent.journal()["web-0"].pid, signal.SIGKILL)
        second = await reported(output, 2)
        assert second[:2] == [digest(CANARY + "-2"), digest(CANARY + "-token-2")] and second[4] == "live-2 live-2 $(TOKEN)"
        assert_not_leaked(scope, agent)
        await scope.until("web-0", "ready", "serving")

        await scope.operator.submit(Delete("Workload", "web", "t"))
        await until(lambda: not directory.exists())
        assert build_secret_files(agent.directory).names() == ()

    run_scenario(scenario)


def test_work_waits_for_missing_secret_and_starts_once_created() -> None:
    async def scenario(scope: Scope) -> None:
        agent, output = scope.agent("--name", "n1"), scope.root / "said"
        await declare(scope, "", "app", "mode", "api")
        await scope.run("web", *report_command(output), spec=SERVICE, secrets=READ, configs=CONFIGS)
        await scope.until("web-0", "starting")

        async def reports_missing() -> bool:
            return any("there is no secret db" in run.said for run in (await scope.runs()).values())

        await until(reports_missing)
        assert not output.exists()
        await declare(scope, "", "db")
        await scope.until("web-0", "ready", "serving")
        assert (await reported(output, 1))[0] == digest(CANARY)
        assert_not_leaked(scope, agent)

    run_scenario(scenario)


def test_killed_agent_finds_running_work_with_files_and_removes_them_at_end() -> None:
    async def scenario(scope: Scope) -> None:
        agent, output = scope.agent("--name", "n1"), scope.root / "said"
        await declare(scope)
        await scope.run("web", *report_command(output), spec=SERVICE, secrets=READ, configs=CONFIGS, restart=AGAIN)
        found = await scope.until("web-0", "ready", "serving")
        directory = build_secret_files(agent.directory).path_of(f"{found.metadata.uid}.1")
        leftover = build_secret_files(agent.directory).path_of("gone.1")
        leftover.mkdir()
        agent.kill()
        await declare(scope, "-2")
        again = scope.agent("--name", "n1")
        await until(lambda: not leftover.exists())
        await until(lambda: (record := again.journal().get("web-0")) is not None and record.alive)
        assert (directory / "secrets/db/password").read_text() == CANARY and lines(output).count("end") == 1
        os.kill(again.journal()["web-0"].pid, signal.SIGKILL)
        assert (await reported(output, 2))[0] == digest(CANARY + "-2"), "a restart fetches the secret again"
        await scope.operator.submit(Delete("Workload", "web", "t"))
        await until(lambda: not directory.exists())
        assert_not_leaked(scope, again)

    run_scenario(scenario, beat_ms=700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs work as another user")
def test_secret_files_belong_to_work_user() -> None:
    async def scenario(scope: Scope) -> None:
        scope.agent("--name", "n1")
        scope.root.chmod(0o711)
        output = scope.root / "given"
        output.mkdir()
        output.chmod(0o777)
        await declare(scope)
        script = f"{{ sha256sum < secrets/db/password; stat -Lc '%a %U' secrets/db/password; }} > {output}/a"
        spec = {"type": "job", "retries": 0}
        await scope.run("job", *shell(script), spec=spec, secrets=READ, configs=CONFIGS, user="nobody")
        await scope.until("job-0", "finished", "released")
        assert lines(output / "a")[:2] == [f"{digest(CANARY)}  -", "400 nobody"]

    run_scenario(scenario)
