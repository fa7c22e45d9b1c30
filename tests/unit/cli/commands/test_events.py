"""Tests of the filter and the empty texts of `remit events`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner, Result

import remit.cli.commands.events as events
from remit.cli.main import remit
from remit.model.wire.api_types import HistoryEvent
from remit.serve.diagnostics.history import EVENTS_LIMIT_MAX


def event(number: int, type_: Any) -> HistoryEvent:
    at = f"2026-01-01T00:00:{number:02d}Z"
    return HistoryEvent(
        at=at, first=at, type=type_, reason=f"Reason{number}", regarding="node/n1", source="nodes", message="", revision=number
    )


class Server:
    """Fake server that returns the latest of its events."""

    def __init__(self, *recorded: HistoryEvent) -> None:
        self._events = recorded

    async def account(self, regarding: str = "", *, limit: int) -> Sequence[HistoryEvent]:
        del regarding
        return self._events[-limit:]


def run_events(monkeypatch: pytest.MonkeyPatch, server: Server, *args: str) -> Result:
    monkeypatch.setattr(events, "call_server", lambda context, operation: asyncio.run(operation(server)))
    env = {"REMIT_TOKEN": "token-of-a-member-unused"}
    return CliRunner().invoke(remit, ["events", "--server", "http://127.0.0.1:7420", *args], prog_name="remit", env=env)


def test_limit_counts_only_events_of_the_requested_type(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(*(event(number, "Warning" if number < 5 else "Normal") for number in range(20)))
    result = run_events(monkeypatch, server, "--type", "warning", "--limit", "2")
    assert [line.split()[1] for line in result.stdout.splitlines()[1:]] == ["Reason3", "Reason4"], result.output


@pytest.mark.parametrize(
    ("recorded", "args", "text"),
    [
        (0, (), "no events recorded\n"),
        (0, ("--type", "Warning", "--for", "node/n1"), "no events recorded for node/n1\n"),
        (1, ("--type", "warning"), "no Warning event among the latest 1\n"),
        (3, ("--type", "Warning", "--for", "node/n1"), "no Warning event among the latest 3 for node/n1\n"),
    ],
)
def test_empty_output_states_what_was_searched(
    monkeypatch: pytest.MonkeyPatch, recorded: int, args: tuple[str, ...], text: str
) -> None:
    result = run_events(monkeypatch, Server(*(event(number, "Normal") for number in range(recorded))), *args)
    assert (result.stdout, result.stderr) == ("", text)


def test_largest_limit_is_that_of_the_server() -> None:
    assert events.LIMIT_MAX == EVENTS_LIMIT_MAX
