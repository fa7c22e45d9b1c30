"""Entry point of the `remit` program; imports almost nothing, so that an interrupt during imports is handled.

An interrupt has the same outcome while modules load and later: one line on stderr and exit code 130.
"""

from __future__ import annotations

import os
import sys

from remit.cli.interrupts import persistent_interrupts

INTERRUPTED = 130
"""128 plus the number of SIGINT, as shells report it. No command uses this exit code for anything else."""


def main() -> None:
    try:
        with persistent_interrupts():
            from remit.cli.main import main as begin  # most of the startup time
        begin()
    except KeyboardInterrupt:
        leave_interrupted("interrupted\n")


def leave_interrupted(word: str = "") -> None:
    """Exit immediately with code 130.

    A normal interpreter exit would print errors about unfinished work. If the interrupt arrived while a class was created,
    Python would even die of the signal, which shells report as 130 but other programs do not.
    """
    from contextlib import suppress

    with suppress(OSError, ValueError, AttributeError):  # the stream may be closed, or its disk full
        sys.stdout.flush()
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(word)
        sys.stderr.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
