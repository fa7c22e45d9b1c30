"""Request bodies: strict JSON, validation, merge patch, fast path for known specs.

A workload of a known spec under another name; bodies.py judges the rest.

It answers with the very object that the whole reading would build, or not at all, for these reasons:

- *No key twice.* Whatever a decoder passes over, a second key of one name for one, is missing when it is written out again.
  Every member of an object has one colon, and without backslashes the colons inside of strings are the same bytes on both
  sides: so if both have as many, nothing was passed over. The spec is not decoded at all, and is written out as it came.
- *A sound spec.* The same bytes were read and judged whole before.
- *Sound metadata.* Nothing but a name, a tenant and labels, each of the plainest form (model/manifests/validation.py).

Strict JSON, then the very same judgement that a file gets. Nothing is done about it here.

Small bodies are read at once. What takes long is read beside the event loop, so that nobody else waits for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw, Struct

from remit.model.claims import Code
from remit.model.kinds import Workload, WorkloadSpec
from remit.model.manifests.documents import DEPTH_MAX, JSON_BYTES_MAX
from remit.model.manifests.reader import read
from remit.model.manifests.validation import Remembered, plainly_named
from remit.model.metadata import API_VERSION, Metadata
from remit.model.objects import AnyObject, key
from remit.model.problems import an, escaped, shown
from remit.model.wire.api_types import ProblemItem
from remit.serve.auth.secrets import Pasted
from remit.serve.http.replies import Failure, breach, invalid, wrong
from remit.serve.http.request_context import Asked
from remit.serve.server_context import Desk


class _Named(Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    name: str
    tenant: str
    labels: dict[str, str] = {}


class Head(Struct, forbid_unknown_fields=True, rename="camel", omit_defaults=True, gc=False):
    """A manifest whose spec was not read."""

    api_version: str
    kind: str
    metadata: _Named
    spec: Raw


_heads: Final = msgspec.json.Decoder(Head)
_raws: Final = msgspec.json.Decoder(list[Raw])
_encode: Final = msgspec.json.Encoder().encode
_specs: Final[Remembered[WorkloadSpec]] = Remembered()


def head_of(body: bytes) -> Head | None:
    """None for whatever is not plain."""
    if b"\\" in body:
        return None
    try:
        head = _heads.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if head.kind != "Workload" or head.api_version != API_VERSION or _encode(head).count(b":") != body.count(b":"):
        return None
    meta = head.metadata
    return head if plainly_named(meta.name, meta.tenant, meta.labels) else None


def known(head: Head) -> AnyObject | None:
    spec = _specs.get(bytes(head.spec))
    if spec is None:
        return None
    meta = Metadata(name=head.metadata.name, tenant=head.metadata.tenant, labels=head.metadata.labels)
    # As it was said: the default is not written out, and a retry of what was read whole must be the same bytes.
    return Workload(api_version=head.api_version, metadata=meta, spec=spec)  # type: ignore[arg-type]  # head_of compared it


def learn(head: Head, thing: AnyObject) -> None:
    """This is what the whole reading made of it."""
    if isinstance(thing, Workload):
        _specs.put(bytes(head.spec), thing.spec)


COMMAS_EACH: Final = 32
"""What has more than so many commas for each manifest that may be is not plain."""


def pieces(body: bytes, most: int) -> list[bytes]:
    """The manifests of an array, each by itself; none if it is something else, or more than may be."""
    if body[:1] != b"[" or body.count(b",") > COMMAS_EACH * most:
        return []
    try:
        found = _raws.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return []
    return [bytes(raw) for raw in found] if len(found) <= most else []


T = TypeVar("T", bound=AnyObject)
W = TypeVar("W")

AT_ONCE_BYTES: Final = 16 << 10
MANIFESTS_MAX: Final = 10_000
PROBLEMS_MAX: Final = 1_000
SLICE_BYTES: Final = 64 << 10
"""Of what is judged at a time."""
NAME: Final = "body.json"

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str)
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_NO_BRACKETS: Final = bytes(sign for sign in range(256) if sign not in b"{}[]")


async def beside(desk: Desk, body: bytes, work: Callable[[], W]) -> W:
    """Work that a body makes, elsewhere if the body is large."""
    return work() if len(body) <= AT_ONCE_BYTES else await desk.judging(work)


def strict(body: bytes, around: int = 0) -> Any:
    """The value in `body`: JSON with no key twice, and not too deep, with as many levels around it. Raises `Failure`."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, ValueError) as error:
        raise _malformed(body, str(error)) from None
    # Now it is known to be JSON: every string ends, so they are taken out in one pass.
    if depth_of(body) + around > DEPTH_MAX:
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
    plain = head_of(body)
    remembered = None if plain is None else known(plain)
    if remembered is not None:
        return remembered
    thing = _judged(body)
    if plain is not None:
        learn(plain, thing)
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
    is wrong with any. What takes long is judged a slice at a time: others' bodies wait for a slice, and not for all.
    """
    body = asked.body
    judging = _Judging(body, lambda thing, manifest: sealed(desk, thing, manifest=manifest))
    if len(body) <= AT_ONCE_BYTES:
        judging.take(pieces_of(body))
    else:
        pieces = await desk.judging(lambda: pieces_of(body))
        for some in _slices(pieces):
            await desk.judging(lambda some=some: judging.take(some))  # type: ignore[misc]
    return judging.ended()


def judged_all(body: bytes) -> tuple[AnyObject, ...]:
    """As they came, secrets too."""
    judging = _Judging(body, lambda thing, manifest: thing)
    judging.take(pieces_of(body))
    return judging.ended()


def _slices(pieces: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    first = size = 0
    for at, piece in enumerate(pieces):
        size += len(piece)
        if size >= SLICE_BYTES or at + 1 == len(pieces):
            yield pieces[first : at + 1]
            first, size = at + 1, 0


class _Judging:
    """The manifests of one body, one after another. `seal` is given each that is sound, and its number."""

    def __init__(self, body: bytes, seal: Callable[[AnyObject, int], AnyObject]) -> None:
        self._seal = seal
        self._around = int(_is_listed(body))
        self._things: list[AnyObject] = []
        self._problems: list[ProblemItem] = []
        self._reserved = False
        self._taken = 0

    def take(self, pieces: Sequence[bytes]) -> None:
        """Once so much is wrong that no answer has room for more, the rest is not looked at."""
        for piece in pieces:
            if len(self._problems) < PROBLEMS_MAX:
                self._take(piece)
            self._taken += 1

    def _take(self, piece: bytes) -> None:
        plain = head_of(piece)
        thing = None if plain is None else known(plain)
        if thing is None:
            strict(piece, self._around)
            found = read(piece, NAME)
            if found.problems or len(found.objects) != 1:
                self._reserved = self._reserved or any(problem.reserved for problem in found.problems)
                room = PROBLEMS_MAX - len(self._problems)
                self._problems += [breach(problem, self._taken) for problem in found.problems[:room]]
                self._things += found.objects
                return
            thing = found.objects[0]
            if plain is not None:
                learn(plain, thing)
        self._things.append(thing if self._problems else self._seal(thing, self._taken))

    def ended(self) -> tuple[AnyObject, ...]:
        if self._problems:
            raise invalid(self._problems, status=403, code=Code.RESERVED) if self._reserved else invalid(self._problems)
        return _once_each(self._things)


def _once_each(things: list[AnyObject]) -> tuple[AnyObject, ...]:
    seen: dict[str, int] = {}
    for index, thing in enumerate(things):
        if (first := seen.setdefault(key(thing), index)) != index:
            message = f"{type(thing).__name__} {shown(thing.metadata.name)} is already declared by manifest {first}"
            raise invalid([ProblemItem(field="metadata.name", message=message, cure="keep one of the two", manifest=index)])
    return tuple(things)


def pieces_of(body: bytes) -> Sequence[bytes]:
    """Each manifest by itself, so that a problem can say in which one it is, and many may be sent at once. None of them is
    judged here, and no more are made than may be. Raises `Failure`.
    """
    quickly = pieces(body, MANIFESTS_MAX)
    if quickly:
        return quickly
    if len(body) <= JSON_BYTES_MAX and _is_one(body) and not _is_listed(body):
        return (body,)
    lines = _lines(body)
    return _separated(body) if lines is None else lines


def _lines(body: bytes) -> list[bytes] | None:
    """One a line; None if it is otherwise."""
    lines: list[bytes] = []
    for line in BytesIO(body):
        if line.strip():
            if _is_listed(line) or not _is_one(line):
                return None
            _check_count(len(lines))
            lines.append(line)
    return lines or None


def _separated(body: bytes) -> list[bytes]:
    """Values one after another, with nothing but blanks between them, or in an array. What is no JSON is told as such."""
    pieces: list[bytes] = []
    try:
        text = body.decode()
        at = _blank(text, 0)
        listed = text[at : at + 1] == "["
        at = _blank(text, at + 1) if listed else at
        while at < len(text) and not (listed and text[at] == "]"):
            _check_count(len(pieces))
            _, end = _DECODER.raw_decode(text, at)
            pieces.append(text[at:end].encode())
            at = _blank(text, end)
            if listed and text[at : at + 1] == ",":
                at = _blank(text, at + 1)
                if text[at : at + 1] == "]":
                    raise ValueError("nothing stands behind a comma")
            elif listed and text[at : at + 1] != "]":
                raise ValueError("an array that does not end")
        if listed and (at >= len(text) or _blank(text, at + 1) < len(text)):
            raise ValueError("something stands behind the array")
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _too_deep() if depth_of(body[:JSON_BYTES_MAX]) > DEPTH_MAX else _malformed(body, str(error)) from None
    if not pieces:
        if not listed:
            raise _malformed(body, "it is empty")
        raise Failure(422, "invalid", "the list is empty", cure="send at least one manifest")
    return pieces


def _blank(text: str, at: int) -> int:
    """Where the next sign is that is no blank."""
    found = _BLANK.match(text, at)
    return at if found is None else found.end()


def _check_count(count: int) -> None:
    if count >= MANIFESTS_MAX:
        raise Failure(413, "too_large", f"more than {MANIFESTS_MAX} manifests at once", cure=f"send at most {MANIFESTS_MAX}")


def _is_listed(body: bytes) -> bool:
    return body[:1] == b"[" or (body[:1].isspace() and body.lstrip()[:1] == b"[")


def _is_one(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=Raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return True


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
