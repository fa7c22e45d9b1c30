"""Admin endpoints: backup stream, rotation of secret keys.

Rotation adds a key and reseals every secret with it, row by row, as claims. One request does a bounded part and returns
where the next one continues, so a rotation can stop anywhere and be resumed. A new key is added only when no secret needs
resealing: a client that starts over after an interruption finishes the earlier rotation first, and two concurrent rotations
add one key.

A backup is a copy of the database made while commits continue, sent as one tar archive and then deleted. It shows the state
at the moment the copy was complete. It contains sealed secrets but not their keys, and token digests but not tokens.
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
from remit.model.kinds import Secret
from remit.model.objects import decode
from remit.model.wire.api_types import OPERATION_HEADER, RotateAnswer
from remit.serve.auth.access_control import forbidden
from remit.serve.http.replies import ApiProblem, unavailable
from remit.serve.http.routes import Parameter, RequestContext, ResponseSpec, Route
from remit.serve.http.streams import StreamResponse
from remit.serve.objects.reads import json_response
from remit.serve.server_context import ServerContext
from remit.store.protocol import Row
from remit.store.sqlite.backup import READ_BYTES, BackupLabel, archive_head, archive_tail, file_digest
from remit.store.sqlite.store import SqliteStore

SECRET_PREFIX: Final = "secret/"  # noqa: S105 - a key prefix
RESEAL_MAX: Final = 200
"""Secrets resealed by one request."""
OLD_KEY_WRITES_MS_MAX: Final = 10_000
_POLL_MS: Final = 20
_TRIES_MAX: Final = 8
_SCAN_ROWS: Final = 500


async def rotate(request: RequestContext, server: ServerContext) -> Response:
    async with server.auth.rotation_lock:
        added = request.query["newKey"] and await _add_key(server, request.headers.get(OPERATION_HEADER.lower(), ""))
        answer = await _reseal(request, server, request.query["after"])
        if request.query["forget"] and not answer.after and await _only_primary_key_in_use(server):
            await server.world.offload(server.auth.keyring.forget_old_keys)
    keys = tuple(key.id for key in server.auth.keyring.sealing_keys.keys)
    return json_response(replace(answer, key=server.auth.keyring.sealing_keys.primary_id, made=bool(added), keys=keys))


async def _only_primary_key_in_use(server: ServerContext) -> bool:
    """Return whether the primary key opens every stored secret and every secret being written. Writes sealed with an older key
    may still be on their way to the store, so wait for them, up to `OLD_KEY_WRITES_MS_MAX`.
    """
    until_ms = server.clock.now_ms() + OLD_KEY_WRITES_MS_MAX
    while not server.auth.keyring.old_keys_unused:
        if server.clock.now_ms() >= until_ms:
            return False
        await server.clock.sleep_ms(_POLL_MS)
    return await _next_to_reseal(server, "") is None


async def _add_key(server: ServerContext, operation: str) -> bool:
    """Add a key, unless a rotation is still under way. `operation` identifies the request: a retry after a lost answer adds no
    second key.
    """
    if (operation and operation == server.auth.keyring.newest_key_operation) or await _next_to_reseal(server, "") is not None:
        return False
    try:
        await server.world.offload(server.auth.keyring.add_key)
        server.auth.keyring.newest_key_operation = operation
    except ValueError as error:
        cure = "forget keys that no secret and no backup needs any more: remit secrets rotate --forget"
        raise ApiProblem(409, "limit", str(error), cure=cure) from None
    return True


async def _reseal(request: RequestContext, server: ServerContext, after: str) -> RotateAnswer:
    resealed = 0
    skipped: list[str] = []
    while resealed < RESEAL_MAX:
        row = await _next_to_reseal(server, after)
        if row is None:
            return RotateAnswer(resealed=resealed, left=tuple(skipped))
        after = row.key
        if await _reseal_one(request, server, row.key):
            resealed += 1
        else:
            skipped.append(row.key)
    return RotateAnswer(resealed=resealed, left=tuple(skipped), after=after)


async def _next_to_reseal(server: ServerContext, after: str) -> Row | None:
    while True:
        page = await server.store.range(SECRET_PREFIX, after=after, limit=_SCAN_ROWS)
        for row in page.rows:
            if server.auth.keyring.sealing_keys.needs_resealing(_decode_secret(row)):
                return row
        if not page.more:
            return None
        after = page.rows[-1].key


async def _reseal_one(request: RequestContext, server: ServerContext, name: str) -> bool:
    """Reseal one secret with the primary key. Return True if it is sealed with that key now, by this call or by a concurrent
    writer. Return False if the secret is being deleted, if a value cannot be unsealed, or if other writers were always faster.
    """
    client, seals = server.authority.client(request.actor), server.auth.keyring.sealing_keys
    for _ in range(_TRIES_MAX):
        row = await server.store.get(name)
        if row is None or not seals.needs_resealing(_decode_secret(row)):
            return True
        secret = _decode_secret(row)
        resealed = seals.seal_object(seals.unseal_object(secret), already_sealed=secret.spec.data)
        if seals.needs_resealing(resealed):
            return False
        verdict = await client.submit(Apply(resealed, row.revision), trace=request.trace)
        if isinstance(verdict, Accepted):
            return True
        if verdict.code is not Code.REVISION:
            return False
    return False


def _decode_secret(row: Row) -> Secret:
    obj = decode(row.value)
    if not isinstance(obj, Secret):
        raise TypeError(f"{row.key} is not a secret")
    return obj


ROTATION_ROUTES: Final = (
    Route(
        "POST",
        "/v1/secrets/rotate",
        "rotateSecrets",
        "Reseal secrets with the primary key, a bounded number per request. Repeat with `after` until it is empty.",
        rotate,
        "Secret",
        (
            Parameter("newKey", bool, "true: add a new key first, unless an earlier rotation is unfinished", default=False),
            Parameter("after", str, "`after` of the previous response", default=""),
            Parameter(OPERATION_HEADER, str, "idempotency key of this request; reuse it when retrying", location="header"),
            Parameter(
                "forget", bool, "true: when all secrets are resealed, delete all keys but the primary one", default=False
            ),
        ),
        responses=(ResponseSpec(200, "progress of the rotation", RotateAnswer),),
        tenant_access=False,
    ),
)


BACKUP_MEDIA: Final = "application/x-tar"
BACKUP_FILE: Final = "backup-under-way.sqlite"
BACKUP_SLACK_BYTES: Final = 64 << 20


async def backup(request: RequestContext, server: ServerContext) -> Response:
    if request.principal.role != "admin":
        raise forbidden("a backup needs the admin role", "use an admin token")
    store = server.store
    if not isinstance(store, SqliteStore):
        raise ApiProblem(
            501,
            "unsupported",
            "the store of this server does not support backups through the API",
            cure="use the backup tool of that store",
        )
    if store.is_backing_up:
        raise ApiProblem(429, "overloaded", "another backup is in progress", cure="retry when it is done", retry_after_ms=5_000)
    free = await server.cpu_offload(lambda: server.world.disk.free_bytes(store.directory))
    need = store.size_bytes() + BACKUP_SLACK_BYTES
    if free < need:
        raise unavailable(
            f"a backup needs {need} bytes next to the store, but only {free} are free",
            cure="free disk space in the data directory",
        )
    return StreamResponse(_backup_stream(server, store), server.streams, media=BACKUP_MEDIA)


async def _backup_stream(server: ServerContext, store: SqliteStore) -> AsyncGenerator[bytes, None]:
    """Stream the backup. On an error it breaks off: `remit restore` rejects a tar archive without its end marker."""
    draft = store.directory / BACKUP_FILE
    try:
        copy = await store.backup(draft)
        size, sha256 = await server.cpu_offload(lambda: file_digest(draft))
        head = copy.head
        label = BackupLabel(
            version=__version__,
            scope=server.authority.scope,
            incarnation="" if head is None else head.incarnation,
            epoch=0 if head is None else head.epoch,
            sequence=0 if head is None else head.sequence,
            revision=copy.revision,
            taken=server.clock.wall(),
            bytes=size,
            sha256=sha256,
        )
        yield archive_head(label)
        for start in range(0, size, READ_BYTES):
            yield await server.cpu_offload(partial(_read_chunk, draft, start))
        yield archive_tail(label)
    finally:
        await server.cpu_offload(partial(draft.unlink, missing_ok=True))


def _read_chunk(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(READ_BYTES)


BACKUP_ROUTES: Final = (
    Route(
        "GET",
        "/v1/backup",
        "backup",
        "A backup of the whole store, taken while the server runs. The keys of secrets are not included.",
        backup,
        tag="server",
        responses=(ResponseSpec(200, "tar archive: label.json, then store.sqlite", bytes, BACKUP_MEDIA),),
        streams=True,
        tenant_access=False,
        audited=True,
    ),
)
