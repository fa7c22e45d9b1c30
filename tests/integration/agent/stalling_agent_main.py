"""Runs an agent whose event loop blocks for good once a file exists: the first argument; the agent's arguments follow."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from remit.agent.agent import Agent
from remit.cli.main import remit


def main() -> None:
    file = Path(sys.argv[1])
    run = Agent.run

    async def stalling(self: Agent) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(run(self))
            while not file.exists():  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(0.02)
            time.sleep(600)  # noqa: ASYNC251 - this is the fault

    Agent.run = stalling  # type: ignore[method-assign]
    remit(["agent", *sys.argv[2:]])


if __name__ == "__main__":
    main()
