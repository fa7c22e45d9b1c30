"""Do secrets and configs come to real work as files and variables, and to nobody else? A canary is looked for."""

from __future__ import annotations

import hashlib
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from remit.agent.setup import build_secret_files
from remit.model.claims import Delete
from remit.model.kinds import Config, DataSpec, ExecProbe, Mount, Probe, Probes, Restart, Secret, SecretSpec
from remit.model.metadata import Metadata
from remit.model.resources import Duration
from remit.serve.auth.secrets import Keyring
from remit.world.files.disk import FileDisk
from remit.world.randomness import RandomIds
from tests.integration.agent.control_plane import AgentProcess, Scope, lines, play, shell, until

CANARY = "canary-51c0-that-nobody-may-see"
READ = (Mount(name="db", path="secrets/db"), Mount(name="api"))
CONFIGS = (Mount(name="app", path="settings"), Mount(name="mode"))
SERVICE = {"type": "service", "replicas": 1}
AGAIN = Restart(backoff=Duration(100))


async def declare(scope: Scope, suffix: str = "", *names: str) -> None:
    """Two secrets and two configs, as a server's API would have them stored."""
    seals = Keyring(FileDisk(), RandomIds(), scope.keys).sealing_keys
    secrets = {"db": {"password": CANARY + suffix, "user": "ann"}, "api": {"TOKEN": CANARY + "-token" + suffix}}
    configs = {"app": {"app.toml": "mode = 1\n"}, "mode": {"MODE": "live" + suffix}}
    for name, data in secrets.items():
        if not names or name in names:
            await scope.apply(seals.seal_object(Secret(metadata=Metadata(name=name, tenant="t"), spec=SecretSpec(data=data))))
    for name, data in configs.items():
        if not names or name in names:
            await scope.apply(Config(metadata=Metadata(name=name, tenant="t"), spec=DataSpec(data=data)))


def telling(said: Path) -> tuple[str, ...]:
    """Says what it reads, and of what is secret only the digest."""
    return shell(
        "{ sha256sum < secrets/db/password; echo -n $TOKEN | sha256sum; cat secrets/db/user; echo; cat settings/app.toml;"
        f" echo $MODE $1; stat -Lc %a secrets/db/password; readlink secrets/db; echo end; }} >> {said}; exec sleep 600"
    )


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def told(said: Path, times: int) -> list[str]:
    await until(lambda: lines(said).count("end") == times)
    found = [line.removesuffix("  -") for line in lines(said)]
    ends = [at for at, line in enumerate(found) if line == "end"]
    return found[ends[-2] + 1 if times > 1 else 0 : ends[-1]]


def nowhere(scope: Scope, agent: AgentProcess) -> None:
    """No file of the agent, the keeper or the scope has it, and nobody's words do."""
    assert CANARY not in agent.said()
    for place, _, names in os.walk(scope.root):  # which passes over directories that go meanwhile
        for path in (Path(place, name) for name in names):
            with suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    assert CANARY.encode() not in path.read_bytes(), path
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes()
            except OSError:
                continue
            assert CANARY.encode() not in words, words


@pytest.mark.smoke
def test_a_service_reads_files_and_variables__new_ones_at_its_next_start__and_nothing_of_them_is_left() -> None:
    async def scene(scope: Scope) -> None:
        agent, said = scope.agent("--name", "n1"), scope.root / "said"
        await declare(scope)
        reads = shell('test -n "$TOKEN" -a -r secrets/db/password')
        probes = Probes(ready=Probe(exec=ExecProbe(command=reads), period=Duration(100)))
        words = (*telling(said), "word", "$(MODE) $(TOKEN)")
        await scope.run("web", *words, spec=SERVICE, secrets=READ, configs=CONFIGS, restart=AGAIN, probes=probes)
        found = await scope.until("web-0", "ready", "serving")
        first = await told(said, 1)
        assert first[:5] == [digest(CANARY), digest(CANARY + "-token"), "ann", "mode = 1", "live live $(TOKEN)"]
        assert first[5] == "400"
        place = build_secret_files(agent.directory).path_of(f"{found.metadata.uid}.1")
        assert first[6] == str(place / "secrets/db") and first[6].startswith("/dev/shm/")
        nowhere(scope, agent)

        await declare(scope, "-2")
        assert (place / "secrets/db/password").read_text() == CANARY, "what runs keeps what it was started with"
        os.kill(agent.kept()["web-0"].pid, signal.SIGKILL)
        second = await told(said, 2)
        assert second[:2] == [digest(CANARY + "-2"), digest(CANARY + "-token-2")] and second[4] == "live-2 live-2 $(TOKEN)"
        nowhere(scope, agent)
        await scope.until("web-0", "ready", "serving")

        await scope.people.submit(Delete("Workload", "web", "t"))
        await until(lambda: not place.exists())
        assert build_secret_files(agent.directory).names() == ()

    play(scene)


def test_work_waits_for_what_is_missing_and_says_so__and_goes_on_when_it_comes() -> None:
    async def scene(scope: Scope) -> None:
        agent, said = scope.agent("--name", "n1"), scope.root / "said"
        await declare(scope, "", "app", "mode", "api")
        await scope.run("web", *telling(said), spec=SERVICE, secrets=READ, configs=CONFIGS)
        await scope.until("web-0", "starting")

        async def says() -> bool:
            return any("there is no secret db" in run.said for run in (await scope.runs()).values())

        await until(says)
        assert not said.exists()
        await declare(scope, "", "db")
        await scope.until("web-0", "ready", "serving")
        assert (await told(said, 1))[0] == digest(CANARY)
        nowhere(scope, agent)

    play(scene)


def test_an_agent_that_was_killed_finds_what_runs_with_its_files__and_removes_them_with_it() -> None:
    async def scene(scope: Scope) -> None:
        agent, said = scope.agent("--name", "n1"), scope.root / "said"
        await declare(scope)
        await scope.run("web", *telling(said), spec=SERVICE, secrets=READ, configs=CONFIGS, restart=AGAIN)
        found = await scope.until("web-0", "ready", "serving")
        place = build_secret_files(agent.directory).path_of(f"{found.metadata.uid}.1")
        stranger = build_secret_files(agent.directory).path_of("gone.1")
        stranger.mkdir()
        agent.kill()
        await declare(scope, "-2")
        again = scope.agent("--name", "n1")
        await until(lambda: not stranger.exists())
        await until(lambda: (await_kept := again.kept().get("web-0")) is not None and await_kept.alive)
        assert (place / "secrets/db/password").read_text() == CANARY and lines(said).count("end") == 1
        os.kill(again.kept()["web-0"].pid, signal.SIGKILL)
        assert (await told(said, 2))[0] == digest(CANARY + "-2"), "whoever starts it asks again"
        await scope.people.submit(Delete("Workload", "web", "t"))
        await until(lambda: not place.exists())
        nowhere(scope, again)

    play(scene, beat_ms=700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs work as another user")
def test_files_are_the_work_users_own() -> None:
    async def scene(scope: Scope) -> None:
        scope.agent("--name", "n1")
        scope.root.chmod(0o711)
        said = scope.root / "given"
        said.mkdir()
        said.chmod(0o777)
        await declare(scope)
        script = f"{{ sha256sum < secrets/db/password; stat -Lc '%a %U' secrets/db/password; }} > {said}/a"
        spec = {"type": "job", "retries": 0}
        await scope.run("job", *shell(script), spec=spec, secrets=READ, configs=CONFIGS, user="nobody")
        await scope.until("job-0", "finished", "released")
        assert lines(said / "a")[:2] == [f"{digest(CANARY)}  -", "400 nobody"]

    play(scene)
