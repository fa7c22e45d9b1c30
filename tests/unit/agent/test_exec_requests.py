"""Is a command beside a copy begun only for whoever may ask, held to its bounds, never left behind? In a time that leaps."""

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
from remit.world.interfaces import CommandOutput, ExecSession, ExitStatus, NotStarted, ProcessHandle, ProcessSpec
from remit.world.interfaces import PtySize as Size
from tests.unit.world.virtual_world import NoRunner, run_virtually, virtual_world

KEY, UID = "replica/t/a-0", "u1"
ORDER = ProcessSpec(("serve",), {"PATH": "/bin", "A": "1"}, group="u1.1", user="nobody", sandbox="bwrap")


class Command:
    """One that does as the test says. What it has left behind is there until it is ended."""

    def __init__(self) -> None:
        self.fed: list[bytes] = []
        self.sizes: list[Size] = []
        self.input_over = self.closed = self.lingers = False
        self.says: asyncio.Queue[CommandOutput | None] = asyncio.Queue()
        self.ended: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()

    async def read(self) -> CommandOutput | None:
        return await self.says.get()

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
            self.says.put_nowait(None)

    async def kill_all(self) -> None:
        self.lingers = False
        self.finish(ExitStatus(signal=9))

    async def close(self) -> None:
        await self.kill_all()
        self.closed = True


class Hand(NoRunner):
    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.orders: list[tuple[ProcessSpec, Size | None]] = []
        self.refuses = ""
        self.running = True

    def is_alive(self, running: ProcessHandle, /) -> bool:
        return self.running

    async def start_exec(self, running: ProcessHandle, order: ProcessSpec, /, *, window: Size | None = None) -> ExecSession:
        if self.refuses:
            raise NotStarted(self.refuses, "install it")
        self.orders.append((order, window))
        self.commands.append(Command())
        return self.commands[-1]


class Scene:
    def __init__(self) -> None:
        self.hand = Hand()
        self.world = replace(virtual_world(), runner=self.hand)
        self.running = True
        self.sessions = ExecService(self.world, "token", self._find)

    def _find(self, copy: AttemptId) -> RunningAttempt | None:
        return RunningAttempt("n1", ProcessHandle(7, "b/7"), ORDER) if self.running and copy == AttemptId(KEY, UID, 1) else None

    def ask(self, name: str = "session1", begin: ExecStart = ExecStart(("id",)), **more: Any) -> AsyncGenerator[bytes, None]:
        words = {"token": "token", "session": name, "key": KEY, "uid": UID, "attempt": 1, "begin": begin, **more}
        return self.sessions.stream(msgspec.json.encode(ExecRequest(**words)))

    async def feed(self, name: str = "session1", token: str = "token", **more: Any) -> None:
        await self.sessions.request(msgspec.json.encode(ExecInputRequest(token=token, session=name, **more)))

    async def refused(self, **more: Any) -> ExecRejected:
        items = [item async for item in self.ask(**more)]
        assert len(items) == 1
        assert items[0][0] == ExecFrameType.REFUSED
        return msgspec.json.decode(items[0][1:], type=ExecRejected)


def play(scene: Coroutine[Any, Any, None]) -> None:
    run_virtually(scene)


def over(item: bytes) -> ExecExit:
    assert item[0] == ExecFrameType.EXITED, item
    return msgspec.json.decode(item[1:], type=ExecExit)


def test_it_runs_as_the_copy_does_and_only_its_words_are_its_own() -> None:
    async def scene() -> None:
        one = Scene()
        async with aclosing(one.ask(begin=ExecStart(("echo", ";$(id)"), stdin=True))) as told:
            assert (await anext(told))[0] == ExecFrameType.STARTED
            command = one.hand.commands[0]
            assert not command.input_over
            await one.feed(data=b"abc")
            await one.feed(window=TerminalSize(3, 4))
            await one.feed(over=True)
            assert (command.fed, command.sizes, command.input_over) == ([b"abc", b"", b""], [Size(3, 4)], True)
            command.says.put_nowait(CommandOutput("stdout", b"out"))
            command.says.put_nowait(CommandOutput("stderr", b"err"))
            assert await anext(told) == bytes((ExecFrameType.STDOUT,)) + b"out"
            assert await anext(told) == bytes((ExecFrameType.STDERR,)) + b"err"
            command.finish(ExitStatus(code=3))
            assert over(await anext(told)) == ExecExit(code=3)
            assert await anext(told, None) is None
        assert one.hand.orders == [(ORDER._replace(argv=("echo", ";$(id)")), None)]
        assert command.closed
        assert len(one.sessions) == 0
        await one.feed(data=b"too late")

    play(scene())


def test_a_terminal_has_its_size_and_kind_and_without_input_there_is_none() -> None:
    async def scene() -> None:
        one = Scene()
        async with aclosing(one.ask(begin=ExecStart(("sh",), window=TerminalSize(5, 6), terminal="xterm"))) as told:
            await anext(told)
        async with aclosing(one.ask("session2")) as told:
            await anext(told)
        (order, size), (_, none) = one.hand.orders
        assert (order.env["TERM"], size, none) == ("xterm", Size(5, 6), None)
        assert [command.input_over for command in one.hand.commands] == [False, True]

    play(scene())


@pytest.mark.parametrize(
    "wrong",
    [{"token": "another"}, {"token": ""}, {"session": "../x"}, {"session": ""}, {"begin": ExecStart(())}],
    ids=str,
)
def test_who_may_not_ask_or_does_not_speak_this_begins_nothing(wrong: dict[str, Any]) -> None:
    async def scene() -> None:
        one = Scene()
        with pytest.raises(CallbackRejected):
            _ = [
                item
                async for item in one.ask(
                    **{"name": wrong.get("session", "session1"), **{k: v for k, v in wrong.items() if k != "session"}}
                )
            ]
        assert one.hand.orders == []
        with pytest.raises(CallbackRejected):
            await one.feed(token="another")

    play(scene())


def test_another_attempt_or_another_replica_is_not_entered() -> None:
    async def scene() -> None:
        one = Scene()
        for more in ({"attempt": 2}, {"uid": "u2"}, {"key": "replica/other/a-0"}, {"key": "../../etc"}):
            assert (await one.refused(**more)).code == "gone"
        one.hand.refuses = "there is no such program"
        assert await one.refused() == ExecRejected("not_started", "there is no such program", "install it")
        assert len(one.sessions) == 0

    play(scene())


def test_who_leaves_ends_it() -> None:
    async def scene() -> None:
        one = Scene()
        told = one.ask()
        await anext(told)
        await told.aclose()
        assert one.hand.commands[0].closed
        assert len(one.sessions) == 0

    play(scene())


def test_a_session_of_the_same_name_is_not_begun_twice() -> None:
    async def scene() -> None:
        one = Scene()
        async with aclosing(one.ask()) as told:
            await anext(told)
            with pytest.raises(CallbackRejected):
                await anext(one.ask())
            assert len(one.sessions) == 1

    play(scene())


def test_what_a_command_has_left_running_is_ended_with_it_and_what_was_written_is_told() -> None:
    async def scene() -> None:
        one = Scene()
        async with aclosing(one.ask()) as told:
            await anext(told)
            command = one.hand.commands[0]
            command.lingers = True  # somebody holds its output open
            command.says.put_nowait(CommandOutput("stdout", b"last words"))
            command.finish(ExitStatus(code=0))
            assert (await anext(told))[1:] == b"last words"
            assert over(await anext(told)) == ExecExit(code=0)

    play(scene())


def test_it_ends_when_nothing_is_said_for_long__and_talking_puts_that_off() -> None:
    async def scene() -> None:
        one = Scene()
        async with aclosing(one.ask(begin=ExecStart(("cat",), stdin=True))) as told:
            await anext(told)
            began_ms = one.world.clock.now_ms()
            last = asyncio.ensure_future(anext(told))
            await one.world.clock.sleep_ms(callbacks.IDLE_MS_MAX - 1_000)
            await one.feed(data=b"x")
            await one.world.clock.sleep_ms(callbacks.IDLE_MS_MAX - 1_000)
            assert not last.done()
            ended = over(await last)
            assert ended.signal == 9
            assert "no input or output for" in ended.why
            assert one.world.clock.now_ms() - began_ms < 2 * callbacks.IDLE_MS_MAX + 1_000

    play(scene())


def test_it_does_not_last_for_ever_however_much_is_said() -> None:
    async def scene() -> None:
        one = Scene()
        async with aclosing(one.ask()) as told:
            await anext(told)
            began_ms = one.world.clock.now_ms()
            command = one.hand.commands[0]
            while True:
                command.says.put_nowait(CommandOutput("stdout", b"x"))
                item = await anext(told)
                if item[0] == ExecFrameType.EXITED:
                    break
                await one.world.clock.sleep_ms(600_000)
            assert "reached its limit of" in over(item).why
            assert one.world.clock.now_ms() - began_ms <= callbacks.SESSION_MS_MAX + 600_000

    play(scene())


def test_that_its_replica_ended_is_said() -> None:
    async def scene() -> None:
        one = Scene()
        async with aclosing(one.ask()) as told:
            await anext(told)
            one.hand.running = False
            one.hand.commands[0].finish(ExitStatus(signal=9))
            assert over(await anext(told)) == ExecExit(signal=9, why="its replica ended")

    play(scene())


def test_there_are_only_so_many_of_a_tenant_and_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "SESSIONS_MAX", 3)
    monkeypatch.setattr(callbacks, "TENANT_SESSIONS_MAX", 2)

    async def scene() -> None:
        one = Scene()
        begun = [one.ask(f"session{number}") for number in range(2)]
        for told in begun:
            await anext(told)
        assert "this tenant has reached its limit" in (await one.refused(name="session9")).cause
        assert (await one.refused(name="session9", key="replica/other/b-0")).code == "gone"
        monkeypatch.setattr(callbacks, "SESSIONS_MAX", 2)
        full = await one.refused(name="session9", key="replica/other/b-0")
        assert (full.code, "this node has reached its limit" in full.cause) == ("overloaded", True)
        for told in begun:
            await told.aclose()
        async with aclosing(one.ask("session9")) as told:
            assert (await anext(told))[0] == ExecFrameType.STARTED

    play(scene())
