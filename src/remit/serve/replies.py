"""How is a whole answer made ready to be sent? Bytes with a few headers; what they say is the handler's affair."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

from starlette.responses import Response

from remit.serve.routes import JSON

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
