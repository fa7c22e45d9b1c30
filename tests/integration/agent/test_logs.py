"""Is what real work says kept within bounds, and told to whoever may hear it, to its last byte and across every cut?"""

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
from tests.integration.agent.control_plane import AgentProcess, Scope, play, shell, until

BOUNDS = "file_bytes=20000,older=2,copies=3,node_bytes=1000000,age_ms=60000"
LINKS: dict[Scope, SocketLink] = {}
ONCE = {"type": "job", "retries": 0}


async def asked(scope: Scope, found: Replica, **more: object) -> AsyncIterator[bytes]:
    if scope not in LINKS:
        row = await scope.store.get("node/n1")
        assert row is not None
        node = decode(row.value)
        assert isinstance(node, Node)
        LINKS[scope] = SocketLink({"agent": f"tcp:{node.spec.address}:{node.spec.port}"})
    link = LINKS[scope]
    words = {
        "token": scope.callbacks[-1],
        "key": "replica/t/" + found.metadata.name,
        "uid": found.metadata.uid,
        "attempt": 1,
        **more,
    }
    async with aclosing(link.stream("agent", msgspec.json.encode(LogsRequest(**words)))) as items:  # type: ignore[arg-type]
        async for item in items:
            yield item


async def whole(scope: Scope, found: Replica, **more: object) -> str:
    return b"".join([item async for item in asked(scope, found, **more)]).decode()


def files(agent: AgentProcess) -> list[Path]:
    return sorted((agent.directory.logs / "n1").iterdir())


def test_whoever_follows_gets_every_line_once_over_many_cuts_until_the_copy_has_ended() -> None:
    async def scene(scope: Scope) -> None:
        agent = scope.agent("--log-bounds", BOUNDS)
        count = 2_000
        words = f"import time\nfor n in range({count}):\n  print(f'line {{n:05}}' + 'x' * 50, flush=True); time.sleep(0.002)"
        await scope.run("job", "python3", "-c", words + "\nimport sys; print('at last', file=sys.stderr)", spec=ONCE)
        found = await scope.until("job-0", "running")
        told = (await whole(scope, found, follow=True)).splitlines()
        out = [line for line in told if line.startswith("line ")]
        missing = count - len(out)
        assert out == sorted(set(out)), "in order, and none twice"
        assert missing <= 10, f"{missing} lines were lost between a copy and its cut"
        assert told[-1] == "at last"
        assert out[-1] == f"line {count - 1:05}" + "x" * 50
        pieces = [path for path in files(agent) if ".out" in path.name]
        assert len(pieces) == 3, "the file, and two older pieces"
        assert sum(path.stat().st_size for path in pieces) < 3 * 80_000
        assert len(out) * 61 > 3 * 20_000, "more was said than is kept"

    play(scene)


@pytest.mark.smoke
def test_the_last_lines_of_either_stream_are_told_and_nothing_to_whoever_has_no_right_or_asks_for_a_path() -> None:
    async def scene(scope: Scope) -> None:
        agent = scope.agent()
        await scope.run("job", *shell("for n in 1 2 3 4 5; do echo out $n; echo err $n >&2; done; sleep 600"), spec=ONCE)
        found = await scope.until("job-0", "running")

        async def complete() -> bool:
            return (await whole(scope, found)).count("\n") == 10

        await until(complete)
        assert await whole(scope, found, tail=2, stream="stdout") == "out 4\nout 5\n"
        assert await whole(scope, found, tail=1) == "out 5\nerr 5\n"
        assert await whole(scope, found, tail=0) == ""
        assert (await whole(scope, found, stream="stderr")).startswith("err 1\n")
        assert "no logs of attempt 7 are stored" in await whole(scope, found, attempt=7)
        for wrong in ({"token": "no"}, {"uid": "../../run/journal"}, {"uid": ""}, {"attempt": -1}):
            with pytest.raises(LinkError):
                await whole(scope, found, **wrong)
        # Whoever runs as we do might put a link in the place of a log. It is not followed, neither to read nor to cut.
        secret = scope.root / "secret"
        secret.write_text("secret\n" * 10)
        log = agent.directory.logs / "n1" / f"{found.metadata.uid}.1.err"
        log.unlink()
        log.symlink_to(secret)
        (log.parent / f"{log.name}@0000000000000000").symlink_to(secret)
        assert "secret" not in await whole(scope, found)
        assert secret.read_text() == "secret\n" * 10

    play(scene)


def test_logs_of_ended_copies_stay_for_a_while_and_only_so_many() -> None:
    async def scene(scope: Scope) -> None:
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
        assert await whole(scope, found, stream="stdout") == "hello\n", "it has ended, and can be read"
        agent.kill()
        agent.directory.keeper_pid.unlink()
        await stop_keeper(agent.directory.root, 0)
        again = scope.agent("--log-bounds", BOUNDS)  # a keeper sweeps when it begins, and every minute

        def few() -> bool:
            return len({path.name.rsplit(".", 1)[0] for path in files(again)}) <= 3

        await until(few)
        names = [path.name for path in files(again)]
        assert f"{found.metadata.uid}.1.out" in names, "the latest stay"
        assert "forgotten-0.1.out" not in names

    play(scene)
