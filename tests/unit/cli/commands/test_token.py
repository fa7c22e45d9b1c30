"""What is told to whoever makes a token, and where?"""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner, Result

from remit.cli.commands import token
from remit.cli.main import remit

ENV = {"REMIT_TOKEN": "an-admins-token-that-nobody-reads"}


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes whatever it is told."""

    def ask(asked: Any, doing: Any) -> None:
        del asked, doing

    monkeypatch.setattr(token, "ask", ask)


def join_token(*nodes: str) -> Result:
    words = ["token", "create", "--server", "http://127.0.0.1:7420", "--role", "join"]
    return CliRunner().invoke(
        remit, [*words, *(word for node in nodes for word in ("--node", node))], prog_name="remit", env=ENV
    )


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        (["n7"], "--data agent --name n7\n"),
        (["n-2", "n-1"], "--data agent --name n --nodes 2\n"),
        ([f"rack-a-{number}" for number in range(1, 12)], "--data agent --name rack-a --nodes 11\n"),
        (["n-1", "n-3"], "make a join token of each other one"),
        (["n-1", "m-2"], "make a join token of each other one"),
        (["alpha", "beta"], "make a join token of each other one"),
    ],
)
def test_a_join_token_is_told_with_the_agent_that_it_is_for__and_on_stdout_alone(nodes: list[str], told: str) -> None:
    result = join_token(*nodes)
    assert result.exit_code == 0, result.output
    made = result.stdout.strip().splitlines()[-1]
    assert made.startswith("remit_") and made not in result.stderr and "remit_" not in result.stderr
    assert told in result.stderr
    assert ("--join FILE" in result.stderr) is ("each other" not in told)
