"""Is whoever joins the only one, and the same one however often it asks? Cut off at every step, over HTTP in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.model.claims import AnyClaim
from remit.model.identity import token_digest
from remit.serve.auth.enrollment import BOOTSTRAP
from tests.unit.serve.auth.test_access_control import token
from tests.unit.serve.in_memory_server import Api, story

JOIN, OTHER = "a-token-for-joining-once", "another-token-for-joining"
PATCH = {"Content-Type": "application/merge-patch+json"}
MINE, THEIRS = token_digest("mine"), token_digest("theirs")


async def invited(api: Api, text: str = JOIN, *nodes: str) -> None:
    await api.must(
        "POST", "/v1/tokens", token(f"join-{text.replace('-', '')[:6]}", text, "join", nodes=[*(nodes or ("j1", "j2"))])
    )
    async with asyncio.timeout(5):
        while (await join(api, "0" * 64, text, nodes=["nobody"]))[0] == 401:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.002)


async def join(api: Api, digest: str, text: str = JOIN, nodes: Any = ("j1", "j2")) -> tuple[int, Any]:
    reply = await api.ask("POST", "/v1/join", {"digest": digest, "nodes": list(nodes)}, token=text)
    return reply.status, reply.json


async def agents(api: Api) -> list[str]:
    """Tokens of agents that are good, by name."""
    found = (await api.must("GET", "/v1/tokens"))["items"]
    return [
        one["metadata"]["name"]
        for one in found
        if one["metadata"]["name"] == f"agent-{one['spec']['digest'][:12]}"
        and set(one["spec"].get("nodes", ())) == {"j1", "j2"}
        and not one["spec"].get("revoked")
    ]


@story
async def test_the_same_agent_asks_again__it_is_answered_as_before_and_anybody_else_is_turned_away(api: Api) -> None:
    """A04, F03."""
    await invited(api)
    first = await join(api, MINE)
    assert first[0] == 200, first
    assert await join(api, MINE, nodes=("j2", "j1")) == first, "the order in which it names its nodes is nothing"
    status, said = await join(api, THEIRS)
    assert (status, said["code"]) == (401, "unauthenticated") and "remit token create" in said["cure"]
    assert (await join(api, MINE, nodes=("j1",)))[0] == 403
    assert await agents(api) == [f"agent-{MINE[:12]}"]


@story
async def test_many_join_at_once_with_one_token__one_wins(api: Api) -> None:
    """A04."""
    await invited(api)
    digests = [token_digest(f"agent {number % 8}") for number in range(24)]
    said = await asyncio.gather(*(join(api, digest) for digest in digests))
    winners = {digest for digest, (status, _) in zip(digests, said, strict=True) if status == 200}
    assert len(winners) == 1, [status for status, _ in said]
    assert [status for status, _ in said].count(200) == 3, "the winner asked three times, and was answered each time"
    assert {status for status, _ in said} == {200, 401}
    assert await agents(api) == [f"agent-{winners.pop()[:12]}"]


@story
async def test_two_tokens_for_one_node_at_two_servers_at_once__one_wins_and_the_other_is_told(api: Api) -> None:
    """A12. Neither server has seen yet what the other one has done."""

    async def sees_nobody(*_: object) -> None:
        pass

    await invited(api)
    await invited(api, OTHER)
    with pytest.MonkeyPatch.context() as blind:
        blind.setattr("remit.serve.auth.enrollment._check_nodes_free", sees_nobody)
        said = await asyncio.gather(join(api, MINE), join(api, THEIRS, OTHER))
    assert sorted(status for status, _ in said) == [200, 409], said
    (lost,) = [one for status, one in said if status == 409]
    assert lost["code"] == "exists" and "already has an agent" in lost["detail"] and "revoke" in lost["cure"]
    (winner,) = await agents(api)
    await api.must("PATCH", f"/v1/tokens/{winner}", {"spec": {"revoked": True}}, headers=PATCH)
    again = await join(api, MINE) if said[0][0] == 409 else await join(api, THEIRS, OTHER)
    assert again[0] == 200, "the one that was told may join with its token once the other is gone"


class Cut:
    """The authority, of which one answer is lost: before it heard what was asked, or after it has done it."""

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
def test_cut_off_at_any_step__asking_again_goes_on_from_there(nth: int, done: bool) -> None:
    """F03: the join token is spent, then the agent's is made; whoever was cut off between is let in by asking again."""

    @story
    async def told(api: Api) -> None:
        await invited(api)
        real = api.desk.authority.client(BOOTSTRAP)
        api.desk.authority._clients[BOOTSTRAP] = Cut(real, nth, done=done)  # type: ignore[assignment]
        assert (await join(api, MINE))[0] in (503, 504)
        api.desk.authority._clients[BOOTSTRAP] = real
        if nth == 2 or done:  # the token is spent, and it is known by whom
            assert (await join(api, THEIRS))[0] == 401
        status, said = await join(api, MINE)
        assert (status, said.get("token")) == (200, f"agent-{MINE[:12]}"), said
        assert await agents(api) == [f"agent-{MINE[:12]}"]

    told()


@story
async def test_the_join_token_ran_out_before_the_answer_was_heard__another_finds_the_same_agent(api: Api) -> None:
    await invited(api)
    first = await join(api, MINE)
    await api.must("PATCH", "/v1/tokens/join-atoken", {"spec": {"revoked": True}}, headers=PATCH)
    await invited(api, OTHER)
    assert (await join(api, THEIRS, OTHER))[0] == 409, "the nodes have an agent, and it is another"
    assert await join(api, MINE, OTHER) == first
    assert (await join(api, THEIRS, OTHER))[0] == 401


@story
async def test_an_agent_that_was_ended_does_not_come_back_by_joining__and_its_join_token_is_not_used_up_by_trying(
    api: Api,
) -> None:
    """A03."""
    await invited(api)
    await join(api, MINE)
    await api.must("PATCH", f"/v1/tokens/agent-{MINE[:12]}", {"spec": {"revoked": True}}, headers=PATCH)
    await invited(api, OTHER)
    status, said = await join(api, MINE, OTHER)
    assert (status, said["field"]) == (409, "digest")
    assert (await join(api, THEIRS, OTHER))[0] == 200


@story
async def test_a_join_token_that_was_used_stays_so(api: Api) -> None:
    await invited(api)
    await join(api, MINE)
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
