"""How does the command line tell what a server refused?"""

from __future__ import annotations

import pytest

from remit.cli.session.server_call import command_error
from remit.client.api_caller import ApiError


@pytest.mark.parametrize("detail", ["spec.tenant: it cannot change", "it cannot change"])
def test_the_field_that_was_refused_is_named_once(detail: str) -> None:
    told = command_error(ApiError(422, "invalid", detail, "spec.tenant", "leave it out"), "workload/w")
    assert told.format_message().splitlines()[0] == "workload/w: spec.tenant: it cannot change"


@pytest.mark.parametrize(
    ("reason", "cure"),
    [
        ("token_revoked", "make another"),
        ("token_expired", "make another"),
        ("", "remit context list"),
    ],
)
def test_who_is_not_known_hears_what_helps(reason: str, cure: str) -> None:
    assert cure in command_error(ApiError(401, "unauthenticated", "the token is refused", reason=reason)).format_message()
