"""OpenAPI document and API page: complete, valid, and in agreement with what the server answers."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shlex
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import jsonschema
import pytest

from remit.model import objects
from remit.model.manifests.reader import read
from remit.serve.http.api_docs import render_page
from remit.serve.http.openapi import EXAMPLE_MANIFESTS, openapi_document
from remit.serve.http.route_table import ROUTES
from tests.unit.serve.in_memory_server import Api, api, http_test, node, tenant, workload

REFERENCE: dict[str, Any] = {
    "type": "object",
    "properties": {"$ref": {"type": "string", "pattern": "^#/components/"}},
    "required": ["$ref"],
    "additionalProperties": False,
}
SHAPE: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["openapi", "info", "paths", "components"],
    "additionalProperties": False,
    "properties": {
        "openapi": {"type": "string", "pattern": r"^3\.1\.\d+$"},
        "info": {
            "type": "object",
            "required": ["title", "version"],
            "additionalProperties": False,
            "properties": {
                **{name: {"type": "string"} for name in ("title", "summary", "description", "version")},
                "license": {
                    "type": "object",
                    "required": ["name"],
                    "additionalProperties": False,
                    "properties": {"name": {"type": "string"}, "identifier": {"type": "string"}},
                },
            },
        },
        "servers": {"type": "array", "items": {"type": "object", "required": ["url"]}},
        "security": {"$ref": "#/$defs/security"},
        "tags": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {"name": {"type": "string"}, "description": {"type": "string", "minLength": 3}},
            },
        },
        "paths": {
            "type": "object",
            "propertyNames": {"pattern": "^/"},
            "additionalProperties": {
                "type": "object",
                "minProperties": 1,
                "propertyNames": {"enum": ["get", "put", "post", "delete", "patch"]},
                "additionalProperties": {"$ref": "#/$defs/operation"},
            },
        },
        "components": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "schemas": {
                    "type": "object",
                    "propertyNames": {"pattern": "^[a-zA-Z0-9._-]+$"},
                    "additionalProperties": {"$ref": "https://json-schema.org/draft/2020-12/schema"},
                },
                "responses": {"type": "object", "additionalProperties": {"$ref": "#/$defs/response"}},
                "securitySchemes": {
                    "type": "object",
                    "additionalProperties": {"type": "object", "required": ["type", "scheme"]},
                },
            },
        },
    },
    "$defs": {
        "reference": REFERENCE,
        "security": {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "array"}}},
        "operation": {
            "type": "object",
            "required": ["operationId", "summary", "tags", "responses"],
            "additionalProperties": False,
            "properties": {
                "operationId": {"type": "string", "pattern": "^[a-zA-Z]+$"},
                "summary": {"type": "string", "pattern": r"[.?]$"},
                "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "parameters": {"type": "array", "items": {"$ref": "#/$defs/parameter"}},
                "requestBody": {
                    "type": "object",
                    "required": ["content"],
                    "additionalProperties": False,
                    "properties": {
                        "description": {"type": "string"},
                        "required": {"type": "boolean"},
                        "content": {"$ref": "#/$defs/content"},
                    },
                },
                "responses": {
                    "type": "object",
                    "required": ["default"],
                    "propertyNames": {"pattern": "^([1-5][0-9]{2}|default)$"},
                    "additionalProperties": {"anyOf": [{"$ref": "#/$defs/reference"}, {"$ref": "#/$defs/response"}]},
                },
                "security": {"$ref": "#/$defs/security"},
            },
        },
        "parameter": {
            "type": "object",
            "required": ["name", "in", "required", "description", "schema"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string"},
                "in": {"enum": ["query", "header", "path"]},
                "required": {"type": "boolean"},
                "description": {"type": "string", "minLength": 3},
                "schema": {"$ref": "https://json-schema.org/draft/2020-12/schema"},
            },
            "if": {"properties": {"in": {"const": "path"}}},
            "then": {"properties": {"required": {"const": True}}},
        },
        "response": {
            "type": "object",
            "required": ["description"],
            "additionalProperties": False,
            "properties": {
                "description": {"type": "string", "minLength": 3},
                "headers": {
                    "type": "object",
                    "additionalProperties": {"type": "object", "required": ["description", "schema"]},
                },
                "content": {"$ref": "#/$defs/content"},
            },
        },
        "content": {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"pattern": "^[a-z]+/[a-z+.-]+$"},
            "additionalProperties": {
                "type": "object",
                "required": ["schema"],
                "additionalProperties": False,
                "properties": {"schema": {"$ref": "https://json-schema.org/draft/2020-12/schema"}},
            },
        },
    },
}
"""The parts of OpenAPI 3.1 that this document uses; anything else is an error."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(openapi_document(ROUTES)))
    return found


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        mapping = value.get("discriminator", {}).get("mapping", {}) if isinstance(value.get("discriminator"), dict) else {}
        yield from mapping.values()
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def validator(document: dict[str, Any], name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**document, "$ref": f"#/components/schemas/{name}"})


def test_document_matches_openapi_3_1_schema(document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SHAPE)
    problems = [
        f"{error.json_path}: {error.message[:200]}" for error in jsonschema.Draft202012Validator(SHAPE).iter_errors(document)
    ]
    assert not problems, problems[:5]


def test_every_route_is_described_exactly_once(document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}
    names = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names)) == len(ROUTES)


def test_every_reference_resolves_and_every_schema_is_used(document: dict[str, Any]) -> None:
    found = set(references(document))
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    responses = {f"#/components/responses/{name}" for name in document["components"]["responses"]}
    assert found <= schemas | responses
    assert schemas - found == set()


def test_path_variables_are_parameters(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        expected = re.findall(r"\{(\w+)\}", path)
        for operation in methods.values():
            assert [one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"] == expected, path


def test_only_open_routes_need_no_token(document: dict[str, Any]) -> None:
    without = {
        path for path, methods in document["paths"].items() for operation in methods.values() if operation.get("security") == []
    }
    assert without == {"/healthz", "/readyz", "/openapi.json", "/docs", "/v1/ca"}
    assert document["security"] == [{"token": []}]


def test_limits_defaults_and_discriminators_are_described(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    parameters = {one["name"]: one for one in document["paths"]["/v1/nodes"]["get"]["parameters"]}
    assert parameters["limit"]["schema"] == {"type": "integer", "minimum": 1, "maximum": 1000, "default": 500}
    assert schemas["WorkloadSpec"]["properties"]["replicas"]["maximum"] == 1_000_000
    claim = schemas["Operation"]["properties"]["claim"]
    assert claim["discriminator"]["propertyName"] == "do" and claim["discriminator"]["mapping"]["bind"].endswith("/Bind")
    assert schemas["Manifest"]["discriminator"]["mapping"]["Node"].endswith("/NodeManifest")
    assert set(schemas["Verdicts"]["properties"]["verdicts"]["items"]["discriminator"]["mapping"]) == {"accepted", "refused"}
    assert schemas["Node"]["properties"]["kind"] == {"const": "Node"} and "status" in schemas["Node"]["properties"]
    assert "status" not in schemas["NodeManifest"]["properties"]


@pytest.mark.parametrize("kind", objects.DECLARED)
def test_example_of_each_kind_passes_reader_and_schema(document: dict[str, Any], kind: str) -> None:
    sample = EXAMPLE_MANIFESTS[kind]
    assert not read(json.dumps(sample).encode(), "sample.json").problems
    validator(document, f"{kind}Manifest").validate(sample)
    validator(document, "Manifest").validate(sample)
    wrong = {**sample, "spec": {**sample["spec"], "misspelt": 1}}
    assert not validator(document, f"{kind}Manifest").is_valid(wrong)


@http_test
async def test_answers_match_their_schemas(client: Api) -> None:
    document = (await client.get("/openapi.json", token=None)).json
    await client.must("POST", "/v1/apply", [tenant(), node("n1"), workload("web", replicas=2)])
    plans = await client.must("POST", "/v1/plan", [workload("web", replicas=3), workload("api"), tenant("other")])
    answers = {
        "/v1/nodes": "NodeList",
        "/v1/nodes/n1": "Node",
        "/v1/tenants/acme/workloads/web": "Workload",
        "/v1/tenants/acme/workloads/web/explain": "WorkloadExplanation",
        "/v1/account": "HistoryEventList",
        "/v1/top/nodes": "NodeTopList",
        "/v1/top/replicas?tenant=acme": "ReplicaTopList",
        "/v1/endpoints?limit=1000": "EndpointItemList",
        "/v1/status": "ScopeStatus",
    }
    for path, name in answers.items():
        validator(document, name).validate((await client.get(path)).json)
    validator(document, "PlanAnswer").validate(plans)
    capacity = await client.must("POST", "/v1/capacity?count=3", workload("more"))
    validator(document, "CapacityAnswer").validate(capacity)
    refused = await client.get("/v1/tenants/acme/workloads/wep/explain")
    validator(document, "ProblemAnswer").validate(refused.json)


# -- HTML page -----------------------------------------------------------------------------------------------------------------


class PageParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        attributes = dict(attrs)
        self.ids += [attributes["id"] or ""] if "id" in attributes else []
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def test_page_has_anchor_per_route_and_loads_nothing_external(document: dict[str, Any]) -> None:
    text = render_page(document)
    read_back = PageParser()
    read_back.feed(text)
    assert read_back.open == []
    assert len(read_back.ids) == len(set(read_back.ids))
    assert {route.name for route in ROUTES} <= set(read_back.ids)
    inside = {link.removeprefix("#") for link in read_back.links if link.startswith("#")}
    assert inside <= set(read_back.ids)
    assert {link for link in read_back.links if not link.startswith("#")} == {"/openapi.json"}
    assert not {"script", "img", "link", "iframe"} & read_back.tags
    assert "url(" not in text and "@import" not in text


def test_each_route_has_example_command_with_valid_shell_syntax(document: dict[str, Any]) -> None:
    text = render_page(document)
    examples = re.findall(r"<h4>Example</h4><pre>(.*?)</pre>", text, re.S)
    assert len(examples) == len(ROUTES)
    for example in examples:
        arguments = shlex.split(html.unescape(example))
        assert arguments[0] == "curl" and "{" not in next(argument for argument in arguments if argument.startswith("$REMIT/"))
        if "-d" in arguments:
            json.loads(arguments[arguments.index("-d") + 1])


def test_descriptions_are_escaped_in_page(document: dict[str, Any]) -> None:
    evil = json.loads(json.dumps(document).replace("Read a Node.", "<script>alert(1)</script> & `<b>`."))
    text = render_page(evil)
    assert "<script>" not in text and "&lt;script&gt;" in text and "<code>&lt;b&gt;</code>" in text


def test_docs_and_openapi_are_open_with_strict_content_security_policy() -> None:
    async def ask() -> None:
        async with api() as client:
            docs = await client.get("/docs", token=None)
            assert (docs.status, docs.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert docs.headers["content-security-policy"].startswith("default-src 'none'")
            assert docs.body.startswith(b"<!doctype html>")
            openapi = await client.get("/openapi.json", token=None)
            assert openapi.headers["content-type"] == "application/json" and openapi.json["openapi"] == "3.1.0"

    asyncio.run(ask())
