"""Routes: explain, capacity, plan, endpoints, top, events, logs, audit.

What is found is found elsewhere.

The newest first; what is written down is auditing.py's affair.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.responses import Response

from remit.model.kinds import Workload
from remit.model.metadata import Natural
from remit.model.objects import TENANTED, encode
from remit.model.problems import an
from remit.model.wire.api_types import (
    HistoryEvent,
    AuditItem,
    EndpointItem,
    ListMeta,
    ListOf,
    NodeTop,
    PlanAnswer,
    ReplicaTop,
    WatchLine,
)
from remit.proposal.explain.capacity import COUNT_MAX, CapacityAnswer
from remit.proposal.explain.result_types import ReplicaExplanation, WorkloadExplanation
from remit.serve.auth.access_control import check_may_declare
from remit.serve.components.replica_logs import Stream, LogOptions
from remit.serve.diagnostics.explanations import (
    capacity_for,
    explain_replica,
    explain_workload,
    add_startup_progress,
    add_workload_startup_progress,
)
from remit.serve.diagnostics.history import EVENTS_LIMIT, EVENTS_LIMIT_MAX, list_events, watch_events
from remit.serve.diagnostics.resource_usage import node_usage, replica_usage
from remit.serve.diagnostics.status_routes import add_unheld_leases
from remit.serve.http.bodies import read_manifests, offload_if_large, validate_manifest
from remit.serve.http.replies import ApiProblem
from remit.serve.http.request_context import RequestContext
from remit.serve.http.routes import TRIAL_COST, AGENT_COST, JSON, LIST_COST, NDJSON, TEXT, ResponseSpec, BodySpec, Parameter, Route
from remit.serve.http.streams import StreamResponse
from remit.serve.http.streams import watch_response as streamed
from remit.serve.objects.dry_run import plan
from remit.serve.objects.object_routes import AFTER, MANIFESTS_BODY, WATCH
from remit.serve.objects.reads import json_response
from remit.serve.objects.rendering import redact_other_tenants
from remit.serve.server_context import ServerContext


def diagnostic_response(value: Any, request: RequestContext | None = None) -> Response:
    """To whoever `asked`, if it may speak of others' things."""
    body = encode(value)
    if request is not None and request.principal.tenant:
        body = redact_other_tenants(body, request.principal.tenant)
    return Response(body, media_type=JSON)


async def get_workload_explanation(request: RequestContext, server: ServerContext) -> Response:
    explanation = await explain_workload(server.snapshots, request.tenant, request.path["name"], request.query["node"])
    explanation = await add_unheld_leases(explanation, server)
    return diagnostic_response(await add_workload_startup_progress(explanation, server.standby), request)


async def get_replica_explanation(request: RequestContext, server: ServerContext) -> Response:
    explanation = await explain_replica(server.snapshots, request.tenant, request.path["name"], request.query["node"])
    return diagnostic_response(await add_startup_progress(explanation, server.standby), request)


async def get_capacity(request: RequestContext, server: ServerContext) -> Response:
    obj = await offload_if_large(server, request.body, lambda: validate_manifest(request.body))
    check_may_declare(request.principal, (obj,))
    if not isinstance(obj, Workload):
        detail = f"kind: this is {an(type(obj).__name__)}, and only a Workload takes room"
        raise ApiProblem(422, "invalid", detail, field="kind", cure="send one Workload manifest")
    return diagnostic_response(await capacity_for(server.snapshots, obj, request.query["count"]))


async def get_plan(request: RequestContext, server: ServerContext) -> Response:
    objects = await read_manifests(request, server)
    check_may_declare(request.principal, objects)
    return diagnostic_response(await server.snapshots.query_private(lambda look: plan(look, objects, request.actor, server.clock)), request)


async def list_endpoints(request: RequestContext, server: ServerContext) -> Response:
    tenant, service = request.tenant, request.path.get("service", "")
    if request.query["watch"]:
        return streamed(server.endpoints.watch(request.query["after"], tenant, service), server)
    await server.snapshots.wait_until_current()
    return diagnostic_response(server.endpoints.list_endpoints(tenant, service))


async def get_node_usage(request: RequestContext, server: ServerContext) -> Response:
    return diagnostic_response(await node_usage(server.snapshots, server.standby))


async def get_replica_usage(request: RequestContext, server: ServerContext) -> Response:
    return diagnostic_response(await replica_usage(server.snapshots, server.standby, request.tenant or request.query["tenant"]))


async def get_events(request: RequestContext, server: ServerContext) -> Response:
    regarding = request.query["regarding"]
    _check_regarding(request, regarding)
    if request.query["watch"]:
        return streamed(watch_events(server.snapshots, regarding, request.query["after"]), server)
    revision, items = await list_events(server.snapshots, regarding, request.query["limit"])
    return diagnostic_response(ListOf(kind="AccountList", metadata=ListMeta(revision=revision), items=items))


_TENANTED_PREFIXES: Final = frozenset(kind.lower() for kind in TENANTED)


def _check_regarding(request: RequestContext, regarding: str) -> None:
    """Whoever belongs to a tenant is told of that one's own things, and must say which."""
    tenant = request.principal.tenant
    kind, _, rest = regarding.partition("/")
    if tenant and (kind not in _TENANTED_PREFIXES or rest.partition("/")[0] != tenant):
        cure = f"ask with regarding=workload/{tenant}/NAME or replica/{tenant}/NAME"
        raise ApiProblem(403, "tenant", f"what happened elsewhere than in {tenant} is not told here", field="regarding", cure=cure)


async def get_logs(request: RequestContext, server: ServerContext) -> Response:
    query = request.query
    options = LogOptions(query["stream"], query["tail"], query["follow"], query["attempt"], query["previous"])
    chunks = await server.agents.logs(request.principal, request.tenant, request.path["name"], options)
    return StreamResponse(chunks, server, media=TEXT, headers={"X-Content-Type-Options": "nosniff"})


# -- the routes ----------------------------------------------------------------------------------------------------------------

NODE_PARAMETER: Final = Parameter("node", str, "say of this node why it could not stand there", default="")
COUNT_PARAMETER: Final = Parameter("count", Annotated[int, Meta(ge=1, le=COUNT_MAX)], "look for no more than so many")
ENDPOINT_PARAMETERS: Final = (WATCH, AFTER, Parameter("limit", Natural, "taken for the sake of clients; all are told at once", default=0))
_WATCH_RESPONSE: Final = ResponseSpec(200, "one line a change", WatchLine, NDJSON)
_ENDPOINT_RESPONSES: Final = (ResponseSpec(200, "those that serve; or lines, if watched", ListOf[EndpointItem]), _WATCH_RESPONSE)


def _endpoints_route(path: str, name: str, summary: str) -> Route:
    return Route(
        "GET", path, name, summary, list_endpoints, "endpoints", ENDPOINT_PARAMETERS, responses=_ENDPOINT_RESPONSES, streams_if="watch", cost=LIST_COST
    )


DIAGNOSTIC_ROUTES: Final = (
    Route(
        "GET",
        "/v1/tenants/{tenant}/workloads/{name}/explain",
        "explainWorkload",
        "What limits a workload now, and what would help?",
        get_workload_explanation,
        "why",
        (NODE_PARAMETER,),
        responses=(ResponseSpec(200, "what there is to tell", WorkloadExplanation),),
        cost=TRIAL_COST,
    ),
    Route(
        "GET",
        "/v1/tenants/{tenant}/replicas/{name}/explain",
        "explainReplica",
        "Why is a replica where it is, or why does it wait?",
        get_replica_explanation,
        "why",
        (NODE_PARAMETER,),
        responses=(ResponseSpec(200, "what there is to tell", ReplicaExplanation),),
        cost=TRIAL_COST,
    ),
    Route(
        "POST",
        "/v1/capacity",
        "capacity",
        "How many more of a workload fit, where, and what stops the next one?",
        get_capacity,
        "what if",
        (COUNT_PARAMETER,),
        BodySpec((Workload,)),
        (ResponseSpec(200, "what there is room for", CapacityAnswer),),
        cost=TRIAL_COST,
        read_only=True,
    ),
    Route(
        "POST",
        "/v1/plan",
        "plan",
        "What would come of it if these manifests were applied? Nothing is written.",
        get_plan,
        "what if",
        (),
        MANIFESTS_BODY,
        (ResponseSpec(200, "what would become of each", PlanAnswer),),
        cost=TRIAL_COST,
        read_only=True,
    ),
    _endpoints_route("/v1/endpoints", "listAllEndpoints", "List or watch where replicas that serve are reached, of all tenants."),
    _endpoints_route(
        "/v1/tenants/{tenant}/endpoints", "listEndpoints", "List or watch where a tenant's replicas that serve are reached."
    ),
    _endpoints_route(
        "/v1/tenants/{tenant}/endpoints/{service}",
        "listServiceEndpoints",
        "List or watch where the replicas of one service are reached.",
    ),
    Route(
        "GET",
        "/v1/top/nodes",
        "topNodes",
        "What nodes last said of themselves, beside what they have and what is asked of them.",
        get_node_usage,
        "use",
        responses=(ResponseSpec(200, "one a node", ListOf[NodeTop]),),
        cost=LIST_COST,
        tenant_access=False,
    ),
    Route(
        "GET",
        "/v1/top/replicas",
        "topReplicas",
        "What replicas use that run now, beside what they asked for.",
        get_replica_usage,
        "use",
        (Parameter("tenant", str, "only those of this tenant", default=""),),
        responses=(ResponseSpec(200, "one a replica that runs", ListOf[ReplicaTop]),),
        cost=LIST_COST,
    ),
    Route(
        "GET",
        "/v1/account",
        "account",
        "What happened, the newest last: events, what the authority accepted and refused, and why work waits.",
        get_events,
        "why",
        (
            Parameter(
                "regarding", str, "replica/TENANT/NAME, workload/TENANT/NAME with its replicas, node/NAME, …", default=""
            ),
            Parameter("limit", Annotated[int, Meta(ge=1, le=EVENTS_LIMIT_MAX)], f"how many at most, 1 to {EVENTS_LIMIT_MAX}", default=EVENTS_LIMIT),
            WATCH,
            AFTER,
        ),
        responses=(ResponseSpec(200, "what happened; or lines, if watched", ListOf[HistoryEvent]), _WATCH_RESPONSE),
        streams_if="watch",
    ),
    Route(
        "GET",
        "/v1/tenants/{tenant}/replicas/{name}/logs",
        "logs",
        "What a replica has written, from the agent of its node.",
        get_logs,
        "why",
        (
            Parameter("stream", Stream, "stdout, stderr or both", default="both"),
            Parameter("follow", bool, "true: go on with what is written from now on", default=False),
            Parameter("tail", Annotated[int, Meta(ge=0, le=1_000_000)], "only the last so many lines"),
            Parameter("attempt", Annotated[int, Meta(ge=1)], "which attempt; the latest, if left out"),
            Parameter("previous", bool, "true: the attempt before the latest", default=False),
        ),
        responses=(ResponseSpec(200, "as it was written", str, TEXT),),
        waits_for_agent=True,
        audited=True,
        streams_if="follow",
        cost=AGENT_COST,
    ),
)


AUDIT_LIMIT: Final = 200
AUDIT_LIMIT_MAX: Final = 10_000


async def get_audit(request: RequestContext, server: ServerContext) -> Response:
    query = request.query
    read = partial(
        server.audit.read,
        limit=query["limit"],
        tenant=request.tenant or query["tenant"],
        subject=query["subject"],
        action=query["action"],
        since=query["since"],
    )
    items = await server.cpu_offload(read)
    return json_response(ListOf(kind="AuditList", metadata=ListMeta(revision=server.watch_cache.revision), items=items))


AUDIT_ROUTES: Final = (
    Route(
        "GET",
        "/v1/audit",
        "audit",
        "Who did what, and who was refused; the newest first. Somebody of a tenant is told of that one's.",
        get_audit,
        "why",
        (
            Parameter(
                "limit",
                Annotated[int, Meta(ge=1, le=AUDIT_LIMIT_MAX)],
                f"how many at most, 1 to {AUDIT_LIMIT_MAX}",
                default=AUDIT_LIMIT,
            ),
            Parameter("tenant", str, "only of this tenant's people", default=""),
            Parameter("subject", str, "only of this person or program", default=""),
            Parameter("action", str, "only this, such as createWorkload", default=""),
            Parameter("since", str, "nothing before this instant, such as 2027-01-31T12:00:00Z", default=""),
        ),
        responses=(ResponseSpec(200, "what was done", ListOf[AuditItem]),),
    ),
)
