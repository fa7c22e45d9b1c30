"""Media types of requests and responses."""

from __future__ import annotations

from typing import Final

from remit.model.wire.api_types import LINES_TYPE, PATCH_TYPE

JSON: Final = "application/json"
NDJSON: Final = LINES_TYPE
MERGE_PATCH: Final = PATCH_TYPE
TEXT: Final = "text/plain"
