"""Tests of the output of `remit token create`."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner, Result

from remit.cli.commands import token
from remit.cli.main import remit

ENV = {"REMIT_TOKEN": "token-of-an-admin-unused"}


@pytest.fixture
def accepting_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the server by one that accepts every request."""

    def call_server(context: Any, operation: Any) -> None:
        del context, operation

    monkeypatch.setattr(token, "call_server", call_server)


def join_token(*nodes: str) -> Result:
    args = ["token", "create", "--server", "http://127.0.0.1:7420", "--role", "join"]
    return CliRunner().invoke(remit, [*args, *(arg for node in nodes for arg in ("--node", node))], prog_name="remit", env=ENV)


@pytest.mark.usefixtures("accepting_server")
@pytest.mark.parametrize(
    ("nodes", "hint"),
    [
        (["n7"], "--data agent --name n7\n"),
        (["n-2", "n-1"], "--data agent --name n --nodes 2\n"),
        ([f"rack-a-{number}" for number in range(1, 12)], "--data agent --name rack-a --nodes 11\n"),
        (["n-1", "n-3"], "create one join token per agent"),
        (["n-1", "m-2"], "create one join token per agent"),
        (["alpha", "beta"], "create one join token per agent"),
    ],
)
def test_join_token_goes_to_stdout_and_the_agent_command_to_stderr(nodes: list[str], hint: str) -> None:
    result = join_token(*nodes)
    assert result.exit_code == 0, result.output
    created = result.stdout.strip().splitlines()[-1]
    assert created.startswith("remit_") and created not in result.stderr and "remit_" not in result.stderr
    assert hint in result.stderr
    assert ("--join FILE" in result.stderr) is ("one join token per agent" not in hint)
