"""Does a server answer as it describes itself? What schemathesis makes of its OpenAPI is asked of a real one, good and bad.

Of every operation, as an admin and as a tenant's member; the components' door as a component. Whatever is sent: no 500, a
status and a body that are described, and a problem document for whatever is refused. The seed is fixed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

from remit.model.identity import token_digest
from remit.model.wire.api_types import PROBLEM_TYPE
from remit.serve.http.openapi import openapi_document
from remit.serve.http.route_table import ROUTES
from tests.integration.serve.server_process import Server
from tests.properties.effort import tries
from tests.unit.serve.in_memory_server import node, tenant, workload

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

ANSWER_S: Final = 10.0
CONVERSING: Final = {route.name for route in ROUTES if route.streams or route.duplex} | {"backup"}
"""These go on for as long as somebody talks or listens."""
ENDLESS: Final = ("watch", "follow")
CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
QUICK, LONG = 4, 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("described") / "data", "127.0.0.1:0", "--log-level", "error") as found:
        found.until_ready()
        limits = {"requestsPerSecond": 100_000, "requestsBurst": 100_000}
        found.must("POST", "/v1/tenants", tenant("acme", limits=limits))
        found.must("POST", "/v1/tenants/acme/workloads", workload("web"))
        found.must("POST", "/v1/nodes", node("n1"))
        for role in ("member", "scheduler"):
            spec = {"role": role, "digest": token_digest(_token(role)), "expires": "2999-01-01T00:00:00Z", "subject": role}
            spec |= {"tenant": "acme"} if role == "member" else {}
            found.must(
                "POST", "/v1/tokens", {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": role}, "spec": spec}
            )
        until = time.monotonic() + 10
        while found.ask("GET", "/v1/status", Authorization=f"Bearer {_token('member')}").status != 200:
            assert time.monotonic() < until
        yield found
        assert found.end() == (0, "")


def _token(role: str) -> str:
    return f"remit_{role}_{'x' * 32}"


def _operations() -> list[Any]:
    schema: Any = schemathesis.openapi.from_dict(openapi_document(ROUTES))
    found = [result.ok() for result in schema.get_all_operations()]
    return [one for one in found if one.definition.raw["operationId"] not in CONVERSING]


OPERATIONS: Final = _operations()


@pytest.mark.smoke
def test_everything_that_is_served_is_described() -> None:
    assert len(OPERATIONS) + len(CONVERSING) == len(ROUTES)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["good", "bad"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: str(one.definition.raw["operationId"]))
def test_it_answers_as_it_says(operation: Any, mode: GenerationMode, server: Server) -> None:
    route = next(route for route in ROUTES if route.name == operation.definition.raw["operationId"])
    tokens = [server.token, _token("member")] if "user" in route.audience else [_token("scheduler")]

    @seed(1)
    @settings(
        tries(QUICK, LONG), phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None, database=None
    )
    @given(operation.as_strategy(generation_mode=mode))
    def asks(case: Any) -> None:
        for name in ENDLESS:
            (case.query or {}).pop(name, None)
        for token in tokens:
            headers = {"Authorization": f"Bearer {token}"}
            reply = case.call(base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=ANSWER_S)
            case.validate_response(reply, checks=CHECKS, headers=headers)
            refused = reply.status_code >= 400
            assert refused == reply.headers.get("content-type", [""])[0].startswith(PROBLEM_TYPE), reply.status_code

    try:
        asks()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE and not operation.definition.raw.get(
            "parameters"
        )  # there is nothing to get wrong
    assert Path(f"/proc/{server.process.pid}").exists()
