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
from remit.model.manifests.json_schema import SUMMARIES, Writer
from remit.model.metadata import API_VERSION, DNS_LABEL
from remit.model.wire.api_types import PROBLEM_TYPE, PlannedPlacement, ProblemAnswer
from remit.proposal.explain.result_types import Waits
from remit.serve.http.routes import NDJSON, Answer, Parameter, Route


def _manifest(kind: str, name: str, spec: dict[str, Any], tenant: str = "") -> dict[str, Any]:
    metadata = {"name": name, "tenant": tenant} if tenant else {"name": name}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


_PLACES: Final = {"region": "eu-central", "capacity": {"cpu": "32", "memory": "128Gi"}}
_TEMPLATE: Final = {
    "command": ["python3", "-m", "http.server", "$(PORT_http)"],
    "ports": [{"name": "http"}],
    "resources": {"cpu": "500m", "memory": "256Mi"},
    "probes": {"ready": {"http": {"port": "http", "path": "/"}, "period": "2s"}},
}

MANIFESTS: Final[dict[str, dict[str, Any]]] = {
    "Region": _manifest("Region", "eu-central", {"zones": ["eu-central-a", "eu-central-b"]}),
    "Node": _manifest("Node", "node-7", {**_PLACES, "zone": "eu-central-a"}),
    "NodePool": _manifest("NodePool", "general", {**_PLACES, "zones": ["eu-central-a"], "max": 20}),
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

NAMES: Final = {"tenant": "risk", "name": "risk-api", "service": "risk-api"}
"""What stands in a path, if a kind says nothing else."""


VERSION: Final = "3.1.0"
AT: Final = "#/components/schemas/"

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

_REFUSALS: Final = {
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


def described(routes: Sequence[Route]) -> dict[str, Any]:
    """The whole document."""
    writer = _Writer()
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, writer)
    # The model knows no explanations, so it cannot say that this is one.
    placement = writer.definitions.get(PlannedPlacement.__name__, {"properties": {}})
    placement["properties"]["waits"] = {"anyOf": [writer.of(Waits), {"type": "null"}]}
    content = {PROBLEM_TYPE: {"schema": writer.of(ProblemAnswer)}}
    refusals = {name: {"description": about, "content": content} for name, about in _REFUSALS.values()}
    return {
        "openapi": VERSION,
        "info": {
            "title": "Remit",
            "summary": "The HTTP API of one scope",
            "description": _INTRODUCTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "version": __version__,
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "tags": [{"name": tag, "description": _about(tag)} for tag in _tags(routes)],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(writer.definitions.items())),
            "responses": refusals,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "the token of the token file"}},
        },
    }


def _tags(routes: Sequence[Route]) -> list[str]:
    """What one does with everything, then the kinds, then what is for few."""
    found = list(dict.fromkeys(route.tag for route in routes))
    known = list(TAGS)
    last = known.index("programs")
    return sorted(found, key=lambda tag: (known.index(tag) >= last) * 2 if tag in known else 1)


def _about(tag: str) -> str:
    if tag in TAGS:
        return TAGS[tag]
    own = "a record of the authority's own, which is read and not declared"
    about = SUMMARIES.get(tag, own)
    return f"{about[0].upper()}{about[1:]}."


class _Sharing(Writer):
    """What stands in many places is defined once."""

    def __init__(self) -> None:
        super().__init__(AT)

    def shared(self, name: str, written: dict[str, Any]) -> dict[str, Any]:
        self.definitions.setdefault(name, {"description": _SHARED[name], **written})
        return {"$ref": f"{AT}{name}"}


class _Writer(_Sharing):
    """Each kind twice: as it is read, and, with `Manifest` after its name, as it is sent."""

    def sent(self, type_: Any) -> dict[str, Any]:
        """As `of`, for what is sent: of a kind that is its manifest."""
        if type_ in objects.KINDS.values():
            return self.manifest(type_.__name__)
        parts = get_args(type_)
        if parts and set(get_args(parts[0])) == set(objects.KINDS.values()):
            return {"type": "array", "items": self._any_manifest(), "minItems": 1}
        return self.of(type_)

    def manifest(self, kind: str) -> dict[str, Any]:
        name = f"{kind}Manifest"
        if name not in self.definitions:
            apart = _Sharing()
            apart.root(kind)
            own = apart.definitions.pop(kind)
            metadata = apart.definitions.pop("Metadata", None)
            if metadata is not None:
                self.definitions["ManifestMetadata"] = metadata
                own["properties"]["metadata"]["allOf"][0] = {"$ref": f"{AT}ManifestMetadata"}
            self.definitions[name] = {**own, "examples": [MANIFESTS[kind]]} if kind in MANIFESTS else own
            self.of(objects.KINDS[kind])  # what it is made of is defined with the kind as it is read, under the same names
        return {"$ref": f"{AT}{name}"}

    def _any_manifest(self) -> dict[str, Any]:
        references = {kind: self.manifest(kind) for kind in objects.DECLARED}
        mapping = {kind: reference["$ref"] for kind, reference in references.items()}
        if "Manifest" not in self.definitions:
            choice = {"oneOf": list(references.values()), "discriminator": {"propertyName": "kind", "mapping": mapping}}
            self.definitions["Manifest"] = {"description": "Any declared kind.", "type": "object", **choice}
        return {"$ref": f"{AT}Manifest"}


# -- one route -----------------------------------------------------------------------------------------------------------------


def _operation(route: Route, writer: _Writer) -> dict[str, Any]:
    told: dict[str, Any] = {"operationId": route.name, "summary": route.summary, "tags": [route.tag]}
    parameters = [*(_variable(name) for name in route.variables), *(_parameter(one, writer) for one in route.parameters)]
    if parameters:
        told["parameters"] = parameters
    if route.body is not None:
        schemas = [writer.sent(type_) for type_ in route.body.types]
        schema = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
        each = schema["items"] if NDJSON in route.body.media and schema.get("type") == "array" else schema
        content = {media: {"schema": each if media == NDJSON else schema} for media in route.body.media}
        summary = f"{route.body.summary or 'one JSON value'}; at most {route.body.bytes_max >> 20} MiB"
        told["requestBody"] = {"description": summary, "required": True, "content": content}
    told["responses"] = {**_answers(route.answers, writer), **_refusals(route)}
    if route.open:
        told["security"] = []
    return told


def _variable(name: str) -> dict[str, Any]:
    schema = {"type": "string", "pattern": DNS_LABEL} if name in ("tenant", "service") else {"type": "string", "minLength": 1}
    about = {"tenant": "whose it is", "name": "what it is called", "service": "which workload"}
    return {"name": name, "in": "path", "required": True, "description": about.get(name, name), "schema": schema}


def _parameter(one: Parameter, writer: _Writer) -> dict[str, Any]:
    schema = writer.of(one.type)
    if one.default not in (None, ""):
        schema = {**schema, "default": one.default}
    return {"name": one.name, "in": one.place, "required": False, "description": one.summary, "schema": schema}


def _answers(answers: Iterable[Answer], writer: _Writer) -> dict[str, Any]:
    """Those of one status stand together, by media type."""
    found: dict[str, Any] = {}
    for one in answers:
        told = found.setdefault(str(one.status), {"description": one.summary})
        if one.headers:
            told["headers"] = {name: {"description": _HEADERS[name], "schema": {"type": "string"}} for name in one.headers}
        if one.type is not None:
            schema = {"type": "string"} if one.type is str else writer.of(one.type)
            told.setdefault("content", {})[one.media] = {"schema": schema}
    return found


def _refusals(route: Route) -> dict[str, Any]:
    wanted = [] if route.open else ["400", "401", "429", "503"]
    if "{" in route.path:
        wanted.append("404")
    return {status: {"$ref": f"#/components/responses/{_REFUSALS[status][0]}"} for status in (*sorted(wanted), "default")}
