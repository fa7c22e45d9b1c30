"""A server process with a client environment, on which a test runs commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

REMIT = str(Path(sys.executable).parent / "remit")


class Scope:
    """A server process and a client environment for commands."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {**os.environ, "REMIT_CONFIG": str(root / "config.yaml"), "NO_COLOR": "1", "REMIT_TENANT": "shop"}
        for name in ("REMIT_SERVER", "REMIT_TOKEN", "REMIT_TOKEN_FILE", "REMIT_CONTEXT", "FORCE_COLOR", "COLUMNS"):
            self.env.pop(name, None)
        command = [REMIT, "server", "--data", str(root / "data"), "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=self.env, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        result = re.search(r"http://[0-9.]+:[0-9]+", line)
        assert result is not None, line
        self.url = result.group()
        self.token = root / "data" / "token"
        self.output("context", "set", "here", "--server", self.url, "--token-file", str(self.token))

    def run(self, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [REMIT, *args]
        return subprocess.run(command, env=self.env, input=stdin, capture_output=True, text=True, check=False, timeout=60)

    def output(self, *args: str, code: int = 0, stdin: str = "") -> str:
        done = self.run(*args, stdin=stdin)
        assert done.returncode == code, (args, done.stdout, done.stderr)
        return done.stdout

    def error(self, *args: str, code: int = 1) -> str:
        done = self.run(*args)
        assert done.returncode == code, (args, done.stdout, done.stderr)
        return done.stderr

    def json(self, *args: str) -> Any:
        return json.loads(self.output(*args, "-o", "json"))
