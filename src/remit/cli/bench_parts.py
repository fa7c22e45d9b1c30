"""Which processes does a benchmark run against? Those of a scope, as people start them; nothing is decided here.

Each is a process of its own in one directory, so what is measured is what is run in earnest. What they do is not known here.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, Process  # noqa: TID251 - children that are started and ended as a person would
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from remit.agent.directory import Directory
from remit.cli.token_files import issued_in
from remit.client.api import Api
from remit.model.identity import TokenRole
from remit.model.kinds import Node, NodeHealth
from remit.world import procfs
from remit.world.ids import RandomIds
from remit.world.promises import Clock

BEAT: Final = "2s"
START_MS_MAX: Final = 60_000
LAST_LINES: Final = 5
NAME: Final = "bench"


class NotUp(Exception):
    """A part does not come up; the last that it said is in the words."""


class Cluster:
    """All parts in `root`. `start` returns once every node is ready; whoever called it calls `end`."""

    def __init__(self, root: Path, nodes: int, clock: Clock) -> None:
        self._root, self._nodes, self._clock = root, nodes, clock
        self._parts: dict[str, Process] = {}
        self.store, self.agent = root / "server", root / "agent"
        self.token_file = self.store / "token"
        self.url = ""

    def api(self) -> Api:
        return Api(self.url, self.token_file.read_text().strip())

    async def start(self) -> None:
        await self._start("server", "--data", str(self.store), "--listen", "127.0.0.1:0")
        self.url = (await self._said("server", " at http")).partition(" at ")[2].partition(",")[0]
        nodes = [f"{NAME}-{number}" for number in range(1, self._nodes + 1)]
        played = ("--name", NAME, "--nodes", str(self._nodes), "--cpu", "64", "--memory", "256Gi", "--data", str(self.agent))
        async with self.api() as api:
            await self._start("scheduler", *await self._asks(api, "scheduler"))
            await self._start("controllers", *await self._asks(api, "controllers"))
            await self._start("agent", *await self._asks(api, "agent", nodes), *played, "--end-work")
            await self._until_ready(api)

    async def _asks(self, api: Api, role: TokenRole, nodes: Sequence[str] = ()) -> tuple[str, ...]:
        """Whom a part asks, and as whom: each has a token of its own."""
        file = self._root / f"{role}.token"
        await issued_in(file, api, RandomIds(), role, nodes=nodes)
        return "--server", self.url, "--token-file", str(file)

    async def end(self) -> None:
        """The agent first: it takes its keeper, and all that this has started, with it."""
        for name in ("agent", "controllers", "scheduler", "server"):
            process = self._parts.get(name)
            if process is not None and process.returncode is None:
                process.terminate()
                await process.wait()

    def cpu_ms(self) -> dict[str, int]:
        """What each part has taken so far. The keeper's is with all that it has started: helpers, and the work itself."""
        taken = {name: _cpu_ms([procfs.member(process.pid)]) for name, process in self._parts.items()}
        keeper = Directory(self.agent).keeper_pid
        if keeper.exists():
            taken["keeper"] = _cpu_ms(procfs.tree(int(keeper.read_text())))
        return taken

    async def _start(self, name: str, *words: str) -> None:
        with (self._root / f"{name}.log").open("ab") as log:
            self._parts[name] = await asyncio.create_subprocess_exec(  # noqa: TID251 - as above
                sys.executable, "-m", "remit.cli", name, *words, "--beat", BEAT, stdin=DEVNULL, stdout=log, stderr=log
            )

    async def _said(self, name: str, words: str) -> str:
        until_ms = self._clock.now_ms() + START_MS_MAX
        while True:
            lines = self._lines(name)
            for line in lines:
                if words in line:
                    return line
            if self._parts[name].returncode is not None or self._clock.now_ms() > until_ms:
                raise NotUp(f"`remit {name}` does not come up: {' / '.join(lines[-LAST_LINES:]) or 'it said nothing'}")
            await self._clock.sleep_ms(20)

    async def _until_ready(self, api: Api) -> None:
        until_ms = self._clock.now_ms() + START_MS_MAX
        while True:
            found: Sequence[Node] = (await api.list(Node)).items
            if sum(node.status.health is NodeHealth.READY for node in found) >= self._nodes:
                return
            if self._clock.now_ms() > until_ms or self._parts["agent"].returncode is not None:
                said = " / ".join(self._lines("agent")[-LAST_LINES:])
                raise NotUp(f"{self._nodes} nodes are not ready after {START_MS_MAX // 1000} s: {said or 'nothing was said'}")
            await self._clock.sleep_ms(50)

    def _lines(self, name: str) -> list[str]:
        return (self._root / f"{name}.log").read_text(errors="replace").splitlines()


def _cpu_ms(members: Sequence[procfs.Member | None]) -> int:
    return sum(one.cpu_ms for one in members if one is not None)
