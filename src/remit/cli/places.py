"""Where does `remit up` keep its data, and where does it listen? Names of places only; little is loaded here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LISTEN_PORT: Final = 7420
LISTEN: Final = f"127.0.0.1:{LISTEN_PORT}"
TOKEN: Final = "token"  # noqa: S105 - the name of the file
SERVER: Final = "server"
AGENT: Final = "agent"
URL: Final = "url"
TOKENS: Final = "tokens"
AGENT_ASKS: Final = "agent-asks"


def data_directory() -> Path:
    """As the machine's other programs have it."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "remit"
