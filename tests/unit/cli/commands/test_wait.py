"""Tests of the goals and messages of `remit wait`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

import remit.cli.commands.rollout as wait
from remit.cli.main import remit
from remit.client.api_caller import ApiError
from remit.model.kinds import Template, Workload, WorkloadSpec, WorkloadStatus
from remit.model.metadata import Condition, Metadata, RecordMetadata
from remit.model.records import Replica, ReplicaSpec

FAILED = Condition(type="Failed", status="True", reason="RetriesExhausted", observed_generation=1)
COMPLETE = Condition(type="Complete", status="True", reason="Done", observed_generation=1)
TEST_TIMEOUT_S = 20
"""Shorter than the default timeout of a wait."""


class Server:
    """Fake server with one workload that has the given conditions, and that is deleted after `reads` reads."""

    def __init__(self, *condition: Condition, kind: Any = "job", reads: int = 1_000) -> None:
        self._conditions, self._kind, self._reads = condition, kind, reads

    async def get(self, kind: type, name: str, *, tenant: str) -> Workload | Replica:
        self._reads -= 1
        if self._reads < 0:
            raise ApiError(404, "NotFound")
        if kind is Replica:
            return Replica(metadata=RecordMetadata(name=name, tenant=tenant), spec=ReplicaSpec("nightly", 1))
        assert kind is Workload
        return Workload(
            metadata=Metadata(name=name, tenant=tenant, generation=1),
            spec=WorkloadSpec(type=self._kind, template=Template(command=("true",))),
            status=WorkloadStatus(self._conditions),
        )


def run_wait(monkeypatch: pytest.MonkeyPatch, server: Server, *args: str) -> Result:
    def call_server(context: Any, operation: Any) -> None:
        del context
        asyncio.run(asyncio.wait_for(operation(server), TEST_TIMEOUT_S))

    monkeypatch.setattr(wait, "call_server", call_server)
    env = {"REMIT_TOKEN": "token-of-a-member-unused"}
    return CliRunner().invoke(remit, ["wait", "--server", "http://127.0.0.1:7420", *args], prog_name="remit", env=env)


def test_wait_for_failed_succeeds_for_a_failed_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_wait(monkeypatch, Server(FAILED), "workload/nightly", "--for", "failed")
    assert (result.exit_code, result.stdout) == (0, "workload/nightly has failed\n"), result.output
    pending = run_wait(monkeypatch, Server(), "workload/nightly", "--for=failed", "--timeout", "1ms")
    assert pending.exit_code == 1 and "has no condition Failed yet" in pending.stderr
    usage_error = run_wait(monkeypatch, Server(), "replica/nightly-0", "--for=failed")
    assert usage_error.exit_code == 2 and "--for=phase=failed" in usage_error.stderr


@pytest.mark.parametrize(
    ("condition", "goal", "message"),
    [
        (COMPLETE, "failed", "it is Complete (Done) and can no longer become Failed"),
        (COMPLETE, "condition=Failed", "it is Complete (Done) and can no longer become Failed"),
        (FAILED, "condition=Complete", "it is Failed (RetriesExhausted) and can no longer become Complete"),
    ],
)
def test_wait_for_the_opposite_outcome_of_a_job_fails_at_once(
    monkeypatch: pytest.MonkeyPatch, condition: Condition, goal: str, message: str
) -> None:
    result = run_wait(monkeypatch, Server(condition), "workload/nightly", f"--for={goal}")
    assert result.exit_code == 1, result.output
    assert f"workload/nightly: {message}\n  for details: remit describe workload/nightly\n" in result.stderr
    changed = replace(condition, observed_generation=0)
    pending = run_wait(monkeypatch, Server(changed), "workload/nightly", f"--for={goal}", "--timeout", "1ms")
    assert "timed out after" in pending.stderr, "the outcome of an earlier generation must be ignored"


@pytest.mark.parametrize(
    ("goal", "outcome"), [("failed", "failed"), ("complete", "complete"), ("condition=Complete", "complete")]
)
def test_wait_for_the_end_of_a_service_fails_at_once(monkeypatch: pytest.MonkeyPatch, goal: str, outcome: str) -> None:
    result = run_wait(monkeypatch, Server(kind="service"), "workload/web", f"--for={goal}")
    assert result.exit_code == 1, result.output
    assert (
        f"it is a service; only jobs can become {outcome}\n  wait until it is ready: remit wait workload/web --for=ready"
        in result.stderr
    )


@pytest.mark.parametrize(
    "args",
    [
        ("workload/nightly", "--for=failed"),
        ("workload/nightly", "--for=condition=Admitted"),
        ("replica/nightly-0", "--for=phase=serving"),
        ("replica/nightly-0", "--for=ready"),
        ("replica/nightly-0", "--for=complete"),
    ],
)
def test_object_deleted_during_the_wait_fails_at_once(monkeypatch: pytest.MonkeyPatch, args: tuple[str, str]) -> None:
    result = run_wait(monkeypatch, Server(reads=2), *args)
    assert result.exit_code == 1, result.output
    assert f"{args[0]}: it was deleted in the meantime\n  apply it again, then wait again\n" in result.stderr
