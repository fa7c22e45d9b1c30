"""Does what work asks for reach a real node: files over HTTP and of the node, unpacked, kept, told of, and refused?"""

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
from remit.model.kinds import (
    HttpProbe,
    Policy,
    PolicyRule,
    PolicySpec,
    PortRequest,
    Probe,
    Probes,
    Secret,
    SecretSpec,
    Workload,
)
from remit.model.manifests.reader import read
from remit.model.metadata import Metadata
from remit.model.resources import Duration
from remit.serve.auth.secrets import Keyring
from remit.world.files.disk import FileDisk
from remit.world.randomness import RandomIds
from tests.integration.agent.artifact_server import ALLOWED, shelf, tarball
from tests.integration.agent.control_plane import ROOT, SLOW_MS, Scope, lines, play, shell, until

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
    """What the tests' own servers and directories need: they are not public."""
    rule = PolicyRule(permit=PolicyPermit(artifact_hosts=("127.0.0.1",), host_paths=tuple(map(str, paths))))
    await scope.apply(Policy(metadata=Metadata(name="lent"), spec=PolicySpec(rules=(rule,))))


async def got(port: int, **headers: str) -> bytes:
    async with ClientSession(headers=headers) as session, session.get(f"http://127.0.0.1:{port}/") as answer:
        return await answer.read()


def once(**more: object) -> dict[str, object]:
    return {"type": "job", "retries": 0, **more}


@pytest.mark.smoke
def test_a_service_is_deployed_from_a_tarball__fetched_once_and_told_of_while_it_comes() -> None:
    async def scene(scope: Scope) -> None:
        await permit(scope)
        async with shelf() as shelves:
            source, digest = shelves.put(
                "/app.tar.gz", tarball({"app/serve.py": SERVE, "app/greeting.txt": os.urandom(200_000)})
            )
            shelves.held.clear()
            agent = scope.agent(*ALLOWED)
            await scope.run(
                "web", "python3", "serve.py", spec={"type": "service", "replicas": 2},
                artifacts=(Artifact(source=source, sha256=digest, unpack=True),), working_directory="app",
                ports=(PortRequest(name="http"),),
                probes=Probes(ready=Probe(http=HttpProbe(port="http"), period=Duration(200))),
            )  # fmt: skip
            await scope.until("web-0", "starting")

            async def told() -> bool:
                said = [run.said for run in (await scope.runs()).values()]
                return any("fetching 0.1 of 0.2 MiB of http" in one for one in said) and any(
                    "another replica" in one for one in said
                )

            await until(told)
            shelves.held.set()
            for name in ("web-0", "web-1"):
                found = await scope.until(name, "ready", "serving")
                assert len(await got(found.status.ports["http"])) == 200_000
            assert shelves.asked == ["/app.tar.gz"], "both have it of one fetch"
            assert len(list((agent.directory.cache / "files").iterdir())) == 1
            rooms = list(agent.directory.work.iterdir())
            assert len(rooms) == 2
            assert not [room for room in rooms if room.name.endswith(".making")]

    play(scene)


def test_a_file_of_the_node_is_had_only_below_a_directory_that_it_lends(tmp_path: Path) -> None:
    tool = b"#!/bin/sh\necho it runs > $1; exit\n"
    (tmp_path / "lent").mkdir()
    for place in ("lent/tool", "elsewhere"):
        (tmp_path / place).write_bytes(tool + place.encode())
    (tmp_path / "lent" / "link").symlink_to(tmp_path / "elsewhere")

    async def scene(scope: Scope) -> None:
        scope.agent("--artifact-dir", str(tmp_path / "lent"))
        said = scope.root / "said"
        for name, path, command in (
            ("good", "lent/tool", ("bin/tool", str(said))),
            ("outside", "elsewhere", ("true",)),
            ("linked", "lent/link", ("true",)),
        ):
            digest = hashlib.sha256((tmp_path / path).read_bytes()).hexdigest()
            artifact = Artifact(source=f"file:{tmp_path / path}", sha256=digest, path="bin/tool")
            await scope.run(name, *command, spec=once(), artifacts=(artifact,))
        found = await scope.until("good-0", "finished", "released")
        assert (found.status.result, lines(said)) == ("ok", ["it runs"])
        refused = (await scope.until("outside-0", "failed", "released")).status
        assert refused.result == "not started"
        assert "is in no directory that this node allows; start its agent with --artifact-dir" in refused.reason
        linked = (await scope.until("linked-0", "failed", "released")).status
        assert "its path contains a symbolic link" in linked.reason

    play(scene)


@pytest.mark.parametrize(
    "case",
    [
        ("/wrong", "0" * 64, "the content has digest"),
        ("/missing", "", "answered with status 404; check the URL"),
        ("/to-metadata", "", "169.254.169.254 is a link-local address"),
    ],
)
def test_what_cannot_be_fetched_is_not_started__with_the_reason_and_the_cure(case: tuple[str, str, str]) -> None:
    path, digest, words = case

    async def scene(scope: Scope) -> None:
        await permit(scope)
        async with shelf() as shelves:
            shelves.put("/wrong", b"something else")
            shelves.leads["/to-metadata"] = "http://169.254.169.254/latest/meta-data/"
            agent = scope.agent(*ALLOWED)
            artifact = Artifact(source=shelves.url + path, sha256=digest or "1" * 64)
            await scope.run("job", "true", spec=once(), artifacts=(artifact,))
            status = (await scope.until("job-0", "failed", "released")).status
            assert status.result == "not started"
            assert words in status.reason, status.reason
            assert "; " in status.reason
            await until(lambda: not list(agent.directory.work.iterdir()))
            assert not list((agent.directory.cache / "files").iterdir())

    play(scene)


def test_a_server_that_is_down_for_a_moment_is_asked_again() -> None:
    async def scene(scope: Scope) -> None:
        await permit(scope)
        async with shelf() as shelves:
            source, digest = shelves.put("/data", b"here")
            shelves.fails["/data"] = 1
            scope.agent(*ALLOWED)
            await scope.run("job", "test", "-f", "data", spec=once(), artifacts=(Artifact(source=source, sha256=digest),))
            assert (await scope.until("job-0", "finished", "released")).status.result == "ok"
            assert shelves.asked == ["/data", "/data"]

    play(scene)


def test_what_is_removed_while_it_is_fetched_leaves_nothing() -> None:
    async def scene(scope: Scope) -> None:
        await permit(scope)
        async with shelf() as shelves:
            source, digest = shelves.put("/data", bytes(100_000))
            shelves.held.clear()
            agent = scope.agent(*ALLOWED)
            await scope.run("job", "true", spec=once(), artifacts=(Artifact(source=source, sha256=digest),))
            await scope.until("job-0", "starting")
            await until(lambda: bool(list((agent.directory.cache / "files").iterdir())))
            verdict = await scope.people.submit(Delete("Workload", "job", "t"))
            assert isinstance(verdict, Accepted)
            await until(lambda: not list(agent.directory.work.iterdir()))
            await until(lambda: not list((agent.directory.cache / "files").iterdir()))

    play(scene)


def test_the_cache_outlives_its_agent__and_a_file_that_was_changed_there_is_fetched_anew() -> None:
    async def scene(scope: Scope) -> None:
        await permit(scope)
        async with shelf() as shelves:
            source, digest = shelves.put("/data", b"as it should be")
            asks: dict[str, Any] = {"spec": once(), "artifacts": (Artifact(source=source, sha256=digest, path="data"),)}
            grep = ("grep", "-q", "as it should be", "data")
            agent = scope.agent(*ALLOWED)
            await scope.run("one", *grep, **asks)
            assert (await scope.until("one-0", "finished", "released")).status.result == "ok"
            agent.kill()
            again = scope.agent(*ALLOWED)
            await scope.run("two", *grep, **asks)
            assert (await scope.until("two-0", "finished", "released")).status.result == "ok"
            assert shelves.asked == ["/data"]
            (file,) = (again.directory.cache / "files").iterdir()
            file.chmod(0o600)
            file.write_bytes(b"as it MUST not be")
            await scope.run("three", *grep, **asks)
            assert (await scope.until("three-0", "finished", "released")).status.result == "ok"
            assert shelves.asked == ["/data", "/data"]

    play(scene)


@pytest.mark.smoke
def test_volumes_are_there__scratch_goes_with_the_copy_and_a_host_path_stays() -> None:
    async def scene(scope: Scope) -> None:
        lent, other = scope.root / "lent", scope.root / "other"
        for place in (lent, other):
            place.mkdir()
            place.chmod(0o777)  # what is lent to be written is lent to those as whom work runs
        await permit(scope, scope.root)
        agent = scope.agent("--host-path", str(lent))
        scratch = Volume(name="tmp", path="data/tmp", scratch=Scratch())
        host = Volume(name="host", path="shared", host=HostPath(path=str(lent), read_only=False))
        script = shell("echo scratch > data/tmp/x && cp data/tmp/x shared/kept")
        await scope.run("job", *script, spec=once(), volumes=(scratch, host))
        await scope.run(
            "bad", "true", spec=once(), volumes=(Volume(name="host", path="shared", host=HostPath(path=str(other))),)
        )
        assert (await scope.until("job-0", "finished", "released")).status.result == "ok"
        assert lines(lent / "kept") == ["scratch"]
        refused = (await scope.until("bad-0", "failed", "released")).status
        assert "is not permitted on this node" in refused.reason
        await until(lambda: not list(agent.directory.work.iterdir()))
        assert lines(lent / "kept") == ["scratch"]

    play(scene)


def test_what_keeps_more_in_its_scratch_than_it_may_is_ended() -> None:
    async def scene(scope: Scope) -> None:
        scope.agent()
        script = shell("dd if=/dev/zero of=tmp/big bs=1M count=3 2>/dev/null; exec sleep 600")
        volume = Volume(name="tmp", path="tmp", scratch=Scratch(size="1Mi"))
        await scope.run("job", *script, spec=once(), volumes=(volume,), stop_grace=Duration(200))
        status = (await scope.until("job-0", "failed", "released")).status
        assert status.result == "scratch full"
        assert status.reason.endswith("raise its size in template.volumes")

    play(scene)


def test_the_example_is_deployed_as_its_page_says(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "examples/quickstart/greeter.py"), str(tmp_path)], capture_output=True, check=True
    )
    again = subprocess.run([*made.args], capture_output=True, check=True)
    assert again.stdout == made.stdout, "the archive is the same each time"
    (workload,) = read(made.stdout, "greeter").objects
    assert isinstance(workload, Workload)
    workload = replace(workload, metadata=replace(workload.metadata, tenant="t"))

    async def scene(scope: Scope) -> None:
        secret = Secret(metadata=Metadata(name="greeter", tenant="t"), spec=SecretSpec(data={"word": "sesame"}))
        await scope.apply(Keyring(FileDisk(), RandomIds(), scope.keys).sealing_keys.seal_object(secret), workload)
        scope.agent("--artifact-dir", str(tmp_path))
        port = (await scope.until("greeter-0", "ready", "serving")).status.ports["http"]
        assert await got(port, **{"X-Word": "sesame"}) == b"hello from an artifact\n"
        assert await got(port, **{"X-Word": "guessed"}) == await got(port) == b"say the word\n"

    play(scene)


def test_an_agent_that_is_killed_while_it_fetches_is_followed_by_one_that_prepares_it_anew() -> None:
    async def scene(scope: Scope) -> None:
        await permit(scope)
        async with shelf() as shelves:
            source, digest = shelves.put("/data", bytes(100_000))
            shelves.held.clear()
            agent = scope.agent(*ALLOWED)
            artifact = Artifact(source=source, sha256=digest, path="data")
            script = shell("test $(wc -c < data) = 100000 && exec sleep 600")
            await scope.run("svc", *script, spec={"type": "service"}, artifacts=(artifact,))
            await scope.until("svc-0", "starting")
            await until(lambda: bool(list((agent.directory.cache / "files").iterdir())))
            agent.kill()
            assert [room.name.endswith(".making") for room in agent.directory.work.iterdir()] == [True]
            shelves.held.set()
            scope.agent(*ALLOWED)
            found = await scope.until("svc-0", "ready", "serving")
            assert [room.name for room in agent.directory.work.iterdir()] == [f"{found.metadata.uid}.{found.status.attempt}"]
            files = [file.name for file in (agent.directory.cache / "files").iterdir()]
            assert files == [f"{digest}.t"]

    play(scene, SLOW_MS)
