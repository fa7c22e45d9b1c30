"""Create, replace, patch, delete and batch apply, as claims.

As a claim, which the authority decides.

The id of a request is its intent's: sent again under the same `Remit-Operation-Id` it gets the same answer. A patch claims to
replace what was read, so it is tried again when somebody else was quicker; each try has an id of its own that follows from the
request's, and a try of which nobody heard the answer is found again by its id.

Judged together, asked in one call, what others depend on first. No rules here.

Any problem in any of them, and nothing is asked. After that each stands for itself: the authority may refuse one and accept the
others, and says so of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace as changed
from starlette.responses import Response

from remit.client.authority_client import NOTHING_SEEN, NoAnswer
from remit.commitment.dry_run import Tried
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
    window_of,
)
from remit.model.manifests.validation import written
from remit.model.metadata import Metadata
from remit.model.objects import AnyObject, decode, encode, key, key_of, object_path
from remit.model.problems import shown
from remit.model.secrets import Secret
from remit.model.wire.api_types import OPERATION_HEADER, ApplyAnswer, ApplyResult, DeleteAnswer
from remit.serve.auth.access_control import check_declared
from remit.serve.http.bodies import all_manifests, beside, check_path, judged, merged, one_manifest, sealed, strict
from remit.serve.http.fair_queue import replicas_cost
from remit.serve.http.replies import Failure, refused, unanswered
from remit.serve.http.request_context import Asked
from remit.serve.http.routes import JSON
from remit.serve.objects.reads import encoded, if_match, no_such, one_object
from remit.serve.objects.rendering import shown as shown_object
from remit.serve.server_context import Desk
from remit.store.protocol import Compacted, Row

PATCH_TRIES_MAX: Final = 8
ID_SIGNS_MAX: Final = 100
"""Of an id that a request brings: what follows from it must be an id too."""


# ------------------------------------------------------------------------------------------------------------ operations


def given_id(asked: Asked) -> OperationID | None:
    given = asked.headers.get(OPERATION_HEADER.lower())
    if given is None:
        return None
    if window_of(given) is None or len(given) > ID_SIGNS_MAX or not given.isascii():
        cure = "take incarnation and window from /v1/status and add a nonce: INCARNATION.WINDOW.NONCE; or leave it out"
        raise Failure(400, "malformed", f"{shown(given)} is no operation id", field=OPERATION_HEADER, cure=cure)
    return OperationID(given)


async def ask(asked: Asked, desk: Desk, claim: AnyClaim) -> tuple[OperationID, Verdict]:
    """The verdict, and the id that it is kept under."""
    given = given_id(asked)
    operation = given or await desk.issue(asked.actor)
    try:
        said = Operation(operation, asked.actor, claim, NOTHING_SEEN, asked.trace)
        verdict = await found_again(desk, said, (await desk.ask((said,)))[0])
        if given is None and isinstance(verdict, Refused) and verdict.code is Code.OPERATION_EXPIRED:
            # The scope was restored since this server last looked: the id was never anybody's.
            client = desk.client(asked.actor)
            await client.status()
            operation = await client.issue()
            verdict = await client.ask(claim, operation_id=operation, trace=asked.trace)
    except NoAnswer as error:
        raise unanswered(error, operation) from error
    return operation, verdict


async def found_again(desk: Desk, operation: Operation, verdict: Verdict) -> Verdict:
    """The same secret is another payload once a new key seals it: if its id is taken, it is asked for as it would have been
    sealed before. Nothing is done by that: an id that was used for something else is refused, whatever comes under it.
    """
    claim = operation.claim
    if _is_taken(verdict) and isinstance(claim, Apply) and isinstance(claim.thing, Secret):
        for former in desk.keyring.seals.formerly(claim.thing):
            again = (await desk.ask((changed(operation, claim=changed(claim, thing=former)),)))[0]
            if not _is_taken(again):
                return again
    return verdict


def _is_taken(verdict: Verdict) -> bool:
    return isinstance(verdict, Refused) and verdict.code is Code.OPERATION_MISMATCH


def must(verdict: Verdict, *, conditional: bool = False) -> Accepted:
    if isinstance(verdict, Refused):
        raise refused(verdict, conditional=conditional)
    return verdict


async def row_at(desk: Desk, name: str, revision: int) -> Row | None:
    """As it stood then; as it stands now, if that is no longer known."""
    stands = desk.declared(name)
    if stands is not None and stands[1] == revision:
        return Row(name, encode(stands[0]), revision)  # a row is what was declared, written out
    try:
        rows = (await desk.store.range(name, limit=1, revision=revision)).rows
    except Compacted:
        return await desk.store.get(name)
    return rows[0] if rows and rows[0].key == name else None


# ---------------------------------------------------------------------------------------------------------- one at a time


async def create(asked: Asked, desk: Desk, kind: str) -> Response:
    thing = await one_manifest(asked, desk, kind)
    return await _apply(asked, desk, thing, 0, conditional=False)


async def replace(asked: Asked, desk: Desk, kind: str) -> Response:
    thing = await one_manifest(asked, desk, kind)
    expect = await _expected(asked, desk, key(thing))
    return await _apply(asked, desk, thing, expect, conditional=expect is not None)


async def _expected(asked: Asked, desk: Desk, name: str) -> int | None:
    matching, absent = if_match(asked), asked.headers.get("if-none-match")
    if absent is not None:
        if absent.strip() != "*" or matching is not None:
            cure = "send If-None-Match: * to create, or If-Match with the ETag that was read to replace; not both"
            raise Failure(400, "malformed", "If-None-Match is understood as * alone", field="If-None-Match", cure=cure)
        return 0
    if matching != 0:
        return matching
    row = await desk.store.get(name)
    if row is None:
        raise Failure(412, "precondition", f"there is no {name}", field="If-Match", cure="create it first, or send no If-Match")
    return row.revision


async def _apply(asked: Asked, desk: Desk, thing: AnyObject, expect: int | None, *, conditional: bool) -> Response:
    claim = Apply(thing, expect, fill=True)
    if asked.query["dryRun"]:
        return _would_be(desk.tried(asked.actor, [claim])[0], conditional=conditional)
    asked.more_cost = replicas_cost((thing,))
    operation, verdict = await ask(asked, desk, claim)
    return await _applied(asked, desk, thing, expect, operation, must(verdict, conditional=conditional))


async def _applied(
    asked: Asked, desk: Desk, thing: AnyObject, expect: int | None, operation: str, accepted: Accepted
) -> Response:
    kind, name = type(thing).__name__, key(thing)
    row = await row_at(desk, name, accepted.revision)
    if row is None:
        # The last one who held it by a finalizer has let it go.
        meta = thing.metadata
        gone = DeleteAnswer(kind=kind, name=meta.name, tenant=meta.tenant, action="deleted", revision=accepted.revision)
        return encoded(gone, remit_operation_id=operation)
    new = expect == 0 if expect is not None else await row_at(desk, name, accepted.revision - 1) is None
    where = object_path(kind, thing.metadata.name, thing.metadata.tenant) if new else ""
    return one_object(kind, row, 201 if new else 200, remit_operation_id=operation, location=where)


def _would_be(tried: Tried, *, conditional: bool) -> Response:
    if isinstance(tried.ruled, Refused):
        raise refused(tried.ruled, conditional=conditional)
    if tried.thing is None:
        return encoded({"action": "deleted"})
    return Response(shown_object(type(tried.thing).__name__, encode(tried.thing), 0), media_type=JSON)


# ------------------------------------------------------------------------------------------------------------------- patch


async def patch(asked: Asked, desk: Desk, kind: str) -> Response:
    """Merge into what is there. Without If-Match, again for as long as somebody else is quicker."""
    change = await beside(desk, asked.body, lambda: strict(asked.body))
    if not isinstance(change, dict):
        raise Failure(
            422, "invalid", "a merge patch is an object", cure='send what is to change, such as {"spec":{"replicas":3}}'
        )
    name, matching = key_of(kind, asked.path["name"], asked.tenant), if_match(asked)
    base = None if asked.query["dryRun"] else given_id(asked) or await desk.client(asked.actor).issue()
    for turn in range(PATCH_TRIES_MAX):
        row = await desk.store.get(name)
        if row is None:
            raise no_such(kind, asked.path["name"], asked.tenant)
        thing = await beside(desk, row.value, lambda row=row: _patched(desk, row, change))  # type: ignore[misc]
        check_path(thing, asked, kind)
        claim = Apply(thing, matching or row.revision)
        if base is None:
            return _would_be(desk.tried(asked.actor, [claim])[0], conditional=matching is not None)
        operation = OperationID(f"{base}-{turn}") if turn else base
        verdict, found = await _found_or_asked(asked, desk, operation, claim, base)
        if found and isinstance(verdict, Accepted) and await _is_other(desk, name, verdict.revision, change):
            raise refused(Refused(Code.OPERATION_MISMATCH, f"{base} was another deed than this patch of {name}"))
        if isinstance(verdict, Refused) and verdict.code is Code.REVISION and not matching:
            continue
        return await _applied(asked, desk, thing, 1, base, must(verdict, conditional=matching is not None))
    detail = f"somebody else changed it {PATCH_TRIES_MAX} times meanwhile"
    raise Failure(409, "revision", detail, cure="try again a little later")


def _patched(desk: Desk, row: Row, change: dict[str, object]) -> AnyObject:
    """A secret is opened for as long as it is judged: its limits are those of what is written, not of what is stored."""
    stands = decode(row.value)
    if not isinstance(stands, Secret):
        return judged(encode(merged(written(stands), change)))
    return sealed(desk, judged(encode(merged(written(desk.keyring.seals.opening(stands)), change))), kept=stands.spec.data)


async def _found_or_asked(asked: Asked, desk: Desk, operation: OperationID, claim: AnyClaim, base: str) -> tuple[Verdict, bool]:
    """The same patch on a later state is another payload: if its id is taken, what was answered then is the answer.

    Also answered is whether it was found so.
    """
    client = desk.client(asked.actor)
    try:
        verdict = await client.ask(claim, operation_id=operation, trace=asked.trace)
        if isinstance(verdict, Refused) and verdict.code is Code.OPERATION_MISMATCH:
            return await client.ask(Abandon(operation), trace=asked.trace), True
    except NoAnswer as error:
        raise unanswered(error, base) from error
    return verdict, False


async def _is_other(desk: Desk, name: str, revision: int, change: dict[str, object]) -> bool:
    """Was an id used for something else? Then what it left at that revision is not as this patch would have left it."""
    try:
        rows = (await desk.store.range(name, limit=1, revision=revision)).rows
    except Compacted:
        return False  # it cannot be told any more; the answer shows what there is
    if not rows or rows[0].key != name:
        return False
    left = rows[0]
    return bool(written(_patched(desk, left, change)) != written(decode(left.value)))


# ------------------------------------------------------------------------------------------------------------------ delete


async def delete(asked: Asked, desk: Desk, kind: str) -> Response:
    name, matching = asked.path["name"], if_match(asked)
    if matching == 0:
        matching = await _expected(asked, desk, key_of(kind, name, asked.tenant))
    claim = Delete(kind, name, asked.tenant, matching)
    conditional = matching is not None
    if asked.query["dryRun"]:
        tried = desk.tried(asked.actor, [claim])[0]
        if isinstance(tried.ruled, Refused):
            raise refused(tried.ruled, conditional=conditional)
        return _deleted(kind, name, asked.tenant, tried.ruled, 0, "")
    operation, verdict = await ask(asked, desk, claim)
    accepted = must(verdict, conditional=conditional)
    return _deleted(kind, name, asked.tenant, accepted.number, accepted.revision, operation)


def _deleted(kind: str, name: str, tenant: str, number: int, revision: int, operation: str) -> Response:
    action = DeleteAnswer(kind=kind, name=name, tenant=tenant, action="deleted" if number else "marked", revision=revision)
    return encoded(action, 200 if number else 202, remit_operation_id=operation)


ORDER: Final = (
    "Region", "NodePool", "Node", "PriorityClass", "Tenant", "Policy", "Config", "Secret", "Workload", "Allotment", "Override",
    "Token",
)  # fmt: skip
"""What others name comes before them."""

OWNERS_DEEP_MAX: Final = 64


class Standing(NamedTuple):
    """One manifest, and what stands there already."""

    thing: AnyObject
    row: Row | None

    @property
    def unchanged(self) -> bool:
        if self.row is None:
            return False
        before = decode(self.row.value)
        going = isinstance(before.metadata, Metadata) and before.metadata.deleting
        return not going and written(before) == written(self.thing)


async def apply_all(asked: Asked, desk: Desk) -> Response:
    with desk.keyring.writing():  # secrets may be among them
        return await _apply_all(asked, desk)


async def _apply_all(asked: Asked, desk: Desk) -> Response:
    things = await all_manifests(asked, desk)
    check_declared(asked.principal, things)
    standing = [Standing(thing, await _row(desk, key(thing))) for thing in things]
    unless = asked.query["ifUnchanged"]
    if unless is not None:
        await _check_unchanged(desk, standing, unless)
    asking = [index for index in in_order(things) if not standing[index].unchanged]
    claims = [Apply(things[index], _expect(standing[index].row) if unless is not None else None, fill=True) for index in asking]
    if asked.query["dryRun"]:
        tried = desk.tried(asked.actor, claims)
        verdicts: Sequence[Verdict] = [one.ruled if isinstance(one.ruled, Refused) else Accepted(0, one.ruled) for one in tried]
        operation = ""
    else:
        asked.more_cost = replicas_cost(things[index] for index in asking)
        operation, verdicts = await _ask(asked, desk, claims, asking)
    results = _results(standing, dict(zip(asking, verdicts, strict=True)))
    revision = max((result.revision for result in results), default=0) or desk.board.revision
    return encoded(ApplyAnswer(revision=revision, results=tuple(results)), remit_operation_id=operation)


async def _ask(asked: Asked, desk: Desk, claims: Sequence[Apply], indexes: Sequence[int]) -> tuple[str, Sequence[Verdict]]:
    """All in one call. The id of each follows from the request's and from its place there, so the same again finds them."""
    base = given_id(asked) or await desk.issue(asked.actor)
    operations = [
        Operation(OperationID(f"{base}-{index}"), asked.actor, claim, trace=asked.trace)
        for index, claim in zip(indexes, claims, strict=True)
    ]
    try:
        verdicts = await desk.ask(operations) if operations else ()
        return base, [await found_again(desk, one, said) for one, said in zip(operations, verdicts, strict=True)]
    except NoAnswer as error:
        raise unanswered(error, base) from error


async def _row(desk: Desk, name: str) -> Row | None:
    """What stands there. What who leads here knows nothing of is not looked for: it is asked for, and the authority decides."""
    return None if desk.standby.leading is not None and desk.declared(name) is None else await desk.store.get(name)


def _expect(row: Row | None) -> int:
    return 0 if row is None else row.revision


async def _check_unchanged(desk: Desk, standing: Sequence[Standing], revision: int) -> None:
    """Is every object declared as it was then? What controllers say of it since is nobody's change.

    Each claim names what it expects as well, for what happens after this look.
    """
    now = await desk.store.revision()
    if revision > now:
        detail = f"revision {revision} has not been yet; the store stands at {now}"
        raise Failure(400, "malformed", detail, field="ifUnchanged", cure="send the revision of a plan or a list")
    for thing, row in standing:
        name = key(thing)
        if (row is None or row.revision > revision) and not await _is_as_it_was(desk, name, revision, row):
            detail = f"{name} has changed since revision {revision}; nothing was applied"
            raise Failure(412, "precondition", detail, cure="plan again, then apply at that plan's revision", revision=now)


async def _is_as_it_was(desk: Desk, name: str, revision: int, now: Row | None) -> bool:
    try:
        rows = (await desk.store.range(name, limit=1, revision=revision)).rows
    except Compacted:
        return False  # that history is gone: it cannot be vouched for
    if not rows or rows[0].key != name:
        return now is None
    if now is None:
        return False
    one, other = decode(now.value), decode(rows[0].value)
    going = [isinstance(meta, Metadata) and meta.deleting for meta in (one.metadata, other.metadata)]
    return one.metadata.uid == other.metadata.uid and going[0] == going[1] and written(one) == written(other)


def in_order(things: Sequence[AnyObject]) -> list[int]:
    """Places in `things`, in the order in which they are asked: by kind, but owners before what they own."""
    at = {key(thing): index for index, thing in enumerate(things)}
    done: dict[int, None] = {}

    def add(index: int, above: frozenset[int]) -> None:
        if index in done or index in above:  # who owns itself in the end is refused by the authority
            return
        meta = things[index].metadata
        for owner in meta.owners if isinstance(meta, Metadata) else ():
            found = at.get(key_of(owner.kind, owner.name, meta.tenant))
            if found is not None and len(above) < OWNERS_DEEP_MAX:
                add(found, above | {index})
        done[index] = None

    for index in sorted(range(len(things)), key=lambda index: (ORDER.index(type(things[index]).__name__), index)):
        add(index, frozenset())
    return list(done)


def _results(standing: Sequence[Standing], verdicts: dict[int, Verdict]) -> list[ApplyResult]:
    results: list[ApplyResult] = []
    for index, (thing, row) in enumerate(standing):
        kind, meta = type(thing).__name__, thing.metadata
        verdict = verdicts.get(index)
        if isinstance(verdict, Refused):
            problem = refused(verdict).document
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
            stands = row.revision if row is not None else 0
            generation = decode(row.value).metadata.generation if row is not None else 0
            result = ApplyResult(
                kind=kind, name=meta.name, tenant=meta.tenant, action="unchanged", revision=stands, generation=generation
            )
        results.append(result)
    return results
