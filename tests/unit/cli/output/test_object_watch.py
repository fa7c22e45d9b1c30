"""`get workloads -w`: the progress of a workload is requested again when it or its replicas change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from remit.cli.output import object_watch
from remit.cli.output.object_list import ListOptions
from remit.cli.output.object_watch import show_watch
from remit.cli.session.contexts import ServerAddress
from remit.cli.session.server_call import CommandContext
from remit.client.api import Changed, Synced, Unanswered
from remit.client.watch import ListResult
from remit.model.kinds import Template, Workload, WorkloadSpec
from remit.model.metadata import Metadata, RecordMetadata
from remit.model.records import Replica, ReplicaSpec
from remit.model.wire.api_types import WorkloadProgressItem

WEB = Workload(
    metadata=Metadata(name="web", tenant="risk"),
    spec=WorkloadSpec(type="service", template=Template(command=("true",)), replicas=3),
)
REPLICA = Replica(metadata=RecordMetadata(name="web-0", tenant="risk"), spec=ReplicaSpec(workload="web", generation=1))


class ChangingServer:
    """A fake server with one workload, of which one more replica is serving at every request. The second request fails."""

    def __init__(self) -> None:
        self.requests, self.replica_watch_after = 0, None

    def _progress(self) -> WorkloadProgressItem:
        self.requests += 1
        if self.requests == 2:
            raise Unanswered("the server restarts")
        return WorkloadProgressItem(tenant="risk", name="web", revision=1, desired=3, stages={"serving": self.requests})

    async def workload_progress(self, name: str, *, tenant: str) -> WorkloadProgressItem:
        assert (name, tenant) == ("web", "risk")
        return self._progress()

    async def list_workload_progress(self, *, tenant: str) -> ListResult[WorkloadProgressItem]:
        return ListResult([self._progress()], 1)

    async def watch(self, kind: type, *, after: Any = None, **options: Any) -> AsyncIterator[Any]:
        if kind is Workload:
            yield Changed(WEB, 7)
            yield Synced(7)
        else:
            self.replica_watch_after = after
            for _ in range(50):
                yield Changed(REPLICA, 8)
        await asyncio.Event().wait()


def test_changes_of_replicas_are_combined_into_few_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(object_watch, "REFRESH_PAUSE_MS", 1)

    server: Any = ChangingServer()
    context = CommandContext(ServerAddress("http://127.0.0.1:7420", "token", "risk"))

    async def watch() -> None:
        async with asyncio.timeout(0.5):
            await show_watch(server, context, ["Workload"], (), ListOptions())

    with suppress(TimeoutError):
        asyncio.run(watch())
    assert server.requests == 3, "one for the table, one that fails, and one more for all changes"
    assert server.replica_watch_after == 7
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[3:5] for row in rows] == [["serving", "1"], ["serving", "3"]]
