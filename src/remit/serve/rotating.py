"""How are all secrets sealed anew? A new key, then row by row as claims; ended anywhere, it goes on there. No rules here.

A request does a part of it and says where the rest begins. A new key is made only when nothing is behind: so whoever begins
again after an interruption ends that rotation first, and two who rotate at once make one key.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace
from starlette.responses import Response

from remit.model.answers import OPERATION_HEADER, RotateAnswer
from remit.model.claims import Accepted, Apply, Code
from remit.model.data import Secret
from remit.model.objects import decode
from remit.serve.asked import Asked
from remit.serve.desk import Desk
from remit.serve.failures import Failure
from remit.serve.reading import encoded
from remit.serve.routes import Answer, Parameter, Route
from remit.store.protocol import Row

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


ROUTES: Final = (
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
