"""Get and list with pagination; label and field selectors.

Reads come from the store, not from the watch cache, and all pages of a list show one revision.

A label selector has the usual form: `app=web,tier!=cache,zone in (a,b),disk notin (hdd),gpu,!old,rank>3`. A field selector
compares dotted paths, spelled as in an object, by `=`, `==` or `!=`: `status.phase=pending,spec.workload!=web`. Selectors
are evaluated on decoded objects, so that fields with their default value match too.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import inspect
from starlette.responses import Response

from remit.law.selectors import match_labels
from remit.model.kinds import NodeExpression
from remit.model.kinds.registry import BY_KIND, AnyObject
from remit.model.metadata import Metadata
from remit.model.objects import KINDS, decode, enc_hook, key_of
from remit.model.problems import closest_name, did_you_mean, one_of, quoted
from remit.model.records import Generation, Replica
from remit.model.resources import Amount, Duration
from remit.observation.watch_cache import WatchCache
from remit.serve.http.media_types import JSON
from remit.serve.http.replies import ApiProblem, BytesResponse
from remit.serve.http.routes import RequestContext
from remit.serve.objects.rendering import etag, render_list
from remit.serve.objects.rendering import render_object as shown_object
from remit.serve.server_context import ServerContext
from remit.store.protocol import Row

TERMS_MAX: Final = 64
SELECTOR_LENGTH_MAX: Final = 4 << 10

_KEY: Final = r"[A-Za-z0-9](?:[-_./A-Za-z0-9]{0,315}[A-Za-z0-9])?"
_TERM: Final = re.compile(
    rf"""\s*(?:
      !\s*(?P<absent>{_KEY})
    | (?P<key>{_KEY})\s*(?:
        (?P<sign>==|=|!=|>|<)\s*(?P<value>[^\s,()!=<>]*)
      | (?P<word>in|notin)\s*\((?P<values>[^()]*)\)
      )?
    )\s*(?:,|\Z)""",
    re.VERBOSE,
)
_FIELD: Final = re.compile(r"\s*(?P<path>[^\s,=!]+)\s*(?P<sign>==|=|!=)\s*(?P<value>[^,]*)(?:,|\Z)")
_SIGNS: Final[dict[str, Literal["In", "NotIn", "Gt", "Lt"]]] = {"=": "In", "==": "In", "!=": "NotIn", ">": "Gt", "<": "Lt"}


class FieldTerm(NamedTuple):
    path: tuple[str, ...]
    value: str
    equal: bool


class Selector(NamedTuple):
    """Matches objects for which all terms hold; without terms, every object."""

    labels: tuple[NodeExpression, ...] = ()
    fields: tuple[FieldTerm, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.labels or self.fields)

    def matches(self, obj: AnyObject, labels_of: Callable[[AnyObject], Mapping[str, str]]) -> bool:
        if any((_field_text(obj, term.path) == term.value) is not term.equal for term in self.fields):
            return False
        return not self.labels or match_labels(self.labels, labels_of(obj))


def parse_selector(kind: str, labels: str, fields: str) -> Selector:
    """Parse the selectors of a query. Raises `ApiProblem`, which names the parameter and the term."""
    return Selector(_label_terms(labels), tuple(_field_terms(kind, fields)))


def label_lookup(watch_cache: WatchCache) -> Callable[[AnyObject], Mapping[str, str]]:
    """Return a function that returns an object's labels. A replica has the labels of its workload's generation."""

    def labels_of(obj: AnyObject) -> Mapping[str, str]:
        if isinstance(obj, Replica):
            spec = obj.spec
            generation = watch_cache.get(f"generation/{obj.metadata.tenant}/{spec.workload}/{spec.generation:08d}")
            return generation.spec.labels if isinstance(generation, Generation) else {}
        return obj.metadata.labels if isinstance(obj.metadata, Metadata) else {}

    return labels_of


def _label_terms(text: str) -> tuple[NodeExpression, ...]:
    terms = []
    # Collapse runs of blanks: otherwise the pattern could split a long run between the parts of a term in very many ways.
    for match in _terms(
        " ".join(text.split()), _TERM, "labelSelector", "write terms as app=web, app!=web, app in (a,b), app or !app"
    ):
        if match["absent"]:
            terms.append(NodeExpression(key=match["absent"], operator="DoesNotExist"))
        elif match["sign"]:
            terms.append(NodeExpression(key=match["key"], operator=_SIGNS[match["sign"]], values=(match["value"],)))
        elif match["word"]:
            values = tuple(value.strip() for value in match["values"].split(","))
            terms.append(NodeExpression(key=match["key"], operator="In" if match["word"] == "in" else "NotIn", values=values))
        else:
            terms.append(NodeExpression(key=match["key"], operator="Exists"))
    return tuple(terms)


def _field_terms(kind: str, text: str) -> list[FieldTerm]:
    matches = _terms(text, _FIELD, "fieldSelector", "write terms as status.phase=pending or spec.type!=job")
    return [FieldTerm(_attribute_path(kind, match["path"]), match["value"].strip(), match["sign"] != "!=") for match in matches]


def _terms(text: str, pattern: re.Pattern[str], name: str, cure: str) -> list[re.Match[str]]:
    if not text.strip():
        return []
    if len(text) > SELECTOR_LENGTH_MAX:
        raise ApiProblem(
            422, "invalid", f"{name}: longer than {SELECTOR_LENGTH_MAX} characters", field=name, cure="use a shorter selector"
        )
    matches: list[re.Match[str]] = []
    position = 0
    while position < len(text) or (matches and text[position - 1] == ","):
        match = pattern.match(text, position)
        if match is None or match.end() == position:
            raise ApiProblem(422, "invalid", f"{name}: invalid term {quoted(text[position:])}", field=name, cure=cure)
        matches.append(match)
        position = match.end()
        if len(matches) > TERMS_MAX:
            raise ApiProblem(422, "invalid", f"{name}: more than {TERMS_MAX} terms", field=name, cure="use fewer terms")
    return matches


@lru_cache(maxsize=1_024)
def _attribute_path(kind: str, dotted: str) -> tuple[str, ...]:
    """Resolve a dotted path to attribute names of this kind. Below a map, the rest of the path is the key."""
    current: inspect.Type = inspect.type_info(KINDS[kind])
    steps: list[str] = []
    remaining = dotted
    while remaining:
        if isinstance(current, inspect.DictType | inspect.CustomType):
            return (*steps, remaining)
        if not isinstance(current, inspect.StructType):
            raise _field_problem(dotted, f"{'.'.join(steps)} has no fields", "end the path there")
        name, _, remaining = remaining.partition(".")
        fields = {field.encode_name: field for field in current.fields}
        if name == "kind" and not remaining and not steps:
            return ("kind",)
        if name not in fields:
            cure = did_you_mean(closest_name(name, fields)) or f"known fields: {one_of(fields)}"
            raise _field_problem(dotted, f"there is no field {quoted(name)}", cure)
        steps.append(fields[name].name)
        current = _unwrap_type(fields[name].type)
    if isinstance(current, inspect.StructType | inspect.DictType | inspect.CollectionType):
        raise _field_problem(dotted, "this is not a single value", "name a field below it")
    return tuple(steps)


def _field_problem(dotted: str, reason: str, cure: str) -> ApiProblem:
    return ApiProblem(422, "invalid", f"fieldSelector: {quoted(dotted)}: {reason}", field="fieldSelector", cure=cure)


def _unwrap_type(type_: inspect.Type) -> inspect.Type:
    """Return the type without its constraints and without None."""
    while isinstance(type_, inspect.Metadata):
        type_ = type_.type
    if isinstance(type_, inspect.UnionType):
        options = [option for option in type_.types if not isinstance(option, inspect.NoneType)]
        return next((option for option in options if isinstance(option, inspect.StructType)), options[0])
    if isinstance(type_, inspect.CustomType) and type_.cls is Duration:
        return inspect.StrType()
    return type_


def _field_text(value: Any, path: tuple[str, ...]) -> str:
    """Return the value at a path as text, as it would be written in a manifest; empty if it is absent."""
    if path == ("kind",):
        return type(value).__name__
    for step in path:
        if isinstance(value, Amount):
            value = value.to_manifest()
        if isinstance(value, dict):
            value = value.get(step)
        else:
            value = getattr(value, step, None)
        if value is None:
            return ""
    return _value_text(value)


def _value_text(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case Enum():
            return str(value.value)
        case Duration():
            return str(enc_hook(value))
        case str() | int() | float():
            return str(value)
        case _:
            return msgspec.json.encode(value, enc_hook=enc_hook).decode()


SCAN_ROWS_MAX: Final = 20_000
"""Rows examined for one page. A selector that matches few of many rows gets short pages."""
PAGE_BYTES_MAX: Final = 4 << 20
"""A page ends with the object that reaches this size."""
_SCAN_ROWS: Final = 200
"""Rows read from the store at once. Reads of single rows wait behind one such read of each list at most."""
_FIRST_ROWS: Final = 20
"""Rows read first, before their size is known."""

_continue_decoder: msgspec.json.Decoder[tuple[int, str]] = msgspec.json.Decoder(tuple[int, str])


async def get_one(request: RequestContext, server: ServerContext, kind: str) -> Response:
    name = key_of(kind, request.path["name"], request.tenant)
    row = await server.store.get(name)
    if row is None:
        raise object_not_found(kind, request.path["name"], request.tenant)
    return object_response(kind, row)


def object_response(kind: str, row: Row, status: int = 200, **headers: str) -> Response:
    """Return one object with its ETag. Names of further `headers` have underscores instead of hyphens."""
    extra = {name.replace("_", "-"): value for name, value in headers.items() if value}
    return BytesResponse(shown_object(kind, row.value, row.revision), status, {"ETag": etag(row.revision), **extra})


def object_not_found(kind: str, name: str, tenant: str) -> ApiProblem:
    where = f" in tenant {quoted(tenant)}" if tenant else ""
    return ApiProblem(404, "not_found", f"there is no {kind} {quoted(name)}{where}", cure="create it, or correct the name")


def key_prefix(kind: str, tenant: str) -> str:
    definition = BY_KIND[kind]
    return f"{definition.prefix}/{tenant}/" if tenant and definition.tenanted else f"{definition.prefix}/"


def selector_from_query(request: RequestContext, kind: str) -> Selector:
    return parse_selector(kind, request.query["labelSelector"], request.query["fieldSelector"])


async def get_list(request: RequestContext, server: ServerContext, kind: str) -> Response:
    prefix = key_prefix(kind, request.tenant)
    revision, after = decode_continue(request.query["continue"], prefix)
    selector = selector_from_query(request, kind)
    rows, revision, rest = await _page(server, prefix, after, request.query["limit"], revision, selector)
    token = encode_continue(revision, rest) if rest else ""
    return Response(
        render_list(kind, (shown_object(kind, row.value, row.revision) for row in rows), revision, token), media_type=JSON
    )


async def _page(
    server: ServerContext, prefix: str, after: str, limit: int, revision: int, selector: Selector
) -> tuple[list[Row], int, str]:
    """Return the rows of one page, their revision, and the key after which the list continues; empty at the end."""
    labels_of = label_lookup(server.watch_cache)
    rows: list[Row] = []
    scanned, scanned_bytes, size, page_rows = 0, 0, 0, _FIRST_ROWS
    while True:
        page_limit = _SCAN_ROWS if selector else limit - len(rows)
        page = await server.store.range(prefix, after=after, limit=min(page_rows, page_limit), revision=revision)
        revision = page.revision
        for row in page.rows:
            after = row.key
            scanned_bytes += len(row.value)
            if not selector or selector.matches(decode(row.value), labels_of):
                rows.append(row)
                size += len(row.value)
                if len(rows) == limit or size >= PAGE_BYTES_MAX:
                    last = not page.more and row is page.rows[-1]
                    return rows, revision, "" if last else after
        scanned += len(page.rows)
        if not page.more or scanned >= SCAN_ROWS_MAX:
            return rows, revision, after if page.more else ""
        page_rows = max(1, min(_SCAN_ROWS, PAGE_BYTES_MAX * scanned // max(scanned_bytes, 1)))


def encode_continue(revision: int, after: str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((revision, after))).decode().rstrip("=")


def decode_continue(token: str, prefix: str) -> tuple[int, str]:
    """Decode a continue token: the revision of the first page, and the last key that was returned."""
    if not token:
        return 0, ""
    try:
        revision, after = _continue_decoder.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    except (binascii.Error, ValueError):
        revision, after = 0, ""
    if revision > 0 and after and not after.startswith(prefix):
        raise ApiProblem(
            403, "not_owner", "continue: the token belongs to another list", field="continue", cure="list again without it"
        )
    if revision <= 0 or not after:
        cure = "use `metadata.continue` of the previous page with the same path, or list again without it"
        raise ApiProblem(400, "malformed", "continue: not a token of this list", field="continue", cure=cure)
    return revision, after


def if_match_revision(request: RequestContext) -> int | None:
    """Return the revision in `If-Match`; 0 for `*` (any revision), None without the header."""
    header = request.headers.get("if-match")
    if header is None:
        return None
    if header.strip() == "*":
        return 0
    bare = header.strip().removeprefix("W/").strip('"')
    if not bare.isascii() or not bare.isdigit() or len(bare) > 16 or int(bare) == 0:
        cure = 'send the ETag of the object as read, such as "42", or *'
        raise ApiProblem(400, "malformed", f"If-Match: {quoted(header)} is not an ETag", field="If-Match", cure=cure)
    return int(bare)


def json_response(value: Any, status: int = 200, **headers: str) -> Response:
    """Return a JSON response that is not an object of a kind."""
    extra = {name.replace("_", "-"): text for name, text in headers.items() if text}
    return BytesResponse(msgspec.json.encode(value), status, extra)
