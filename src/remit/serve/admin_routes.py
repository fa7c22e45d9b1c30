"""Admin endpoints: backup stream, rotation of secret keys.

A new key, then row by row as claims; ended anywhere, it goes on there. No rules here.

A request does a part of it and says where the rest begins. A new key is made only when nothing is behind: so whoever begins
again after an interruption ends that rotation first, and two who rotate at once make one key.

A copy made beside the work, sent as one tar, and gone again. Keys never go.

The copy shows the moment at which it was complete; commits go on meanwhile. It holds all that is stored: sealed secrets without
the keys to them, and digests of tokens without the tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from starlette.responses import Response

from remit import __version__
from remit.model.claims import Accepted, Apply, Code
from remit.model.objects import decode
from remit.model.secrets import Secret
from remit.model.wire.api_types import OPERATION_HEADER, RotateAnswer
from remit.serve.auth.access_control import forbidden
from remit.serve.http.replies import Failure, unavailable
from remit.serve.http.request_context import Asked
from remit.serve.http.routes import Answer, Parameter, Route
from remit.serve.http.streams import Streamed
from remit.serve.objects.reads import encoded
from remit.serve.server_context import Desk
from remit.store.protocol import Row
from remit.store.sqlite.backup import PIECE_BYTES, Label, closing, digest_of, opening
from remit.store.sqlite.store import SqliteStore

PREFIX: Final = "secret/"
ROWS_MAX: Final = 200
"""So many are sealed anew by one request."""
SETTLE_MS: Final = 10_000
_LOOK_MS: Final = 20
_TRIES_MAX: Final = 8
_SCAN_ROWS: Final = 500


async def rotate(asked: Asked, desk: Desk) -> Response:
    async with desk.turning:
        made = asked.query["newKey"] and await _new_key(desk, asked.headers.get(OPERATION_HEADER.lower(), ""))
        answer = await _reseal(asked, desk, asked.query["after"])
        if asked.query["forget"] and not answer.after and await _nothing_needs_others(desk):
            await desk.world.offload(desk.keyring.forget)
    keys = tuple(one.id for one in desk.keyring.seals.keys)
    return encoded(replace(answer, key=desk.keyring.seals.first, made=bool(made), keys=keys))


async def _nothing_needs_others(desk: Desk) -> bool:
    """Does the first key open all that is stored, and all that is about to be? One who sealed before may not be stored yet."""
    until_ms = desk.clock.now_ms() + SETTLE_MS
    while not desk.keyring.is_settled:
        if desk.clock.now_ms() >= until_ms:
            return False
        await desk.clock.sleep_ms(_LOOK_MS)
    return await _first_behind(desk, "") is None


async def _new_key(desk: Desk, operation: str) -> bool:
    """`operation` names the request: sent again because its answer was lost, it makes no second one."""
    if (operation and operation == desk.keyring.made_by) or await _first_behind(desk, "") is not None:
        return False
    try:
        await desk.world.offload(desk.keyring.add)
        desk.keyring.made_by = operation
    except ValueError as error:
        cure = "let go of those that no secret and no backup needs any more: remit secrets rotate --forget"
        raise Failure(409, "limit", str(error), cure=cure) from None
    return True


async def _reseal(asked: Asked, desk: Desk, after: str) -> RotateAnswer:
    done = 0
    left: list[str] = []
    while done < ROWS_MAX:
        row = await _first_behind(desk, after)
        if row is None:
            return RotateAnswer(resealed=done, left=tuple(left))
        after = row.key
        if await _reseal_one(asked, desk, row.key):
            done += 1
        else:
            left.append(row.key)
    return RotateAnswer(resealed=done, left=tuple(left), after=after)


async def _first_behind(desk: Desk, after: str) -> Row | None:
    while True:
        page = await desk.store.range(PREFIX, after=after, limit=_SCAN_ROWS)
        for row in page.rows:
            if desk.keyring.seals.is_behind(_secret(row)):
                return row
        if not page.more:
            return None
        after = page.rows[-1].key


async def _reseal_one(asked: Asked, desk: Desk, name: str) -> bool:
    """False: it cannot be, as it is being deleted or does not open. Whoever is quicker seals by the first key as well."""
    client, seals = desk.client(asked.actor), desk.keyring.seals
    for _ in range(_TRIES_MAX):
        row = await desk.store.get(name)
        if row is None or not seals.is_behind(_secret(row)):
            return True
        thing = _secret(row)
        anew = seals.sealing(seals.opening(thing), kept=thing.spec.data)
        if seals.is_behind(anew):
            return False
        verdict = await client.ask(Apply(anew, row.revision), trace=asked.trace)
        if isinstance(verdict, Accepted):
            return True
        if verdict.code is not Code.REVISION:
            return False
    return False


def _secret(row: Row) -> Secret:
    thing = decode(row.value)
    if not isinstance(thing, Secret):
        raise TypeError(f"{row.key} is no secret")
    return thing


ROTATION_ROUTES: Final = (
    Route(
        "POST",
        "/v1/secrets/rotate",
        "rotateSecrets",
        "Seal secrets anew by the first key, some at a time: until `after` is empty.",
        rotate,
        "Secret",
        (
            Parameter(
                "newKey", bool, "true: make a new key first, unless an earlier rotation is not at its end", default=False
            ),
            Parameter("after", str, "`after` of the answer before", default=""),
            Parameter(OPERATION_HEADER, str, "names this intent, the same over retries", place="header"),
            Parameter("forget", bool, "true: at the end, let go of all other keys", default=False),
        ),
        answers=(Answer(200, "how far it is", RotateAnswer),),
        tenants=False,
    ),
)


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


BACKUP_ROUTES: Final = (
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
