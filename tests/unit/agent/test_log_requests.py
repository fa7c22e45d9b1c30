"""Log requests to an agent, while logs rotate (virtual time)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from remit.agent.attempts import AttemptId
from remit.agent.callbacks import CHUNK_BYTES, CallbackRejected, LogService
from remit.model.wire.agent_messages import LogsRequest
from remit.world.files.log_files import FileLogFiles
from remit.world.interfaces import World
from tests.unit.world.virtual_world import run_virtually, virtual_world

ONE = AttemptId("replica/t/a-0", "u1", 1)


class Scene:
    def __init__(self, place: Path, world: World, *, runs: bool = False) -> None:
        self.place, self.world, self.runs = place, world, runs
        self.logs = LogService(world, FileLogFiles(), "token", self._places)
        self.out, self.err = place / "u1.1.out", place / "u1.1.err"

    def _places(self, copy: AttemptId) -> tuple[Iterable[Path], bool]:
        return [self.place], self.runs and copy == ONE

    async def received(self, **more: object) -> bytes:
        fields = {"token": "token", "key": ONE.key, "uid": "u1", "attempt": 1, **more}
        body = msgspec.json.encode(LogsRequest(**fields))  # type: ignore[arg-type]
        return b"".join([item async for item in self.logs.stream(body)])

    def cut(self) -> None:
        size = self.out.stat().st_size
        assert FileLogFiles().rotate(self.place, self.out.name, bytes_max=size - 1, rotated_max=2)


def test_tail_spans_rotated_files_and_chunks(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path, virtual_world())
        long = b"y" * (CHUNK_BYTES + 10)
        scene.out.write_bytes(b"one\ntwo\n")
        scene.cut()
        with scene.out.open("ab") as file:
            file.write(b"three\n" + long + b"\nfive")
        log = b"one\ntwo\nthree\n" + long + b"\nfive"
        assert await scene.received() == log
        lines = log.split(b"\n")
        for tail in range(1, 7):
            assert await scene.received(tail=tail) == b"\n".join(lines[-tail:]), tail
        assert await scene.received(tail=0) == b""
        assert await scene.received(tail=-5) == b""
        scene.err.touch()
        assert await scene.received(stream="stderr") == b""

    run_virtually(play())


def test_removed_log_bytes_are_reported_as_gap(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path, virtual_world())
        for n in range(5):
            scene.out.write_bytes(b"%d\n" % n)
            scene.cut()
        assert await scene.received() == b"3\n4\n"
        positions = {scene.out.name: 0}
        new = [item async for item in scene.logs._new_output(tmp_path, scene.out.name, positions)]
        assert b"".join(new) == b"-- 6 bytes were removed by log rotation --\n3\n4\n"

    run_virtually(play())


def test_follow_streams_rotated_output_until_attempt_ends(tmp_path: Path) -> None:
    async def play() -> None:
        world = virtual_world()
        scene = Scene(tmp_path, world, runs=True)
        received: list[bytes] = []
        fields = LogsRequest("token", ONE.key, "u1", 1, "both", None, True)
        stream = scene.logs.stream(msgspec.json.encode(fields))

        async def follow() -> None:
            received.extend([item async for item in stream])

        task = asyncio.create_task(follow())
        await world.clock.sleep_ms(1_000)
        assert not task.done(), "follow waits for output"
        for n in range(20):
            with scene.out.open("ab") as file:
                file.write(b"%d\n" % n)
            if n % 3 == 0:
                scene.cut()
            await world.clock.sleep_ms(70)
        scene.err.write_bytes(b"last fields")
        scene.runs = False
        await task
        assert b"".join(received) == b"".join(b"%d\n" % n for n in range(20)) + b"last fields"

    run_virtually(play())


def test_logs_request_with_wrong_token_or_bad_attempt_is_rejected(tmp_path: Path) -> None:
    (tmp_path.parent / "passwd.1.out").write_text("secret")

    async def play() -> None:
        scene = Scene(tmp_path, virtual_world())
        wrong: tuple[dict[str, object], ...] = (
            {"token": ""}, {"token": "Token"}, {"uid": "../passwd"}, {"uid": "a/b"}, {"uid": ""}, {"uid": "."}, {"attempt": -1},
            {"uid": "u" * 200},
        )  # fmt: skip
        for fields in wrong:
            with pytest.raises(CallbackRejected):
                await scene.received(**fields)
        for body in (b"", b"{}", b"[" * 5_000, b'{"type":"orders","nodes":[]}'):
            with pytest.raises(CallbackRejected):
                _ = [item async for item in scene.logs.stream(body)]
        with pytest.raises(CallbackRejected):
            await scene.logs.request(b"")
        assert b"no logs of attempt 3 are stored" in await scene.received(attempt=3)

    run_virtually(play())
