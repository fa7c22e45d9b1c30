"""What may be expected of a command that was started beside a run? Promises only: see promises.py."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from remit.world.promises import Ended


class Window(NamedTuple):
    """How large a terminal is, in letters."""

    rows: int = 24
    columns: int = 80


class Said(NamedTuple):
    """Some of what a command has written. All that one with a terminal writes is `stdout`."""

    stream: Literal["stdout", "stderr"]
    data: bytes


class Session(Protocol):
    """A command that runs beside a run, and our ends of its streams. It ends, at the latest, when that run has."""

    async def read(self) -> Said | None:
        """What it writes, as it comes; None when nothing more can come. One reader at a time."""
        ...

    async def feed(self, data: bytes, /) -> None:
        """Returns when all of it is taken; also when the command does not want any more. One feeder at a time."""
        ...

    def end_input(self) -> None:
        """There is no more. On a terminal: what the key for that does."""
        ...

    def resize(self, window: Window, /) -> None:
        """Of its terminal, if it has one."""
        ...

    async def wait(self) -> Ended:
        """Returns when the command itself has ended."""
        ...

    async def end(self) -> None:
        """Kill all that came of it. Returns when nothing of it is left. What was written may still be read."""
        ...

    async def close(self) -> None:
        """End it, and let go: nothing can be read any more."""
        ...
