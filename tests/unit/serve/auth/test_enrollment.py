"""Enrollment over HTTP in memory: one agent per join token, idempotent retries, interrupted at every step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.model.claims import AnyClaim
from remit.model.identity import token_digest
from remit.serve.auth.enrollment import BOOTSTRAP
from tests.unit.serve.auth.user_tokens import token
from tests.unit.serve.in_memory_server import Api, http_test

JOIN, OTHER = "a-token-for-joining-once", "another-token-for-joining"
PATCH = {"Content-Type": "application/merge-patch+json"}
OWN_DIGEST, OTHER_DIGEST = token_digest("mine"), token_digest("theirs")


async def create_join_token(api: Api, text: str = JOIN, *nodes: str) -> None:
    await api.must(
        "POST", "/v1/tokens", token(f"join-{text.replace('-', '')[:6]}", text, "join", nodes=[*(nodes or ("j1", "j2"))])
    )
    async with asyncio.timeout(5):
        while (await join(api, "0" * 64, text, nodes=["nobody"]))[0] == 401:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.002)


async def join(api: Api, digest: str, text: str = JOIN, nodes: Any = ("j1", "j2")) -> tuple[int, Any]:
    reply = await api.ask("POST", "/v1/join", {"digest": digest, "nodes": list(nodes)}, token=text)
    return reply.status, reply.json


async def valid_agent_tokens(api: Api) -> list[str]:
    """Names of the valid agent tokens."""
    found = (await api.must("GET", "/v1/tokens"))["items"]
    return [
        one["metadata"]["name"]
        for one in found
        if one["metadata"]["name"] == f"agent-{one['spec']['digest'][:12]}"
        and set(one["spec"].get("nodes", ())) == {"j1", "j2"}
        and not one["spec"].get("revoked")
    ]


@http_test
async def test_join_retry_gets_same_answer_and_other_agents_get_401(api: Api) -> None:
    """A04, F03."""
    await create_join_token(api)
    first = await join(api, OWN_DIGEST)
    assert first[0] == 200, first
    assert await join(api, OWN_DIGEST, nodes=("j2", "j1")) == first, "the order of nodes does not matter"
    status, answer = await join(api, OTHER_DIGEST)
    assert (status, answer["code"]) == (401, "unauthenticated") and "remit token create" in answer["cure"]
    assert (await join(api, OWN_DIGEST, nodes=("j1",)))[0] == 403
    assert await valid_agent_tokens(api) == [f"agent-{OWN_DIGEST[:12]}"]


@http_test
async def test_concurrent_joins_with_one_token_have_one_winner(api: Api) -> None:
    """A04."""
    await create_join_token(api)
    digests = [token_digest(f"agent {number % 8}") for number in range(24)]
    answer = await asyncio.gather(*(join(api, digest) for digest in digests))
    winners = {digest for digest, (status, _) in zip(digests, answer, strict=True) if status == 200}
    assert len(winners) == 1, [status for status, _ in answer]
    assert [status for status, _ in answer].count(200) == 3, "the winner joined three times and was answered each time"
    assert {status for status, _ in answer} == {200, 401}
    assert await valid_agent_tokens(api) == [f"agent-{winners.pop()[:12]}"]


@http_test
async def test_two_join_tokens_for_one_node_at_two_servers__one_gets_409(api: Api) -> None:
    """A12. Neither server has seen yet what the other has committed."""

    async def skip_check(*_: object) -> None:
        pass

    await create_join_token(api)
    await create_join_token(api, OTHER)
    with pytest.MonkeyPatch.context() as patch_:
        patch_.setattr("remit.serve.auth.enrollment._check_nodes_free", skip_check)
        answer = await asyncio.gather(join(api, OWN_DIGEST), join(api, OTHER_DIGEST, OTHER))
    assert sorted(status for status, _ in answer) == [200, 409], answer
    (lost,) = [one for status, one in answer if status == 409]
    assert lost["code"] == "exists" and "already has an agent" in lost["detail"] and "revoke" in lost["cure"]
    (winner,) = await valid_agent_tokens(api)
    await api.must("PATCH", f"/v1/tokens/{winner}", {"spec": {"revoked": True}}, headers=PATCH)
    again = await join(api, OWN_DIGEST) if answer[0][0] == 409 else await join(api, OTHER_DIGEST, OTHER)
    assert again[0] == 200, "the refused agent may join once the other is revoked"


class LosesAnswer:
    """The authority with one answer lost: before the claim arrived, or after it was applied."""

    def __init__(self, real: AuthorityClient, nth: int, *, done: bool) -> None:
        self._real, self._left, self._done = real, nth, done

    async def submit(self, claim: AnyClaim) -> Any:
        self._left -= 1
        if self._left:
            return await self._real.submit(claim)
        if self._done:
            await self._real.submit(claim)
        raise RetriesExhausted("cut off", outcome_unknown=True)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("nth", [1, 2])
def test_join_interrupted_at_any_step_continues_on_retry(nth: int, done: bool) -> None:
    """F03: the join token is spent, then the agent token is created; an agent interrupted in between joins by retrying."""

    @http_test
    async def scenario(api: Api) -> None:
        await create_join_token(api)
        real = api.server.authority.client(BOOTSTRAP)
        api.server.authority._clients[BOOTSTRAP] = LosesAnswer(real, nth, done=done)  # type: ignore[assignment]
        assert (await join(api, OWN_DIGEST))[0] in (503, 504)
        api.server.authority._clients[BOOTSTRAP] = real
        if nth == 2 or done:  # the token is spent, and the store records by which agent
            assert (await join(api, OTHER_DIGEST))[0] == 401
        status, answer = await join(api, OWN_DIGEST)
        assert (status, answer.get("token")) == (200, f"agent-{OWN_DIGEST[:12]}"), answer
        assert await valid_agent_tokens(api) == [f"agent-{OWN_DIGEST[:12]}"]

    scenario()


@http_test
async def test_join_with_second_token_finds_agent_created_before_lost_answer(api: Api) -> None:
    await create_join_token(api)
    first = await join(api, OWN_DIGEST)
    await api.must("PATCH", "/v1/tokens/join-atoken", {"spec": {"revoked": True}}, headers=PATCH)
    await create_join_token(api, OTHER)
    assert (await join(api, OTHER_DIGEST, OTHER))[0] == 409, "the nodes have another agent"
    assert await join(api, OWN_DIGEST, OTHER) == first
    assert (await join(api, OTHER_DIGEST, OTHER))[0] == 401


@http_test
async def test_revoked_agent_cannot_rejoin_and_failed_attempt_keeps_join_token_valid(
    api: Api,
) -> None:
    """A03."""
    await create_join_token(api)
    await join(api, OWN_DIGEST)
    await api.must("PATCH", f"/v1/tokens/agent-{OWN_DIGEST[:12]}", {"spec": {"revoked": True}}, headers=PATCH)
    await create_join_token(api, OTHER)
    status, answer = await join(api, OWN_DIGEST, OTHER)
    assert (status, answer["field"]) == (409, "digest")
    assert (await join(api, OTHER_DIGEST, OTHER))[0] == 200


@http_test
async def test_spent_join_token_cannot_be_reset(api: Api) -> None:
    await create_join_token(api)
    await join(api, OWN_DIGEST)
    known = await api.must("GET", "/v1/tokens/join-atoken")
    assert len(known["spec"]["spent"]) == 64
    for spent in ("", "0" * 64):
        refused = await api.ask("PATCH", "/v1/tokens/join-atoken", {"spec": {"spent": spent}}, headers=PATCH)
        assert (refused.status, refused.json["code"]) == (409, "exists"), spent
    wrong = token("m", "a-token-of-somebody", "admin", spent="0" * 64)
    reply = await api.ask("POST", "/v1/tokens", wrong)
    assert (reply.status, reply.json["errors"][0]["field"] if "errors" in reply.json else reply.json["field"]) == (
        422,
        "spec.spent",
    )
