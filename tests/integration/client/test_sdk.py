"""The SDK loses no change and applies nothing twice against a real `remit server` that is killed, stopped and cut off."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from remit.cli.session.token_files import ensure_issued_token
from remit.client.api import ALL_TENANTS, Api, ApiError, Bookmark, Changed, Deleted, Synced
from remit.client.blocking import BlockingApi
from remit.client.http_link import connect
from remit.model.claims import Accepted, Acquire, Actor, Operation
from remit.model.identity import token_digest
from remit.model.kinds import (
    Config,
    DataSpec,
    Region,
    Secret,
    SecretSpec,
    Template,
    Tenant,
    TenantSpec,
    Token,
    TokenSpec,
    Workload,
    WorkloadSpec,
)
from remit.model.metadata import Metadata
from remit.model.records import Replica
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.world.production import production
from tests.integration.client.tcp_proxy import proxied
from tests.integration.serve.server_process import BEAT, Server

ROOT = Path(__file__).resolve().parents[3]
ACME = Tenant(metadata=Metadata(name="acme"), spec=TenantSpec(quota=Amount.parse({"cpu": "100", "memory": "64Gi"})))


def config(name: str, text: str) -> Config:
    return Config(metadata=Metadata(name=name), spec=DataSpec(data={"text": text}))


def workload(name: str, replicas: int = 1) -> Workload:
    template = Template(command=("sleep", "60"), resources=Amount.parse({"cpu": "100m", "memory": "64Mi"}))
    spec = WorkloadSpec(type="service", replicas=replicas, template=template)
    return Workload(metadata=Metadata(name=name, labels={"app": name}), spec=spec)


@contextmanager
def with_controllers(server: Server) -> Iterator[None]:
    """Run controllers beside the server: a deleted workload goes once they have ended its replicas."""
    url, text = f"http://127.0.0.1:{server.port}", "a-token-of-controllers"
    spec = TokenSpec(role="controllers", digest=token_digest(text), expires="2999-01-01T00:00:00Z")
    with BlockingApi(url, server.token) as api:
        api.create(Token(metadata=Metadata(name="loops"), spec=spec))
    argv = [sys.executable, "-m", "remit.cli", "controllers", "--server", url, "--heartbeat-interval", BEAT]
    process = subprocess.Popen(
        argv, env={**os.environ, "REMIT_TOKEN": text}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def api_to(server: Server, url: str = "") -> Api:
    return Api(url or f"http://127.0.0.1:{server.port}", server.token, tenant="acme", timeout_s=30, try_s=5)


def blocking_to(server: Server) -> BlockingApi:
    return BlockingApi(f"http://127.0.0.1:{server.port}", server.token, tenant="acme")


class WatchMirror:
    """Follows a watch and mirrors its objects."""

    def __init__(self) -> None:
        self.objects: dict[str, str] = {}
        self.synced = 0
        self.breaks: list[str] = []
        self.repeated: list[str] = []
        self._seen_revisions: dict[str, int] = {}

    async def follow(self, events: AsyncGenerator[Any, None]) -> None:
        async for event in events:
            match event:
                case Changed(object=Config() as one):
                    name, revision = one.metadata.name, one.metadata.revision
                    if self._seen_revisions.get(name, 0) >= revision:
                        self.repeated.append(f"{name}@{revision}")
                    self._seen_revisions[name] = revision
                    self.objects[name] = one.spec.data["text"]
                case Deleted(name=name):
                    del self.objects[name]
                case Synced():
                    self.synced += 1
                case Bookmark():
                    pass

    async def until(self, expected: dict[str, str]) -> None:
        async with asyncio.timeout(30):
            while self.objects != expected:  # noqa: ASYNC110 - changed by another task
                await asyncio.sleep(0.02)


def test_watch_misses_and_repeats_nothing_over_three_server_lives(tmp_path: Path) -> None:
    """Each life ends by kill -9 during writes, under a watch that continues."""

    async def main() -> None:
        mirror, expected, port = WatchMirror(), dict[str, str](), 0
        following: asyncio.Task[None] | None = None
        watching: Api | None = None
        for life in range(3):
            with Server(tmp_path / "data", f"127.0.0.1:{port}") as server:
                port = server.port
                async with api_to(server) as api:
                    if watching is None:
                        await api.apply([ACME])
                        watching = api_to(server)
                        events = watching.watch(Config, silence_s=5, lost=mirror.breaks.append)
                        following = asyncio.create_task(mirror.follow(events))
                    for turn in range(20):
                        name = f"c{turn % 7}"
                        if turn % 7 == 3 and name in expected:
                            await api.delete(Config, name)
                            del expected[name]
                        else:
                            expected[name] = f"{life}-{turn}"
                            await api.replace(config(name, expected[name]))
                    if life < 2:  # the watch is connected, so the kill breaks it
                        await mirror.until(expected)
                server.kill()
        with Server(tmp_path / "data", f"127.0.0.1:{port}"):
            await mirror.until(expected)
            assert mirror.repeated == []
            assert len(mirror.breaks) >= 2
            assert mirror.synced >= 2
            assert following is not None and not following.done()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            assert watching is not None
            await watching.close()

    asyncio.run(main())


@pytest.mark.smoke
def test_write_with_lost_answer_is_applied_once(tmp_path: Path) -> None:
    """The connection is cut after the server has got the request and before its answer arrives."""

    async def main() -> None:
        with Server(tmp_path / "data") as server:
            async with proxied(server.port) as (proxy, url), api_to(server) as direct, api_to(server, url) as api:
                await direct.apply([ACME])
                await api.status()

                def lose_twice(piece: bytes) -> bool:
                    return piece.startswith((b"POST", b"PUT", b"PATCH", b"DELETE")) and proxy.lost % 3 < 2

                proxy.lose = lose_twice
                made = await api.create(workload("web"))
                assert proxy.lost == 2, "the request was sent three times"
                assert (made.metadata.generation, made.spec.replicas) == (1, 1)
                proxy.lost = 0
                patched = await api.patch(Workload, "web", {"spec": {"replicas": 7}})
                assert (patched.metadata.generation, patched.spec.replicas) == (2, 7)
                assert proxy.lost == 2
                proxy.lost = 0
                results = (await api.apply([workload("web", 8), workload("other", 0)])).results
                assert [one.generation for one in results] == [3, 1]
                assert proxy.lost == 2
                proxy.lost = 0
                gone = await api.delete(Workload, "other")
                assert (proxy.lost, gone.action) == (2, "deleted"), "the second delete of it would find nothing"
                assert (await direct.get(Workload, "web")).metadata.generation == 3

    asyncio.run(main())


def test_watch_over_unstable_connection_converges(tmp_path: Path) -> None:
    async def main() -> None:
        with Server(tmp_path / "data") as server:
            async with proxied(server.port) as (proxy, url), api_to(server) as direct, api_to(server, url) as api:
                await direct.apply([ACME])
                mirror, expected = WatchMirror(), dict[str, str]()
                following = asyncio.create_task(mirror.follow(api.watch(Config, lost=mirror.breaks.append)))
                for turn in range(60):
                    expected[f"c{turn % 9}"] = str(turn)
                    await direct.replace(config(f"c{turn % 9}", str(turn)))
                    if turn % 12 == 7:
                        proxy.cut()
                await mirror.until(expected)
                assert mirror.repeated == []
                assert mirror.breaks
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())


def test_server_shutdown_is_announced_to_watchers(tmp_path: Path) -> None:
    async def main() -> None:
        breaks: list[str] = []
        with Server(tmp_path / "data") as server:
            async with api_to(server) as api, aclosing(api.watch(Region, lost=breaks.append)) as events:
                assert isinstance(await anext(events), Synced)
                assert isinstance(await anext(events), Bookmark)
                code, output = await asyncio.to_thread(server.end)
                assert (code, output) == (0, "")
                with Server(tmp_path / "data", f"127.0.0.1:{server.port}"):
                    async with asyncio.timeout(30):
                        while not isinstance(await anext(events), Synced):
                            pass
        assert breaks[0] == "shutdown"

    asyncio.run(main())


@pytest.mark.smoke
def test_every_sdk_call_works_against_real_server(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        server.until_ready()
        with blocking_to(server) as api:
            assert api.ready() == ""
            assert api.status().incarnation
            web = workload("web", 2)
            planned = api.plan([web, ACME])
            assert [one.action for one in planned.items] == ["create", "create"]
            applied = api.apply([web, ACME], if_unchanged=planned.revision)
            assert [one.action for one in applied.results] == ["created", "created"]
            assert [one.action for one in api.apply([web]).results] == ["unchanged"]
            with pytest.raises(ApiError) as caught:
                api.apply([workload("web", 3)], if_unchanged=planned.revision)
            assert (caught.value.status, caught.value.code) == (412, "precondition")

            read = api.get(Workload, "web")
            assert read.metadata.revision and read.metadata.tenant == "acme"
            with pytest.raises(ApiError) as caught:
                api.create(web)
            assert (caught.value.status, caught.value.code) == (409, "exists")
            with pytest.raises(ApiError) as caught:
                api.replace(web, expect=read.metadata.revision - 1)
            assert (caught.value.status, caught.value.code) == (412, "revision")
            dry = api.patch(Workload, "web", {"spec": {"replicas": 9}}, dry_run=True)
            assert dry.spec.replicas == 9
            assert api.get(Workload, "web") == read
            with pytest.raises(ApiError) as caught:
                api.patch(Workload, "web", {"spec": {"replicas": -1}})
            assert (caught.value.status, caught.value.code) == (422, "invalid")
            assert "replicas" in caught.value.field

            api.create(Secret(metadata=Metadata(name="s"), spec=SecretSpec(data={"key": "value"})))
            assert api.get(Secret, "s").spec.data == {"key": ""}
            assert [one.metadata.name for one in api.list(Workload, labels={"app": "web"}).items] == ["web"]
            assert api.list(Workload, labels="app=no").items == []
            everywhere = api.list(Workload, tenant=ALL_TENANTS, fields="spec.type=service")
            assert [one.metadata.name for one in everywhere.items] == ["web"]
            assert [one.metadata.name for one in api.list(Replica).items] == ["web-0", "web-1"], (
                "its replicas are created with it"
            )

            assert api.explain(Workload, "web")["kind"] == "workload"
            progress = api.workload_progress("web")
            assert (progress.desired, progress.stages, progress.limit.code) == (2, {"queued": 2}, "queued")
            assert [one.name for one in api.list_workload_progress(tenant=ALL_TENANTS).items] == ["web"]
            assert api.capacity(web, 5)
            assert api.endpoints("web").items == []
            assert isinstance(next(api.watch_endpoints()), Synced)
            assert list(api.top_nodes()) == []
            assert list(api.top_replicas(tenant=ALL_TENANTS)) == []
            assert api.account("workload/acme/web")
            with pytest.raises(ApiError) as caught:
                next(api.logs("web-0"))
            assert caught.value.status == 404

            operation = Operation(api.issue(), Actor("me", Role.SCHEDULER), Acquire("scheduler", Duration(10_000)))
            with pytest.raises(ApiError) as caught:
                api.claims([operation])
            assert caught.value.status == 401, "users may not submit claims"
            mine = token_digest("a-token-of-a-scheduler")
            spec = TokenSpec(role="scheduler", digest=mine, expires="2999-01-01T00:00:00Z")
            api.create(Token(metadata=Metadata(name="s"), spec=spec))
            with BlockingApi(f"http://127.0.0.1:{server.port}", "a-token-of-a-scheduler") as program:
                first = program.claims([operation])
                assert isinstance(first[0], Accepted)
                assert program.claims([operation]) == first
            assert api.delete(Workload, "web", expect=read.metadata.revision).action == "marked"
            assert api.get(Workload, "web").metadata.deleting, "its replicas remain without controllers"
            api.create(workload("idle", 0))
            assert api.delete(Workload, "idle").action == "deleted"
            with pytest.raises(ApiError) as caught:
                api.get(Workload, "idle")
            assert caught.value.code == "not_found"


def test_dry_run_with_operation_id_writes_nothing(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "data") as server,
        BlockingApi(f"http://127.0.0.1:{server.port}", server.token, tenant="acme") as api,
    ):
        api.apply([ACME, workload("web", 0)])
        before = api.get(Workload, "web")
        path, operation = "/v1/tenants/acme/workloads/web", {"Remit-Operation-Id": api.issue()}
        media = {"Content-Type": "application/merge-patch+json"}
        patched = server.ask("PATCH", f"{path}?dryRun=true", {"spec": {"replicas": 9}}, **operation, **media)
        assert patched.json["spec"]["replicas"] == 9
        assert server.ask("DELETE", f"{path}?dryRun=true", **operation).status == 200
        assert api.get(Workload, "web") == before


def test_component_uses_one_connection_to_server(tmp_path: Path) -> None:
    async def main() -> None:
        world = production()
        with Server(tmp_path / "data") as server:
            async with api_to(server) as api:
                token = await ensure_issued_token(tmp_path / "token", api, world.ids, "scheduler")
                async with connect([f"http://127.0.0.1:{server.port}/"], token, world) as connected:
                    client = connected.client_for(Actor("one", Role.SCHEDULER))
                    assert (await client.status()).scope == "local"
                    await api.apply([ACME])
                    row = await connected.store.get("tenant/acme")
                    assert row is not None
                    watch = await connected.store.watch("tenant/", after=row.revision)
                    await api.patch(Tenant, "acme", {"spec": {"weight": 5}})
                    event = await asyncio.wait_for(anext(aiter(watch)), 10)
                    while not event.changes:
                        event = await asyncio.wait_for(anext(aiter(watch)), 10)
                    assert [change.key for change in event.changes] == ["tenant/acme"]
                    await watch.close()
        await world.offload.close()

    asyncio.run(main())


def test_examples_of_sdk_page_run(tmp_path: Path) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "sdk.md").read_text(), re.M | re.S)
    assert len(programs) == 5
    with Server(tmp_path / "data") as server:
        server.until_ready()
        env = {**os.environ, "REMIT_SERVER": f"http://127.0.0.1:{server.port}", "REMIT_TOKEN": server.token}
        with with_controllers(server):
            for program in programs:
                done = subprocess.run(
                    [sys.executable, "-W", "error", "-c", program],
                    env=env, capture_output=True, text=True, timeout=60, check=False,
                )  # fmt: skip
                assert done.returncode == 0, f"{program}\n{done.stderr}"
                assert "never" not in done.stderr, done.stderr
