"""JSON replies and RFC 9457 problem documents.

A code for programs and a cure for people; what has failed is decided elsewhere.

Bytes with a few headers; what they say is the handler's affair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.responses import Response

from remit.client.authority_client import NoAnswer
from remit.client.endpoint import NoVerdict, Overloaded, Turned
from remit.law.refusals import REFUSALS
from remit.model.claims import Code, Refused
from remit.model.problems import Problem
from remit.model.wire.api_types import OPERATION_HEADER, PROBLEM_TYPE, ProblemAnswer, ProblemItem
from remit.serve.http.routes import JSON
from remit.store.protocol import Compacted, Corrupt, Invalid, StoreError

RETRY_AFTER_MS: Final = 1_000

STATUSES: Final[dict[Code, int]] = {
    Code.INVALID: 422,
    Code.RESERVED: 403,
    Code.POLICY: 403,
    Code.ROLE: 403,
    Code.TENANT: 403,
    Code.NOT_OWNER: 403,
    Code.NOT_FOUND: 404,
    Code.FAULT: 500,
}
"""Of a refusal of the authority; any other is 409: it stands against what is there."""


_FIELD: Final = re.compile(r"((?:metadata|spec|kind)[^ :]{0,200}): ")
"""How the authority's words begin that are about one field."""


class Failure(Exception):
    """What a handler raises to answer with a problem."""

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


def problem(failure: Failure) -> Response:
    return Response(_encode(failure.document), failure.document.status, failure.headers, PROBLEM_TYPE)


def breach(found: Problem, manifest: int | None = None) -> ProblemItem:
    return ProblemItem(field=found.path, message=found.message, cure=found.cure, manifest=manifest)


def wrong(found: Sequence[Problem]) -> Failure:
    """Of what a manifest says. What only Remit may say is forbidden rather than wrong, whatever else is."""
    reserved = [problem for problem in found if problem.reserved]
    items = [breach(problem) for problem in (*reserved, *(problem for problem in found if not problem.reserved))]
    return invalid(items, status=403, code=Code.RESERVED) if reserved else invalid(items)


def invalid(found: Sequence[ProblemItem], *, status: int = 422, code: str = "invalid") -> Failure:
    """One document for all that is wrong; the first is told in its own fields as well."""
    first = found[0]
    words = f"{first.field}: {first.message}" if first.field else first.message
    detail = words if len(found) == 1 else f"{len(found)} problems; the first: {words}"
    return Failure(status, code, detail, field=first.field, cure=first.cure, problems=found if len(found) > 1 else ())


def refused(verdict: Refused, *, conditional: bool = False) -> Failure:
    """What the authority refused. `conditional`: the asker named the revision that it must stand at."""
    status = STATUSES.get(verdict.code, 409)
    if conditional and verdict.code in (Code.REVISION, Code.EXISTS, Code.NOT_FOUND):
        status = 412
    meaning = REFUSALS[verdict.code]
    field = _FIELD.match(verdict.detail)
    detail, cure = verdict.detail, meaning.cure
    if field and " | " not in detail and "; " in detail:  # whoever refused one field has said what to write there
        if verdict.code is Code.INVALID:
            detail, _, cure = detail.partition("; ")
        elif verdict.code is Code.POLICY:
            detail, _, cure = detail.rpartition("; ")  # last: before that comes its author's reason, in any words
    return Failure(
        status,
        verdict.code.value,
        detail or meaning.meaning,
        field=field[1] if field else "",
        cure=cure,
        revision=verdict.revision,
    )


def unanswered(error: NoAnswer, operation: str = "") -> Failure:
    """`operation` is the id under which to ask again."""
    if error.silent:
        cure = f"it may have happened: send the same again with the same {OPERATION_HEADER}, which never does it twice"
        headers = {OPERATION_HEADER: operation} if operation else None
        return Failure(504, "timeout", error.why, cure=cure, headers=headers)
    return unavailable(error.why)


def unavailable(why: str, *, cure: str = "nothing was done; ask again a little later") -> Failure:
    return Failure(503, "unavailable", why, cure=cure, retry_after_ms=RETRY_AFTER_MS)


def no_verdict(error: NoVerdict) -> Failure:
    match error:
        case Overloaded():
            why = error.why or "more is asked than can be decided"
            wait_ms = max(error.retry_after_ms, RETRY_AFTER_MS)
            return Failure(
                429, "overloaded", why, cure="nothing was done; ask again after the time named", retry_after_ms=wait_ms
            )
        case Turned():
            return unavailable(error.why or f"nobody leads here just now{f'; {error.hint} may' if error.hint else ''}")
        case _:
            cure = "it may have happened: send the same again with the same ids, which never does it twice"
            return Failure(504, "timeout", error.why or "the authority did not answer", cure=cure)


def store_failed(error: StoreError) -> Failure:
    match error:
        case Compacted():
            return Failure(410, "compacted", str(error), cure="list again, then go on from its revision", revision=error.oldest)
        case Invalid():
            return Failure(400, "malformed", str(error), cure="ask for something that this store can hold")
        case Corrupt():
            return Failure(500, "fault", str(error), cure="restore a backup")
        case _:
            return unavailable(str(error))


NONE: Final[Mapping[str, str]] = {}


class Reply(Response):
    """A `Response` whose body is bytes already: the same headers leave, without asking of each what it might be."""

    def __init__(self, body: bytes, status: int = 200, headers: Mapping[str, str] = NONE, media: str = JSON) -> None:
        self.status_code, self.body, self.media_type, self.background = status, body, media, None
        told = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        told.append((b"content-length", b"%d" % len(body)))
        told.append((b"content-type", _spelt(media)))
        self.raw_headers = told


@cache
def _spelt(media: str) -> bytes:
    return media.encode("latin-1")
