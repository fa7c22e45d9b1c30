"""Does the SDK keep what it promises: typed answers, deeds done once, refusals told, patience that ends?"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

import pytest

from remit.client.api import ALL_TENANTS, Api, ApiError, NotYet, Unanswered
from remit.client.api_caller import ApiCaller
from remit.model.kinds import Config
from tests.unit.client.fake_api import TOKEN, FakeApi, Fault, config, serving
from tests.unit.client.raw_http import Said, raw_server


def play(scene: Callable[[FakeApi, Api], Awaitable[None]], *, timeout_s: float = 10, try_s: float = 5) -> None:
    async def main() -> None:
        fake = FakeApi()
        async with serving(fake) as url, Api(url, TOKEN, timeout_s=timeout_s, try_s=try_s) as api:
            await scene(fake, api)

    asyncio.run(main())


# ----------------------------------------------------------------------------------------------------------------- reading


def test_what_is_got_is_of_its_kind() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        revision = fake.put("a", "hello")
        found = await api.get(Config, "a")
        assert isinstance(found, Config)
        assert found.spec.data == {"text": "hello"}
        assert found.metadata.revision == revision
        assert (await api.get(Config, "a", tenant="default")) == found

    play(scene)


def test_what_is_not_there_is_told_with_its_cure_and_asked_for_once() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        with pytest.raises(ApiError) as caught:
            await api.get(Config, "a", tenant="other")
        assert (caught.value.status, caught.value.code, caught.value.cure) == (404, "not_found", "make one")
        assert str(caught.value) == "there is none; make one"
        assert [one.path for one in fake.said] == ["/v1/tenants/other/configs/a"]

    play(scene)


def test_problems_are_told_one_by_one() -> None:
    async def handler(said: Said) -> None:
        problems = [{"field": "spec.x", "message": "is bad", "cure": "mend it"}, {"message": "so is this", "manifest": 1}]
        said.problem(422, "invalid", "2 problems", field="spec.x", problems=problems, revision=9)

    async def main() -> None:
        async with raw_server(handler) as url, Api(url, TOKEN) as api:
            with pytest.raises(ApiError) as caught:
                await api.status()
            error = caught.value
            assert (error.status, error.code, error.field, error.revision) == (422, "invalid", "spec.x", 9)
            assert [(one.field, one.message, one.cure) for one in error.problems] == [
                ("spec.x", "is bad", "mend it"),
                ("", "so is this", ""),
            ]

    asyncio.run(main())


def test_a_list_is_whole_and_of_one_revision_however_many_pages() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.page = 3
        for number in range(10):
            fake.put(f"c{number}", tenant="t1" if number % 2 else "t2")
        found = await api.list(Config, tenant=ALL_TENANTS)
        assert sorted(one.metadata.name for one in found.items) == [f"c{number}" for number in range(10)]
        assert found.revision == fake.revision
        assert len([one for one in fake.said if one.path == "/v1/configs"]) == 4
        assert len((await api.list(Config, tenant="t1")).items) == 5
        assert (await api.list(Config)).items == []

    play(scene)


def test_a_list_whose_revision_was_compacted_is_begun_anew() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.page = 2
        for number in range(5):
            fake.put(f"c{number}")
        original = ApiCaller.read

        async def read(self: ApiCaller, *args: object, **more: object) -> object:
            answer = await original(self, *args, **more)  # type: ignore[arg-type]
            if len(fake.said) == 1:
                fake.put("late")
                fake.oldest = fake.revision
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ApiCaller, "read", read)
            found = await api.list(Config)
        assert len(found.items) == 6
        assert found.revision == fake.revision

    play(scene)


def test_selectors_travel_as_text_or_as_what_must_be_equal() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        await api.list(Config, labels={"app": "web", "tier": "x"}, fields="status.phase!=pending")
        assert fake.said[-1].query["labelSelector"] == "app=web,tier=x"
        assert fake.said[-1].query["fieldSelector"] == "status.phase!=pending"

    play(scene)


# ----------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    "faults", [["cut after"], ["cut before"], ["cut after", "cut before", "cut after"], ["busy"], ["away"], ["late"]], ids=str
)
def test_a_write_is_done_once_whatever_became_of_its_answers(faults: list[Fault]) -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.faults = deque(faults)
        made = await api.create(config("a", "x"))
        assert made.spec.data == {"text": "x"}
        assert made.metadata.revision == fake.revision
        writes = fake.writes()
        assert len(writes) == len(faults) + (0 if faults == ["late"] else 1)
        assert len({one.headers["remit-operation-id"] for one in writes}) == 1
        assert writes[0].headers["remit-operation-id"].startswith("inc1.7.")
        assert len(fake.done) == 1

    play(scene)


def test_a_silent_try_is_given_up_and_asked_again_under_the_same_id() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.faults = deque(["late"])
        await api.create(config("a"))
        assert len(fake.writes()) == 2
        assert len(fake.done) == 1

    play(scene, try_s=0.2)


def test_whoever_is_told_to_wait_waits() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.faults = deque(["busy"])
        began = time.monotonic()
        await api.create(config("a"))
        assert time.monotonic() - began >= 1.0

    play(scene)


def test_a_refusal_is_told_and_not_asked_again() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a")
        with pytest.raises(ApiError) as caught:
            await api.create(config("a"))
        assert (caught.value.status, caught.value.code) == (409, "exists")
        assert len(fake.writes()) == 1

    play(scene)


def test_two_writes_have_two_ids_and_share_one_status() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        await api.create(config("a"))
        await api.create(config("b"))
        assert len(set(fake.done)) == 2
        assert len([one for one in fake.said if one.path == "/v1/status"]) == 1

    play(scene)


def test_an_id_that_expired_before_it_was_ever_sent_is_replaced_once() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        await api.status()
        fake.window += 5
        await api.create(config("a"))
        assert [one.split(".")[1] for one in fake.done] == ["12"]
        assert len(fake.writes()) == 2

    play(scene)


def test_an_id_that_was_given_or_may_have_been_heard_is_never_replaced() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        given = await api.issue()
        fake.window += 5
        with pytest.raises(ApiError) as caught:
            await api.create(config("a"), operation_id=given)
        assert caught.value.code == "operation_expired"
        fake.faults = deque(["cut before"])
        with pytest.raises(ApiError) as caught:
            await api.create(config("a"))
        assert caught.value.code == "operation_expired"
        assert fake.done == []

    play(scene)


def test_when_patience_ends_it_is_said_whether_it_may_have_happened_and_under_which_id() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        await api.status()
        fake.faults = deque(["cut after"] * 100)
        with pytest.raises(Unanswered) as caught:
            await api.create(config("a"))
        assert caught.value.silent
        assert caught.value.operation_id in fake.done
        assert caught.value.operation_id in str(caught.value)
        fake.faults.clear()
        made = await api.create(config("a"), operation_id=caught.value.operation_id)
        assert made.metadata.name == "a"
        assert len(fake.done) == 1
        fake.faults = deque(["away"] * 100)
        with pytest.raises(Unanswered) as caught:
            await api.create(config("b"))
        assert not caught.value.silent
        assert "nobody leads" in str(caught.value)

    play(scene, timeout_s=0.6)


def test_where_nobody_listens_it_is_said_within_the_time_given() -> None:
    async def main() -> None:
        async with Api("http://127.0.0.1:1", TOKEN, timeout_s=0.3) as api:
            began = time.monotonic()
            with pytest.raises(Unanswered, match=r"no server answers at http://127\.0\.0\.1:1") as caught:
                await api.create(config("a"))
            assert not caught.value.silent
            assert time.monotonic() - began < 5
            assert "no server answers" in await api.ready()

    asyncio.run(main())


def test_a_wrong_token_is_told_at_once() -> None:
    async def main() -> None:
        fake = FakeApi()
        async with serving(fake) as url, Api(url, "another") as api:
            with pytest.raises(ApiError) as caught:
                await api.get(Config, "a")
            assert (caught.value.status, caught.value.code) == (401, "unauthenticated")
            assert len(fake.said) == 1

    asyncio.run(main())


def test_of_several_servers_one_that_is_away_is_passed_over() -> None:
    async def main() -> None:
        fake = FakeApi()
        fake.put("a")
        async with serving(fake) as url, Api(["http://127.0.0.1:1", url], TOKEN) as api:
            for _ in range(5):
                assert (await api.get(Config, "a")).metadata.name == "a"
            assert len(fake.said) == 5

    asyncio.run(main())


def test_an_answer_that_cannot_be_read_is_none() -> None:
    async def handler(said: Said) -> None:
        said.answer(200, b'{"surprise": ')

    async def main() -> None:
        async with raw_server(handler) as url, Api(url, TOKEN) as api:
            with pytest.raises(Unanswered, match="run the same version"):
                await api.status()

    asyncio.run(main())


# ----------------------------------------------------------------------------------------------------------------- waiting


def test_who_waits_is_told_as_soon_as_it_holds() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        async def later() -> None:
            for text in ("1", "2", "3"):
                await asyncio.sleep(0.05)
                fake.put("a", text)

        async with asyncio.TaskGroup() as group:
            group.create_task(later())
            found = await api.wait(Config, "a", lambda one: one is not None and one.spec.data["text"] == "3", timeout_s=5)
            assert found is not None
            assert found.spec.data == {"text": "3"}

    play(scene)


def test_who_waits_for_it_to_be_gone_is_told_too() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a")
        asyncio.get_running_loop().call_later(0.1, fake.drop, "a")
        assert await api.wait(Config, "a", lambda one: one is None, timeout_s=5) is None

    play(scene)


def test_who_waits_too_long_learns_how_it_stood() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a", "old")
        with pytest.raises(NotYet, match="Config a") as caught:
            await api.wait(Config, "a", lambda one: False, timeout_s=0.2)
        assert isinstance(caught.value.last, Config)
        assert caught.value.last.spec.data == {"text": "old"}

    play(scene)
