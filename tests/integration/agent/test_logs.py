"""Logs of real work: bounded, complete to the last byte across rotations, and served only to authorised callers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from remit.cli.local.down import stop_keeper
from remit.model.kinds import Node
from remit.model.objects import decode
from remit.model.records import Replica
from remit.model.wire.agent_messages import LogsRequest
from remit.world.interfaces import LinkError
from remit.world.net.rpc_client import SocketLink
from tests.integration.agent.control_plane import AgentProcess, Scope, run_scenario, shell, until

BOUNDS = "file_bytes=20000,older=2,copies=3,node_bytes=1000000,age_ms=60000"
LINKS: dict[Scope, SocketLink] = {}
ONCE = {"type": "job", "retries": 0}


async def stream_logs(scope: Scope, found: Replica, **more: object) -> AsyncIterator[bytes]:
    if scope not in LINKS:
        row = await scope.store.get("node/n1")
        assert row is not None
        node = decode(row.value)
        assert isinstance(node, Node)
        LINKS[scope] = SocketLink({"agent": f"tcp:{node.spec.address}:{node.spec.port}"})
    link = LINKS[scope]
    parameters = {
        "token": scope.callbacks[-1],
        "key": "replica/t/" + found.metadata.name,
        "uid": found.metadata.uid,
        "attempt": 1,
        **more,
    }
    async with aclosing(link.stream("agent", msgspec.json.encode(LogsRequest(**parameters)))) as items:  # type: ignore[arg-type]
        async for item in items:
            yield item


async def read_logs(scope: Scope, found: Replica, **more: object) -> str:
    return b"".join([item async for item in stream_logs(scope, found, **more)]).decode()


def files(agent: AgentProcess) -> list[Path]:
    return sorted((agent.directory.logs / "n1").iterdir())


def test_follower_gets_every_line_once_across_rotations_until_end() -> None:
    async def scenario(scope: Scope) -> None:
        agent = scope.agent("--log-bounds", BOUNDS)
        count = 2_000
        program = f"import time\nfor n in range({count}):\n  print(f'line {{n:05}}' + 'x' * 50, flush=True); time.sleep(0.002)"
        await scope.run("job", "python3", "-c", program + "\nimport sys; print('at last', file=sys.stderr)", spec=ONCE)
        found = await scope.until("job-0", "running")
        received = (await read_logs(scope, found, follow=True)).splitlines()
        out = [line for line in received if line.startswith("line ")]
        missing = count - len(out)
        assert out == sorted(set(out)), "in order and without repeats"
        assert missing <= 10, f"{missing} lines were lost between a copy and its cut"
        assert received[-1] == "at last"
        assert out[-1] == f"line {count - 1:05}" + "x" * 50
        pieces = [path for path in files(agent) if ".out" in path.name]
        assert len(pieces) == 3, "the file, and two older pieces"
        assert sum(path.stat().st_size for path in pieces) < 3 * 80_000
        assert len(out) * 61 > 3 * 20_000, "more was written than is retained"

    run_scenario(scenario)


@pytest.mark.smoke
def test_tail_and_streams_are_served_and_unauthorised_requests_refused() -> None:
    async def scenario(scope: Scope) -> None:
        agent = scope.agent()
        await scope.run("job", *shell("for n in 1 2 3 4 5; do echo out $n; echo err $n >&2; done; sleep 600"), spec=ONCE)
        found = await scope.until("job-0", "running")

        async def complete() -> bool:
            return (await read_logs(scope, found)).count("\n") == 10

        await until(complete)
        assert await read_logs(scope, found, tail=2, stream="stdout") == "out 4\nout 5\n"
        assert await read_logs(scope, found, tail=1) == "out 5\nerr 5\n"
        assert await read_logs(scope, found, tail=0) == ""
        assert (await read_logs(scope, found, stream="stderr")).startswith("err 1\n")
        assert "no logs of attempt 7 are stored" in await read_logs(scope, found, attempt=7)
        for wrong in ({"token": "no"}, {"uid": "../../run/journal"}, {"uid": ""}, {"attempt": -1}):
            with pytest.raises(LinkError):
                await read_logs(scope, found, **wrong)
        # Another process of the same user might replace a log by a symlink. It is not followed when reading or rotating.
        secret = scope.root / "secret"
        secret.write_text("secret\n" * 10)
        log = agent.directory.logs / "n1" / f"{found.metadata.uid}.1.err"
        log.unlink()
        log.symlink_to(secret)
        (log.parent / f"{log.name}@0000000000000000").symlink_to(secret)
        assert "secret" not in await read_logs(scope, found)
        assert secret.read_text() == "secret\n" * 10

    run_scenario(scenario)


def test_logs_of_ended_attempts_are_kept_within_limits() -> None:
    async def scenario(scope: Scope) -> None:
        agent = scope.agent("--log-bounds", BOUNDS)
        await until(lambda: agent.directory.logs.is_dir())
        place = agent.directory.logs / "n1"
        place.mkdir(exist_ok=True)
        for n in range(6):
            old = place / f"forgotten-{n}.1.out"
            old.write_text("words\n")
            os.utime(old, (1_700_000_000 + n, 1_700_000_000 + n) if n < 2 else None)
        await scope.run("job", *shell("echo hello"), spec=ONCE)
        found = await scope.until("job-0", "finished", "released")
        assert await read_logs(scope, found, stream="stdout") == "hello\n", "the log of an ended attempt can be read"
        agent.kill()
        agent.directory.keeper_pid.unlink()
        await stop_keeper(agent.directory.root, 0)
        again = scope.agent("--log-bounds", BOUNDS)  # a keeper prunes at start and every minute

        def few() -> bool:
            return len({path.name.rsplit(".", 1)[0] for path in files(again)}) <= 3

        await until(few)
        names = [path.name for path in files(again)]
        assert f"{found.metadata.uid}.1.out" in names, "the latest stay"
        assert "forgotten-0.1.out" not in names

    run_scenario(scenario)
