"""Audit entries for refused claims of components: schedulers, controllers and agents.

A request whose claims are refused succeeds as a request, so nothing else would record the refusals. A batch may have thousands
of refusals, most of them lost races, so each call writes one entry per refusal code.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from remit.client.endpoint import AuthorityStatus, Endpoint
from remit.model.claims import Actor, Code, Operation, Refused, Verdict
from remit.model.problems import escaped
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeState
from remit.model.wire.api_types import AuditItem
from remit.serve.diagnostics.audit_log import AuditLog
from remit.serve.http.replies import REFUSAL_STATUSES
from remit.world.interfaces import Clock

IN_PROCESS = "(component in the server process)"
"""Target of audit entries whose claims did not arrive over HTTP."""
OPERATION_ID_MAX = 128


def audit_refusals(audit: AuditLog, call: AuditItem, operations: Sequence[Operation], verdicts: Sequence[Verdict]) -> None:
    """Write one entry per refusal code. `call` is the entry of the call: who submitted the operations, when and where."""
    if not any(type(verdict) is Refused for verdict in verdicts):
        return
    codes = set[Code]()
    for operation, verdict in zip(operations, verdicts, strict=False):
        if isinstance(verdict, Refused) and verdict.code not in codes:
            codes.add(verdict.code)
            item = replace(
                call,
                action=f"{call.action}:{operation.claim.__struct_config__.tag}",
                operation=escaped(operation.id[:OPERATION_ID_MAX]),
                trace=operation.trace or call.trace,
            )
            audit_refusal(audit, item, verdict)


def audit_refusal(audit: AuditLog, call: AuditItem, refused: Refused) -> None:
    status = REFUSAL_STATUSES.get(refused.code, 409)
    audit.record_refusal(replace(call, status=status, code=refused.code.value, detail=escaped(refused.detail)))


class AuditedEndpoint:
    """The endpoint of a server, for one component in the same process. Implements `client.endpoint.Endpoint`."""

    def __init__(self, endpoint: Endpoint, audit: AuditLog, clock: Clock, actor: Actor) -> None:
        self._endpoint, self._audit, self._clock = endpoint, audit, clock
        self._call = AuditItem(time="", subject=actor.name, role=actor.role.value, action="claim", target=IN_PROCESS)

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        verdicts = await self._endpoint.submit(operations)
        audit_refusals(self._audit, replace(self._call, time=self._clock.wall()), operations, verdicts)
        return verdicts

    async def status(self) -> AuthorityStatus:
        return await self._endpoint.status()

    async def renew(self, actor: Actor, /) -> bool:
        return await self._endpoint.renew(actor)

    async def heartbeat(self, beats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        return await self._endpoint.heartbeat(beats)

    async def heartbeat_ages(self) -> HeartbeatReport:
        return await self._endpoint.heartbeat_ages()

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return await self._endpoint.node_states(nodes)
