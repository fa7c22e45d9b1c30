"""How does the command line tell what a server refused?"""

from __future__ import annotations

import pytest

from remit.cli.reaching import refusal
from remit.client.calling import ApiError


@pytest.mark.parametrize("detail", ["spec.tenant: it cannot change", "it cannot change"])
def test_the_field_that_was_refused_is_named_once(detail: str) -> None:
    told = refusal(ApiError(422, "invalid", detail, "spec.tenant", "leave it out"), "workload/w")
    assert told.format_message().splitlines()[0] == "workload/w: spec.tenant: it cannot change"
