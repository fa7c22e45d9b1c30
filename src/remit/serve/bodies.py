"""What does a body declare? Strict JSON, then the very same judgement that a file gets. Nothing is done about it here.

Small bodies are read at once. What takes long is read beside the event loop, so that nobody else waits for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from remit.model.answers import ProblemItem
from remit.model.claims import Code
from remit.model.documents import DEPTH_MAX, JSON_BYTES_MAX
from remit.model.manifests import read
from remit.model.objects import AnyObject, key
from remit.model.problems import an, escaped, shown
from remit.serve import quick
from remit.serve.asked import Asked
from remit.serve.desk import Desk
from remit.serve.failures import Failure, breach, invalid, wrong
from remit.serve.sealing import Pasted

T = TypeVar("T", bound=AnyObject)
W = TypeVar("W")

AT_ONCE_BYTES: Final = 16 << 10
MANIFESTS_MAX: Final = 10_000
PROBLEMS_MAX: Final = 1_000
NAME: Final = "body.json"

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str)
_NO_BRACKETS: Final = bytes(sign for sign in range(256) if sign not in b"{}[]")


async def beside(desk: Desk, body: bytes, work: Callable[[], W]) -> W:
    """Work that a body makes, elsewhere if the body is large."""
    return work() if len(body) <= AT_ONCE_BYTES else await desk.judging(work)


def strict(body: bytes) -> Any:
    """The value in `body`: JSON with no key twice, and not too deep. Raises `Failure`."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, ValueError) as error:
        raise _malformed(body, str(error)) from None
    # Now it is known to be JSON: every string ends, so they are taken out in one pass.
    if depth_of(body) > DEPTH_MAX:
        raise _too_deep()
    twice = _twice(body)
    if twice is not None:
        detail = f"the key {shown(twice)} stands twice in one object"
        raise Failure(400, "malformed", detail, field=escaped(twice), cure="keep one of the two")
    return value


def depth_of(body: bytes) -> int:
    """How deep the brackets of a JSON text go."""
    deepest = depth = 0
    for sign in _STRING.sub(b"", body).translate(None, _NO_BRACKETS):
        if sign in b"{[":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


class _Twice(Exception):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Twice(name)
            seen.add(name)
    return found


def _twice(body: bytes) -> str | None:
    try:
        json.loads(body, object_pairs_hook=_once, parse_int=str, parse_float=str)
    except _Twice as twice:
        return str(twice)
    return None


def _too_deep() -> Failure:
    return Failure(400, "too_deep", f"the JSON is more than {DEPTH_MAX} levels deep", cure="flatten it")


def _malformed(body: bytes, why: str) -> Failure:
    """The reader of manifests tells where it stops being JSON; if it has nothing to say, the parser does."""
    problems = read(body[: JSON_BYTES_MAX + 1], NAME).problems
    if not problems or not body.strip():
        return Failure(400, "malformed", f"the body is no JSON ({escaped(why)})", cure="send one JSON value")
    first = problems[0]
    detail = f"line {first.line}, column {first.column}: {first.message}"
    if _is_json_but_for_numbers(body):
        return Failure(422, "invalid", detail, field=first.path, cure=first.cure)
    return Failure(400, "malformed", detail, field=first.path, cure=first.cure)


def _is_json_but_for_numbers(body: bytes) -> bool:
    """Is everything where it belongs, and only a number not one that can be kept?"""
    try:
        json.loads(body, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- manifests


async def one_manifest(asked: Asked, desk: Desk, kind: str) -> AnyObject:
    """The one object in a body, which is that of the path; as it is to be stored."""
    thing = await beside(desk, asked.body, lambda: judged(asked.body))
    check_path(thing, asked, kind)
    return sealed(desk, thing)


def sealed(desk: Desk, thing: T, kept: Mapping[str, str] | None = None, manifest: int | None = None) -> T:
    """With nothing in it that is secret: from here on nobody has the values. `kept` are those that are sealed already."""
    try:
        return desk.keyring.seals.sealing(thing, kept)
    except Pasted as error:
        message, _, cure = str(error).removeprefix(f"{error.field}: ").partition("; ")
        raise invalid([ProblemItem(field=error.field, message=message, cure=cure, manifest=manifest)]) from None


def judged(body: bytes) -> AnyObject:
    """Raises `Failure` with all that is wrong."""
    plain = quick.head_of(body)
    known = None if plain is None else quick.known(plain)
    if known is not None:
        return known
    thing = _judged(body)
    if plain is not None:
        quick.learn(plain, thing)
    return thing


def _judged(body: bytes) -> AnyObject:
    strict(body)
    found = read(body, NAME)
    if found.problems:
        raise wrong(found.problems)
    if len(found.objects) != 1:
        detail = f"the body has {len(found.objects)} manifests"
        raise Failure(422, "invalid", detail, cure="send one, or send all of them to /v1/apply")
    return found.objects[0]


def check_path(thing: AnyObject, asked: Asked, kind: str) -> None:
    """Does the object say of itself what the path says of it?"""
    said = type(thing).__name__
    if said != kind:
        raise Failure(
            422, "invalid", f"kind: this is {an(said)}, and the path is of {an(kind)}", field="kind", cure="use its own path"
        )
    for name, found in (("tenant", thing.metadata.tenant), ("name", thing.metadata.name)):
        wanted = asked.path.get(name, found)
        if found != wanted:
            detail = f"metadata.{name}: {shown(found)} in the body and {shown(wanted)} in the path"
            raise Failure(422, "invalid", detail, field=f"metadata.{name}", cure="make them the same")


async def all_manifests(asked: Asked, desk: Desk) -> tuple[AnyObject, ...]:
    """Every object of a body, as it is to be stored: an array of manifests, or one after another. Raises `Failure` if anything
    is wrong with any.
    """

    def work() -> tuple[AnyObject, ...]:
        return tuple(sealed(desk, thing, manifest=index) for index, thing in enumerate(judged_all(asked.body)))

    return await beside(desk, asked.body, work)


def judged_all(body: bytes) -> tuple[AnyObject, ...]:
    return _once_each(_quickly(body) or _slowly(body))


def _quickly(body: bytes) -> list[AnyObject] | None:
    """One by one, as if each had come alone; None if anything is wrong, or unusual: then all of it is read as it stands."""
    pieces = quick.pieces(body)
    if not 0 < len(pieces) <= MANIFESTS_MAX:
        return None
    things, anew = list[AnyObject](), False
    for piece in pieces:
        plain = quick.head_of(piece)
        thing = None if plain is None else quick.known(plain)
        if thing is None:
            anew = True
            try:
                thing = judged(piece)
            except Failure:
                return None
        things.append(thing)
    return None if anew and depth_of(body) > DEPTH_MAX else things


def _slowly(body: bytes) -> list[AnyObject]:
    pieces = _pieces(body)
    if len(pieces) > MANIFESTS_MAX:
        raise Failure(413, "too_large", f"{len(pieces)} manifests at once", cure=f"send at most {MANIFESTS_MAX}")
    things: list[AnyObject] = []
    problems: list[ProblemItem] = []
    reserved = False
    for index, piece in enumerate(pieces):
        found = read(piece, NAME)
        reserved = reserved or any(problem.reserved for problem in found.problems)
        problems += [breach(problem, index) for problem in found.problems[: PROBLEMS_MAX - len(problems)]]
        things += found.objects
    if problems:
        raise invalid(problems, status=403, code=Code.RESERVED) if reserved else invalid(problems)
    return things


def _once_each(things: list[AnyObject]) -> tuple[AnyObject, ...]:
    seen: dict[str, int] = {}
    for index, thing in enumerate(things):
        if (first := seen.setdefault(key(thing), index)) != index:
            message = f"{type(thing).__name__} {shown(thing.metadata.name)} is already declared by manifest {first}"
            raise invalid([ProblemItem(field="metadata.name", message=message, cure="keep one of the two", manifest=index)])
    return tuple(things)


def _pieces(body: bytes) -> list[bytes]:
    """Each manifest by itself, so that a problem can say in which one it is, and many may be sent at once."""
    if body.lstrip()[:1] == b"[":
        strict(body)
        pieces = [bytes(raw) for raw in msgspec.json.decode(body, type=list[Raw])]
        if not pieces:
            raise Failure(422, "invalid", "the list is empty", cure="send at least one manifest")
        return pieces
    try:
        lines = [line for line in body.splitlines() if line.strip()]
        for line in lines:
            msgspec.json.decode(line, type=Raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        # Not one a line: one in all, or several over many lines.
        return [_strictly(body)] if _is_one(body) or len(body) > JSON_BYTES_MAX else _separated(body)
    return [_strictly(line) for line in lines] or [_strictly(body)]


def _separated(body: bytes) -> list[bytes]:
    """Values one after another, with nothing but blanks between them. What is no JSON at all is told as such."""
    if depth_of(body) > DEPTH_MAX:
        raise _too_deep()
    pieces, at = list[bytes](), 0
    try:
        text = body.decode()
        while at < len(text):
            _, end = _DECODER.raw_decode(text, at)
            pieces.append(_strictly(text[at:end].encode()))
            at = end + len(text[end:]) - len(text[end:].lstrip())
    except (ValueError, RecursionError) as error:
        raise _malformed(body, str(error)) from None
    return pieces


def _is_one(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=Raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return True


def _strictly(body: bytes) -> bytes:
    strict(body)
    return body


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396. Both are bounded in depth: one by its types, the other by `strict`."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result
