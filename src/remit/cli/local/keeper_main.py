"""Minimal entry point of the keeper process.

Runs a keeper: the process that outlives its agent. As little as possible is loaded, since one runs on every machine.

    python -m remit.cli.local.keeper_main DIRECTORY [BOUNDS]

It ends when it is told to (`remit keeper --end`), or killed. An interrupt at the terminal, and the end of that, are not meant
for it. Exits with 3 if another keeper has the directory.
"""

from __future__ import annotations

import os
import signal  # noqa: TID251 - its own end: nobody's terminal ends it
import sys
from pathlib import Path

for _unneeded in ("ssl", "typing_extensions"):  # loaded by others where they are there: a third of its memory
    sys.modules.setdefault(_unneeded, None)  # type: ignore[arg-type]

import asyncio  # noqa: E402
import gc  # noqa: E402

import msgspec  # noqa: E402

from remit.agent.directory import KEEPER, AgentDirectory  # noqa: E402
from remit.agent.keeper.log_retention import LogBounds, parse_log_bounds  # noqa: E402
from remit.agent.setup import build_keeper  # noqa: E402
from remit.model.problems import escaped  # noqa: E402
from remit.world.clock import BootClock  # noqa: E402
from remit.world.interfaces import FileBusy, WorldError  # noqa: E402
from remit.world.process.spawn import raise_open_files_limit  # noqa: E402
from remit.world.production import production  # noqa: E402

BUSY = 3
GC_THRESHOLD = 20_000
"""What it makes for a start is let go without a collector, but for the odd exception: that looks through all of it rarely."""


async def run_keeper(directory: AgentDirectory, bounds: LogBounds) -> None:
    world = production(directory.addresses)
    try:
        with world.disk.lock(directory.keeper_lock):
            directory.write_pid(world.disk, directory.keeper_pid, os.getpid())
            one = build_keeper(world, directory, bounds, log_warning)
            async with world.link.serve(KEEPER, one):
                await one.run()
            world.disk.remove(directory.keeper_pid)
    finally:
        await world.offload.close()


def log_warning(words: str) -> None:
    """As the other parts log, but without loading what they log with: a keeper is small, and there are many."""
    line = {"time": BootClock().wall(), "level": "warning", "part": "keeper", "event": escaped(words)}
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
        print(f"keeper: another one runs on {directory.root} ({error.cause})", file=sys.stderr)
        return BUSY
    except (WorldError, OSError, ValueError) as error:
        print(f"keeper: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
