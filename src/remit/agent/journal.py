"""What has this keeper begun? A file that is only added to, so that one who was killed finds again what it had started.

Three things are written of each start. That it is *begun*, durably, before it is: whoever reads this starts it never again. As
what it *runs*, and how it *ended*: these need not outlive the machine, which would end it too. A file of mostly forgotten
starts is written anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from remit.agent.copies import Copy
from remit.agent.keeping import NEVER, Begun
from remit.world.promises import Disk, Missing

REWRITE_LINES: Final = 10_000
"""A longer file is written anew once most of what it tells is forgotten."""

_encoder = msgspec.json.Encoder()
_lines: msgspec.json.Decoder[Begun] = msgspec.json.Decoder(Begun)


class Journal:
    """It blocks: called through an offload, one call at a time. `starts` is what was read, by copy: the latest of each."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk, self._path = disk, path
        self._lines = 0
        self._torn = False
        """May the last line have been cut off? Then the next one begins on a line of its own."""

    def read(self) -> dict[Copy, Begun]:
        self._disk.make_directory(self._path.parent)
        try:
            data = self._disk.read(self._path)
        except Missing:
            return {}
        self._torn = bool(data) and not data.endswith(b"\n")
        found: dict[Copy, Begun] = {}
        for line in data.split(b"\n"):
            kept = _read_line(line)
            if kept is None:
                continue
            self._lines += 1
            if kept.number == NEVER:
                found.pop(kept.copy, None)
            else:
                found[kept.copy] = kept
        return found

    def write(self, entries: list[Begun], *, durably: bool) -> None:
        self._lines += len(entries)
        lines = b"".join(_encoder.encode(one) + b"\n" for one in entries)
        torn, self._torn = self._torn, True
        self._disk.append(self._path, b"\n" * torn + lines, durably=durably)
        self._torn = False

    def grown(self, live: int) -> bool:
        return self._lines > REWRITE_LINES + 4 * live

    def rewrite(self, entries: list[Begun]) -> None:
        self._disk.write_atomically(self._path, b"".join(_encoder.encode(one) + b"\n" for one in entries))
        self._lines = len(entries)


def forgotten(kept: Begun) -> Begun:
    """What is written when a copy is forgotten."""
    return msgspec.structs.replace(kept, number=NEVER, ports={}, failed="", cure="")


def _read_line(line: bytes) -> Begun | None:
    """None for a line that was cut off by a crash: what it would have told was not relied on yet."""
    try:
        return _lines.decode(line) if line else None
    except msgspec.DecodeError:
        return None
