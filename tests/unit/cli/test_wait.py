"""What can be waited for, and how is it told?"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from click.testing import CliRunner, Result

import remit.cli.wait as wait
from remit.cli.main import remit
from remit.model.fields import Condition, Metadata
from remit.model.kinds import Template, Workload, WorkloadSpec, WorkloadStatus

FAILED = Condition(type="Failed", status="True", reason="RetriesExhausted", observed_generation=1)


class Server:
    """One that has one job, which stands as it is told."""

    def __init__(self, *said: Condition) -> None:
        self._said = said

    async def get(self, kind: type, name: str, *, tenant: str) -> Workload:
        assert kind is Workload
        return Workload(
            metadata=Metadata(name=name, tenant=tenant, generation=1),
            spec=WorkloadSpec(type="job", template=Template(command=("true",))),
            status=WorkloadStatus(self._said),
        )


def waits(monkeypatch: pytest.MonkeyPatch, server: Server, *words: str) -> Result:
    def ask(asked: Any, doing: Any) -> None:
        del asked
        asyncio.run(doing(server))

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
