"""How are many manifests applied at once? Judged together, asked in one call, what others depend on first. No rules here.

Any problem in any of them, and nothing is asked. After that each stands for itself: the authority may refuse one and accept the
others, and says so of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from starlette.responses import Response

from remit.client.client import NoAnswer
from remit.model.answers import ApplyAnswer, ApplyResult
from remit.model.claims import Accepted, Apply, Operation, OperationID, Refused, Verdict
from remit.model.fields import Metadata
from remit.model.judging import written
from remit.model.objects import AnyObject, decode, key, key_of
from remit.serve.asked import Asked
from remit.serve.bodies import all_manifests
from remit.serve.desk import Desk
from remit.serve.entering import check_declared
from remit.serve.failures import Failure, refused, unanswered
from remit.serve.flowing import replicas_cost
from remit.serve.reading import encoded
from remit.serve.writing import found_again, given_id
from remit.store.protocol import Compacted, Row

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
