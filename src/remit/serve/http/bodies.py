"""Request bodies: strict JSON, manifests, merge patch.

A manifest is decoded and checked in one pass (model/manifests/decoder.py). One that is rejected is read again, as strict JSON
and by the manifest reader, which reports every problem with its position. Small bodies are read at once; large ones are read
off the event loop, a slice at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from remit.model.claims import Code
from remit.model.kinds import Workload
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.decoder import decode_manifest, has_unique_keys
from remit.model.manifests.documents import DEPTH_MAX, JSON_BYTES_MAX
from remit.model.manifests.reader import read
from remit.model.manifests.validation import mark_validated
from remit.model.objects import key
from remit.model.problems import an, escaped, quoted
from remit.model.wire.api_types import ProblemItem
from remit.serve.auth.secrets import ClientSealedValue
from remit.serve.http.replies import ApiProblem, invalid_body, invalid_manifest, problem_item
from remit.serve.http.routes import RequestContext
from remit.serve.server_context import ServerContext

_raws: Final = msgspec.json.Decoder(list[Raw])

COMMAS_PER_MANIFEST: Final = 32
"""A body with more commas than this per allowed manifest is left to full validation: splitting it could be slow."""


def split_array(body: bytes, count_max: int) -> list[bytes]:
    """Split an array into its manifests. Empty if the body is not an array, or has more than `count_max` items."""
    if body[:1] != b"[" or body.count(b",") > COMMAS_PER_MANIFEST * count_max:
        return []
    try:
        values = _raws.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return []
    return [bytes(raw) for raw in values] if len(values) <= count_max else []


T = TypeVar("T", bound=AnyObject)
W = TypeVar("W")

INLINE_BYTES_MAX: Final = 16 << 10
MANIFESTS_MAX: Final = 10_000
PROBLEMS_MAX: Final = 1_000
SLICE_BYTES: Final = 64 << 10
"""Bytes validated at a time off the event loop."""
BODY_FILE_NAME: Final = "body.json"

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str)
_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_NO_BRACKETS: Final = bytes(sign for sign in range(256) if sign not in b"{}[]")


async def offload_if_large(server: ServerContext, body: bytes, work: Callable[[], W]) -> W:
    """Run work that depends on a body: inline if the body is small, else off the event loop."""
    return work() if len(body) <= INLINE_BYTES_MAX else await server.cpu_offload(work)


def parse_strict_json(body: bytes, outer_depth: int = 0) -> Any:
    """Parse JSON without duplicate keys and at most `DEPTH_MAX` levels deep, counting `outer_depth` levels around it. Raises
    `ApiProblem`.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, ValueError) as error:
        raise _malformed(body, str(error)) from None
    # Fewer brackets than levels cannot nest too deep. The body is valid JSON by now, so every string ends and one pass of the
    # regular expression removes all of them.
    if body.count(b"{") + body.count(b"[") + outer_depth > DEPTH_MAX and nesting_depth(body) + outer_depth > DEPTH_MAX:
        raise _too_deep()
    duplicate = None if has_unique_keys(body, value) else _find_duplicate_key(body)
    if duplicate is not None:
        detail = f"duplicate key {quoted(duplicate)} in one object"
        raise ApiProblem(400, "malformed", detail, field=escaped(duplicate), cure="keep one of the two")
    return value


def nesting_depth(body: bytes) -> int:
    """Return the nesting depth of a JSON text."""
    deepest = depth = 0
    for byte in _STRING.sub(b"", body).translate(None, _NO_BRACKETS):
        if byte in b"{[":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


class _DuplicateKey(Exception):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _DuplicateKey(name)
            seen.add(name)
    return members


def _find_duplicate_key(body: bytes) -> str | None:
    try:
        json.loads(body, object_pairs_hook=_unique_keys, parse_int=str, parse_float=str)
    except _DuplicateKey as twice:
        return str(twice)
    return None


def _too_deep() -> ApiProblem:
    return ApiProblem(400, "too_deep", f"the JSON is nested more than {DEPTH_MAX} levels deep", cure="flatten it")


def _malformed(body: bytes, reason: str) -> ApiProblem:
    """Return the problem of a body that is not JSON. The manifest reader knows the position; if it finds no problem, `reason`
    is the parser's message.
    """
    problems = read(body[: JSON_BYTES_MAX + 1], BODY_FILE_NAME).problems
    if not problems or not body.strip():
        return ApiProblem(400, "malformed", f"the body is not JSON ({escaped(reason)})", cure="send one JSON value")
    first = problems[0]
    detail = f"line {first.line}, column {first.column}: {first.message}"
    if _is_json_but_for_numbers(body):
        return ApiProblem(422, "invalid", detail, field=first.path, cure=first.cure)
    return ApiProblem(400, "malformed", detail, field=first.path, cure=first.cure)


def _is_json_but_for_numbers(body: bytes) -> bool:
    """Return whether the body is JSON apart from numbers that cannot be represented."""
    try:
        json.loads(body, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- manifests


async def read_manifest(request: RequestContext, server: ServerContext, kind: str) -> AnyObject:
    """Read the object of a single-object request, check that it matches the path, and seal it if it is a secret."""
    obj = await offload_if_large(server, request.body, lambda: validate_manifest(request.body))
    check_path(obj, request, kind)
    return seal_for_storage(server, obj)


def seal_for_storage(
    server: ServerContext, obj: T, already_sealed: Mapping[str, str] | None = None, manifest: int | None = None
) -> T:
    """Seal the values of a secret; other objects are returned as they are. From here on no plain value is in memory.
    `already_sealed` are values that the store holds sealed.
    """
    try:
        return server.auth.keyring.sealing_keys.seal_object(obj, already_sealed)
    except ClientSealedValue as error:
        message, _, cure = str(error).removeprefix(f"{error.field}: ").partition("; ")
        raise invalid_body([ProblemItem(field=error.field, message=message, cure=cure, manifest=manifest)]) from None


def validate_manifest(body: bytes) -> AnyObject:
    """Validate one manifest. Raises `ApiProblem` with everything that is wrong."""
    return _decode_manifest(body) or _read_with_positions(body)


def _decode_manifest(body: bytes) -> AnyObject | None:
    """Decode and check a manifest. Return None if it is invalid or has a form that only the slower reader accepts.

    Only workloads are marked as validated, so that the authority need not validate them again. Other kinds are rare. They
    are validated twice, because rules of a policy can depend on whether a default was written out, which a decoded object
    does not show.
    """
    obj = decode_manifest(body)
    if isinstance(obj, Workload) and len(body) <= INLINE_BYTES_MAX:
        mark_validated(obj)
    return obj


def _read_with_positions(body: bytes) -> AnyObject:
    parse_strict_json(body)
    result = read(body, BODY_FILE_NAME)
    if result.problems:
        raise invalid_manifest(result.problems)
    if len(result.objects) != 1:
        detail = f"the body has {len(result.objects)} manifests, expected one"
        raise ApiProblem(422, "invalid", detail, cure="send one manifest, or all of them to /v1/apply")
    return result.objects[0]


def check_path(obj: AnyObject, request: RequestContext, kind: str) -> None:
    """Check that kind, tenant and name of the object match the path. Raises `ApiProblem`."""
    body_kind = type(obj).__name__
    if body_kind != kind:
        raise ApiProblem(
            422,
            "invalid",
            f"kind: the body is {an(body_kind)}, but the path is for {an(kind)}",
            field="kind",
            cure="use the path of that kind",
        )
    for name, in_body in (("tenant", obj.metadata.tenant), ("name", obj.metadata.name)):
        in_path = request.path.get(name, in_body)
        if in_body != in_path:
            detail = f"metadata.{name}: {quoted(in_body)} in the body, but {quoted(in_path)} in the path"
            raise ApiProblem(422, "invalid", detail, field=f"metadata.{name}", cure="make them the same")


async def read_manifests(request: RequestContext, server: ServerContext) -> tuple[AnyObject, ...]:
    """Read every object of a body, sealed for storage: an array of manifests, or manifests one after another. Raises
    `ApiProblem` if any is invalid.

    Large bodies are validated a slice at a time, so that bodies of other requests wait for one slice at most.
    """
    body = request.body
    batch = _ManifestBatch(body, lambda obj, manifest: seal_for_storage(server, obj, manifest=manifest))
    if len(body) <= INLINE_BYTES_MAX:
        batch.add(split_manifests(body))
    else:
        pieces = await server.cpu_offload(lambda: split_manifests(body))
        for slice_ in _slices(pieces):
            await server.cpu_offload(lambda slice_=slice_: batch.add(slice_))  # type: ignore[misc]
    return batch.result()


def validate_manifests(body: bytes) -> tuple[AnyObject, ...]:
    """Validate every manifest of a body, without sealing secrets."""
    batch = _ManifestBatch(body, lambda obj, manifest: obj)
    batch.add(split_manifests(body))
    return batch.result()


def _slices(pieces: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    first = size = 0
    for index, piece in enumerate(pieces):
        size += len(piece)
        if size >= SLICE_BYTES or index + 1 == len(pieces):
            yield pieces[first : index + 1]
            first, size = index + 1, 0


class _ManifestBatch:
    """Validates the manifests of one body in order. `seal` is called with each valid object and its index."""

    def __init__(self, body: bytes, seal: Callable[[AnyObject, int], AnyObject]) -> None:
        self._seal = seal
        self._outer_depth = int(_is_array(body))
        self._objects: list[AnyObject] = []
        self._problems: list[ProblemItem] = []
        self._reserved = False
        self._count = 0

    def add(self, pieces: Sequence[bytes]) -> None:
        """Validate more manifests. After `PROBLEMS_MAX` problems the rest is skipped: a response has no room for more."""
        for piece in pieces:
            if len(self._problems) < PROBLEMS_MAX:
                self._add_one(piece)
            self._count += 1

    def _add_one(self, piece: bytes) -> None:
        obj = _decode_manifest(piece)
        if obj is None:
            parse_strict_json(piece, self._outer_depth)
            result = read(piece, BODY_FILE_NAME)
            if result.problems or len(result.objects) != 1:
                self._reserved = self._reserved or any(problem.reserved for problem in result.problems)
                problems_left = PROBLEMS_MAX - len(self._problems)
                self._problems += [problem_item(problem, self._count) for problem in result.problems[:problems_left]]
                self._objects += result.objects
                return
            obj = result.objects[0]
        self._objects.append(obj if self._problems else self._seal(obj, self._count))

    def result(self) -> tuple[AnyObject, ...]:
        if self._problems:
            raise (
                invalid_body(self._problems, status=403, code=Code.RESERVED) if self._reserved else invalid_body(self._problems)
            )
        return _check_declared_once(self._objects)


def _check_declared_once(objects: list[AnyObject]) -> tuple[AnyObject, ...]:
    seen: dict[str, int] = {}
    for index, obj in enumerate(objects):
        if (first := seen.setdefault(key(obj), index)) != index:
            message = f"{type(obj).__name__} {quoted(obj.metadata.name)} is already declared by manifest {first}"
            raise invalid_body(
                [ProblemItem(field="metadata.name", message=message, cure="keep one of the two", manifest=index)]
            )
    return tuple(objects)


def split_manifests(body: bytes) -> Sequence[bytes]:
    """Split a body into its manifests, so that a problem can name the manifest. At most `MANIFESTS_MAX`, none validated yet.
    Raises `ApiProblem`.
    """
    manifests = split_array(body, MANIFESTS_MAX)
    if manifests:
        return manifests
    if len(body) <= JSON_BYTES_MAX and _is_one_json_value(body) and not _is_array(body):
        return (body,)
    lines = _split_lines(body)
    return _split_values(body) if lines is None else lines


def _split_lines(body: bytes) -> list[bytes] | None:
    """Split a body with one JSON value per line; None if it has another form."""
    lines: list[bytes] = []
    for line in BytesIO(body):
        if line.strip():
            if _is_array(line) or not _is_one_json_value(line):
                return None
            _check_count(len(lines))
            lines.append(line)
    return lines or None


def _split_values(body: bytes) -> list[bytes]:
    """Split JSON values that follow each other with only blanks between them, or that are in an array."""
    pieces: list[bytes] = []
    try:
        text = body.decode()
        position = _skip_blanks(text, 0)
        is_array = text[position : position + 1] == "["
        position = _skip_blanks(text, position + 1) if is_array else position
        while position < len(text) and not (is_array and text[position] == "]"):
            _check_count(len(pieces))
            _, end = _DECODER.raw_decode(text, position)
            pieces.append(text[position:end].encode())
            position = _skip_blanks(text, end)
            if is_array and text[position : position + 1] == ",":
                position = _skip_blanks(text, position + 1)
                if text[position : position + 1] == "]":
                    raise ValueError("trailing comma in the array")
            elif is_array and text[position : position + 1] != "]":
                raise ValueError("unterminated array")
        if is_array and (position >= len(text) or _skip_blanks(text, position + 1) < len(text)):
            raise ValueError("extra data after the array")
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _too_deep() if nesting_depth(body[:JSON_BYTES_MAX]) > DEPTH_MAX else _malformed(body, str(error)) from None
    if not pieces:
        if not is_array:
            raise _malformed(body, "the body is empty")
        raise ApiProblem(422, "invalid", "the list has no manifests", cure="send at least one manifest")
    return pieces


def _skip_blanks(text: str, position: int) -> int:
    """Return the position of the next character that is not blank."""
    blanks = _BLANKS.match(text, position)
    return position if blanks is None else blanks.end()


def _check_count(count: int) -> None:
    if count >= MANIFESTS_MAX:
        raise ApiProblem(
            413,
            "too_large",
            f"the body has more than {MANIFESTS_MAX} manifests",
            cure=f"send at most {MANIFESTS_MAX} per request",
        )


def _is_array(body: bytes) -> bool:
    return body[:1] == b"[" or (body[:1].isspace() and body.lstrip()[:1] == b"[")


def _is_one_json_value(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=Raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return True


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396). The depth of both is bounded: of the target by its types, of the patch by
    `parse_strict_json`.
    """
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result
