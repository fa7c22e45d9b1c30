"""`/metrics` and Prometheus HTTP service discovery.

Metrics are those of this process; discovery lists the endpoints and nodes of the scope as `http_sd_config` targets.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from msgspec import Meta, Struct
from starlette.responses import Response

from remit.model.kinds import Node
from remit.serve.http.routes import Parameter, RequestContext, ResponseSpec, Route
from remit.serve.metrics.exposition import PLAIN_TYPE
from remit.serve.objects.reads import json_response
from remit.serve.server_context import ServerContext

META_LABEL_PREFIX: Final = "__meta_remit_"
NODE_PORT: Final = 9100
"""Port of node_exporter, the most common target on a node."""
_NOT_IN_LABEL_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")


class Targets(Struct, frozen=True):
    """One target group of Prometheus' `http_sd_config`."""

    targets: tuple[str, ...]
    labels: dict[str, str]


async def get_metrics(request: RequestContext, server: ServerContext) -> Response:
    body, media = server.telemetry.registry.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": media})


async def discover_endpoints(request: RequestContext, server: ServerContext) -> Response:
    """Return the endpoints as targets. Callers of one tenant get only that tenant's."""
    own_tenant, tenant = request.principal.tenant, request.query["tenant"]
    if own_tenant and tenant not in ("", own_tenant):
        return json_response([])
    groups = [
        Targets(
            (_target(endpoint.host, port),),
            _labels(
                tenant=endpoint.tenant,
                service=endpoint.service,
                replica=endpoint.replica,
                node=endpoint.node,
                region=endpoint.region,
                zone=endpoint.zone,
                port=name,
                scope=server.authority.scope,
            ),
        )
        for endpoint in server.endpoints.list_endpoints(
            request.tenant or request.query["tenant"], request.query["service"]
        ).items
        for name, port in sorted(endpoint.ports.items())
        if endpoint.host and request.query["port"] in ("", name)
    ]
    return json_response(groups)


async def discover_nodes(request: RequestContext, server: ServerContext) -> Response:
    groups = [
        _node_targets(row.obj, request.query["port"], server.authority.scope)
        for _, row in sorted(server.watch_cache.of_kind("node/"))
    ]
    return json_response([group for group in groups if group is not None])


def _node_targets(node: Node, port: int, scope: str) -> Targets | None:
    spec, name = node.spec, node.metadata.name
    if not spec.address:
        return None
    object_labels = {
        f"{META_LABEL_PREFIX}node_label_{_NOT_IN_LABEL_NAME.sub('_', label)}": value
        for label, value in sorted(node.metadata.labels.items())
    }
    node_labels = _labels(
        node=name, region=spec.region, zone=spec.zone, pool=spec.pool, health=node.status.health.value, scope=scope
    )
    return Targets((_target(spec.address, port),), {**object_labels, **node_labels})


def _labels(**values: str) -> dict[str, str]:
    return {META_LABEL_PREFIX + name: value for name, value in values.items()}


def _target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_TARGETS_RESPONSE: Final = ResponseSpec(200, "target groups with their labels", list[Targets])

ROUTES: Final = (
    Route(
        "GET",
        "/metrics",
        "getMetrics",
        "Metrics of this process, in Prometheus text format or OpenMetrics.",
        get_metrics,
        tag="server",
        responses=(ResponseSpec(200, "one sample per line", str, PLAIN_TYPE.partition(";")[0]),),
        tenant_access=False,
    ),
    Route(
        "GET",
        "/v1/sd/endpoints",
        "discoverEndpoints",
        "Endpoints of serving replicas, for Prometheus http_sd_config.",
        discover_endpoints,
        tag="server",
        parameters=(
            Parameter("tenant", str, "only endpoints of this tenant", default=""),
            Parameter("service", str, "only endpoints of this service", default=""),
            Parameter("port", str, "only ports with this name", default=""),
        ),
        responses=(_TARGETS_RESPONSE,),
    ),
    Route(
        "GET",
        "/v1/sd/nodes",
        "discoverNodes",
        "Addresses of nodes, for Prometheus http_sd_config.",
        discover_nodes,
        tag="server",
        parameters=(
            Parameter(
                "port", Annotated[int, Meta(ge=1, le=65535)], "port to scrape on each node, 1 to 65535", default=NODE_PORT
            ),
        ),
        responses=(_TARGETS_RESPONSE,),
        tenant_access=False,
    ),
)
