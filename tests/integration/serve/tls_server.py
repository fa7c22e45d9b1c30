"""A server process with TLS."""

from __future__ import annotations

import re
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

REMIT = str(Path(sys.executable).parent / "remit")


@contextmanager
def serving(data: Path, *options: str, listen: str = "127.0.0.1:0", before: Sequence[str] = ()) -> Iterator[str]:
    """Run a server while the context is open; yield its address."""
    command = [*before, REMIT, "server", "--data", str(data), "--listen", listen, "--heartbeat-interval", "200ms", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 30)
        line = process.stdout.readline().decode() if ready else ""
        found = re.search(r"https://\S+:\d+", line)
        assert found, (line, process.stdout.read() if process.poll() is not None else "")
        yield found[0]
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
