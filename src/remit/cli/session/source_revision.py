"""The revision of the running code, for reports that must name what was measured or replayed."""

from __future__ import annotations

import subprocess  # noqa: TID251 - asks git which commit is checked out
from functools import cache
from pathlib import Path
from typing import Final

from remit import __version__

PACKAGE: Final = Path(__file__).resolve().parents[2]
CHANGED: Final = "+changes"
"""Suffix of a revision with uncommitted changes."""


@cache
def revision(below: Path = PACKAGE) -> str:
    """Return the checked-out commit, with a suffix if files in `below` differ. Outside a repository, return the version."""
    git_commands = (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--", "."))
    try:
        commit, changes = (
            subprocess.run(  # noqa: S603  (constant arguments, no shell)
                ["git", "--no-optional-locks", "-C", str(below), *args],  # noqa: S607
                capture_output=True, text=True, timeout=5, check=True,
            ).stdout.strip()
            for args in git_commands
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return __version__
    return f"{commit}{CHANGED if changes else ''}" if commit else __version__
