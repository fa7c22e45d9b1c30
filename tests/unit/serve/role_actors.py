"""Claims of components, made on the authority of an in-memory server."""

from __future__ import annotations

from remit.model.claims import Accepted, Acquire, Actor, AnyClaim, Mark
from remit.model.kinds import NodeHealth
from remit.model.resources import Duration
from remit.model.roles import Role
from tests.unit.serve.in_memory_server import Api, node, tenant, workload

TTL = Duration(60_000)


async def acquire_role(api: Api, role: Role, lease: str = "") -> Actor:
    """An actor that holds the lease of this role."""
    name = lease or role.value
    verdict = await api.server.authority.client(Actor(name, role)).submit(Acquire(name, TTL))
    assert isinstance(verdict, Accepted), verdict
    return Actor(name, role, name, verdict.number)


async def submit_accepted(api: Api, actor: Actor, *claims: AnyClaim) -> None:
    for verdict in await api.server.authority.client(actor).submit_many(claims):
        assert isinstance(verdict, Accepted), verdict


async def revision(api: Api, key: str) -> int:
    row = await api.store.get(key)
    assert row is not None
    return row.revision


async def prepare(api: Api) -> None:
    """A node that is ready, and a workload with two pending replicas."""
    await api.must("POST", "/v1/apply", [tenant(), node("n1"), workload("web", replicas=2)])
    nodes = await acquire_role(api, Role.NODES)
    await submit_accepted(api, nodes, Mark("n1", await revision(api, "node/n1"), NodeHealth.READY))
