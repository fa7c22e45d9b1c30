"""JSON replies and RFC 9457 problem documents.

A problem has a stable `code` for programs and a `cure` for people. Callers decide which errors they report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.responses import Response

from remit.client.authority_client import RetriesExhausted
from remit.client.endpoint import EndpointError, NotLeader, Overloaded
from remit.law.refusals import REFUSALS
from remit.model.claims import Code, Refused
from remit.model.problems import Problem
from remit.model.wire.api_types import OPERATION_HEADER, PROBLEM_TYPE, ProblemAnswer, ProblemItem
from remit.serve.http.routes import JSON
from remit.store.protocol import Compacted, Corrupt, Invalid, StoreError

RETRY_AFTER_MS: Final = 1_000

REFUSAL_STATUSES: Final[dict[Code, int]] = {
    Code.INVALID: 422,
    Code.RESERVED: 403,
    Code.POLICY: 403,
    Code.ROLE: 403,
    Code.TENANT: 403,
    Code.NOT_OWNER: 403,
    Code.NOT_FOUND: 404,
    Code.FAULT: 500,
}
"""HTTP status of a refusal by the authority. Every other code is 409: the claim conflicts with the current state."""


_FIELD: Final = re.compile(r"((?:metadata|spec|kind)[^ :]{0,200}): ")
"""Matches the beginning of a refusal detail that concerns one field."""


class ApiProblem(Exception):
    """Raised by a handler to answer with a problem document."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        field: str = "",
        cure: str = "",
        problems: Sequence[ProblemItem] = (),
        revision: int = 0,
        retry_after_ms: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.document = ProblemAnswer(
            title=HTTPStatus(status).phrase,
            status=status,
            code=code,
            detail=detail,
            field=field,
            cure=cure,
            problems=tuple(problems),
            revision=revision,
        )
        self.headers = dict(headers or {})
        if retry_after_ms:
            self.headers["Retry-After"] = str(max(1, -(-retry_after_ms // 1000)))
        super().__init__(f"{status} {code}: {detail}")


_encode: Final = msgspec.json.Encoder().encode


def problem_response(problem: ApiProblem) -> Response:
    return Response(_encode(problem.document), problem.document.status, problem.headers, PROBLEM_TYPE)


def problem_item(problem: Problem, manifest: int | None = None) -> ProblemItem:
    return ProblemItem(field=problem.path, message=problem.message, cure=problem.cure, manifest=manifest)


def invalid_manifest(problems: Sequence[Problem]) -> ApiProblem:
    """Return one problem for all problems of a manifest. Setting a field reserved for Remit is forbidden (403), even if other
    fields are invalid.
    """
    reserved = [problem for problem in problems if problem.reserved]
    items = [problem_item(problem) for problem in (*reserved, *(problem for problem in problems if not problem.reserved))]
    return invalid_body(items, status=403, code=Code.RESERVED) if reserved else invalid_body(items)


def invalid_body(items: Sequence[ProblemItem], *, status: int = 422, code: str = "invalid") -> ApiProblem:
    """Return one document for all problems. The fields of the document describe the first one."""
    first = items[0]
    text = f"{first.field}: {first.message}" if first.field else first.message
    detail = text if len(items) == 1 else f"{len(items)} problems; the first: {text}"
    return ApiProblem(status, code, detail, field=first.field, cure=first.cure, problems=items if len(items) > 1 else ())


def refusal_problem(verdict: Refused, *, conditional: bool = False) -> ApiProblem:
    """Return the problem for a refusal of the authority. `conditional`: the caller required a revision, so that a mismatch is
    412.
    """
    status = REFUSAL_STATUSES.get(verdict.code, 409)
    if conditional and verdict.code in (Code.REVISION, Code.EXISTS, Code.NOT_FOUND):
        status = 412
    meaning = REFUSALS[verdict.code]
    field = _FIELD.match(verdict.detail)
    detail, cure = verdict.detail, meaning.cure
    if field and " | " not in detail and "; " in detail:  # the detail of a refused field carries its own fix after a semicolon
        if verdict.code is Code.INVALID:
            detail, _, cure = detail.partition("; ")
        elif verdict.code is Code.POLICY:
            detail, _, cure = detail.rpartition("; ")  # the last part: an author's reason before it may contain semicolons
    return ApiProblem(
        status,
        verdict.code.value,
        detail or meaning.meaning,
        field=field[1] if field else "",
        cure=cure,
        revision=verdict.revision,
    )


def unanswered_problem(error: RetriesExhausted, operation: str = "") -> ApiProblem:
    """Return the problem for a claim without an answer. `operation` is the id to retry under."""
    if error.outcome_unknown:
        cure = f"it may have been applied: retry with the same {OPERATION_HEADER}; it is never applied twice"
        headers = {OPERATION_HEADER: operation} if operation else None
        return ApiProblem(504, "timeout", error.reason, cure=cure, headers=headers)
    return unavailable(error.reason)


def unavailable(detail: str, *, cure: str = "nothing was done; retry shortly") -> ApiProblem:
    return ApiProblem(503, "unavailable", detail, cure=cure, retry_after_ms=RETRY_AFTER_MS)


def endpoint_problem(error: EndpointError) -> ApiProblem:
    match error:
        case Overloaded():
            detail = error.reason or "the authority is overloaded"
            wait_ms = max(error.retry_after_ms, RETRY_AFTER_MS)
            return ApiProblem(
                429, "overloaded", detail, cure="nothing was done; retry after the time in Retry-After", retry_after_ms=wait_ms
            )
        case NotLeader():
            return unavailable(error.reason or f"no leader is available{f'; try {error.hint}' if error.hint else ''}")
        case _:
            cure = "it may have been applied: retry with the same operation ids; none is applied twice"
            return ApiProblem(504, "timeout", error.reason or "the authority did not answer", cure=cure)


def store_problem(error: StoreError) -> ApiProblem:
    match error:
        case Compacted():
            return ApiProblem(
                410,
                "compacted",
                str(error),
                cure="list again, then continue from the revision of that list",
                revision=error.oldest,
            )
        case Invalid():
            return ApiProblem(400, "malformed", str(error), cure="correct the request: the store cannot represent it")
        case Corrupt():
            return ApiProblem(500, "fault", str(error), cure="the store is corrupt: restore a backup")
        case _:
            return unavailable(str(error))


NO_HEADERS: Final[Mapping[str, str]] = {}


class BytesResponse(Response):
    """A `Response` whose body is bytes already. It sends the same headers without Starlette's per-type conversions, which cost
    more than the rest of a small reply.
    """

    def __init__(self, body: bytes, status: int = 200, headers: Mapping[str, str] = NO_HEADERS, media: str = JSON) -> None:
        self.status_code, self.body, self.media_type, self.background = status, body, media, None
        raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        raw_headers.append((b"content-length", b"%d" % len(body)))
        raw_headers.append((b"content-type", _media_bytes(media)))
        self.raw_headers = raw_headers


@cache
def _media_bytes(media: str) -> bytes:
    return media.encode("latin-1")
