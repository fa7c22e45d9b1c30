"""Does everybody who has no stream yet find a place, however many another has, and are agents never kept out by people?"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from remit.serve.http.connection_limits import WatchLimit
from remit.serve.http.replies import ApiProblem
from tests.unit.serve.auth.test_access_control import ANN, BOB, people
from tests.unit.serve.in_memory_server import TOKENS, api


def taken(listeners: WatchLimit, flow: str, held: contextlib.ExitStack) -> int:
    """How many it gets before it is refused."""
    for count in range(10_000):
        try:
            held.enter_context(listeners.slot(flow))
        except ApiProblem:
            return count
    raise AssertionError("without end")


def test_a_flow_may_hold_as_many_as_are_free__so_another_always_finds_some() -> None:
    """A30: one tenant opens all that it can."""
    listeners = WatchLimit(1_000)
    with contextlib.ExitStack() as held:
        assert taken(listeners, "tenant flood", held) == 500
        assert [taken(listeners, f"tenant {number}", held) for number in range(3)] == [250, 125, 63]
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
    assert listeners.count == 0 and not listeners._held, "nothing is kept of who has left"


def test_one_tenant_watches_as_much_as_it_can__the_other_and_the_components_still_do() -> None:
    async def main() -> None:
        async with api(watchers_max=8) as asked, contextlib.AsyncExitStack() as open_:
            await people(asked)

            async def watch(token: str) -> int:
                """The status of one more watch, which stays open if it is begun."""
                began: asyncio.Future[int] = asyncio.get_running_loop().create_future()
                task = asyncio.ensure_future(asked.ask("GET", "/v1/workloads?watch=true", token=token))
                before = asked.desk.streams.user_watches.count
                while not task.done() and asked.desk.streams.user_watches.count == before:  # noqa: ASYNC110 - nothing tells of it
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
            with asked.desk.streams.slot(asked.desk.auth.tokens.authenticate(f"Bearer {TOKENS['agent']}")):
                assert asked.desk.streams.component_watches.count == 1
        assert asked.desk.streams.count == 0

    asyncio.run(main())
