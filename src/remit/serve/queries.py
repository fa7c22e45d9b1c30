"""What does a query ask for? Each field by its name and type, within bounds; one that the route does not have is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from remit.model.problems import did_you_mean, escaped, meant, one_of, shown
from remit.serve.failures import Failure
from remit.serve.routes import Parameter

QUERY_BYTES_MAX: Final = 48 << 10
QUERY_FIELDS_MAX: Final = 64


class Fields:
    """What may stand in the query of a route, and what counts where it does not."""

    __slots__ = ("defaults", "known")

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.known = {one.name: one for one in parameters if one.place == "query"}
        self.defaults = {name: one.default for name, one in self.known.items()}


def read_query(raw: bytes, fields: Fields) -> dict[str, Any]:
    known, found = fields.known, dict(fields.defaults)
    if not raw:
        return found
    if len(raw) > QUERY_BYTES_MAX:
        raise Failure(414, "too_large", f"the query has more than {QUERY_BYTES_MAX} bytes", cure="use shorter selectors")
    try:
        pairs = parse_qsl(raw.decode(), keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX, errors="strict")
    except (ValueError, UnicodeDecodeError) as error:
        raise Failure(
            400, "malformed", f"the query cannot be read ({error})", cure="write it as name=value&name=value"
        ) from None
    seen: set[str] = set()
    for name, value in pairs:
        parameter = known.get(name)
        if parameter is None:
            cure = did_you_mean(meant(name, known)) or (
                f"known here: {one_of(known)}" if known else "nothing is asked for here"
            )
            raise Failure(400, "malformed", f"the query has no {shown(name)}", field=escaped(name), cure=cure)
        if name in seen:
            raise Failure(400, "malformed", f"{name} stands in the query twice", field=name, cure="keep one of the two")
        seen.add(name)
        found[name] = _read(parameter, value)
    return found


def _read(parameter: Parameter, value: str) -> Any:
    try:
        return msgspec.convert(value, parameter.type, strict=False)
    except msgspec.ValidationError as error:
        detail = f"{parameter.name}={shown(value)} cannot be read: {escaped(str(error))}"
        raise Failure(400, "malformed", detail, field=parameter.name, cure=parameter.summary) from None
