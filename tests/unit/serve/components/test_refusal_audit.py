"""Audit entries for refused claims of components that run in the server's process."""

from __future__ import annotations

from typing import Any

from remit.assembly import ApiServer, LocalConnection
from remit.model.claims import Accepted, Acquire, Actor, Delete, Refused
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.serve.components.refusal_audit import IN_PROCESS
from tests.unit.serve.in_memory_server import Api, http_test, tenant

ACTOR = Actor("scheduler", Role.SCHEDULER)


def local_connection(api: Api) -> LocalConnection:
    return LocalConnection(ApiServer("http://unused", api.serving, api.server), api.server.world)


async def audited(api: Api) -> list[Any]:
    api.server.audit.flush_counts(all_=True)
    items = (await api.get("/v1/audit")).json["items"]
    return [item for item in items if item.get("target") == IN_PROCESS]


@http_test
async def test_local_connection_submits_claims_and_reads_rows_without_http(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    connection = local_connection(api)
    verdict = await connection.client_for(ACTOR).submit(Acquire("scheduler", Duration(60_000)))
    assert isinstance(verdict, Accepted)
    assert (await connection.store.get("tenant/acme")) is not None
    assert await audited(api) == []


@http_test
async def test_refused_claims_of_a_local_component_are_audited_once_per_code(api: Api) -> None:
    client = local_connection(api).client_for(ACTOR)
    verdicts = [await client.submit(Delete("Tenant", "acme")) for _ in range(3)]
    assert all(isinstance(verdict, Refused) for verdict in verdicts)
    first, *repeated = reversed(await audited(api))
    assert (first["subject"], first["role"], first["action"]) == ("scheduler", "scheduler", "claim:delete")
    assert (first["code"], first["status"], first["operation"] != "") == ("role", 403, True)
    assert sum(item.get("count", 1) for item in repeated) == 2
