"""Tests of the formatting of error responses."""

from __future__ import annotations

import pytest

from remit.cli.session.server_call import command_error
from remit.client.api_caller import ApiError


@pytest.mark.parametrize("detail", ["spec.tenant: it cannot change", "it cannot change"])
def test_refused_field_is_named_once(detail: str) -> None:
    error = command_error(ApiError(422, "invalid", detail, "spec.tenant", "leave it out"), "workload/w")
    assert error.format_message().splitlines()[0] == "workload/w: spec.tenant: it cannot change"


@pytest.mark.parametrize(
    ("detail", "fix"),
    [
        ("token malt was revoked", "ask an admin for a new token"),
        ("token malt expired at 2026-01-01T00:00:00Z", "ask an admin for a new token"),
        ("the token is not valid in this scope", "remit context list"),
    ],
)
def test_unauthenticated_error_has_a_fix_for_its_cause(detail: str, fix: str) -> None:
    assert fix in command_error(ApiError(401, "unauthenticated", detail, "", "")).format_message()
