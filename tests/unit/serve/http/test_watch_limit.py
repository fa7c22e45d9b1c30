"""Watch limit: every caller without a stream gets one, however many others hold, and components are never refused."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from remit.serve.http.connection_limits import WatchLimit
from remit.serve.http.replies import ApiProblem
from tests.unit.serve.auth.user_tokens import ANN, BOB, create_users
from tests.unit.serve.in_memory_server import TOKENS, api


def acquire_all(listeners: WatchLimit, flow: str, held: contextlib.ExitStack) -> int:
    """Number of streams acquired before the first refusal."""
    for count in range(10_000):
        try:
            held.enter_context(listeners.slot(flow))
        except ApiProblem:
            return count
    raise AssertionError("no limit")


def test_flow_may_hold_as_many_streams_as_are_free() -> None:
    """A30: one tenant opens as many streams as it can."""
    listeners = WatchLimit(1_000)
    with contextlib.ExitStack() as held:
        assert acquire_all(listeners, "tenant flood", held) == 500
        assert [acquire_all(listeners, f"tenant {number}", held) for number in range(3)] == [250, 125, 63]
        with pytest.raises(ApiProblem) as refused:
            held.enter_context(listeners.slot("tenant flood"))
        document = refused.value.document
        assert (document.status, document.code) == (429, "throttled")
        assert document.detail == "tenant flood has 500 streams open, and only 62 are free for all callers"
        for number in range(62):
            held.enter_context(listeners.slot(f"person {number}"))
        with pytest.raises(ApiProblem) as full:
            held.enter_context(listeners.slot("one more"))
        assert full.value.document.code == "overloaded"
    assert listeners.count == 0 and not listeners._held, "no state is left of closed streams"


def test_tenant_with_maximum_watches_leaves_room_for_others_and_components() -> None:
    async def main() -> None:
        async with api(watchers_max=8) as client, contextlib.AsyncExitStack() as open_:
            await create_users(client)

            async def watch(token: str) -> int:
                """Status of one more watch, which stays open if it started."""
                began: asyncio.Future[int] = asyncio.get_running_loop().create_future()
                task = asyncio.ensure_future(client.ask("GET", "/v1/workloads?watch=true", token=token))
                before = client.server.streams.user_watches.count
                while not task.done() and client.server.streams.user_watches.count == before:  # noqa: ASYNC110 - no event to wait for
                    await asyncio.sleep(0.002)
                if task.done():
                    return task.result().status
                began.set_result(200)

                async def end() -> None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task

                open_.push_async_callback(end)
                return began.result()

            assert [await watch(ANN) for _ in range(6)] == [200] * 4 + [429] * 2
            assert [await watch(BOB) for _ in range(3)] == [200] * 2 + [429]
            with client.server.streams.slot(client.server.auth.tokens.authenticate(f"Bearer {TOKENS['agent']}")):
                assert client.server.streams.component_watches.count == 1
        assert client.server.streams.count == 0

    asyncio.run(main())
