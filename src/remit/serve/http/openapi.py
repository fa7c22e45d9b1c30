"""OpenAPI 3.1 document from the route table, with example manifests.

One short example each, for whoever reads the API's description.

OpenAPI 3.1, made from the table of routes and the types they name.

Nothing is described that is not served, and the other way round: there is no second list.
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
from remit.serve.http.routes import NDJSON, ResponseSpec, Parameter, Route


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
    "Secret": _manifest("Secret", "risk-db", {"data": {"password": "a word that nobody knows"}}, "risk"),
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
            "reason": "its switch is being replaced",
            "author": "ann",
        },
    ),
    "Token": _manifest(
        "Token",
        "member-risk-ann",
        {"role": "member", "tenant": "risk", "subject": "ann", "digest": "0" * 64, "expires": "2027-01-31T12:00:00Z"},
    ),
}
"""One of each declared kind; the reader of manifests takes them all."""

EXAMPLE_NAMES: Final = {"tenant": "risk", "name": "risk-api", "service": "risk-api"}
"""What stands in a path, if a kind says nothing else."""


OPENAPI_VERSION: Final = "3.1.0"
SCHEMAS_PATH: Final = "#/components/schemas/"

TAGS: Final = {
    "many": "Many objects at once.",
    "why": "Why work is where it is, or waits; what happened; what it has written.",
    "what if": "What would come of it. Nothing is written.",
    "endpoints": "Where replicas that serve are reached.",
    "use": "What nodes and replicas use.",
    "programs": "For programs that propose, and for Remit's own components.",
    "server": "How the server stands, and what it can be asked.",
}
"""What each group is about; those of the kinds say it themselves."""

_INTRODUCTION: Final = """\
Objects are JSON. A list shows one state of everything, however many pages it has, and says at which `revision` that was. A
watch of the same path (`watch=true&after=REVISION`) goes on from there, one JSON line a change; the last says how to go on.

Every write may carry the header `Remit-Operation-Id`. It names the intent: the same id over retries gets the same answer, and
the deed is done once. `If-Match` takes the `ETag` that was read.

Whatever is refused is answered with a problem document (RFC 9457): a `code` that does not change, the `field` if there is one,
and a `cure`."""

_PROBLEMS: Final = {
    "400": ("Malformed", "it cannot be read, or the query has something that is not known"),
    "401": ("Unauthenticated", "the token is missing, or is another's"),
    "404": ("NotFound", "there is nothing of that name"),
    "429": ("Overloaded", "more is asked than can be done; `Retry-After` says when to come back"),
    "503": ("Unavailable", "no authority is reached just now; `Retry-After` says when to come back"),
    "default": ("Problem", "why not, and what would mend it"),
}
"""What may be answered to almost everything, and how each is called."""

_SHARED: Final = {
    "Amount": "Resources by name, such as `cpu` (`500m`, `4`) and `memory` (`256Mi`), and devices by kind.",
    "Resources": "Resources by name, such as `cpu` (`500m`, `4`) and `memory` (`256Mi`).",
    "Duration": "How long.",
}
_HEADERS: Final = {
    "ETag": "the revision at which the object stands, for If-Match",
    "Location": "where the object is found",
    "Remit-Operation-Id": "under which id this was done; the same again with it is done once",
}


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """The whole document."""
    writer = _ApiSchemaWriter()
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, writer)
    # The model knows no explanations, so it cannot say that this is one.
    placement = writer.definitions.get(PlannedPlacement.__name__, {"properties": {}})
    placement["properties"]["waits"] = {"anyOf": [writer.schema_of(PendingExplanation), {"type": "null"}]}
    content = {PROBLEM_TYPE: {"schema": writer.schema_of(ProblemAnswer)}}
    refusals = {name: {"description": about, "content": content} for name, about in _PROBLEMS.values()}
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Remit",
            "summary": "The HTTP API of one scope",
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
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "the token of the token file"}},
        },
    }


def _tags(routes: Sequence[Route]) -> list[str]:
    """What one does with everything, then the kinds, then what is for few."""
    tags = list(dict.fromkeys(route.tag for route in routes))
    known = list(TAGS)
    last = known.index("programs")
    return sorted(tags, key=lambda tag: (known.index(tag) >= last) * 2 if tag in known else 1)


def _tag_description(tag: str) -> str:
    if tag in TAGS:
        return TAGS[tag]
    record_text = "a record of the authority's own, which is read and not declared"
    description = SUMMARIES.get(tag, record_text)
    return f"{description[0].upper()}{description[1:]}."


class _SharedSchemaWriter(SchemaWriter):
    """What stands in many places is defined once."""

    def __init__(self) -> None:
        super().__init__(SCHEMAS_PATH)

    def shared(self, name: str, written: dict[str, Any]) -> dict[str, Any]:
        self.definitions.setdefault(name, {"description": _SHARED[name], **written})
        return {"$ref": f"{SCHEMAS_PATH}{name}"}


class _ApiSchemaWriter(_SharedSchemaWriter):
    """Each kind twice: as it is read, and, with `Manifest` after its name, as it is sent."""

    def request_schema(self, type_: Any) -> dict[str, Any]:
        """As `of`, for what is sent: of a kind that is its manifest."""
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
            self.definitions[name] = {**definition, "examples": [EXAMPLE_MANIFESTS[kind]]} if kind in EXAMPLE_MANIFESTS else definition
            self.schema_of(objects.KINDS[kind])  # what it is made of is defined with the kind as it is read, under the same names
        return {"$ref": f"{SCHEMAS_PATH}{name}"}

    def _any_manifest(self) -> dict[str, Any]:
        references = {kind: self.manifest_schema(kind) for kind in objects.DECLARED}
        mapping = {kind: reference["$ref"] for kind, reference in references.items()}
        if "Manifest" not in self.definitions:
            choice = {"oneOf": list(references.values()), "discriminator": {"propertyName": "kind", "mapping": mapping}}
            self.definitions["Manifest"] = {"description": "Any declared kind.", "type": "object", **choice}
        return {"$ref": f"{SCHEMAS_PATH}Manifest"}


# -- one route -----------------------------------------------------------------------------------------------------------------


def _operation(route: Route, writer: _ApiSchemaWriter) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": route.name, "summary": route.summary, "tags": [route.tag]}
    parameters = [*(_path_parameter(name) for name in route.variables), *(_parameter(parameter, writer) for parameter in route.parameters)]
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
    descriptions = {"tenant": "whose it is", "name": "what it is called", "service": "which workload"}
    return {"name": name, "in": "path", "required": True, "description": descriptions.get(name, name), "schema": schema}


def _parameter(parameter: Parameter, writer: _ApiSchemaWriter) -> dict[str, Any]:
    schema = writer.schema_of(parameter.type)
    if parameter.default not in (None, ""):
        schema = {**schema, "default": parameter.default}
    return {"name": parameter.name, "in": parameter.location, "required": False, "description": parameter.summary, "schema": schema}


def _responses(specs: Iterable[ResponseSpec], writer: _ApiSchemaWriter) -> dict[str, Any]:
    """Those of one status stand together, by media type."""
    responses: dict[str, Any] = {}
    for response in specs:
        description = responses.setdefault(str(response.status), {"description": response.summary})
        if response.headers:
            description["headers"] = {name: {"description": _HEADERS[name], "schema": {"type": "string"}} for name in response.headers}
        if response.type is not None:
            schema = {"type": "string"} if response.type is str else writer.schema_of(response.type)
            description.setdefault("content", {})[response.media] = {"schema": schema}
    return responses


def _problem_responses(route: Route) -> dict[str, Any]:
    statuses = [] if route.anonymous else ["400", "401", "429", "503"]
    if "{" in route.path:
        statuses.append("404")
    return {status: {"$ref": f"#/components/responses/{_PROBLEMS[status][0]}"} for status in (*sorted(statuses), "default")}
