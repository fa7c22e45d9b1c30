"""Python SDK: typed results, idempotent writes, errors, deadlines."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

import pytest

from remit.client.api import ALL_TENANTS, Api, ApiError, NotYet, Unanswered
from remit.client.api_caller import ApiCaller
from remit.model.secrets import Config
from tests.unit.client.fake_api import TOKEN, FakeApi, Fault, config, serving
from tests.unit.client.raw_http import RawRequest, raw_server


def play(scene: Callable[[FakeApi, Api], Awaitable[None]], *, timeout_s: float = 10, try_s: float = 5) -> None:
    async def main() -> None:
        fake = FakeApi()
        async with serving(fake) as url, Api(url, TOKEN, timeout_s=timeout_s, try_s=try_s) as api:
            await scene(fake, api)

    asyncio.run(main())


# ----------------------------------------------------------------------------------------------------------------- reading


def test_get_returns_object_of_requested_kind() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        revision = fake.put("a", "hello")
        found = await api.get(Config, "a")
        assert isinstance(found, Config)
        assert found.spec.data == {"text": "hello"}
        assert found.metadata.revision == revision
        assert (await api.get(Config, "a", tenant="default")) == found

    play(scene)


def test_get_of_missing_object_fails_once_with_cure() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        with pytest.raises(ApiError) as caught:
            await api.get(Config, "a", tenant="other")
        assert (caught.value.status, caught.value.code, caught.value.cure) == (404, "not_found", "make one")
        assert str(caught.value) == "there is none; make one"
        assert [request.path for request in fake.requests] == ["/v1/tenants/other/configs/a"]

    play(scene)


def test_validation_error_carries_each_problem() -> None:
    async def handler(request: RawRequest) -> None:
        problems = [{"field": "spec.x", "message": "is bad", "cure": "mend it"}, {"message": "so is this", "manifest": 1}]
        request.problem(422, "invalid", "2 problems", field="spec.x", problems=problems, revision=9)

    async def main() -> None:
        async with raw_server(handler) as url, Api(url, TOKEN) as api:
            with pytest.raises(ApiError) as caught:
                await api.status()
            error = caught.value
            assert (error.status, error.code, error.field, error.revision) == (422, "invalid", "spec.x", 9)
            assert [(problem.field, problem.message, problem.cure) for problem in error.problems] == [
                ("spec.x", "is bad", "mend it"),
                ("", "so is this", ""),
            ]

    asyncio.run(main())


def test_list_spans_pages_at_one_revision() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.page = 3
        for number in range(10):
            fake.put(f"c{number}", tenant="t1" if number % 2 else "t2")
        found = await api.list(Config, tenant=ALL_TENANTS)
        assert sorted(one.metadata.name for one in found.items) == [f"c{number}" for number in range(10)]
        assert found.revision == fake.revision
        assert len([request for request in fake.requests if request.path == "/v1/configs"]) == 4
        assert len((await api.list(Config, tenant="t1")).items) == 5
        assert (await api.list(Config)).items == []

    play(scene)


def test_list_restarts_when_its_revision_is_compacted() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.page = 2
        for number in range(5):
            fake.put(f"c{number}")
        original = ApiCaller.read

        async def read(self: ApiCaller, *args: object, **more: object) -> object:
            answer = await original(self, *args, **more)  # type: ignore[arg-type]
            if len(fake.requests) == 1:
                fake.put("late")
                fake.oldest = fake.revision
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ApiCaller, "read", read)
            found = await api.list(Config)
        assert len(found.items) == 6
        assert found.revision == fake.revision

    play(scene)


def test_selectors_are_sent_as_text_or_label_equality() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        await api.list(Config, labels={"app": "web", "tier": "x"}, fields="status.phase!=pending")
        assert fake.requests[-1].query["labelSelector"] == "app=web,tier=x"
        assert fake.requests[-1].query["fieldSelector"] == "status.phase!=pending"

    play(scene)


# ----------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    "faults", [["cut after"], ["cut before"], ["cut after", "cut before", "cut after"], ["busy"], ["away"], ["late"]], ids=str
)
def test_write_is_applied_once_despite_lost_or_late_replies(faults: list[Fault]) -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.faults = deque(faults)
        made = await api.create(config("a", "x"))
        assert made.spec.data == {"text": "x"}
        assert made.metadata.revision == fake.revision
        writes = fake.writes()
        assert len(writes) == len(faults) + (0 if faults == ["late"] else 1)
        assert len({write.headers["remit-operation-id"] for write in writes}) == 1
        assert writes[0].headers["remit-operation-id"].startswith("inc1.7.")
        assert len(fake.done) == 1

    play(scene)


def test_timed_out_try_is_repeated_under_same_operation_id() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.faults = deque(["late"])
        await api.create(config("a"))
        assert len(fake.writes()) == 2
        assert len(fake.done) == 1

    play(scene, try_s=0.2)


def test_client_waits_for_retry_after() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.faults = deque(["busy"])
        began = time.monotonic()
        await api.create(config("a"))
        assert time.monotonic() - began >= 1.0

    play(scene)


def test_conflict_is_raised_without_retry() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a")
        with pytest.raises(ApiError) as caught:
            await api.create(config("a"))
        assert (caught.value.status, caught.value.code) == (409, "exists")
        assert len(fake.writes()) == 1

    play(scene)


def test_writes_have_distinct_ids_and_share_one_status_call() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        await api.create(config("a"))
        await api.create(config("b"))
        assert len(set(fake.done)) == 2
        assert len([request for request in fake.requests if request.path == "/v1/status"]) == 1

    play(scene)


def test_id_expired_before_first_send_is_replaced_once() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        await api.status()
        fake.window += 5
        await api.create(config("a"))
        assert [one.split(".")[1] for one in fake.done] == ["12"]
        assert len(fake.writes()) == 2

    play(scene)


def test_given_or_possibly_received_id_is_never_replaced() -> None:
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


def test_deadline_error_states_operation_id_and_possible_effect() -> None:
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


def test_unreachable_server_fails_within_deadline() -> None:
    async def main() -> None:
        async with Api("http://127.0.0.1:1", TOKEN, timeout_s=0.3) as api:
            began = time.monotonic()
            with pytest.raises(Unanswered, match=r"no server answers at http://127\.0\.0\.1:1") as caught:
                await api.create(config("a"))
            assert not caught.value.silent
            assert time.monotonic() - began < 5
            assert "no server answers" in await api.ready()

    asyncio.run(main())


def test_wrong_token_fails_at_once() -> None:
    async def main() -> None:
        fake = FakeApi()
        async with serving(fake) as url, Api(url, "another") as api:
            with pytest.raises(ApiError) as caught:
                await api.get(Config, "a")
            assert (caught.value.status, caught.value.code) == (401, "unauthenticated")
            assert len(fake.requests) == 1

    asyncio.run(main())


def test_unreachable_server_of_several_is_skipped() -> None:
    async def main() -> None:
        fake = FakeApi()
        fake.put("a")
        async with serving(fake) as url, Api(["http://127.0.0.1:1", url], TOKEN) as api:
            for _ in range(5):
                assert (await api.get(Config, "a")).metadata.name == "a"
            assert len(fake.requests) == 5

    asyncio.run(main())


def test_undecodable_response_is_reported_as_no_answer() -> None:
    async def handler(request: RawRequest) -> None:
        request.answer(200, b'{"surprise": ')

    async def main() -> None:
        async with raw_server(handler) as url, Api(url, TOKEN) as api:
            with pytest.raises(Unanswered, match="run the same version"):
                await api.status()

    asyncio.run(main())


# ----------------------------------------------------------------------------------------------------------------- waiting


def test_wait_returns_as_soon_as_condition_holds() -> None:
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


def test_wait_returns_when_object_is_deleted() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a")
        asyncio.get_running_loop().call_later(0.1, fake.drop, "a")
        assert await api.wait(Config, "a", lambda one: one is None, timeout_s=5) is None

    play(scene)


def test_wait_timeout_reports_last_state() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a", "old")
        with pytest.raises(NotYet, match="Config a") as caught:
            await api.wait(Config, "a", lambda one: False, timeout_s=0.2)
        assert isinstance(caught.value.last, Config)
        assert caught.value.last.spec.data == {"text": "old"}

    play(scene)
