"""Entry point; imports almost nothing, so that an interrupt during import is handled.

Here, so that an interrupt ends it alike while it loads and later. Little is loaded here.
"""

from __future__ import annotations

import os
import sys

from remit.cli.interrupts import insisting

INTERRUPTED = 130
"""128 and the number of SIGINT, as shells count. No command means anything else by it."""


def main() -> None:
    try:
        with insisting():
            from remit.cli.main import main as begin  # most of the time until a command is known
        begin()
    except KeyboardInterrupt:
        leave_interrupted("interrupted\n")


def leave_interrupted(word: str = "") -> None:
    """At once. On its usual way out Python complains of what was left halfway; and if the interrupt came while it made a class,
    it dies of the signal instead: to a shell that is the same, to other programs it is not.
    """
    from contextlib import suppress

    with suppress(OSError, ValueError, AttributeError):  # each may be full, gone or closed
        sys.stdout.flush()
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(word)
        sys.stderr.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
