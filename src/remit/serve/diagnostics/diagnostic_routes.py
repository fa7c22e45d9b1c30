"""Routes: explain, capacity, plan, endpoints, top, events, logs, audit.

Handlers only check and render; the answers are computed by the modules of this package and of serve/objects.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.responses import Response

from remit.model.kinds import Workload
from remit.model.kinds.registry import DEFINITIONS
from remit.model.metadata import Natural
from remit.model.objects import encode
from remit.model.problems import an
from remit.model.wire.api_types import (
    AuditItem,
    EndpointItem,
    HistoryEvent,
    ListMeta,
    ListOf,
    NodeTop,
    PlanAnswer,
    ReplicaTop,
    WatchLine,
    WorkloadProgressItem,
)
from remit.proposal.explain.capacity import COUNT_MAX, CapacityAnswer
from remit.proposal.explain.result_types import ReplicaExplanation, WorkloadExplanation
from remit.serve.auth.access_control import check_may_declare
from remit.serve.components.replica_logs import LogOptions, Stream
from remit.serve.diagnostics.explanations import (
    add_startup_progress,
    add_workload_startup_progress,
    capacity_for,
    explain_replica,
    explain_workload,
)
from remit.serve.diagnostics.history import EVENTS_LIMIT, EVENTS_LIMIT_MAX, list_events, watch_events
from remit.serve.diagnostics.resource_usage import node_usage, replica_usage
from remit.serve.diagnostics.status_routes import add_unheld_leases
from remit.serve.http.bodies import offload_if_large, read_manifests, validate_manifest
from remit.serve.http.media_types import JSON, NDJSON, TEXT
from remit.serve.http.replies import ApiProblem
from remit.serve.http.routes import AGENT_COST, LIST_COST, TRIAL_COST, BodySpec, Parameter, RequestContext, ResponseSpec, Route
from remit.serve.http.streams import StreamResponse
from remit.serve.http.streams import watch_response as streamed
from remit.serve.objects.dry_run import plan
from remit.serve.objects.object_routes import AFTER, CONTINUE, LIMIT, MANIFESTS_BODY, WATCH
from remit.serve.objects.reads import decode_continue, encode_continue, json_response, key_prefix
from remit.serve.objects.rendering import redact_other_tenants
from remit.serve.server_context import ServerContext


def diagnostic_response(value: Any, request: RequestContext | None = None) -> Response:
    """Return a JSON response. With `request`, names of other tenants' objects are redacted for callers of one tenant."""
    body = encode(value)
    if request is not None and request.principal.tenant:
        body = redact_other_tenants(body, request.principal.tenant)
    return Response(body, media_type=JSON)


async def get_workload_explanation(request: RequestContext, server: ServerContext) -> Response:
    explanation = await explain_workload(server.snapshots, request.tenant, request.path["name"], request.query["node"])
    explanation = await add_unheld_leases(explanation, server)
    return diagnostic_response(await add_workload_startup_progress(explanation, server.authority.standby), request)


async def get_replica_explanation(request: RequestContext, server: ServerContext) -> Response:
    explanation = await explain_replica(server.snapshots, request.tenant, request.path["name"], request.query["node"])
    return diagnostic_response(await add_startup_progress(explanation, server.authority.standby), request)


async def get_workload_progress(request: RequestContext, server: ServerContext) -> Response:
    return diagnostic_response(await server.workload_progress.read(request.tenant, request.path["name"]))


async def list_workload_progress(request: RequestContext, server: ServerContext) -> Response:
    prefix = key_prefix("Workload", request.tenant or request.query["tenant"])
    _, after = decode_continue(request.query["continue"], prefix)
    revision, items, rest = await server.workload_progress.read_page(prefix, after, request.query["limit"])
    metadata = ListMeta(revision=revision, next=encode_continue(revision, rest) if rest else "")
    return diagnostic_response(ListOf(kind="WorkloadProgressList", metadata=metadata, items=items))


async def get_capacity(request: RequestContext, server: ServerContext) -> Response:
    obj = await offload_if_large(server, request.body, lambda: validate_manifest(request.body))
    check_may_declare(request.principal, (obj,))
    if not isinstance(obj, Workload):
        detail = f"kind: the body is {an(type(obj).__name__)}, and capacity is computed for a Workload"
        raise ApiProblem(422, "invalid", detail, field="kind", cure="send one Workload manifest")
    return diagnostic_response(await capacity_for(server.snapshots, obj, request.query["count"]))


async def get_plan(request: RequestContext, server: ServerContext) -> Response:
    objects = await read_manifests(request, server)
    check_may_declare(request.principal, objects)
    return diagnostic_response(
        await server.snapshots.query_private(lambda snapshot: plan(snapshot, objects, request.actor, server.clock)), request
    )


async def list_endpoints(request: RequestContext, server: ServerContext) -> Response:
    tenant, service = request.tenant, request.path.get("service", "")
    if request.query["watch"]:
        return streamed(server.endpoints.watch(request.query["after"], tenant, service), server.streams)
    await server.snapshots.wait_until_current()
    return diagnostic_response(server.endpoints.list_endpoints(tenant, service))


async def get_node_usage(request: RequestContext, server: ServerContext) -> Response:
    return diagnostic_response(await node_usage(server.snapshots, server.authority.standby))


async def get_replica_usage(request: RequestContext, server: ServerContext) -> Response:
    return diagnostic_response(
        await replica_usage(server.snapshots, server.authority.standby, request.tenant or request.query["tenant"])
    )


async def get_events(request: RequestContext, server: ServerContext) -> Response:
    regarding = request.query["regarding"]
    _check_regarding(request, regarding)
    if request.query["watch"]:
        return streamed(watch_events(server.snapshots, regarding, request.query["after"]), server.streams)
    revision, items = await list_events(server.snapshots, regarding, request.query["limit"])
    return diagnostic_response(ListOf(kind="AccountList", metadata=ListMeta(revision=revision), items=items))


_TENANTED_PREFIXES: Final = frozenset(definition.prefix for definition in DEFINITIONS if definition.tenanted)


def _check_regarding(request: RequestContext, regarding: str) -> None:
    """Check that a caller of one tenant asks for that tenant's objects only."""
    tenant = request.principal.tenant
    kind, _, rest = regarding.partition("/")
    if tenant and (kind not in _TENANTED_PREFIXES or rest.partition("/")[0] != tenant):
        cure = f"use regarding=workload/{tenant}/NAME or regarding=replica/{tenant}/NAME"
        raise ApiProblem(
            403,
            "tenant",
            f"regarding: events outside tenant {tenant} are not visible to this token",
            field="regarding",
            cure=cure,
        )


async def get_logs(request: RequestContext, server: ServerContext) -> Response:
    query = request.query
    options = LogOptions(query["stream"], query["tail"], query["follow"], query["attempt"], query["previous"])
    chunks = await server.agents.logs(request.principal, request.tenant, request.path["name"], options)
    return StreamResponse(chunks, server.streams, media=TEXT, headers={"X-Content-Type-Options": "nosniff"})


# -- routes ------------------------------------------------------------------------------------------------------------------

NODE_PARAMETER: Final = Parameter("node", str, "also explain why the replica cannot run on this node", default="")
COUNT_PARAMETER: Final = Parameter("count", Annotated[int, Meta(ge=1, le=COUNT_MAX)], "maximum number of replicas to look for")
ENDPOINT_PARAMETERS: Final = (
    WATCH,
    AFTER,
    Parameter(
        "limit", Natural, "accepted for compatibility with other lists and ignored: all endpoints are returned", default=0
    ),
)
_WATCH_RESPONSE: Final = ResponseSpec(200, "one change per line", WatchLine, NDJSON)
_ENDPOINT_RESPONSES: Final = (
    ResponseSpec(200, "endpoints of serving replicas; with watch=true a stream of changes", ListOf[EndpointItem]),
    _WATCH_RESPONSE,
)


def _endpoints_route(path: str, name: str, summary: str) -> Route:
    return Route(
        "GET",
        path,
        name,
        summary,
        list_endpoints,
        "endpoints",
        ENDPOINT_PARAMETERS,
        responses=_ENDPOINT_RESPONSES,
        streams_if="watch",
        cost=LIST_COST,
    )


DIAGNOSTIC_ROUTES: Final = (
    Route(
        "GET",
        "/v1/tenants/{tenant}/workloads/{name}/explain",
        "explainWorkload",
        "Explain what limits a workload now, and what would help.",
        get_workload_explanation,
        "diagnostics",
        (NODE_PARAMETER,),
        responses=(ResponseSpec(200, "the explanation", WorkloadExplanation),),
        cost=TRIAL_COST,
    ),
    Route(
        "GET",
        "/v1/tenants/{tenant}/replicas/{name}/explain",
        "explainReplica",
        "Explain why a replica is on its node, or why it is pending.",
        get_replica_explanation,
        "diagnostics",
        (NODE_PARAMETER,),
        responses=(ResponseSpec(200, "the explanation", ReplicaExplanation),),
        cost=TRIAL_COST,
    ),
    Route(
        "GET",
        "/v1/tenants/{tenant}/workloads/{name}/progress",
        "workloadProgress",
        "Show how far a workload has come, and what limits it.",
        get_workload_progress,
        "diagnostics",
        responses=(ResponseSpec(200, "the progress", WorkloadProgressItem),),
        cost=LIST_COST,
    ),
    Route(
        "GET",
        "/v1/workloads/progress",
        "listWorkloadProgress",
        "List how far workloads have come, and what limits each.",
        list_workload_progress,
        "diagnostics",
        (Parameter("tenant", str, "only workloads of this tenant", default=""), LIMIT, CONTINUE),
        responses=(ResponseSpec(200, "a page of workloads, each as of the revision it names", ListOf[WorkloadProgressItem]),),
        cost=LIST_COST,
    ),
    Route(
        "POST",
        "/v1/capacity",
        "capacity",
        "Compute how many more replicas of a workload fit, where, and what prevents the next one.",
        get_capacity,
        "what if",
        (COUNT_PARAMETER,),
        BodySpec((Workload,)),
        (ResponseSpec(200, "replicas that fit, and the limiting constraint", CapacityAnswer),),
        cost=TRIAL_COST,
        read_only=True,
    ),
    Route(
        "POST",
        "/v1/plan",
        "plan",
        "Show what applying these manifests would change and where replicas would be placed. Nothing is written.",
        get_plan,
        "what if",
        (),
        MANIFESTS_BODY,
        (ResponseSpec(200, "the planned result for each object", PlanAnswer),),
        cost=TRIAL_COST,
        read_only=True,
    ),
    _endpoints_route("/v1/endpoints", "listAllEndpoints", "List or watch the endpoints of all tenants."),
    _endpoints_route("/v1/tenants/{tenant}/endpoints", "listEndpoints", "List or watch the endpoints of a tenant."),
    _endpoints_route(
        "/v1/tenants/{tenant}/endpoints/{service}",
        "listServiceEndpoints",
        "List or watch the endpoints of one service.",
    ),
    Route(
        "GET",
        "/v1/top/nodes",
        "topNodes",
        "Resource usage that nodes last reported, with their capacity and the requests of their replicas.",
        get_node_usage,
        "usage",
        responses=(ResponseSpec(200, "one item per node", ListOf[NodeTop]),),
        cost=LIST_COST,
        tenant_access=False,
    ),
    Route(
        "GET",
        "/v1/top/replicas",
        "topReplicas",
        "Resource usage of running replicas, with their requests.",
        get_replica_usage,
        "usage",
        (Parameter("tenant", str, "only replicas of this tenant", default=""),),
        responses=(ResponseSpec(200, "one item per running replica", ListOf[ReplicaTop]),),
        cost=LIST_COST,
    ),
    Route(
        "GET",
        "/v1/account",
        "account",
        "List or watch what happened, the newest last: events, verdicts of the authority, and why replicas are pending.",
        get_events,
        "diagnostics",
        (
            Parameter(
                "regarding",
                str,
                "only about this object: replica/TENANT/NAME, workload/TENANT/NAME (with its replicas), node/NAME, …",
                default="",
            ),
            Parameter(
                "limit",
                Annotated[int, Meta(ge=1, le=EVENTS_LIMIT_MAX)],
                f"maximum number of events, 1 to {EVENTS_LIMIT_MAX}",
                default=EVENTS_LIMIT,
            ),
            WATCH,
            AFTER,
        ),
        responses=(ResponseSpec(200, "events; with watch=true a stream of events", ListOf[HistoryEvent]), _WATCH_RESPONSE),
        streams_if="watch",
    ),
    Route(
        "GET",
        "/v1/tenants/{tenant}/replicas/{name}/logs",
        "logs",
        "Read the log of a replica from the agent of its node.",
        get_logs,
        "diagnostics",
        (
            Parameter("stream", Stream, "stdout, stderr or both", default="both"),
            Parameter("follow", bool, "true: continue with new output until the client disconnects", default=False),
            Parameter("tail", Annotated[int, Meta(ge=0, le=1_000_000)], "only the last lines, at most this many"),
            Parameter("attempt", Annotated[int, Meta(ge=1)], "number of the attempt; default: the latest"),
            Parameter("previous", bool, "true: the attempt before the latest", default=False),
        ),
        responses=(ResponseSpec(200, "the output, as written", str, TEXT),),
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
        "List actions of users and refused requests, the newest first. Callers of a tenant see only that tenant's.",
        get_audit,
        "diagnostics",
        (
            Parameter(
                "limit",
                Annotated[int, Meta(ge=1, le=AUDIT_LIMIT_MAX)],
                f"maximum number of entries, 1 to {AUDIT_LIMIT_MAX}",
                default=AUDIT_LIMIT,
            ),
            Parameter("tenant", str, "only entries of this tenant", default=""),
            Parameter("subject", str, "only actions of this user or program", default=""),
            Parameter("action", str, "only this action, such as createWorkload", default=""),
            Parameter("since", str, "only entries at or after this time, such as 2027-01-31T12:00:00Z", default=""),
        ),
        responses=(ResponseSpec(200, "audit entries", ListOf[AuditItem]),),
    ),
)
