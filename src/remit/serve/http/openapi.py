"""OpenAPI 3.1 document from the route table, with example manifests.

The document is generated from the routes and the types they name, so it describes exactly what is served: there is no second
list to keep in step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, get_args

from remit import __version__
from remit.model import objects
from remit.model.manifests.json_schema import SUMMARIES, SchemaWriter
from remit.model.metadata import API_VERSION, DNS_LABEL
from remit.model.wire.api_types import PROBLEM_TYPE, PlannedPlacement, ProblemAnswer
from remit.proposal.explain.result_types import PendingExplanation
from remit.serve.http.routes import NDJSON, Parameter, ResponseSpec, Route


def _manifest(kind: str, name: str, spec: dict[str, Any], tenant: str = "") -> dict[str, Any]:
    metadata = {"name": name, "tenant": tenant} if tenant else {"name": name}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


_NODE_SPEC: Final = {"region": "eu-central", "capacity": {"cpu": "32", "memory": "128Gi"}}
_TEMPLATE: Final = {
    "command": ["python3", "-m", "http.server", "$(PORT_http)"],
    "ports": [{"name": "http"}],
    "resources": {"cpu": "500m", "memory": "256Mi"},
    "probes": {"ready": {"http": {"port": "http", "path": "/"}, "period": "2s"}},
}

EXAMPLE_MANIFESTS: Final[dict[str, dict[str, Any]]] = {
    "Region": _manifest("Region", "eu-central", {"zones": ["eu-central-a", "eu-central-b"]}),
    "Node": _manifest("Node", "node-7", {**_NODE_SPEC, "zone": "eu-central-a"}),
    "NodePool": _manifest("NodePool", "general", {**_NODE_SPEC, "zones": ["eu-central-a"], "max": 20}),
    "Tenant": _manifest("Tenant", "risk", {"quota": {"cpu": "200", "memory": "512Gi"}}),
    "PriorityClass": _manifest("PriorityClass", "critical", {"value": 1000}),
    "Policy": _manifest(
        "Policy",
        "residency",
        {"rules": [{"match": {"tenants": ["risk"]}, "allow": {"regions": ["eu-central"]}, "reason": "data stays in the EU"}]},
    ),
    "Workload": _manifest("Workload", "risk-api", {"type": "service", "replicas": 4, "template": _TEMPLATE}, "risk"),
    "Secret": _manifest("Secret", "risk-db", {"data": {"password": "correct horse battery staple"}}, "risk"),
    "Config": _manifest("Config", "risk-settings", {"data": {"MODE": "live"}}, "risk"),
    "Allotment": _manifest(
        "Allotment", "risk-api-eu-west", {"workload": "risk-api", "region": "eu-west", "replicas": 2}, "risk"
    ),
    "Override": _manifest(
        "Override",
        "avoid-zone-b",
        {
            "effect": "avoid",
            "scope": {"zones": ["eu-central-b"]},
            "ttl": "30m",
            "reason": "the switch of this zone is being replaced",
            "author": "ann",
        },
    ),
    "Token": _manifest(
        "Token",
        "member-risk-ann",
        {"role": "member", "tenant": "risk", "subject": "ann", "digest": "0" * 64, "expires": "2027-01-31T12:00:00Z"},
    ),
}
"""One valid example of each declared kind."""

EXAMPLE_NAMES: Final = {"tenant": "risk", "name": "risk-api", "service": "risk-api"}
"""Values of path variables in examples, unless the example manifest has others."""


OPENAPI_VERSION: Final = "3.1.0"
SCHEMAS_PATH: Final = "#/components/schemas/"

TAGS: Final = {
    "batch": "Operations on many objects at once.",
    "diagnostics": "Why work is placed or pending, what happened, logs, exec and the audit log.",
    "what if": "Capacity and the effect of a change, without making it.",
    "endpoints": "Addresses of the replicas that serve.",
    "usage": "Resource usage of nodes and replicas.",
    "components": "For agents, schedulers and controllers, Remit's own and others.",
    "server": "State of the server, metrics, backup and the API description.",
}
"""Descriptions of the groups of operations. Groups of a kind are described by the kind."""

_INTRODUCTION: Final = """\
Objects are JSON. A list shows one consistent state, however many pages it has, and returns its `revision`. A watch of the same
path (`watch=true&after=REVISION`) continues from there with one JSON line per change; its last line tells how to continue.

Every write accepts the header `Remit-Operation-Id`, an idempotency key: a retry with the same id gets the same answer and takes
effect once. `If-Match` takes the `ETag` of the object that was read.

Every error is a problem document (RFC 9457) with a stable `code`, the `field` it is about, if any, and a `cure`: what to do."""

_PROBLEMS: Final = {
    "400": ("Malformed", "the request is malformed, or has an unknown query parameter"),
    "401": ("Unauthenticated", "the token is missing, invalid, or not accepted for this operation"),
    "404": ("NotFound", "there is no such object"),
    "429": ("Overloaded", "the caller is over a limit, or the server is overloaded; retry after `Retry-After`"),
    "503": ("Unavailable", "no authority can be reached now; retry after `Retry-After`"),
    "default": ("Problem", "what is wrong, and what to do about it"),
}
"""Responses that almost every operation may return, with their component names."""

_SHARED: Final = {
    "Amount": "Resources by name, such as `cpu` (`500m`, `4`) and `memory` (`256Mi`), and devices by kind.",
    "Resources": "Resources by name, such as `cpu` (`500m`, `4`) and `memory` (`256Mi`).",
    "Duration": "A length of time, such as `30s`, `5m` or `1h30m`.",
}
_HEADERS: Final = {
    "ETag": "revision of the object, for If-Match",
    "Location": "path of the object",
    "Remit-Operation-Id": "operation id of this write; a retry with it takes effect once",
}


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document."""
    writer = _ApiSchemaWriter()
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, writer)
    # The model layer does not import the explanation types, so the type of this field is filled in here.
    placement = writer.definitions.get(PlannedPlacement.__name__, {"properties": {}})
    placement["properties"]["waits"] = {"anyOf": [writer.schema_of(PendingExplanation), {"type": "null"}]}
    content = {PROBLEM_TYPE: {"schema": writer.schema_of(ProblemAnswer)}}
    refusals = {name: {"description": about, "content": content} for name, about in _PROBLEMS.values()}
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Remit",
            "summary": "HTTP API of a Remit scope",
            "description": _INTRODUCTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "version": __version__,
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "tags": [{"name": tag, "description": _tag_description(tag)} for tag in _tags(routes)],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(writer.definitions.items())),
            "responses": refusals,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "a token from `remit token create`"}
            },
        },
    }


def _tags(routes: Sequence[Route]) -> list[str]:
    """Return the tags of the routes in order: common operations, then kinds, then operations for components and operators."""
    tags = list(dict.fromkeys(route.tag for route in routes))
    known = list(TAGS)
    last = known.index("components")
    return sorted(tags, key=lambda tag: (known.index(tag) >= last) * 2 if tag in known else 1)


def _tag_description(tag: str) -> str:
    if tag in TAGS:
        return TAGS[tag]
    record_text = "a record written by Remit; read-only"
    description = SUMMARIES.get(tag, record_text)
    return f"{description[0].upper()}{description[1:]}."


class _SharedSchemaWriter(SchemaWriter):
    """Defines schemas that occur in many places once, and refers to them."""

    def __init__(self) -> None:
        super().__init__(SCHEMAS_PATH)

    def shared(self, name: str, written: dict[str, Any]) -> dict[str, Any]:
        self.definitions.setdefault(name, {"description": _SHARED[name], **written})
        return {"$ref": f"{SCHEMAS_PATH}{name}"}


class _ApiSchemaWriter(_SharedSchemaWriter):
    """Writes two schemas per kind: the object as it is read, and, with the suffix `Manifest`, as it is sent."""

    def request_schema(self, type_: Any) -> dict[str, Any]:
        """Return the schema of a request body: the manifest schema for kinds, else the same as `of`."""
        if type_ in objects.KINDS.values():
            return self.manifest_schema(type_.__name__)
        parts = get_args(type_)
        if parts and set(get_args(parts[0])) == set(objects.KINDS.values()):
            return {"type": "array", "items": self._any_manifest(), "minItems": 1}
        return self.schema_of(type_)

    def manifest_schema(self, kind: str) -> dict[str, Any]:
        name = f"{kind}Manifest"
        if name not in self.definitions:
            standalone = _SharedSchemaWriter()
            standalone.root(kind)
            definition = standalone.definitions.pop(kind)
            metadata = standalone.definitions.pop("Metadata", None)
            if metadata is not None:
                self.definitions["ManifestMetadata"] = metadata
                definition["properties"]["metadata"]["allOf"][0] = {"$ref": f"{SCHEMAS_PATH}ManifestMetadata"}
            self.definitions[name] = (
                {**definition, "examples": [EXAMPLE_MANIFESTS[kind]]} if kind in EXAMPLE_MANIFESTS else definition
            )
            self.schema_of(
                objects.KINDS[kind]
            )  # also define the schemas of the field types, which the schema of the manifest refers to
        return {"$ref": f"{SCHEMAS_PATH}{name}"}

    def _any_manifest(self) -> dict[str, Any]:
        references = {kind: self.manifest_schema(kind) for kind in objects.DECLARED}
        mapping = {kind: reference["$ref"] for kind, reference in references.items()}
        if "Manifest" not in self.definitions:
            choice = {"oneOf": list(references.values()), "discriminator": {"propertyName": "kind", "mapping": mapping}}
            self.definitions["Manifest"] = {"description": "Any declared kind.", "type": "object", **choice}
        return {"$ref": f"{SCHEMAS_PATH}Manifest"}


# -- operations --------------------------------------------------------------------------------------------------------------


def _operation(route: Route, writer: _ApiSchemaWriter) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": route.name, "summary": route.summary, "tags": [route.tag]}
    parameters = [
        *(_path_parameter(name) for name in route.variables),
        *(_parameter(parameter, writer) for parameter in route.parameters),
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        schemas = [writer.request_schema(type_) for type_ in route.body.types]
        schema = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
        line_schema = schema["items"] if NDJSON in route.body.media and schema.get("type") == "array" else schema
        content = {media: {"schema": line_schema if media == NDJSON else schema} for media in route.body.media}
        summary = f"{route.body.summary or 'one JSON value'}; at most {route.body.bytes_max >> 20} MiB"
        operation["requestBody"] = {"description": summary, "required": True, "content": content}
    operation["responses"] = {**_responses(route.responses, writer), **_problem_responses(route)}
    if route.anonymous:
        operation["security"] = []
    return operation


def _path_parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string", "pattern": DNS_LABEL} if name in ("tenant", "service") else {"type": "string", "minLength": 1}
    descriptions = {"tenant": "name of the tenant", "name": "name of the object", "service": "name of the workload"}
    return {"name": name, "in": "path", "required": True, "description": descriptions.get(name, name), "schema": schema}


def _parameter(parameter: Parameter, writer: _ApiSchemaWriter) -> dict[str, Any]:
    schema = writer.schema_of(parameter.type)
    if parameter.default not in (None, ""):
        schema = {**schema, "default": parameter.default}
    return {
        "name": parameter.name,
        "in": parameter.location,
        "required": False,
        "description": parameter.summary,
        "schema": schema,
    }


def _responses(specs: Iterable[ResponseSpec], writer: _ApiSchemaWriter) -> dict[str, Any]:
    """Return the responses by status; those of one status are combined, by media type."""
    responses: dict[str, Any] = {}
    for response in specs:
        description = responses.setdefault(str(response.status), {"description": response.summary})
        if response.headers:
            description["headers"] = {
                name: {"description": _HEADERS[name], "schema": {"type": "string"}} for name in response.headers
            }
        if response.type is not None:
            schema = {"type": "string"} if response.type is str else writer.schema_of(response.type)
            description.setdefault("content", {})[response.media] = {"schema": schema}
    return responses


def _problem_responses(route: Route) -> dict[str, Any]:
    statuses = [] if route.anonymous else ["400", "401", "429", "503"]
    if "{" in route.path:
        statuses.append("404")
    return {status: {"$ref": f"#/components/responses/{_PROBLEMS[status][0]}"} for status in (*sorted(statuses), "default")}
