"""Get and list with pagination; label and field selectors.

Parsed once, in one pass, within bounds; judged on objects, so that defaults count too.

A label selector is as elsewhere: `app=web,tier!=cache,zone in (a,b),disk notin (hdd),gpu,!old,rank>3`. A field selector names
dotted paths as an object spells them, each with `=`, `==` or `!=`: `status.phase=pending,spec.workload!=web`.

One object, or a list of them page by page, all as of one revision; read from the store, not from a memory.
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
from remit.model.metadata import Metadata
from remit.model.objects import KINDS, TENANTED, AnyObject, decode, enc_hook, key_of
from remit.model.problems import did_you_mean, meant, one_of, shown
from remit.model.records import Generation, Replica
from remit.model.resources import Amount, Duration
from remit.observation.watch_cache import Board
from remit.serve.http.replies import Failure, Reply
from remit.serve.http.request_context import Asked
from remit.serve.http.routes import JSON
from remit.serve.objects.rendering import listed, tag
from remit.serve.objects.rendering import shown as shown_object
from remit.serve.server_context import Desk
from remit.store.protocol import Row

TERMS_MAX: Final = 64
BYTES_MAX: Final = 4 << 10

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
    """All of its terms hold for what it picks; without terms it picks everything."""

    labels: tuple[NodeExpression, ...] = ()
    fields: tuple[FieldTerm, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.labels or self.fields)

    def picks(self, thing: AnyObject, labels_of: Callable[[AnyObject], Mapping[str, str]]) -> bool:
        if any((_text(thing, term.path) == term.value) is not term.equal for term in self.fields):
            return False
        return not self.labels or match_labels(self.labels, labels_of(thing))


def selector(kind: str, labels: str, fields: str) -> Selector:
    """Raises `Failure`, which names the parameter and the term."""
    return Selector(_label_terms(labels), tuple(_field_terms(kind, fields)))


def labels_on(board: Board) -> Callable[[AnyObject], Mapping[str, str]]:
    """An object's own labels. A replica has those of the workload's generation that it was made of."""

    def labels_of(thing: AnyObject) -> Mapping[str, str]:
        if isinstance(thing, Replica):
            spec = thing.spec
            made_of = board.get(f"generation/{thing.metadata.tenant}/{spec.workload}/{spec.generation:08d}")
            return made_of.spec.labels if isinstance(made_of, Generation) else {}
        return thing.metadata.labels if isinstance(thing.metadata, Metadata) else {}

    return labels_of


def _label_terms(text: str) -> tuple[NodeExpression, ...]:
    terms = []
    # One space at a time: else a row of them could be shared out between the parts of a term in very many ways.
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
    found = _terms(text, _FIELD, "fieldSelector", "write terms as status.phase=pending or spec.type!=job")
    return [FieldTerm(_path(kind, match["path"]), match["value"].strip(), match["sign"] != "!=") for match in found]


def _terms(text: str, pattern: re.Pattern[str], name: str, cure: str) -> list[re.Match[str]]:
    if not text.strip():
        return []
    if len(text) > BYTES_MAX:
        raise Failure(422, "invalid", f"{name} has more than {BYTES_MAX} signs", field=name, cure="use a shorter one")
    found: list[re.Match[str]] = []
    at = 0
    while at < len(text) or (found and text[at - 1] == ","):
        match = pattern.match(text, at)
        if match is None or match.end() == at:
            raise Failure(422, "invalid", f"{name}: {shown(text[at:])} is no term", field=name, cure=cure)
        found.append(match)
        at = match.end()
        if len(found) > TERMS_MAX:
            raise Failure(422, "invalid", f"{name} has more than {TERMS_MAX} terms", field=name, cure="use fewer")
    return found


@lru_cache(maxsize=1_024)
def _path(kind: str, dotted: str) -> tuple[str, ...]:
    """The attributes that lead to a value of this kind of object. Below a map, all that is left is the key."""
    here: inspect.Type = inspect.type_info(KINDS[kind])
    steps: list[str] = []
    left = dotted
    while left:
        if isinstance(here, inspect.DictType | inspect.CustomType):
            return (*steps, left)
        if not isinstance(here, inspect.StructType):
            raise _no_field(dotted, f"below {'.'.join(steps)} there is nothing", "end the path there")
        name, _, left = left.partition(".")
        fields = {field.encode_name: field for field in here.fields}
        if name == "kind" and not left and not steps:
            return ("kind",)
        if name not in fields:
            cure = did_you_mean(meant(name, fields)) or f"known there: {one_of(fields)}"
            raise _no_field(dotted, f"{shown(name)} is no field there", cure)
        steps.append(fields[name].name)
        here = _plain(fields[name].type)
    if isinstance(here, inspect.StructType | inspect.DictType | inspect.CollectionType):
        raise _no_field(dotted, "it is no single value", "name a field inside it that is one")
    return tuple(steps)


def _no_field(dotted: str, why: str, cure: str) -> Failure:
    return Failure(422, "invalid", f"fieldSelector: {shown(dotted)}: {why}", field="fieldSelector", cure=cure)


def _plain(found: inspect.Type) -> inspect.Type:
    """What may be there, without its limits and without None."""
    while isinstance(found, inspect.Metadata):
        found = found.type
    if isinstance(found, inspect.UnionType):
        kept = [one for one in found.types if not isinstance(one, inspect.NoneType)]
        return next((one for one in kept if isinstance(one, inspect.StructType)), kept[0])
    if isinstance(found, inspect.CustomType) and found.cls is Duration:
        return inspect.StrType()
    return found


def _text(thing: Any, path: tuple[str, ...]) -> str:
    """As it would be written; empty if it is not there."""
    if path == ("kind",):
        return type(thing).__name__
    for step in path:
        if isinstance(thing, Amount):
            thing = thing.written()
        if isinstance(thing, dict):
            thing = thing.get(step)
        else:
            thing = getattr(thing, step, None)
        if thing is None:
            return ""
    return _written(thing)


def _written(value: object) -> str:
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
"""So many rows are looked at for one page; a selector that picks few of many gets short pages."""
PAGE_BYTES_MAX: Final = 4 << 20
"""A page ends with the object that comes to so many bytes: others may be as large."""
_SCAN_ROWS: Final = 200
"""So many are read at once: one who asks for a single row waits behind no more of each who lists."""
_FIRST_ROWS: Final = 20
"""So many are read before it is known how large they are."""

_tokens: msgspec.json.Decoder[tuple[int, str]] = msgspec.json.Decoder(tuple[int, str])


async def get_one(asked: Asked, desk: Desk, kind: str) -> Response:
    name = key_of(kind, asked.path["name"], asked.tenant)
    row = await desk.store.get(name)
    if row is None:
        raise no_such(kind, asked.path["name"], asked.tenant)
    return one_object(kind, row)


def one_object(kind: str, row: Row, status: int = 200, **headers: str) -> Response:
    """`headers` have underscores for hyphens."""
    told = {name.replace("_", "-"): value for name, value in headers.items() if value}
    return Reply(shown_object(kind, row.value, row.revision), status, {"ETag": tag(row.revision), **told})


def no_such(kind: str, name: str, tenant: str) -> Failure:
    where = f" in tenant {shown(tenant)}" if tenant else ""
    return Failure(404, "not_found", f"there is no {kind} {shown(name)}{where}", cure="create it, or correct the name")


def prefix_of(kind: str, tenant: str) -> str:
    return f"{kind.lower()}/{tenant}/" if tenant and kind in TENANTED else f"{kind.lower()}/"


def selector_of(asked: Asked, kind: str) -> Selector:
    return selector(kind, asked.query["labelSelector"], asked.query["fieldSelector"])


async def get_list(asked: Asked, desk: Desk, kind: str) -> Response:
    prefix = prefix_of(kind, asked.tenant)
    revision, after = _place(asked.query["continue"], prefix)
    wanted = selector_of(asked, kind)
    rows, revision, rest = await _page(desk, prefix, after, asked.query["limit"], revision, wanted)
    token = _token(revision, rest) if rest else ""
    return Response(
        listed(kind, (shown_object(kind, row.value, row.revision) for row in rows), revision, token), media_type=JSON
    )


async def _page(desk: Desk, prefix: str, after: str, limit: int, revision: int, wanted: Selector) -> tuple[list[Row], int, str]:
    """Some rows, as of which revision, and the key after which there are more; empty if there are none."""
    labels_of = labels_on(desk.board)
    found: list[Row] = []
    looked, looked_bytes, size, at_once = 0, 0, 0, _FIRST_ROWS
    while True:
        most = _SCAN_ROWS if wanted else limit - len(found)
        page = await desk.store.range(prefix, after=after, limit=min(at_once, most), revision=revision)
        revision = page.revision
        for row in page.rows:
            after = row.key
            looked_bytes += len(row.value)
            if not wanted or wanted.picks(decode(row.value), labels_of):
                found.append(row)
                size += len(row.value)
                if len(found) == limit or size >= PAGE_BYTES_MAX:
                    last = not page.more and row is page.rows[-1]
                    return found, revision, "" if last else after
        looked += len(page.rows)
        if not page.more or looked >= SCAN_ROWS_MAX:
            return found, revision, after if page.more else ""
        at_once = max(1, min(_SCAN_ROWS, PAGE_BYTES_MAX * looked // max(looked_bytes, 1)))


def _token(revision: int, after: str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((revision, after))).decode().rstrip("=")


def _place(token: str, prefix: str) -> tuple[int, str]:
    """Where a list goes on: the revision of its first page, and the last key that was told."""
    if not token:
        return 0, ""
    try:
        revision, after = _tokens.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    except (binascii.Error, ValueError):
        revision, after = 0, ""
    if revision > 0 and after and not after.startswith(prefix):
        raise Failure(403, "not_owner", "continue is of another list", field="continue", cure="list anew without it")
    if revision <= 0 or not after:
        cure = "use what metadata.continue of the page before says, with the same path; or list anew without it"
        raise Failure(400, "malformed", "continue is none that this list has given", field="continue", cure=cure)
    return revision, after


def if_match(asked: Asked) -> int | None:
    """The revision in `If-Match`; 0 stands for `*`, that there is one at all; None if nothing is said."""
    given = asked.headers.get("if-match")
    if given is None:
        return None
    if given.strip() == "*":
        return 0
    bare = given.strip().removeprefix("W/").strip('"')
    if not bare.isascii() or not bare.isdigit() or len(bare) > 16 or int(bare) == 0:
        cure = 'send the ETag of the object that was read, such as "42", or *'
        raise Failure(400, "malformed", f"If-Match: {shown(given)} is no revision", field="If-Match", cure=cure)
    return int(bare)


def encoded(value: Any, status: int = 200, **headers: str) -> Response:
    """An answer that is no object."""
    told = {name.replace("_", "-"): text for name, text in headers.items() if text}
    return Reply(msgspec.json.encode(value), status, told)
