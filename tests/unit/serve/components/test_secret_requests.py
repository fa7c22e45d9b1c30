"""Secret requests over HTTP: two tenants on two nodes with one secret name, and each agent gets only its own."""

from __future__ import annotations

from typing import Any

import msgspec

from remit.model.claims import Accepted, Acquire, Actor, AnyClaim, Bind, Mark
from remit.model.kinds import NodeHealth
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.model.wire.agent_messages import SecretMaterialRequest
from remit.serve.auth.enrollment import ensure_bootstrap_token
from tests.unit.serve.in_memory_server import TOKEN, TOKENS, Api, http_test, node, secret, tenant, workload

CANARY = "canary-of-"
MINUTE = Duration(60_000)
AGENTS = {"n1": TOKENS["agent"], "n2": "a-token-of-another-agent"}


class TwoTenants:
    """A server with two tenants and a replica of each on its own node."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.actors: dict[str, Actor] = {}

    async def prepare(self) -> None:
        api = self.api
        await ensure_bootstrap_token(api.server, AGENTS["n2"], "agent", subject="another", nodes=["n2"])
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
        verdict = await self.api.server.authority.client(actor).submit(claim)
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

    async def request_material(self, tenant: str, as_node: str, token: str) -> Any:
        body = SecretMaterialRequest(self.actors[f"agent/{as_node}"], f"replica/{tenant}/web-0", await self.uid(tenant), 1)
        return await self.api.ask("POST", "/v1/ask", msgspec.json.encode(body), token=token)


@http_test
async def test_each_agent_gets_only_secrets_of_its_own_replicas(api: Api) -> None:
    """A08."""
    scope = TwoTenants(api)
    await scope.prepare()
    for name, of in (("acme", "n1"), ("evil", "n2")):
        reply = await scope.request_material(name, of, AGENTS[of])
        assert (reply.status, reply.json) == (200, {"secrets": {"db": {"password": CANARY + name}}})
    refused_requests = {
        "other node's agent requests secret of acme": (await scope.request_material("acme", "n2", AGENTS["n2"]), 403),
        "other node's agent requests secret of evil": (await scope.request_material("evil", "n1", AGENTS["n1"]), 403),
        "token of another node": (await scope.request_material("acme", "n1", AGENTS["n2"]), 403),
        "a scheduler": (await scope.request_material("acme", "n1", TOKENS["scheduler"]), 403),
        "controllers": (await scope.request_material("acme", "n1", TOKENS["controllers"]), 403),
        "an admin on the component route": (await scope.request_material("acme", "n1", TOKEN), 401),
        "unknown token": (await scope.request_material("acme", "n1", "no-token-of-anybody"), 401),
    }
    for case, (reply, status) in refused_requests.items():
        assert reply.status == status, (case, reply.body)
        assert CANARY not in reply.body.decode(), case
    audit = await api.must("GET", "/v1/audit?limit=1000")
    refused = [one for one in audit["items"] if one.get("action") == "ask" and one.get("status") == 403]
    assert {one["token"].partition("-")[0] for one in refused} >= {"agent", "scheduler", "controllers"}
    assert CANARY not in msgspec.json.encode(audit).decode()


@http_test
async def test_row_ranges_return_sealed_values_to_components_and_403_to_agents(api: Api) -> None:
    scope = TwoTenants(api)
    await scope.prepare()
    body = {"type": "range", "prefix": "secret/"}
    assert (await api.ask("POST", "/v1/ask", body, token=AGENTS["n1"])).status == 403
    rows = await api.ask("POST", "/v1/ask", body, token=TOKENS["scheduler"])
    assert rows.status == 200 and CANARY not in rows.body.decode()
    assert rows.body.decode().count("remit:sealed:") == 2


@http_test
async def test_only_admin_may_rotate_sealing_key(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    for token in TOKENS.values():
        reply = await api.ask("POST", "/v1/secrets/rotate?newKey=true", token=token)
        assert reply.status == (200 if token == TOKEN else 401), (token, reply.body)
    assert len(api.server.auth.keyring.sealing_keys.keys) == 2
