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
    AccountItem,
    AuditItem,
    EndpointItem,
    ListMeta,
    ListOf,
    NodeTop,
    PlanAnswer,
    ReplicaTop,
    WatchLine,
)
from remit.proposal.explain.capacity import COUNT_MAX, Capacity
from remit.proposal.explain.result_types import ReplicaTold, WorkloadTold
from remit.serve.auth.access_control import check_declared
from remit.serve.components.replica_logs import Stream, Wanted
from remit.serve.diagnostics.explanations import (
    capacity_for,
    explain_replica,
    explain_workload,
    with_words_of_its_node,
    with_words_of_its_nodes,
)
from remit.serve.diagnostics.history import LIMIT, LIMIT_MAX, accounted, watched
from remit.serve.diagnostics.resource_usage import top_nodes, top_replicas
from remit.serve.diagnostics.status_routes import with_who_does_not_act
from remit.serve.http.bodies import all_manifests, beside, judged
from remit.serve.http.replies import Failure
from remit.serve.http.request_context import Asked
from remit.serve.http.routes import DEAR, FETCHED, JSON, LISTED, NDJSON, TEXT, Answer, Body, Parameter, Route
from remit.serve.http.streams import Streamed
from remit.serve.http.streams import watched as streamed
from remit.serve.objects.dry_run import plan
from remit.serve.objects.object_routes import AFTER, MANIFESTS, WATCH
from remit.serve.objects.reads import encoded
from remit.serve.objects.rendering import nameless
from remit.serve.server_context import Desk


def told(value: Any, asked: Asked | None = None) -> Response:
    """To whoever `asked`, if it may speak of others' things."""
    body = encode(value)
    if asked is not None and asked.principal.tenant:
        body = nameless(body, asked.principal.tenant)
    return Response(body, media_type=JSON)


async def explained_workload(asked: Asked, desk: Desk) -> Response:
    found = await explain_workload(desk.looking, asked.tenant, asked.path["name"], asked.query["node"])
    found = await with_who_does_not_act(found, desk)
    return told(await with_words_of_its_nodes(found, desk.standby), asked)


async def explained_replica(asked: Asked, desk: Desk) -> Response:
    found = await explain_replica(desk.looking, asked.tenant, asked.path["name"], asked.query["node"])
    return told(await with_words_of_its_node(found, desk.standby), asked)


async def capacity(asked: Asked, desk: Desk) -> Response:
    thing = await beside(desk, asked.body, lambda: judged(asked.body))
    check_declared(asked.principal, (thing,))
    if not isinstance(thing, Workload):
        detail = f"kind: this is {an(type(thing).__name__)}, and only a Workload takes room"
        raise Failure(422, "invalid", detail, field="kind", cure="send one Workload manifest")
    return told(await capacity_for(desk.looking, thing, asked.query["count"]))


async def planned(asked: Asked, desk: Desk) -> Response:
    things = await all_manifests(asked, desk)
    check_declared(asked.principal, things)
    return told(await desk.looking.spoil(lambda look: plan(look, things, asked.actor, desk.clock)), asked)


async def endpoints(asked: Asked, desk: Desk) -> Response:
    tenant, service = asked.tenant, asked.path.get("service", "")
    if asked.query["watch"]:
        return streamed(desk.endpoints.watched(asked.query["after"], tenant, service), desk)
    await desk.looking.caught_up()
    return told(desk.endpoints.listed(tenant, service))


async def nodes_top(asked: Asked, desk: Desk) -> Response:
    return told(await top_nodes(desk.looking, desk.standby))


async def replicas_top(asked: Asked, desk: Desk) -> Response:
    return told(await top_replicas(desk.looking, desk.standby, asked.tenant or asked.query["tenant"]))


async def account(asked: Asked, desk: Desk) -> Response:
    regarding = asked.query["regarding"]
    _check_regarding(asked, regarding)
    if asked.query["watch"]:
        return streamed(watched(desk.looking, regarding, asked.query["after"]), desk)
    revision, items = await accounted(desk.looking, regarding, asked.query["limit"])
    return told(ListOf(kind="AccountList", metadata=ListMeta(revision=revision), items=items))


_TENANTED: Final = frozenset(kind.lower() for kind in TENANTED)


def _check_regarding(asked: Asked, regarding: str) -> None:
    """Whoever belongs to a tenant is told of that one's own things, and must say which."""
    mine = asked.principal.tenant
    word, _, rest = regarding.partition("/")
    if mine and (word not in _TENANTED or rest.partition("/")[0] != mine):
        cure = f"ask with regarding=workload/{mine}/NAME or replica/{mine}/NAME"
        raise Failure(403, "tenant", f"what happened elsewhere than in {mine} is not told here", field="regarding", cure=cure)


async def logs(asked: Asked, desk: Desk) -> Response:
    query = asked.query
    wanted = Wanted(query["stream"], query["tail"], query["follow"], query["attempt"], query["previous"])
    pieces = await desk.agents.logs(asked.principal, asked.tenant, asked.path["name"], wanted)
    return Streamed(pieces, desk, media=TEXT, headers={"X-Content-Type-Options": "nosniff"})


# -- the routes ----------------------------------------------------------------------------------------------------------------

NODE: Final = Parameter("node", str, "say of this node why it could not stand there", default="")
COUNT: Final = Parameter("count", Annotated[int, Meta(ge=1, le=COUNT_MAX)], "look for no more than so many")
ENDPOINTS: Final = (WATCH, AFTER, Parameter("limit", Natural, "taken for the sake of clients; all are told at once", default=0))
_LINES: Final = Answer(200, "one line a change", WatchLine, NDJSON)
_SERVED: Final = (Answer(200, "those that serve; or lines, if watched", ListOf[EndpointItem]), _LINES)


def _endpoints(path: str, name: str, summary: str) -> Route:
    return Route(
        "GET", path, name, summary, endpoints, "endpoints", ENDPOINTS, answers=_SERVED, streams_if="watch", cost=LISTED
    )


EVIDENCE_ROUTES: Final = (
    Route(
        "GET",
        "/v1/tenants/{tenant}/workloads/{name}/explain",
        "explainWorkload",
        "What limits a workload now, and what would help?",
        explained_workload,
        "why",
        (NODE,),
        answers=(Answer(200, "what there is to tell", WorkloadTold),),
        cost=DEAR,
    ),
    Route(
        "GET",
        "/v1/tenants/{tenant}/replicas/{name}/explain",
        "explainReplica",
        "Why is a replica where it is, or why does it wait?",
        explained_replica,
        "why",
        (NODE,),
        answers=(Answer(200, "what there is to tell", ReplicaTold),),
        cost=DEAR,
    ),
    Route(
        "POST",
        "/v1/capacity",
        "capacity",
        "How many more of a workload fit, where, and what stops the next one?",
        capacity,
        "what if",
        (COUNT,),
        Body((Workload,)),
        (Answer(200, "what there is room for", Capacity),),
        cost=DEAR,
        looks=True,
    ),
    Route(
        "POST",
        "/v1/plan",
        "plan",
        "What would come of it if these manifests were applied? Nothing is written.",
        planned,
        "what if",
        (),
        MANIFESTS,
        (Answer(200, "what would become of each", PlanAnswer),),
        cost=DEAR,
        looks=True,
    ),
    _endpoints("/v1/endpoints", "listAllEndpoints", "List or watch where replicas that serve are reached, of all tenants."),
    _endpoints(
        "/v1/tenants/{tenant}/endpoints", "listEndpoints", "List or watch where a tenant's replicas that serve are reached."
    ),
    _endpoints(
        "/v1/tenants/{tenant}/endpoints/{service}",
        "listServiceEndpoints",
        "List or watch where the replicas of one service are reached.",
    ),
    Route(
        "GET",
        "/v1/top/nodes",
        "topNodes",
        "What nodes last said of themselves, beside what they have and what is asked of them.",
        nodes_top,
        "use",
        answers=(Answer(200, "one a node", ListOf[NodeTop]),),
        cost=LISTED,
        tenants=False,
    ),
    Route(
        "GET",
        "/v1/top/replicas",
        "topReplicas",
        "What replicas use that run now, beside what they asked for.",
        replicas_top,
        "use",
        (Parameter("tenant", str, "only those of this tenant", default=""),),
        answers=(Answer(200, "one a replica that runs", ListOf[ReplicaTop]),),
        cost=LISTED,
    ),
    Route(
        "GET",
        "/v1/account",
        "account",
        "What happened, the newest last: events, what the authority accepted and refused, and why work waits.",
        account,
        "why",
        (
            Parameter(
                "regarding", str, "replica/TENANT/NAME, workload/TENANT/NAME with its replicas, node/NAME, …", default=""
            ),
            Parameter("limit", Annotated[int, Meta(ge=1, le=LIMIT_MAX)], f"how many at most, 1 to {LIMIT_MAX}", default=LIMIT),
            WATCH,
            AFTER,
        ),
        answers=(Answer(200, "what happened; or lines, if watched", ListOf[AccountItem]), _LINES),
        streams_if="watch",
    ),
    Route(
        "GET",
        "/v1/tenants/{tenant}/replicas/{name}/logs",
        "logs",
        "What a replica has written, from the agent of its node.",
        logs,
        "why",
        (
            Parameter("stream", Stream, "stdout, stderr or both", default="both"),
            Parameter("follow", bool, "true: go on with what is written from now on", default=False),
            Parameter("tail", Annotated[int, Meta(ge=0, le=1_000_000)], "only the last so many lines"),
            Parameter("attempt", Annotated[int, Meta(ge=1)], "which attempt; the latest, if left out"),
            Parameter("previous", bool, "true: the attempt before the latest", default=False),
        ),
        answers=(Answer(200, "as it was written", str, TEXT),),
        elsewhere=True,
        audited=True,
        streams_if="follow",
        cost=FETCHED,
    ),
)


AUDIT_LIMIT: Final = 200
AUDIT_LIMIT_MAX: Final = 10_000


async def audit(asked: Asked, desk: Desk) -> Response:
    query = asked.query
    read = partial(
        desk.audit.read,
        limit=query["limit"],
        tenant=asked.tenant or query["tenant"],
        subject=query["subject"],
        action=query["action"],
        since=query["since"],
    )
    items = await desk.judging(read)
    return encoded(ListOf(kind="AuditList", metadata=ListMeta(revision=desk.board.revision), items=items))


AUDIT_ROUTES: Final = (
    Route(
        "GET",
        "/v1/audit",
        "audit",
        "Who did what, and who was refused; the newest first. Somebody of a tenant is told of that one's.",
        audit,
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
        answers=(Answer(200, "what was done", ListOf[AuditItem]),),
    ),
)
