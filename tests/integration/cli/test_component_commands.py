"""Does a component say why nothing comes of it? A real server, and a token that is for another door."""

from __future__ import annotations

import select
import subprocess
from pathlib import Path

import pytest

from tests.integration.cli.test_up import REMIT
from tests.integration.serve.server_process import Server


@pytest.mark.smoke
@pytest.mark.parametrize("part", ["scheduler", "controllers"])
def test_a_part_with_the_token_of_people_says_so__with_the_cure(part: str, tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        server.until_ready()
        url = f"http://127.0.0.1:{server.port}"
        words = [REMIT, part, "--server", url, "--token-file", str(server.data / "token")]
        with subprocess.Popen(words, stderr=subprocess.PIPE) as running:
            try:
                assert running.stderr is not None
                heard, _, _ = select.select([running.stderr], [], [], 30)
                said = running.stderr.readline().decode() if heard else ""
            finally:
                running.kill()
    assert "401" in said and "remit token create --role" in said, said
