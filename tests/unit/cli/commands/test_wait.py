"""What can be waited for, and how is it told?"""

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
PATIENCE_S = 20
"""Long before a wait of a minute would be over."""


class Server:
    """One that has one workload, which stands as it is told; after `looks` it is gone."""

    def __init__(self, *said: Condition, kind: Any = "job", looks: int = 1_000) -> None:
        self._said, self._kind, self._looks = said, kind, looks

    async def get(self, kind: type, name: str, *, tenant: str) -> Workload | Replica:
        self._looks -= 1
        if self._looks < 0:
            raise ApiError(404, "NotFound")
        if kind is Replica:
            return Replica(metadata=RecordMetadata(name=name, tenant=tenant), spec=ReplicaSpec("nightly", 1))
        assert kind is Workload
        return Workload(
            metadata=Metadata(name=name, tenant=tenant, generation=1),
            spec=WorkloadSpec(type=self._kind, template=Template(command=("true",))),
            status=WorkloadStatus(self._said),
        )


def waits(monkeypatch: pytest.MonkeyPatch, server: Server, *words: str) -> Result:
    def ask(asked: Any, doing: Any) -> None:
        del asked
        asyncio.run(asyncio.wait_for(doing(server), PATIENCE_S))

    monkeypatch.setattr(wait, "ask", ask)
    env = {"REMIT_TOKEN": "a-members-token-that-nobody-reads"}
    return CliRunner().invoke(remit, ["wait", "--server", "http://127.0.0.1:7420", *words], prog_name="remit", env=env)


def test_that_a_job_has_failed_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done = waits(monkeypatch, Server(FAILED), "workload/nightly", "--for", "failed")
    assert (done.exit_code, done.stdout) == (0, "workload/nightly has failed\n"), done.output
    still = waits(monkeypatch, Server(), "workload/nightly", "--for=failed", "--timeout", "1ms")
    assert still.exit_code == 1 and "nothing is said of Failed yet" in still.stderr
    other = waits(monkeypatch, Server(), "replica/nightly-0", "--for=failed")
    assert other.exit_code == 2 and "--for=phase=failed" in other.stderr


@pytest.mark.parametrize(
    ("said", "goal", "told"),
    [
        (COMPLETE, "failed", "it is Complete (Done), and does not become Failed any more"),
        (COMPLETE, "condition=Failed", "it is Complete (Done), and does not become Failed any more"),
        (FAILED, "condition=Complete", "it is Failed (RetriesExhausted), and does not become Complete any more"),
    ],
)
def test_a_job_that_has_ended_is_not_waited_for_to_end_otherwise(
    monkeypatch: pytest.MonkeyPatch, said: Condition, goal: str, told: str
) -> None:
    done = waits(monkeypatch, Server(said), "workload/nightly", f"--for={goal}")
    assert done.exit_code == 1, done.output
    assert f"workload/nightly: {told}\n  see how it went: remit describe workload/nightly\n" in done.stderr
    changed = replace(said, observed_generation=0)
    still = waits(monkeypatch, Server(changed), "workload/nightly", f"--for={goal}", "--timeout", "1ms")
    assert "not reached within" in still.stderr, "how an earlier generation ended says nothing of this one"


def test_a_service_is_not_waited_for_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    done = waits(monkeypatch, Server(kind="service"), "workload/web", "--for=failed")
    assert done.exit_code == 1, done.output
    assert "only jobs become Failed\n  wait until it stands: remit wait workload/web --for=ready" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("workload/nightly", "--for=failed"),
        ("workload/nightly", "--for=condition=Admitted"),
        ("replica/nightly-0", "--for=phase=serving"),
        ("replica/nightly-0", "--for=ready"),
        ("replica/nightly-0", "--for=complete"),
    ],
)
def test_what_is_deleted_meanwhile_is_not_waited_for_any_longer(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, str]
) -> None:
    done = waits(monkeypatch, Server(looks=2), *words)
    assert done.exit_code == 1, done.output
    assert f"{words[0]}: it was deleted meanwhile\n  apply it again, and wait anew\n" in done.stderr
