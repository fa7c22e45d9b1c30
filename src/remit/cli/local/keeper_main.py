"""Minimal entry point of the keeper, the supervisor process that outlives its agent.

It imports as little as possible, because a keeper runs on every machine.

    python -m remit.cli.local.keeper_main DIRECTORY [BOUNDS]

It runs until `remit keeper --end` or a kill; SIGINT and SIGHUP of the terminal are ignored. Exits with 3 if another keeper
runs on the directory.
"""

from __future__ import annotations

import os
import signal  # noqa: TID251 - ignores the signals of the terminal
import sys
from pathlib import Path

for _unneeded in (
    "ssl",
    "typing_extensions",
):  # optional imports of libraries; without them the keeper needs a third less memory
    sys.modules.setdefault(_unneeded, None)  # type: ignore[arg-type]

import asyncio  # noqa: E402
import gc  # noqa: E402

import msgspec  # noqa: E402

from remit.agent.keeper.log_retention import LogBounds, parse_log_bounds  # noqa: E402
from remit.agent.setup import KEEPER, AgentDirectory, build_keeper  # noqa: E402
from remit.model.problems import escaped  # noqa: E402
from remit.world.clock import BootClock  # noqa: E402
from remit.world.interfaces import FileBusy, WorldError  # noqa: E402
from remit.world.process.spawn import raise_open_files_limit  # noqa: E402
from remit.world.production import production  # noqa: E402

BUSY = 3
GC_THRESHOLD = 20_000
"""The keeper creates almost no reference cycles, so the garbage collector runs rarely."""


async def run_keeper(directory: AgentDirectory, bounds: LogBounds) -> None:
    world = production(directory.addresses)
    try:
        with world.disk.lock(directory.keeper_lock):
            directory.write_pid(world.disk, directory.keeper_pid, os.getpid())
            keeper = build_keeper(world, directory, bounds, log_warning)
            async with world.link.serve(KEEPER, keeper):
                await keeper.run()
            world.disk.remove(directory.keeper_pid)
    finally:
        await world.offload.close()


def log_warning(text: str) -> None:
    """Log in the format of the other components, without importing their logger, to save memory."""
    line = {"time": BootClock().wall(), "level": "warning", "part": "keeper", "event": escaped(text)}
    print(msgspec.json.encode(line).decode(), file=sys.stderr, flush=True)


def main() -> int:
    directory = AgentDirectory(Path(sys.argv[1]).absolute())
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    raise_open_files_limit()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
    try:
        directory.create()
        asyncio.run(run_keeper(directory, parse_log_bounds(sys.argv[2] if len(sys.argv) > 2 else "")))
    except FileBusy as error:
        print(f"keeper: another keeper runs on {directory.root} ({error.cause})", file=sys.stderr)
        return BUSY
    except (WorldError, OSError, ValueError) as error:
        print(f"keeper: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
