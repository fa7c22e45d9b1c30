"""How does a running server give its store away? A copy made beside the work, sent as one tar, and gone again. Keys never go.

The copy shows the moment at which it was complete; commits go on meanwhile. It holds all that is stored: sealed secrets without
the keys to them, and digests of tokens without the tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Final

from starlette.responses import Response

from remit import __version__
from remit.serve.asked import Asked
from remit.serve.desk import Desk
from remit.serve.entering import forbidden
from remit.serve.failures import Failure, unavailable
from remit.serve.routes import Answer, Route
from remit.serve.streams import Streamed
from remit.store.sqlite import SqliteStore
from remit.store.travelling import PIECE_BYTES, Label, closing, digest_of, opening

MEDIA: Final = "application/x-tar"
DRAFT: Final = "backup-under-way.sqlite"
SLACK_BYTES: Final = 64 << 20


async def backup(asked: Asked, desk: Desk) -> Response:
    if asked.principal.role != "admin":
        raise forbidden("a copy of everything is given to an admin alone", "ask with an admin's token")
    store = desk.store
    if not isinstance(store, SqliteStore):
        raise Failure(501, "unsupported", "the store of this server makes no copies of itself", cure="back up the store itself")
    if store.is_backing_up:
        raise Failure(429, "overloaded", "a backup is being made already", cure="wait until it is done", retry_after_ms=5_000)
    free = await desk.judging(lambda: desk.world.disk.free_bytes(store.directory))
    need = store.size_bytes() + SLACK_BYTES
    if free < need:
        raise unavailable(f"a copy needs {need} bytes beside the store, and {free} are free", cure="make room there")
    return Streamed(_copied(desk, store), desk, media=MEDIA)


async def _copied(desk: Desk, store: SqliteStore) -> AsyncGenerator[bytes, None]:
    """What cannot go on breaks off: a tar without its end is refused by whoever restores it."""
    draft = store.directory / DRAFT
    try:
        made = await store.backup(draft)
        size, sha256 = await desk.judging(lambda: digest_of(draft))
        head = made.head
        label = Label(
            version=__version__,
            scope=desk.scope,
            incarnation="" if head is None else head.incarnation,
            epoch=0 if head is None else head.epoch,
            sequence=0 if head is None else head.sequence,
            revision=made.revision,
            taken=desk.clock.wall(),
            bytes=size,
            sha256=sha256,
        )
        yield opening(label)
        for start in range(0, size, PIECE_BYTES):
            yield await desk.judging(partial(_piece, draft, start))
        yield closing(label)
    finally:
        await desk.judging(partial(draft.unlink, missing_ok=True))


def _piece(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(PIECE_BYTES)


ROUTES: Final = (
    Route(
        "GET",
        "/v1/backup",
        "backup",
        "A copy of the whole store as it stands, made while the server runs; the keys of secrets are not in it.",
        backup,
        tag="server",
        answers=(Answer(200, "a tar: label.json, then store.sqlite", bytes, MEDIA),),
        streams=True,
        tenants=False,
        audited=True,
    ),
)
