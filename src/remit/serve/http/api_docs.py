"""HTML reference page and the routes that serve the API description.

The page is generated from the OpenAPI document and loads nothing from other hosts. Both are served without a token and built
once, at the first request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from html import escape
from typing import Any, Final

import msgspec
from starlette.responses import Response

from remit.serve.http.media_types import JSON
from remit.serve.http.openapi import EXAMPLE_MANIFESTS, EXAMPLE_NAMES, openapi_document
from remit.serve.http.routes import RequestContext, ResponseSpec, Route
from remit.serve.server_context import ServerContext

_REF: Final = "#/components/schemas/"
_METHODS: Final = ("get", "post", "put", "patch", "delete")
_CURL: Final = 'curl -sS -H "Authorization: Bearer $REMIT_TOKEN"'

WIDTH: Final = 92

_QUICK_START: Final = f"""\
export REMIT=http://127.0.0.1:7420 REMIT_TOKEN="$(cat TOKEN_FILE)"
{_CURL} "$REMIT/v1/status"
{_CURL} "$REMIT/v1/nodes?limit=10"
{_CURL} -N "$REMIT/v1/replicas?watch=true&fieldSelector=status.phase=pending"
"""

_EXAMPLE_BODIES: Final = {
    "apply": [EXAMPLE_MANIFESTS["Tenant"], EXAMPLE_MANIFESTS["Workload"]],
    "plan": [EXAMPLE_MANIFESTS["Tenant"], EXAMPLE_MANIFESTS["Workload"]],
    "claim": {
        "operations": [
            {
                "id": "INCARNATION.WINDOW.NONCE",
                "actor": {"name": "ann", "role": "operator"},
                "claim": {"do": "delete", "kind": "Region", "name": "eu-central"},
            }
        ]
    },
    "ask": {"type": "range", "prefix": "node/"},
    "follow": {"type": "rows", "prefix": "node/"},
}
"""Example bodies of operations that do not take a manifest of one kind."""

STYLE: Final = """
:root{--ink:#1d2430;--soft:#5a6577;--line:#dfe4ec;--paper:#fff;--wash:#f5f7fa;--link:#0b5cad;--get:#0b6e4f;--post:#0b5cad;
--put:#8a5a00;--patch:#6b3fa0;--delete:#b3261e;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ef;--soft:#9aa6b8;--line:#2c3442;--paper:#12161d;--wash:#1a2029;--link:#6db3f8;
--get:#4cc38a;--post:#6db3f8;--put:#e0a43a;--patch:#b794f6;--delete:#ff8a80}}
*{box-sizing:border-box}
html{scroll-padding-top:1rem}
body{margin:0;color:var(--ink);background:var(--paper);font:16px/1.55 system-ui,sans-serif;display:grid;
grid-template-columns:17rem minmax(0,1fr)}
nav{position:sticky;top:0;height:100vh;overflow-y:auto;padding:1.2rem 1rem;background:var(--wash);
border-right:1px solid var(--line);font-size:.875rem}
nav h1{font-size:1.15rem;margin:0 0 .2rem}
nav p{margin:0 0 1rem;color:var(--soft)}
nav details{margin:.15rem 0}
nav summary{cursor:pointer;font-weight:600;padding:.1rem 0}
nav ul{list-style:none;margin:.1rem 0 .5rem;padding:0 0 0 .9rem}
nav li{margin:.1rem 0;overflow-wrap:anywhere}
main{padding:2rem clamp(1rem,4vw,4rem) 5rem;max-width:66rem;min-width:0}
a{color:var(--link);text-decoration:none}a:hover,a:focus-visible{text-decoration:underline}
h2{margin:3rem 0 .3rem;padding-bottom:.3rem;border-bottom:1px solid var(--line);font-size:1.5rem}
p.about{margin-top:.2rem;color:var(--soft)}
section.op{margin:1.6rem 0;border:1px solid var(--line);border-radius:.5rem;overflow:hidden}
section.op>header{display:flex;flex-wrap:wrap;gap:.3rem .8rem;align-items:baseline;padding:.6rem 1rem;background:var(--wash)}
section.op>header h3{margin:0;font:600 .95rem/1.4 ui-monospace,monospace;overflow-wrap:anywhere}
section.op>header p{margin:0;flex-basis:100%}
section.op>div{padding:.2rem 1rem 1rem}
.m{font:700 .78rem/1 ui-monospace,monospace;text-transform:uppercase;letter-spacing:.04em}
.get{color:var(--get)}.post{color:var(--post)}.put{color:var(--put)}.patch{color:var(--patch)}.delete{color:var(--delete)}
h4{margin:1.1rem 0 .3rem;font-size:.8rem;text-transform:uppercase;letter-spacing:.06em;color:var(--soft)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th{text-align:left;font-weight:600;color:var(--soft);font-size:.8rem}
td,th{padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
td:first-child{white-space:nowrap}
code,pre{font-family:ui-monospace,monospace;font-size:.86em}
pre{margin:.3rem 0;padding:.7rem .9rem;background:var(--wash);border:1px solid var(--line);border-radius:.4rem;overflow-x:auto}
.soft{color:var(--soft)}
.need{color:var(--delete);font-size:.75rem}
section.schema{margin:1.2rem 0}
section.schema h3{margin:0;font:600 .95rem/1.4 ui-monospace,monospace}
section.schema p{margin:.1rem 0 .3rem;color:var(--soft)}
@media(max-width:56rem){body{display:block}nav{position:static;height:auto;max-height:45vh;border-right:0;
border-bottom:1px solid var(--line)}}
"""


def render_page(document: dict[str, Any]) -> str:
    """Return the HTML page."""
    info = document["info"]
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(info['title'])} HTTP API</title><style>{STYLE}</style></head><body>",
            *_navigation(document),
            "<main>",
            *_introduction(document),
            *_groups(document),
            *_schemas(document),
            "</main></body></html>\n",
        )
    )


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if method in methods:
                yield path, method, methods[method]


def _navigation(document: dict[str, Any]) -> Iterator[str]:
    info = document["info"]
    yield f"<nav aria-label='Contents'><h1>{escape(info['title'])}</h1><p>HTTP API, version {escape(info['version'])}</p>"
    yield "<ul><li><a href='#begin'>Getting started</a></li></ul>"
    for tag in document["tags"]:
        yield f"<details{'' if tag['name'][:1].isupper() else ' open'}><summary>{_title(tag['name'])}</summary><ul>"
        for path, method, operation in _operations(document):
            if operation["tags"][0] == tag["name"]:
                name = escape(operation["operationId"])
                yield f"<li><a href='#{name}' title='{escape(path)}'>{name}</a> <span class='m {method}'>{method}</span></li>"
        yield "</ul></details>"
    yield "<ul><li><a href='#schemas'>Schemas</a></li></ul></nav>"


def _title(tag: str) -> str:
    return escape(tag if tag[:1].isupper() else tag.capitalize())


def _introduction(document: dict[str, Any]) -> Iterator[str]:
    info = document["info"]
    yield f"<h2 id='begin'>{escape(info['summary'])}</h2>"
    for paragraph in info["description"].split("\n\n"):
        yield f"<p>{_inline_markup(' '.join(paragraph.split()))}</p>"
    yield "<h4>Quick start</h4><pre>"
    yield escape(_QUICK_START)
    yield "</pre><p class='soft'>Machine-readable: <a href='/openapi.json'>/openapi.json</a> (OpenAPI 3.1).</p>"


def _groups(document: dict[str, Any]) -> Iterator[str]:
    for tag in document["tags"]:
        yield f"<h2 id='{_anchor(tag['name'])}'>{_title(tag['name'])}</h2>"
        yield f"<p class='about'>{_inline_markup(tag['description'])}</p>"
        for path, method, operation in _operations(document):
            if operation["tags"][0] == tag["name"]:
                yield from _operation(path, method, operation, document)


def _anchor(tag: str) -> str:
    return f"tag-{re.sub(r'[^A-Za-z0-9]+', '-', tag)}"


def _operation(path: str, method: str, operation: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    name = escape(operation["operationId"])
    yield f"<section class='op' id='{name}'><header><span class='m {method}'>{method}</span>"
    yield f"<h3><a href='#{name}'>{escape(path)}</a></h3><p>{_inline_markup(operation['summary'])}</p></header><div>"
    if "parameters" in operation:
        yield "<h4>Parameters</h4><div class='scroll'><table><tr><th>name</th><th>in</th><th>type</th><th>meaning</th></tr>"
        for parameter in operation["parameters"]:
            required = " <span class='need'>required</span>" if parameter["required"] else ""
            yield f"<tr><td><code>{escape(parameter['name'])}</code>{required}</td><td class='soft'>{parameter['in']}</td>"
            yield f"<td>{_type(parameter['schema'])}</td><td>{_inline_markup(parameter['description'])}</td></tr>"
        yield "</table></div>"
    if "requestBody" in operation:
        body = operation["requestBody"]
        yield f"<h4>Body</h4><p>{_inline_markup(body['description'])}: {_content(body['content'])}</p>"
    yield "<h4>Responses</h4><div class='scroll'><table>"
    for status, answer in operation["responses"].items():
        if "$ref" not in answer:
            yield f"<tr><td><code>{status}</code></td><td>{_inline_markup(answer['description'])}</td>"
            yield f"<td>{_content(answer.get('content', {}))}</td></tr>"
    refused = [
        _problem_reference(status, answer, document) for status, answer in operation["responses"].items() if "$ref" in answer
    ]
    yield f"<tr><td class='soft'>errors</td><td colspan='2'>{', '.join(refused)}</td></tr></table></div>"
    yield f"<h4>Example</h4><pre>{escape(_curl(path, method, operation))}</pre></div></section>"


def _problem_reference(status: str, answer: dict[str, Any], document: dict[str, Any]) -> str:
    about = document["components"]["responses"][answer["$ref"].rpartition("/")[2]]["description"]
    if status == "default":
        return f"any other, as a <a href='#schema-ProblemAnswer'>problem document</a>: {_inline_markup(about)}"
    return f"<code title='{escape(about)}'>{status}</code>"


def _content(content: dict[str, Any]) -> str:
    return " or ".join(
        f"{_type(content_type['schema'])} <span class='soft'>as {escape(media)}</span>"
        for media, content_type in content.items()
    )


def _curl(path: str, method: str, operation: dict[str, Any]) -> str:
    kind = operation["tags"][0]
    sample = EXAMPLE_MANIFESTS.get(kind, EXAMPLE_MANIFESTS["Workload"])
    names = {**EXAMPLE_NAMES, **(sample["metadata"] if kind in EXAMPLE_MANIFESTS else {})}
    if "/replicas/" in path:
        names["name"] = "risk-api-0"
    url_path = re.sub(r"\{(\w+)\}", lambda match: str(names.get(match[1], match[1])), path)
    parameter_names = {parameter["name"] for parameter in operation.get("parameters", ())}
    query = "?watch=true" if "watch" in parameter_names else ""
    command = _CURL if operation.get("security") != [] else "curl -sS"
    arguments = [
        f'{command}{" -N" if query else ""}{"" if method == "get" else f" -X {method.upper()}"} "$REMIT{url_path}{query}"'
    ]
    if "If-Match" in parameter_names:
        arguments.append("-H 'If-Match: \"42\"'")
    if "requestBody" in operation:
        media = next(iter(operation["requestBody"]["content"]))
        arguments.append(f"-H 'Content-Type: {media}'")
        arguments.append(f"-d '{_example_body(operation, sample, media)}'")
    return " \\\n  ".join(arguments)


def _example_body(operation: dict[str, Any], sample: dict[str, Any], media: str) -> str:
    """Return the body of an example, with single quotes escaped for a shell."""
    patch = {"metadata": {"labels": {"team": "risk"}}}
    value = patch if "merge-patch" in media else _EXAMPLE_BODIES.get(operation["operationId"], sample)
    return _pretty_json(value).replace("'", "'\\''")


def _pretty_json(value: Any, indent: str = "  ") -> str:
    """Format JSON with short values on one line."""
    flat = json.dumps(value)
    if len(flat) + len(indent) <= WIDTH or not isinstance(value, dict | list):
        return flat
    inner_indent = indent + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {_pretty_json(item, inner_indent)}" for name, item in value.items()]
        return "{\n" + ",\n".join(inner_indent + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner_indent + _pretty_json(item, inner_indent) for item in value) + f"\n{indent}]"


# -- schemas -------------------------------------------------------------------------------------------------------------------


def _schemas(document: dict[str, Any]) -> Iterator[str]:
    yield "<h2 id='schemas'>Schemas</h2><p class='about'>Request and response types. An absent field has its default value.</p>"
    for name, schema in document["components"]["schemas"].items():
        yield f"<section class='schema' id='schema-{name}'><h3><a href='#schema-{name}'>{name}</a></h3>"
        if "description" in schema:
            yield f"<p>{_inline_markup(schema['description'])}</p>"
        properties = {key: prop for key, prop in schema.get("properties", {}).items() if prop is not False}
        if properties:
            yield "<div class='scroll'><table>"
            for key, prop in properties.items():
                required = " <span class='need'>required</span>" if key in schema.get("required", ()) else ""
                about = prop.get("description", "")
                yield f"<tr><td><code>{escape(key)}</code>{required}</td>"
                yield f"<td>{_type(prop)}</td><td>{_inline_markup(about)}</td></tr>"
            yield "</table></div>"
        elif "oneOf" in schema:
            yield f"<p>one of {', '.join(_type(prop) for prop in schema['oneOf'])}</p>"
        else:
            yield f"<p>{_type(schema)}</p>"
        yield "</section>"


def _type(schema: Any, depth: int = 0) -> str:
    """Return a short HTML description of a schema, with its limits."""
    if schema is True or not schema:
        return "anything"
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return f"<a href='#schema-{name}'>{name}</a>" + _default(schema)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return " or ".join(dict.fromkeys(_type(part, depth + 1) for part in schema[keyword])) + _default(schema)
    if "allOf" in schema:
        return _type(schema["allOf"][0], depth + 1)
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if "enum" in schema:
        return " ".join(f"<code>{escape(str(part) or '“”')}</code>" for part in schema["enum"]) + _default(schema)
    kind = schema.get("type", "string" if "pattern" in schema else "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items'), depth + 1)}{_limits(schema)}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"map to {_type(values, depth + 1)}{_limits(schema)}" if values else "object"
    examples = schema.get("examples", ()) if kind == "string" else ()
    example_text = f" <span class='soft'>such as {', '.join(map(escape, examples))}</span>" if examples else ""
    return f"{kind}{_limits(schema)}{example_text}{_default(schema)}"


_UNBOUNDED: Final = (1 << 53) - 1
"""Larger bounds are technical limits and are not shown."""

_BOUNDS: Final = {
    "minimum": "≥ {}",
    "maximum": "≤ {}",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "maxProperties": "at most {}",
}


def _limits(schema: dict[str, Any]) -> str:
    limits = ["not empty"] if schema.get("minLength") == 1 else []
    limits += [
        form.format(f"{schema[keyword]:,}") for keyword, form in _BOUNDS.items() if schema.get(keyword, _UNBOUNDED) < _UNBOUNDED
    ]
    return f" <span class='soft'>({', '.join(limits)})</span>" if limits else ""


def _default(schema: dict[str, Any]) -> str:
    return f" <span class='soft'>default {escape(json.dumps(schema['default']))}</span>" if "default" in schema else ""


def _inline_markup(text: str) -> str:
    """Escape text for HTML, and mark up `code`."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


HTML = "text/html"
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def routes(table: Callable[[], Sequence[Route]]) -> tuple[Route, ...]:
    """Return the routes of the API description. `table` returns all routes, including these."""

    @cache
    def document() -> dict[str, Any]:
        return openapi_document(table())

    @cache
    def as_json() -> bytes:
        return msgspec.json.encode(document())

    @cache
    def as_html() -> bytes:
        return render_page(document()).encode()

    async def openapi(request: RequestContext, server: ServerContext) -> Response:
        return Response(await server.cpu_offload(as_json), media_type=JSON)

    async def docs(request: RequestContext, server: ServerContext) -> Response:
        headers = {"Content-Security-Policy": _CONTENT_SECURITY_POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(await server.cpu_offload(as_html), headers=headers, media_type=HTML)

    return (
        Route(
            "GET",
            "/openapi.json",
            "getOpenApi",
            "The OpenAPI description of this API.",
            openapi,
            "server",
            responses=(ResponseSpec(200, "an OpenAPI 3.1 document", dict[str, Any]),),
            anonymous=True,
        ),
        Route(
            "GET",
            "/docs",
            "getDocs",
            "The reference page of this API.",
            docs,
            "server",
            responses=(ResponseSpec(200, "an HTML page", str, HTML),),
            anonymous=True,
        ),
    )
