"""Create, replace, patch, delete and batch apply, as claims.

Every write is a claim that the authority decides. A request has an operation id, from its `Remit-Operation-Id` header or
generated: a retry under the same id gets the same answer. A patch claims to replace the revision it read, so it is tried
again after a conflict; each try has an id derived from the request's, so that a retried request finds a try whose answer was
lost.

A batch apply validates all manifests first, and submits nothing if any is invalid. The claims go to the authority in one
call, objects before those that refer to them. After that each stands alone: some may be refused and others accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace as changed
from starlette.responses import Response

from remit.client.authority_client import NO_EVIDENCE, RetriesExhausted
from remit.commitment.dry_run import DryRunResult
from remit.model.claims import (
    Abandon,
    Accepted,
    AnyClaim,
    Apply,
    Code,
    Delete,
    Operation,
    OperationID,
    Refused,
    Verdict,
    parse_operation_id,
)
from remit.model.kinds import Secret
from remit.model.kinds.registry import DEFINITIONS, AnyObject
from remit.model.manifests.validation import to_manifest
from remit.model.metadata import Metadata
from remit.model.objects import decode, encode, key, key_of, object_path
from remit.model.problems import quoted
from remit.model.wire.api_types import OPERATION_HEADER, ApplyAnswer, ApplyResult, DeleteAnswer
from remit.serve.auth.access_control import check_may_declare
from remit.serve.http.bodies import (
    check_path,
    merge_patch,
    offload_if_large,
    parse_strict_json,
    read_manifest,
    read_manifests,
    seal_for_storage,
    validate_manifest,
)
from remit.serve.http.fair_queue import replica_creation_cost
from remit.serve.http.media_types import JSON
from remit.serve.http.replies import ApiProblem, refusal_problem, unanswered_problem
from remit.serve.http.routes import RequestContext
from remit.serve.objects.reads import if_match_revision, json_response, object_not_found, object_response
from remit.serve.objects.rendering import render_object as shown_object
from remit.serve.server_context import ServerContext
from remit.store.protocol import Compacted, Row

PATCH_TRIES_MAX: Final = 8
OPERATION_ID_LENGTH_MAX: Final = 100
"""Limit of a client's operation id, so that ids derived from it are valid too."""


# ------------------------------------------------------------------------------------------------------------ operations


def requested_operation_id(request: RequestContext) -> OperationID | None:
    header = request.headers.get(OPERATION_HEADER.lower())
    if header is None:
        return None
    if parse_operation_id(header) is None or len(header) > OPERATION_ID_LENGTH_MAX or not header.isascii():
        cure = "use INCARNATION.WINDOW.NONCE with incarnation and window from /v1/status, or omit the header"
        raise ApiProblem(
            400, "malformed", f"{OPERATION_HEADER}: {quoted(header)} is not an operation id", field=OPERATION_HEADER, cure=cure
        )
    return OperationID(header)


async def submit(request: RequestContext, server: ServerContext, claim: AnyClaim) -> tuple[OperationID, Verdict]:
    """Submit a claim and return its verdict and operation id."""
    given = requested_operation_id(request)
    operation = given or await server.authority.issue_operation_id(request.actor)
    try:
        to_submit = Operation(operation, request.actor, claim, NO_EVIDENCE, request.trace)
        verdict = await retry_with_older_keys(server, to_submit, (await server.authority.submit((to_submit,)))[0])
        if given is None and isinstance(verdict, Refused) and verdict.code is Code.OPERATION_EXPIRED:
            # The scope was restored since this server last read the window, so the generated id was never used. Use a new one.
            client = server.authority.client(request.actor)
            await client.status()
            operation = await client.new_operation_id()
            verdict = await client.submit(claim, operation_id=operation, trace=request.trace)
    except RetriesExhausted as error:
        raise unanswered_problem(error, operation) from error
    return operation, verdict


async def retry_with_older_keys(server: ServerContext, operation: Operation, verdict: Verdict) -> Verdict:
    """Retry a secret under older keys if its operation id is taken: after a key rotation the same secret has another payload.
    This writes nothing new, since an id used for something else is refused with any payload.
    """
    claim = operation.claim
    if _is_operation_mismatch(verdict) and isinstance(claim, Apply) and isinstance(claim.thing, Secret):
        for former in server.auth.keyring.sealing_keys.sealed_by_older_keys(claim.thing):
            retried = (await server.authority.submit((changed(operation, claim=changed(claim, thing=former)),)))[0]
            if not _is_operation_mismatch(retried):
                return retried
    return verdict


def _is_operation_mismatch(verdict: Verdict) -> bool:
    return isinstance(verdict, Refused) and verdict.code is Code.OPERATION_MISMATCH


def require_accepted(verdict: Verdict, *, conditional: bool = False) -> Accepted:
    if isinstance(verdict, Refused):
        raise refusal_problem(verdict, conditional=conditional)
    return verdict


async def row_at(server: ServerContext, name: str, revision: int) -> Row | None:
    """Return a row at a revision; the current one if that revision was compacted."""
    committed = server.authority.committed_object(name)
    if committed is not None and committed[1] == revision:
        return Row(name, encode(committed[0]), revision)  # the stored row is the encoded object
    try:
        rows = (await server.store.range(name, limit=1, revision=revision)).rows
    except Compacted:
        return await server.store.get(name)
    return rows[0] if rows and rows[0].key == name else None


# --------------------------------------------------------------------------------------------------------- single objects


async def create(request: RequestContext, server: ServerContext, kind: str) -> Response:
    obj = await read_manifest(request, server, kind)
    return await _apply(request, server, obj, 0, conditional=False)


async def replace(request: RequestContext, server: ServerContext, kind: str) -> Response:
    obj = await read_manifest(request, server, kind)
    expect = await _expected_revision(request, server, key(obj))
    return await _apply(request, server, obj, expect, conditional=expect is not None)


async def _expected_revision(request: RequestContext, server: ServerContext, name: str) -> int | None:
    matching, if_none_match = if_match_revision(request), request.headers.get("if-none-match")
    if if_none_match is not None:
        if if_none_match.strip() != "*" or matching is not None:
            cure = "send If-None-Match: * to create, or If-Match with the ETag as read to replace, not both"
            raise ApiProblem(
                400,
                "malformed",
                "If-None-Match: only * is supported, and not together with If-Match",
                field="If-None-Match",
                cure=cure,
            )
        return 0
    if matching != 0:
        return matching
    row = await server.store.get(name)
    if row is None:
        raise ApiProblem(
            412, "precondition", f"If-Match: there is no {name}", field="If-Match", cure="create it first, or send no If-Match"
        )
    return row.revision


async def _apply(
    request: RequestContext, server: ServerContext, obj: AnyObject, expect: int | None, *, conditional: bool
) -> Response:
    claim = Apply(obj, expect, fill=True)
    if request.query["dryRun"]:
        return _dry_run_response(server.authority.dry_run(request.actor, [claim])[0], conditional=conditional)
    request.extra_cost = replica_creation_cost((obj,))
    operation, verdict = await submit(request, server, claim)
    return await _apply_response(request, server, obj, expect, operation, require_accepted(verdict, conditional=conditional))


async def _apply_response(
    request: RequestContext, server: ServerContext, obj: AnyObject, expect: int | None, operation: str, accepted: Accepted
) -> Response:
    kind, name = type(obj).__name__, key(obj)
    row = await row_at(server, name, accepted.revision)
    if row is None:
        # The write removed the last finalizer of an object that was being deleted.
        meta = obj.metadata
        gone = DeleteAnswer(kind=kind, name=meta.name, tenant=meta.tenant, action="deleted", revision=accepted.revision)
        return json_response(gone, remit_operation_id=operation)
    is_new = expect == 0 if expect is not None else await row_at(server, name, accepted.revision - 1) is None
    location = object_path(kind, obj.metadata.name, obj.metadata.tenant) if is_new else ""
    return object_response(kind, row, 201 if is_new else 200, remit_operation_id=operation, location=location)


def _dry_run_response(trial: DryRunResult, *, conditional: bool) -> Response:
    if isinstance(trial.result, Refused):
        raise refusal_problem(trial.result, conditional=conditional)
    if trial.obj is None:
        return json_response({"action": "deleted"})
    return Response(shown_object(type(trial.obj).__name__, encode(trial.obj), 0), media_type=JSON)


# ------------------------------------------------------------------------------------------------------------------- patch


async def patch(request: RequestContext, server: ServerContext, kind: str) -> Response:
    """Merge a patch into the current object. Without If-Match it is tried again after a conflict."""
    change = await offload_if_large(server, request.body, lambda: parse_strict_json(request.body))
    if not isinstance(change, dict):
        raise ApiProblem(
            422,
            "invalid",
            "the body of a merge patch must be an object",
            cure='send the fields to change, such as {"spec":{"replicas":3}}',
        )
    name, matching = key_of(kind, request.path["name"], request.tenant), if_match_revision(request)
    base = (
        None
        if request.query["dryRun"]
        else requested_operation_id(request) or await server.authority.client(request.actor).new_operation_id()
    )
    for attempt in range(PATCH_TRIES_MAX):
        row = await server.store.get(name)
        if row is None:
            raise object_not_found(kind, request.path["name"], request.tenant)
        obj = await offload_if_large(server, row.value, lambda row=row: _apply_patch(server, row, change))  # type: ignore[misc]
        check_path(obj, request, kind)
        claim = Apply(obj, matching or row.revision)
        if base is None:
            return _dry_run_response(server.authority.dry_run(request.actor, [claim])[0], conditional=matching is not None)
        operation = OperationID(f"{base}-{attempt}") if attempt else base
        verdict, recovered = await _submit_or_recover(request, server, operation, claim, base)
        if recovered and isinstance(verdict, Accepted) and await _is_different_patch(server, name, verdict.revision, change):
            raise refusal_problem(
                Refused(Code.OPERATION_MISMATCH, f"{base} was used for another operation than this patch of {name}")
            )
        if isinstance(verdict, Refused) and verdict.code is Code.REVISION and not matching:
            continue
        return await _apply_response(request, server, obj, 1, base, require_accepted(verdict, conditional=matching is not None))
    detail = f"the object was changed by others {PATCH_TRIES_MAX} times during the patch"
    raise ApiProblem(409, "revision", detail, cure="retry shortly")


def _apply_patch(server: ServerContext, row: Row, change: dict[str, object]) -> AnyObject:
    """Apply a patch and validate the result. A secret is unsealed first: limits apply to plain values, not to sealed ones."""
    stored = decode(row.value)
    if not isinstance(stored, Secret):
        return validate_manifest(encode(merge_patch(to_manifest(stored), change)))
    return seal_for_storage(
        server,
        validate_manifest(encode(merge_patch(to_manifest(server.auth.keyring.sealing_keys.unseal_object(stored)), change))),
        already_sealed=stored.spec.data,
    )


async def _submit_or_recover(
    request: RequestContext, server: ServerContext, operation: OperationID, claim: AnyClaim, base: str
) -> tuple[Verdict, bool]:
    """Submit a patch and return its verdict, and whether it was recovered from an earlier try.

    The same patch on a later state is another payload. If the operation id is taken, the recorded answer of the earlier try
    is returned.
    """
    client = server.authority.client(request.actor)
    try:
        verdict = await client.submit(claim, operation_id=operation, trace=request.trace)
        if isinstance(verdict, Refused) and verdict.code is Code.OPERATION_MISMATCH:
            return await client.submit(Abandon(operation), trace=request.trace), True
    except RetriesExhausted as error:
        raise unanswered_problem(error, base) from error
    return verdict, False


async def _is_different_patch(server: ServerContext, name: str, revision: int, change: dict[str, object]) -> bool:
    """Return whether an operation id was used for another operation: the object at that revision is not what this patch would
    have produced.
    """
    try:
        rows = (await server.store.range(name, limit=1, revision=revision)).rows
    except Compacted:
        return False  # cannot be determined any more; the response shows the current object
    if not rows or rows[0].key != name:
        return False
    result = rows[0]
    return bool(to_manifest(_apply_patch(server, result, change)) != to_manifest(decode(result.value)))


# ------------------------------------------------------------------------------------------------------------------ delete


async def delete(request: RequestContext, server: ServerContext, kind: str) -> Response:
    name, matching = request.path["name"], if_match_revision(request)
    if matching == 0:
        matching = await _expected_revision(request, server, key_of(kind, name, request.tenant))
    claim = Delete(kind, name, request.tenant, matching)
    conditional = matching is not None
    if request.query["dryRun"]:
        trial = server.authority.dry_run(request.actor, [claim])[0]
        if isinstance(trial.result, Refused):
            raise refusal_problem(trial.result, conditional=conditional)
        return _delete_response(kind, name, request.tenant, trial.result, 0, "")
    operation, verdict = await submit(request, server, claim)
    accepted = require_accepted(verdict, conditional=conditional)
    return _delete_response(kind, name, request.tenant, accepted.number, accepted.revision, operation)


def _delete_response(kind: str, name: str, tenant: str, number: int, revision: int, operation: str) -> Response:
    action = DeleteAnswer(kind=kind, name=name, tenant=tenant, action="deleted" if number else "marked", revision=revision)
    return json_response(action, 200 if number else 202, remit_operation_id=operation)


_APPLY_RANKS: Final = {definition.struct: rank for rank, definition in enumerate(DEFINITIONS)}
"""Objects that others refer to come first."""

OWNER_DEPTH_MAX: Final = 64


class ApplyItem(NamedTuple):
    """A manifest, and the stored row of its object."""

    obj: AnyObject
    row: Row | None

    @property
    def is_unchanged(self) -> bool:
        if self.row is None:
            return False
        stored = decode(self.row.value)
        is_deleting = isinstance(stored.metadata, Metadata) and stored.metadata.deleting
        return not is_deleting and to_manifest(stored) == to_manifest(self.obj)


async def apply_all(request: RequestContext, server: ServerContext) -> Response:
    with server.auth.keyring.track_write():  # the manifests may contain secrets
        return await _apply_all(request, server)


async def _apply_all(request: RequestContext, server: ServerContext) -> Response:
    objects = await read_manifests(request, server)
    check_may_declare(request.principal, objects)
    items = [ApplyItem(obj, await _current_row(server, key(obj))) for obj in objects]
    expected_revision = request.query["ifUnchanged"]
    if expected_revision is not None:
        await _check_unchanged(server, items, expected_revision)
    changed_indexes = [index for index in apply_order(objects) if not items[index].is_unchanged]
    claims = [
        Apply(objects[index], _expect(items[index].row) if expected_revision is not None else None, fill=True)
        for index in changed_indexes
    ]
    if request.query["dryRun"]:
        trials = server.authority.dry_run(request.actor, claims)
        verdicts: Sequence[Verdict] = [
            trial.result if isinstance(trial.result, Refused) else Accepted(0, trial.result) for trial in trials
        ]
        operation = ""
    else:
        request.extra_cost = replica_creation_cost(objects[index] for index in changed_indexes)
        operation, verdicts = await _submit_all(request, server, claims, changed_indexes)
    results = _results(items, dict(zip(changed_indexes, verdicts, strict=True)))
    revision = max((result.revision for result in results), default=0) or server.watch_cache.revision
    return json_response(ApplyAnswer(revision=revision, results=tuple(results)), remit_operation_id=operation)


async def _submit_all(
    request: RequestContext, server: ServerContext, claims: Sequence[Apply], indexes: Sequence[int]
) -> tuple[str, Sequence[Verdict]]:
    """Submit all claims in one call. Each operation id derives from the request's id and the index of the manifest, so a retry
    finds them.
    """
    base = requested_operation_id(request) or await server.authority.issue_operation_id(request.actor)
    operations = [
        Operation(OperationID(f"{base}-{index}"), request.actor, claim, trace=request.trace)
        for index, claim in zip(indexes, claims, strict=True)
    ]
    try:
        verdicts = await server.authority.submit(operations) if operations else ()
        return base, [
            await retry_with_older_keys(server, operation, verdict)
            for operation, verdict in zip(operations, verdicts, strict=True)
        ]
    except RetriesExhausted as error:
        raise unanswered_problem(error, base) from error


async def _current_row(server: ServerContext, name: str) -> Row | None:
    """Return the stored row. If the leader runs here and does not know the key, skip the store read; the authority decides."""
    authority = server.authority
    if authority.standby.leading is not None and authority.committed_object(name) is None:
        return None
    return await server.store.get(name)


def _expect(row: Row | None) -> int:
    return 0 if row is None else row.revision


async def _check_unchanged(server: ServerContext, items: Sequence[ApplyItem], revision: int) -> None:
    """Check that every object is declared as it was at `revision`. Changes by controllers do not count. Raises `ApiProblem`.

    Each claim also has its expected revision, for changes after this check.
    """
    now = await server.store.revision()
    if revision > now:
        detail = f"ifUnchanged: revision {revision} is newer than the store's revision {now}"
        raise ApiProblem(400, "malformed", detail, field="ifUnchanged", cure="use the revision of a plan or a list")
    for obj, row in items:
        name = key(obj)
        if (row is None or row.revision > revision) and not await _is_unchanged_since(server, name, revision, row):
            detail = f"{name} has changed since revision {revision}; nothing was applied"
            raise ApiProblem(
                412, "precondition", detail, cure="plan again, then apply with the revision of that plan", revision=now
            )


async def _is_unchanged_since(server: ServerContext, name: str, revision: int, now: Row | None) -> bool:
    try:
        rows = (await server.store.range(name, limit=1, revision=revision)).rows
    except Compacted:
        return False  # that revision was compacted, so it cannot be verified
    if not rows or rows[0].key != name:
        return now is None
    if now is None:
        return False
    current, earlier = decode(now.value), decode(rows[0].value)
    deleting = [isinstance(meta, Metadata) and meta.deleting for meta in (current.metadata, earlier.metadata)]
    return (
        current.metadata.uid == earlier.metadata.uid
        and deleting[0] == deleting[1]
        and to_manifest(current) == to_manifest(earlier)
    )


def apply_order(objects: Sequence[AnyObject]) -> list[int]:
    """Return the indexes of `objects` in the order of submission: by kind, and owners before what they own."""
    index_by_key = {key(obj): index for index, obj in enumerate(objects)}
    ordered: dict[int, None] = {}

    def add(index: int, above: frozenset[int]) -> None:
        if index in ordered or index in above:  # a cycle of owners is refused by the authority
            return
        meta = objects[index].metadata
        for owner in meta.owners if isinstance(meta, Metadata) else ():
            owner_index = index_by_key.get(key_of(owner.kind, owner.name, meta.tenant))
            if owner_index is not None and len(above) < OWNER_DEPTH_MAX:
                add(owner_index, above | {index})
        ordered[index] = None

    for index in sorted(range(len(objects)), key=lambda index: (_APPLY_RANKS[type(objects[index])], index)):
        add(index, frozenset())
    return list(ordered)


def _results(items: Sequence[ApplyItem], verdicts: dict[int, Verdict]) -> list[ApplyResult]:
    results: list[ApplyResult] = []
    for index, (obj, row) in enumerate(items):
        kind, meta = type(obj).__name__, obj.metadata
        verdict = verdicts.get(index)
        if isinstance(verdict, Refused):
            problem = refusal_problem(verdict).document
            result = ApplyResult(kind=kind, name=meta.name, tenant=meta.tenant, action="refused", problem=problem)
        elif verdict is not None:
            result = ApplyResult(
                kind=kind,
                name=meta.name,
                tenant=meta.tenant,
                action="created" if row is None else "replaced",
                revision=verdict.revision,
                generation=verdict.number,
            )
        else:
            revision = row.revision if row is not None else 0
            generation = decode(row.value).metadata.generation if row is not None else 0
            result = ApplyResult(
                kind=kind, name=meta.name, tenant=meta.tenant, action="unchanged", revision=revision, generation=generation
            )
        results.append(result)
    return results
