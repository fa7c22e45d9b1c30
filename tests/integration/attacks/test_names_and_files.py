"""Invalid names are refused, and nothing in a file is executed. A27 and A28."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.integration.cli.up_process import REMIT
from tests.unit.serve.in_memory_server import Api, http_test, tenant, workload

NAMES: Final = {
    "a path": "../x",
    "an absolute path": "/etc/passwd",
    "nul": "a\0b",
    "a newline": "a\nb",
    "a return": "a\rb",
    "an escape": "a\x1b[31mb",
    "right to left": "a\u202eb",
    "zero width": "a\u200bb",
    "another script": "аpple",
    "300 letters": "a" * 300,
    "nothing": "",
    "a dot": ".",
    "two dots": "..",
    "a space": "a b",
    "percent": "a%2fb",
    "a quote": 'a"b',
    "markup": "<script>",
}

TAGS: Final = {
    "apply": "!!python/object/apply:os.system ['touch {mark}']",
    "new": "!!python/object/new:os.system ['touch {mark}']",
    "object": "!!python/object:subprocess.Popen {{args: [touch, {mark}]}}",
    "name": "!!python/name:os.system",
    "module": "!!python/module:os",
    "own": "!remit.cli.main.main {{}}",
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", list(NAMES))
def test_row_28_invalid_name_gets_422(case: str) -> None:
    name = NAMES[case]

    @http_test
    async def refused(client: Api) -> None:
        await client.must("POST", "/v1/tenants", tenant())
        reply = await client.ask("POST", "/v1/tenants/acme/workloads", workload(name))
        assert reply.status == 422, reply
        assert "name" in reply.json["field"]
        assert reply.json["cure"]
        assert reply.body.isascii() or "\u202e" not in reply.body.decode()
        many = await client.ask("POST", "/v1/apply", [workload(name)])
        assert many.status in (207, 422), many
        assert (await client.get("/v1/tenants/acme/workloads")).json["items"] == []
        other = await client.ask("POST", "/v1/tenants", tenant(name))
        assert other.status == 422, other

    refused()


@pytest.mark.parametrize("tag", list(TAGS))
@pytest.mark.parametrize("command", ["validate", "apply"])
def test_row_27_python_tag_in_file_is_error_and_runs_nothing(tag: str, command: str, tmp_path: Path) -> None:
    marker, file = tmp_path / "mark", tmp_path / "evil.yaml"
    head = "apiVersion: remit/v1\nkind: Tenant\nmetadata: {name: evil}\nspec:\n  weight: "
    file.write_text(head + TAGS[tag].format(mark=marker) + "\n")
    command_line = [REMIT, command, *(["-f", str(file)] if command == "apply" else [str(file)])]
    env = {**os.environ, "REMIT_CONFIG": str(tmp_path / "none"), "REMIT_SERVER": "http://127.0.0.1:1", "REMIT_TOKEN": "x"}
    done = subprocess.run(command_line, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode in (1, 2), done
    assert not marker.exists()
    assert "Traceback" not in done.stderr
    assert "evil.yaml" in done.stdout + done.stderr
