"""How is what a program wrote shown without obeying it? Colours are dropped, all else that steers a terminal is spelt."""

from __future__ import annotations

import codecs
import re
from typing import Final

from remit.model.problems import escaped

LINE_LETTERS_MAX: Final = 65_536
"""A longer line is shown in pieces: nobody waits for an end that may never come."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")


class Lines:
    """Pieces of bytes in, lines of text out. A letter that is cut in two by the pieces is put together again."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        self._begun = ""

    def feed(self, piece: bytes) -> list[str]:
        *whole, self._begun = (self._begun + self._decoder.decode(piece)).split("\n")
        while len(self._begun) > LINE_LETTERS_MAX:
            whole.append(self._begun[:LINE_LETTERS_MAX])
            self._begun = self._begun[LINE_LETTERS_MAX:]
        return whole

    def rest(self) -> list[str]:
        """What came without an end of its line."""
        last, self._begun = self._begun + self._decoder.decode(b"", final=True), ""
        return [last] if last else []


class Tame:
    """Pieces of bytes in, text out that a terminal may be given: as `harmless`, but lines go on."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")

    def feed(self, piece: bytes, *, last: bool = False) -> str:
        lines = self._decoder.decode(piece, last).replace("\r\n", "\n").split("\n")
        return "\n".join("\t".join(escaped(part) for part in _COLOUR.sub("", line).split("\t")) for line in lines)


def harmless(line: str) -> str:
    """For a terminal: a title, a cursor or a clipboard is nobody's business but its owner's."""
    bare = _COLOUR.sub("", line.removesuffix("\r"))
    return "\t".join(escaped(part) for part in bare.split("\t"))
