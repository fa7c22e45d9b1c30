"""`/metrics` and Prometheus HTTP service discovery.

What this process counts, and where to look next, in Prometheus' own forms.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from msgspec import Meta, Struct
from starlette.responses import Response

from remit.model.kinds import Node
from remit.serve.http.request_context import Asked
from remit.serve.http.routes import Answer, Parameter, Route
from remit.serve.metrics.exposition import PLAIN_TYPE
from remit.serve.objects.reads import encoded
from remit.serve.server_context import Desk

META: Final = "__meta_remit_"
NODE_PORT: Final = 9100
"""Where node_exporter listens, which is what people most often ask of a node."""
_ODD: Final = re.compile(r"[^a-zA-Z0-9_]")


class Targets(Struct, frozen=True):
    """One group of Prometheus' `http_sd_config`."""

    targets: tuple[str, ...]
    labels: dict[str, str]


async def metrics(asked: Asked, desk: Desk) -> Response:
    body, media = desk.metrics.written(asked.headers.get("accept", ""))
    return Response(body, headers={"content-type": media})


async def endpoints(asked: Asked, desk: Desk) -> Response:
    """Somebody of one tenant finds that one's alone."""
    mine, tenant = asked.principal.tenant, asked.query["tenant"]
    if mine and tenant not in ("", mine):
        return encoded([])
    found = [
        Targets((_target(one.host, port),), _labels(tenant=one.tenant, service=one.service, replica=one.replica,
            node=one.node, region=one.region, zone=one.zone, port=name, scope=desk.scope))
        for one in desk.endpoints.listed(asked.tenant or asked.query["tenant"], asked.query["service"]).items
        for name, port in sorted(one.ports.items())
        if one.host and asked.query["port"] in ("", name)
    ]  # fmt: skip
    return encoded(found)


async def nodes(asked: Asked, desk: Desk) -> Response:
    found = [_node(kept.thing, asked.query["port"], desk.scope) for _, kept in sorted(desk.board.kind("node/"))]
    return encoded([one for one in found if one is not None])


def _node(node: Node, port: int, scope: str) -> Targets | None:
    spec, name = node.spec, node.metadata.name
    if not spec.address:
        return None
    own = {f"{META}node_label_{_ODD.sub('_', label)}": value for label, value in sorted(node.metadata.labels.items())}
    known = _labels(node=name, region=spec.region, zone=spec.zone, pool=spec.pool, health=node.status.health.value, scope=scope)
    return Targets((_target(spec.address, port),), {**own, **known})


def _labels(**values: str) -> dict[str, str]:
    return {META + name: value for name, value in values.items()}


def _target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_FOUND: Final = Answer(200, "groups of targets, with their labels", list[Targets])

ROUTES: Final = (
    Route(
        "GET",
        "/metrics",
        "getMetrics",
        "What this process counts and measures, for Prometheus: as its text, or as OpenMetrics.",
        metrics,
        tag="server",
        answers=(Answer(200, "one series a line", str, PLAIN_TYPE.partition(";")[0]),),
        tenants=False,
    ),
    Route(
        "GET",
        "/v1/sd/endpoints",
        "discoverEndpoints",
        "Where replicas that serve are reached, for Prometheus' http_sd.",
        endpoints,
        tag="server",
        parameters=(
            Parameter("tenant", str, "only those of this tenant", default=""),
            Parameter("service", str, "only those of this service", default=""),
            Parameter("port", str, "only the port of this name", default=""),
        ),
        answers=(_FOUND,),
    ),
    Route(
        "GET",
        "/v1/sd/nodes",
        "discoverNodes",
        "Where nodes are reached, for Prometheus' http_sd.",
        nodes,
        tag="server",
        parameters=(
            Parameter(
                "port", Annotated[int, Meta(ge=1, le=65535)], "which port of a node is meant, 1 to 65535", default=NODE_PORT
            ),
        ),
        answers=(_FOUND,),
        tenants=False,
    ),
)
