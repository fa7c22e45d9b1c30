"""Exec sessions of an agent: authorisation, limits, cleanup (virtual time)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from remit.agent import callbacks
from remit.agent.attempts import AttemptId
from remit.agent.callbacks import CallbackRejected, ExecService, RunningAttempt
from remit.model.wire.agent_messages import ExecInputRequest, ExecRequest
from remit.model.wire.exec_frames import ExecExit, ExecFrameType, ExecRejected, ExecStart, TerminalSize
from remit.world.interfaces import ExitStatus, NotStarted, ProcessHandle, ProcessSpec
from remit.world.process.exec_session import CommandOutput, ExecSession
from remit.world.process.exec_session import PtySize as Size
from tests.unit.world.virtual_world import NoRunner, run_virtually, virtual_world

KEY, UID = "replica/t/a-0", "u1"
ORDER = ProcessSpec(("serve",), {"PATH": "/bin", "A": "1"}, group="u1.1", user="nobody", sandbox="bwrap")


class FakeSession:
    """Scripted exec session. With `lingers`, its output stays open until it is killed."""

    def __init__(self) -> None:
        self.fed: list[bytes] = []
        self.sizes: list[Size] = []
        self.input_over = self.closed = self.lingers = False
        self.output: asyncio.Queue[CommandOutput | None] = asyncio.Queue()
        self.ended: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()

    async def read(self) -> CommandOutput | None:
        return await self.output.get()

    async def write(self, data: bytes, /) -> None:
        self.fed.append(data)

    def close_input(self) -> None:
        self.input_over = True

    def resize(self, window: Size, /) -> None:
        self.sizes.append(window)

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self.ended)

    def finish(self, ended: ExitStatus) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)
        if not self.lingers:
            self.output.put_nowait(None)

    async def kill_all(self) -> None:
        self.lingers = False
        self.finish(ExitStatus(signal=9))

    async def close(self) -> None:
        await self.kill_all()
        self.closed = True


class ExecRunner(NoRunner):
    def __init__(self) -> None:
        self.commands: list[FakeSession] = []
        self.orders: list[tuple[ProcessSpec, Size | None]] = []
        self.refuses = ""
        self.running = True

    def is_alive(self, running: ProcessHandle, /) -> bool:
        return self.running

    async def start_exec(self, running: ProcessHandle, order: ProcessSpec, /, *, window: Size | None = None) -> ExecSession:
        if self.refuses:
            raise NotStarted(self.refuses, "install it")
        self.orders.append((order, window))
        self.commands.append(FakeSession())
        return self.commands[-1]


class Scene:
    def __init__(self) -> None:
        self.runner = ExecRunner()
        self.world = replace(virtual_world(), runner=self.runner)
        self.running = True
        self.sessions = ExecService(self.world, "token", self._find)

    def _find(self, copy: AttemptId) -> RunningAttempt | None:
        return RunningAttempt("n1", ProcessHandle(7, "b/7"), ORDER) if self.running and copy == AttemptId(KEY, UID, 1) else None

    def request(
        self, name: str = "session1", begin: ExecStart = ExecStart(("id",)), **more: Any
    ) -> AsyncGenerator[bytes, None]:
        fields = {"token": "token", "session": name, "key": KEY, "uid": UID, "attempt": 1, "begin": begin, **more}
        return self.sessions.stream(msgspec.json.encode(ExecRequest(**fields)))

    async def feed(self, name: str = "session1", token: str = "token", **more: Any) -> None:
        await self.sessions.request(msgspec.json.encode(ExecInputRequest(token=token, session=name, **more)))

    async def refused(self, **more: Any) -> ExecRejected:
        items = [item async for item in self.request(**more)]
        assert len(items) == 1
        assert items[0][0] == ExecFrameType.REFUSED
        return msgspec.json.decode(items[0][1:], type=ExecRejected)


def play(play_scene: Coroutine[Any, Any, None]) -> None:
    run_virtually(play_scene)


def exited(item: bytes) -> ExecExit:
    assert item[0] == ExecFrameType.EXITED, item
    return msgspec.json.decode(item[1:], type=ExecExit)


def test_session_inherits_run_spec_and_streams_both_ways() -> None:
    async def play_scene() -> None:
        scene = Scene()
        async with aclosing(scene.request(begin=ExecStart(("echo", ";$(id)"), stdin=True))) as frames:
            assert (await anext(frames))[0] == ExecFrameType.STARTED
            command = scene.runner.commands[0]
            assert not command.input_over
            await scene.feed(data=b"abc")
            await scene.feed(window=TerminalSize(3, 4))
            await scene.feed(over=True)
            assert (command.fed, command.sizes, command.input_over) == ([b"abc", b"", b""], [Size(3, 4)], True)
            command.output.put_nowait(CommandOutput("stdout", b"out"))
            command.output.put_nowait(CommandOutput("stderr", b"err"))
            assert await anext(frames) == bytes((ExecFrameType.STDOUT,)) + b"out"
            assert await anext(frames) == bytes((ExecFrameType.STDERR,)) + b"err"
            command.finish(ExitStatus(code=3))
            assert exited(await anext(frames)) == ExecExit(code=3)
            assert await anext(frames, None) is None
        assert scene.runner.orders == [(ORDER._replace(argv=("echo", ";$(id)")), None)]
        assert command.closed
        assert len(scene.sessions) == 0
        await scene.feed(data=b"too late")

    play(play_scene())


def test_terminal_gets_size_and_type_and_session_without_stdin_gets_none() -> None:
    async def play_scene() -> None:
        scene = Scene()
        async with aclosing(scene.request(begin=ExecStart(("sh",), window=TerminalSize(5, 6), terminal="xterm"))) as frames:
            await anext(frames)
        async with aclosing(scene.request("session2")) as frames:
            await anext(frames)
        (order, size), (_, none) = scene.runner.orders
        assert (order.env["TERM"], size, none) == ("xterm", Size(5, 6), None)
        assert [command.input_over for command in scene.runner.commands] == [False, True]

    play(play_scene())


@pytest.mark.parametrize(
    "wrong",
    [{"token": "another"}, {"token": ""}, {"session": "../x"}, {"session": ""}, {"begin": ExecStart(())}],
    ids=str,
)
def test_request_with_wrong_token_or_malformed_fields_is_rejected(wrong: dict[str, Any]) -> None:
    async def play_scene() -> None:
        scene = Scene()
        with pytest.raises(CallbackRejected):
            _ = [
                item
                async for item in scene.request(
                    **{"name": wrong.get("session", "session1"), **{k: v for k, v in wrong.items() if k != "session"}}
                )
            ]
        assert scene.runner.orders == []
        with pytest.raises(CallbackRejected):
            await scene.feed(token="another")

    play(play_scene())


def test_request_for_other_attempt_or_replica_is_refused_as_gone() -> None:
    async def play_scene() -> None:
        scene = Scene()
        for more in ({"attempt": 2}, {"uid": "u2"}, {"key": "replica/other/a-0"}, {"key": "../../etc"}):
            assert (await scene.refused(**more)).code == "gone"
        scene.runner.refuses = "there is no such program"
        assert await scene.refused() == ExecRejected("not_started", "there is no such program", "install it")
        assert len(scene.sessions) == 0

    play(play_scene())


def test_client_disconnect_closes_session() -> None:
    async def play_scene() -> None:
        scene = Scene()
        frames = scene.request()
        await anext(frames)
        await frames.aclose()
        assert scene.runner.commands[0].closed
        assert len(scene.sessions) == 0

    play(play_scene())


def test_duplicate_session_name_is_rejected() -> None:
    async def play_scene() -> None:
        scene = Scene()
        async with aclosing(scene.request()) as frames:
            await anext(frames)
            with pytest.raises(CallbackRejected):
                await anext(scene.request())
            assert len(scene.sessions) == 1

    play(play_scene())


def test_process_left_by_command_is_killed_and_its_output_delivered() -> None:
    async def play_scene() -> None:
        scene = Scene()
        async with aclosing(scene.request()) as frames:
            await anext(frames)
            command = scene.runner.commands[0]
            command.lingers = True  # a child keeps the output open
            command.output.put_nowait(CommandOutput("stdout", b"last fields"))
            command.finish(ExitStatus(code=0))
            assert (await anext(frames))[1:] == b"last fields"
            assert exited(await anext(frames)) == ExecExit(code=0)

    play(play_scene())


def test_idle_session_is_killed_and_input_resets_timeout() -> None:
    async def play_scene() -> None:
        scene = Scene()
        async with aclosing(scene.request(begin=ExecStart(("cat",), stdin=True))) as frames:
            await anext(frames)
            began_ms = scene.world.clock.now_ms()
            last = asyncio.ensure_future(anext(frames))
            await scene.world.clock.sleep_ms(callbacks.IDLE_MS_MAX - 1_000)
            await scene.feed(data=b"x")
            await scene.world.clock.sleep_ms(callbacks.IDLE_MS_MAX - 1_000)
            assert not last.done()
            ended = exited(await last)
            assert ended.signal == 9
            assert "no input or output for" in ended.why
            assert scene.world.clock.now_ms() - began_ms < 2 * callbacks.IDLE_MS_MAX + 1_000

    play(play_scene())


def test_session_ends_at_its_maximum_duration() -> None:
    async def play_scene() -> None:
        scene = Scene()
        async with aclosing(scene.request()) as frames:
            await anext(frames)
            began_ms = scene.world.clock.now_ms()
            command = scene.runner.commands[0]
            while True:
                command.output.put_nowait(CommandOutput("stdout", b"x"))
                item = await anext(frames)
                if item[0] == ExecFrameType.EXITED:
                    break
                await scene.world.clock.sleep_ms(600_000)
            assert "reached its limit of" in exited(item).why
            assert scene.world.clock.now_ms() - began_ms <= callbacks.SESSION_MS_MAX + 600_000

    play(play_scene())


def test_session_ends_with_its_replica_and_reports_it() -> None:
    async def play_scene() -> None:
        scene = Scene()
        async with aclosing(scene.request()) as frames:
            await anext(frames)
            scene.runner.running = False
            scene.runner.commands[0].finish(ExitStatus(signal=9))
            assert exited(await anext(frames)) == ExecExit(signal=9, why="its replica ended")

    play(play_scene())


def test_sessions_per_tenant_and_per_node_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "SESSIONS_MAX", 3)
    monkeypatch.setattr(callbacks, "TENANT_SESSIONS_MAX", 2)

    async def play_scene() -> None:
        scene = Scene()
        begun = [scene.request(f"session{number}") for number in range(2)]
        for frames in begun:
            await anext(frames)
        assert "this tenant has reached its limit" in (await scene.refused(name="session9")).cause
        assert (await scene.refused(name="session9", key="replica/other/b-0")).code == "gone"
        monkeypatch.setattr(callbacks, "SESSIONS_MAX", 2)
        full = await scene.refused(name="session9", key="replica/other/b-0")
        assert (full.code, "this node has reached its limit" in full.cause) == ("overloaded", True)
        for frames in begun:
            await frames.aclose()
        async with aclosing(scene.request("session9")) as frames:
            assert (await anext(frames))[0] == ExecFrameType.STARTED

    play(play_scene())
