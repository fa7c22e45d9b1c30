"""What is there? One object, or a list of them page by page, all as of one revision; read from the store, not from a memory."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import msgspec
from starlette.responses import Response

from remit.model.objects import TENANTED, decode, key_of
from remit.model.problems import shown
from remit.serve.asked import Asked
from remit.serve.desk import Desk
from remit.serve.failures import Failure
from remit.serve.replies import Reply
from remit.serve.routes import JSON
from remit.serve.selecting import Selector, labels_on, selector
from remit.serve.shown import listed, tag
from remit.serve.shown import shown as shown_object
from remit.store.protocol import Row

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
