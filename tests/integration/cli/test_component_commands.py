"""Components with a token of the wrong role, against a real server."""

from __future__ import annotations

import select
import subprocess
from pathlib import Path

import pytest

from tests.integration.cli.up_process import REMIT
from tests.integration.serve.server_process import Server


@pytest.mark.smoke
@pytest.mark.parametrize("component", ["scheduler", "controllers"])
def test_component_with_an_admin_token_logs_401_with_a_fix(component: str, tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        server.until_ready()
        url = f"http://127.0.0.1:{server.port}"
        args = [REMIT, component, "--server", url, "--token-file", str(server.data / "token")]
        with subprocess.Popen(args, stderr=subprocess.PIPE) as process:
            try:
                assert process.stderr is not None
                readable, _, _ = select.select([process.stderr], [], [], 30)
                line = process.stderr.readline().decode() if readable else ""
            finally:
                process.kill()
    assert "401" in line and "remit token create --role" in line, line
