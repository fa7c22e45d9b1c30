"""Artifacts on a real node: fetched over HTTP or from the node, unpacked, cached, reported and refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from msgspec.structs import replace

from remit.model.artifacts import Artifact, HostPath, PolicyPermit, Scratch, Volume
from remit.model.claims import Accepted, Delete
from remit.model.kinds import HttpProbe, Policy, PolicySpec, PortRequest, Probe, Probes, Workload
from remit.model.manifests.reader import read
from remit.model.metadata import Metadata
from remit.model.policies import PolicyRule
from remit.model.resources import Duration
from remit.model.secrets import Secret, SecretSpec
from remit.serve.auth.secrets import Keyring
from remit.world.files.disk import FileDisk
from remit.world.randomness import RandomIds
from tests.integration.agent.artifact_server import ALLOWED, artifact_server, tarball
from tests.integration.agent.control_plane import ROOT, SLOW_MS, Scope, lines, run_scenario, shell, until

SERVE = """
import http.server, os, pathlib
text = pathlib.Path("greeting.txt").read_bytes()
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", str(len(text))); self.end_headers(); self.wfile.write(text)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT_http"])), Answer).serve_forever()
"""


async def permit(scope: Scope, *paths: Path) -> None:
    """Permit the tests' own servers and directories, which are not public."""
    rule = PolicyRule(permit=PolicyPermit(artifact_hosts=("127.0.0.1",), host_paths=tuple(map(str, paths))))
    await scope.apply(Policy(metadata=Metadata(name="lent"), spec=PolicySpec(rules=(rule,))))


async def fetch(port: int, **headers: str) -> bytes:
    async with ClientSession(headers=headers) as session, session.get(f"http://127.0.0.1:{port}/") as answer:
        return await answer.read()


def once(**more: object) -> dict[str, object]:
    return {"type": "job", "retries": 0, **more}


@pytest.mark.smoke
def test_service_from_tarball_is_fetched_once_with_progress() -> None:
    async def scenario(scope: Scope) -> None:
        await permit(scope)
        async with artifact_server() as server:
            source, digest = server.put(
                "/app.tar.gz", tarball({"app/serve.py": SERVE, "app/greeting.txt": os.urandom(200_000)})
            )
            server.released.clear()
            agent = scope.agent(*ALLOWED)
            await scope.run(
                "web", "python3", "serve.py", spec={"type": "service", "replicas": 2},
                artifacts=(Artifact(source=source, sha256=digest, unpack=True),), working_directory="app",
                ports=(PortRequest(name="http"),),
                probes=Probes(ready=Probe(http=HttpProbe(port="http"), period=Duration(200))),
            )  # fmt: skip
            await scope.until("web-0", "starting")

            async def progress_reported() -> bool:
                output = [run.said for run in (await scope.runs()).values()]
                return any("fetching 0.1 of 0.2 MiB of http" in one for one in output) and any(
                    "another replica" in one for one in output
                )

            await until(progress_reported)
            server.released.set()
            for name in ("web-0", "web-1"):
                found = await scope.until(name, "ready", "serving")
                assert len(await fetch(found.status.ports["http"])) == 200_000
            assert server.requests == ["/app.tar.gz"], "both replicas use one fetch"
            assert len(list((agent.directory.cache / "files").iterdir())) == 1
            work_dirs = list(agent.directory.work.iterdir())
            assert len(work_dirs) == 2
            assert not [work_dir for work_dir in work_dirs if work_dir.name.endswith(".making")]

    run_scenario(scenario)


def test_node_file_is_available_only_below_permitted_directory(tmp_path: Path) -> None:
    tool = b"#!/bin/sh\necho it runs > $1; exit\n"
    (tmp_path / "lent").mkdir()
    for place in ("lent/tool", "elsewhere"):
        (tmp_path / place).write_bytes(tool + place.encode())
    (tmp_path / "lent" / "link").symlink_to(tmp_path / "elsewhere")

    async def scenario(scope: Scope) -> None:
        scope.agent("--artifact-dir", str(tmp_path / "lent"))
        output = scope.root / "said"
        for name, path, command in (
            ("good", "lent/tool", ("bin/tool", str(output))),
            ("outside", "elsewhere", ("true",)),
            ("linked", "lent/link", ("true",)),
        ):
            digest = hashlib.sha256((tmp_path / path).read_bytes()).hexdigest()
            artifact = Artifact(source=f"file:{tmp_path / path}", sha256=digest, path="bin/tool")
            await scope.run(name, *command, spec=once(), artifacts=(artifact,))
        found = await scope.until("good-0", "finished", "released")
        assert (found.status.result, lines(output)) == ("ok", ["it runs"])
        refused = (await scope.until("outside-0", "failed", "released")).status
        assert refused.result == "not started"
        assert "is in no directory that this node allows; start its agent with --artifact-dir" in refused.reason
        linked = (await scope.until("linked-0", "failed", "released")).status
        assert "its path contains a symbolic link" in linked.reason

    run_scenario(scenario)


@pytest.mark.parametrize(
    "case",
    [
        ("/wrong", "0" * 64, "the content has digest"),
        ("/missing", "", "answered with status 404; check the URL"),
        ("/to-metadata", "", "169.254.169.254 is a link-local address"),
    ],
)
def test_failed_fetch_prevents_start_with_reason_and_fix(case: tuple[str, str, str]) -> None:
    path, digest, message = case

    async def scenario(scope: Scope) -> None:
        await permit(scope)
        async with artifact_server() as server:
            server.put("/wrong", b"something else")
            server.redirects["/to-metadata"] = "http://169.254.169.254/latest/meta-data/"
            agent = scope.agent(*ALLOWED)
            artifact = Artifact(source=server.url + path, sha256=digest or "1" * 64)
            await scope.run("job", "true", spec=once(), artifacts=(artifact,))
            status = (await scope.until("job-0", "failed", "released")).status
            assert status.result == "not started"
            assert message in status.reason, status.reason
            assert "; " in status.reason
            await until(lambda: not list(agent.directory.work.iterdir()))
            assert not list((agent.directory.cache / "files").iterdir())

    run_scenario(scenario)


def test_server_failing_once_is_retried() -> None:
    async def scenario(scope: Scope) -> None:
        await permit(scope)
        async with artifact_server() as server:
            source, digest = server.put("/data", b"here")
            server.failures["/data"] = 1
            scope.agent(*ALLOWED)
            await scope.run("job", "test", "-f", "data", spec=once(), artifacts=(Artifact(source=source, sha256=digest),))
            assert (await scope.until("job-0", "finished", "released")).status.result == "ok"
            assert server.requests == ["/data", "/data"]

    run_scenario(scenario)


def test_workload_deleted_during_fetch_leaves_no_files() -> None:
    async def scenario(scope: Scope) -> None:
        await permit(scope)
        async with artifact_server() as server:
            source, digest = server.put("/data", bytes(100_000))
            server.released.clear()
            agent = scope.agent(*ALLOWED)
            await scope.run("job", "true", spec=once(), artifacts=(Artifact(source=source, sha256=digest),))
            await scope.until("job-0", "starting")
            await until(lambda: bool(list((agent.directory.cache / "files").iterdir())))
            verdict = await scope.operator.submit(Delete("Workload", "job", "t"))
            assert isinstance(verdict, Accepted)
            await until(lambda: not list(agent.directory.work.iterdir()))
            await until(lambda: not list((agent.directory.cache / "files").iterdir()))

    run_scenario(scenario)


def test_cache_outlives_agent_and_changed_file_is_fetched_again() -> None:
    async def scenario(scope: Scope) -> None:
        await permit(scope)
        async with artifact_server() as server:
            source, digest = server.put("/data", b"as it should be")
            asks: dict[str, Any] = {"spec": once(), "artifacts": (Artifact(source=source, sha256=digest, path="data"),)}
            grep = ("grep", "-q", "as it should be", "data")
            agent = scope.agent(*ALLOWED)
            await scope.run("one", *grep, **asks)
            assert (await scope.until("one-0", "finished", "released")).status.result == "ok"
            agent.kill()
            again = scope.agent(*ALLOWED)
            await scope.run("two", *grep, **asks)
            assert (await scope.until("two-0", "finished", "released")).status.result == "ok"
            assert server.requests == ["/data"]
            (file,) = (again.directory.cache / "files").iterdir()
            file.chmod(0o600)
            file.write_bytes(b"as it MUST not be")
            await scope.run("three", *grep, **asks)
            assert (await scope.until("three-0", "finished", "released")).status.result == "ok"
            assert server.requests == ["/data", "/data"]

    run_scenario(scenario)


@pytest.mark.smoke
def test_scratch_volume_goes_with_attempt_and_host_path_stays() -> None:
    async def scenario(scope: Scope) -> None:
        permitted, other = scope.root / "lent", scope.root / "other"
        for place in (permitted, other):
            place.mkdir()
            place.chmod(0o777)  # a writable host path is writable for the users that work runs as
        await permit(scope, scope.root)
        agent = scope.agent("--host-path", str(permitted))
        scratch = Volume(name="tmp", path="data/tmp", scratch=Scratch())
        host = Volume(name="host", path="shared", host=HostPath(path=str(permitted), read_only=False))
        script = shell("echo scratch > data/tmp/x && cp data/tmp/x shared/kept")
        await scope.run("job", *script, spec=once(), volumes=(scratch, host))
        await scope.run(
            "bad", "true", spec=once(), volumes=(Volume(name="host", path="shared", host=HostPath(path=str(other))),)
        )
        assert (await scope.until("job-0", "finished", "released")).status.result == "ok"
        assert lines(permitted / "kept") == ["scratch"]
        refused = (await scope.until("bad-0", "failed", "released")).status
        assert "is not permitted on this node" in refused.reason
        await until(lambda: not list(agent.directory.work.iterdir()))
        assert lines(permitted / "kept") == ["scratch"]

    run_scenario(scenario)


def test_work_over_scratch_size_is_ended() -> None:
    async def scenario(scope: Scope) -> None:
        scope.agent()
        script = shell("dd if=/dev/zero of=tmp/big bs=1M count=3 2>/dev/null; exec sleep 600")
        volume = Volume(name="tmp", path="tmp", scratch=Scratch(size="1Mi"))
        await scope.run("job", *script, spec=once(), volumes=(volume,), stop_grace=Duration(200))
        status = (await scope.until("job-0", "failed", "released")).status
        assert status.result == "scratch full"
        assert status.reason.endswith("raise its size in template.volumes")

    run_scenario(scenario)


def test_quickstart_example_is_deployed_as_documented(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "examples/quickstart/greeter.py"), str(tmp_path)], capture_output=True, check=True
    )
    again = subprocess.run([*made.args], capture_output=True, check=True)
    assert again.stdout == made.stdout, "the archive is reproducible"
    (workload,) = read(made.stdout, "greeter").objects
    assert isinstance(workload, Workload)
    workload = replace(workload, metadata=replace(workload.metadata, tenant="t"))

    async def scenario(scope: Scope) -> None:
        secret = Secret(metadata=Metadata(name="greeter", tenant="t"), spec=SecretSpec(data={"word": "sesame"}))
        await scope.apply(Keyring(FileDisk(), RandomIds(), scope.keys).sealing_keys.seal_object(secret), workload)
        scope.agent("--artifact-dir", str(tmp_path))
        port = (await scope.until("greeter-0", "ready", "serving")).status.ports["http"]
        assert await fetch(port, **{"X-Word": "sesame"}) == b"hello from an artifact\n"
        assert await fetch(port, **{"X-Word": "guessed"}) == await fetch(port) == b"say the word\n"

    run_scenario(scenario)


def test_agent_killed_during_fetch_is_replaced_and_prepares_again() -> None:
    async def scenario(scope: Scope) -> None:
        await permit(scope)
        async with artifact_server() as server:
            source, digest = server.put("/data", bytes(100_000))
            server.released.clear()
            agent = scope.agent(*ALLOWED)
            artifact = Artifact(source=source, sha256=digest, path="data")
            script = shell("test $(wc -c < data) = 100000 && exec sleep 600")
            await scope.run("svc", *script, spec={"type": "service"}, artifacts=(artifact,))
            await scope.until("svc-0", "starting")
            await until(lambda: bool(list((agent.directory.cache / "files").iterdir())))
            agent.kill()
            assert [work_dir.name.endswith(".making") for work_dir in agent.directory.work.iterdir()] == [True]
            server.released.set()
            scope.agent(*ALLOWED)
            found = await scope.until("svc-0", "ready", "serving")
            assert [work_dir.name for work_dir in agent.directory.work.iterdir()] == [
                f"{found.metadata.uid}.{found.status.attempt}"
            ]
            files = [file.name for file in (agent.directory.cache / "files").iterdir()]
            assert files == [f"{digest}.t"]

    run_scenario(scenario, SLOW_MS)
