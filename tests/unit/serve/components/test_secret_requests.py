"""Two tenants, two nodes, one secret's name in both: does each agent get its own over HTTP, and nobody else any?"""

from __future__ import annotations

from typing import Any

import msgspec

from remit.model.claims import Accepted, Acquire, Actor, AnyClaim, Bind, Mark, Role
from remit.model.kinds import NodeHealth
from remit.model.resources import Duration
from remit.model.wire.agent_messages import SecretMaterialRequest
from remit.serve.auth.enrollment import ensure_bootstrap_token
from tests.unit.serve.in_memory_server import TOKEN, TOKENS, Api, node, secret, story, tenant, workload

CANARY = "canary-of-"
MINUTE = Duration(60_000)
AGENTS = {"n1": TOKENS["agent"], "n2": "a-token-of-another-agent"}


class Field:
    """A server with two tenants, and a replica of each on a node of its own."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.actors: dict[str, Actor] = {}

    async def prepare(self) -> None:
        api = self.api
        await ensure_bootstrap_token(api.desk, AGENTS["n2"], "agent", subject="another", nodes=["n2"])
        for name, of in (("acme", "n1"), ("evil", "n2")):
            await api.must("POST", "/v1/tenants", tenant(name))
            await api.must("POST", "/v1/nodes", node(of))
            made = secret("db", password=CANARY + name)
            made["metadata"]["tenant"] = name
            await api.must("POST", f"/v1/tenants/{name}/secrets", made)
            work = workload("web", name)
            work["spec"]["template"]["secrets"] = [{"name": "db", "path": "secrets"}]
            await api.must("POST", f"/v1/tenants/{name}/workloads", work)
        for role in (Role.SCHEDULER, Role.NODES):
            await self.acquire(role, str(role))
        for name, of in (("acme", "n1"), ("evil", "n2")):
            await self.acquire(Role.AGENT, f"agent/{of}")
            await self.ask(self.actors[str(Role.NODES)], Mark(of, await self.at(f"node/{of}"), NodeHealth.READY))
            key = f"replica/{name}/web-0"
            await self.ask(self.actors[str(Role.SCHEDULER)], Bind(key, await self.at(key), of, f"tenant/{name}"))

    async def acquire(self, role: Role, lease: str) -> None:
        epoch = await self.ask(Actor("one", role), Acquire(lease, MINUTE))
        self.actors[lease] = Actor("one", role, lease, epoch)

    async def ask(self, actor: Actor, claim: AnyClaim) -> int:
        verdict = await self.api.desk.authority.client(actor).submit(claim)
        assert isinstance(verdict, Accepted), verdict
        return verdict.number

    async def at(self, name: str) -> int:
        row = await self.api.store.get(name)
        assert row is not None
        return row.revision

    async def uid(self, name: str) -> str:
        row = await self.api.store.get(f"replica/{name}/web-0")
        assert row is not None
        return str(msgspec.json.decode(row.value)["metadata"]["uid"])

    async def asked(self, tenant: str, as_node: str, token: str) -> Any:
        wanted = SecretMaterialRequest(self.actors[f"agent/{as_node}"], f"replica/{tenant}/web-0", await self.uid(tenant), 1)
        return await self.api.ask("POST", "/v1/ask", msgspec.json.encode(wanted), token=token)


@story
async def test_each_node_gets_what_its_own_work_reads_and_nobody_anything_else(api: Api) -> None:
    """A08."""
    field = Field(api)
    await field.prepare()
    for name, of in (("acme", "n1"), ("evil", "n2")):
        reply = await field.asked(name, of, AGENTS[of])
        assert (reply.status, reply.json) == (200, {"secrets": {"db": {"password": CANARY + name}}})
    turned = {
        "a node asks for what another's work reads": (await field.asked("acme", "n2", AGENTS["n2"]), 403),
        "and the other way round": (await field.asked("evil", "n1", AGENTS["n1"]), 403),
        "a node speaks as another": (await field.asked("acme", "n1", AGENTS["n2"]), 403),
        "a scheduler": (await field.asked("acme", "n1", TOKENS["scheduler"]), 403),
        "controllers": (await field.asked("acme", "n1", TOKENS["controllers"]), 403),
        "an admin, at the door of components": (await field.asked("acme", "n1", TOKEN), 401),
        "nobody": (await field.asked("acme", "n1", "no-token-of-anybody"), 401),
    }
    for who, (reply, status) in turned.items():
        assert reply.status == status, (who, reply.body)
        assert CANARY not in reply.body.decode(), who
    told = await api.must("GET", "/v1/audit?limit=1000")
    refused = [one for one in told["items"] if one.get("action") == "ask" and one.get("status") == 403]
    assert {one["token"].partition("-")[0] for one in refused} >= {"agent", "scheduler", "controllers"}
    assert CANARY not in msgspec.json.encode(told).decode()


@story
async def test_rows_tell_components_only_what_is_sealed_and_agents_nothing(api: Api) -> None:
    field = Field(api)
    await field.prepare()
    wanted = {"type": "range", "prefix": "secret/"}
    assert (await api.ask("POST", "/v1/ask", wanted, token=AGENTS["n1"])).status == 403
    rows = await api.ask("POST", "/v1/ask", wanted, token=TOKENS["scheduler"])
    assert rows.status == 200 and CANARY not in rows.body.decode()
    assert rows.body.decode().count("remit:sealed:") == 2


@story
async def test_only_an_admin_turns_the_key(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    for token in TOKENS.values():
        reply = await api.ask("POST", "/v1/secrets/rotate?newKey=true", token=token)
        assert reply.status == (200 if token == TOKEN else 401), (token, reply.body)
    assert len(api.desk.auth.keyring.sealing_keys.keys) == 2
