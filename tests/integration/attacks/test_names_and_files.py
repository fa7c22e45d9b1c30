"""Are names that are none refused, and does nothing that a file says run? A27 and A28."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.integration.cli.test_up import REMIT
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
@pytest.mark.parametrize("what", list(NAMES))
def test_row_28__a_name_that_is_none_is_a_422(what: str) -> None:
    name = NAMES[what]

    @http_test
    async def refused(asked: Api) -> None:
        await asked.must("POST", "/v1/tenants", tenant())
        reply = await asked.ask("POST", "/v1/tenants/acme/workloads", workload(name))
        assert reply.status == 422, reply
        assert "name" in reply.json["field"]
        assert reply.json["cure"]
        assert reply.body.isascii() or "\u202e" not in reply.body.decode()
        many = await asked.ask("POST", "/v1/apply", [workload(name)])
        assert many.status in (207, 422), many
        assert (await asked.get("/v1/tenants/acme/workloads")).json["items"] == []
        other = await asked.ask("POST", "/v1/tenants", tenant(name))
        assert other.status == 422, other

    refused()


@pytest.mark.parametrize("tag", list(TAGS))
@pytest.mark.parametrize("command", ["validate", "apply"])
def test_row_27__a_tag_of_python_in_a_file_is_an_error_and_runs_nothing(tag: str, command: str, tmp_path: Path) -> None:
    mark, file = tmp_path / "mark", tmp_path / "evil.yaml"
    head = "apiVersion: remit/v1\nkind: Tenant\nmetadata: {name: evil}\nspec:\n  weight: "
    file.write_text(head + TAGS[tag].format(mark=mark) + "\n")
    words = [REMIT, command, *(["-f", str(file)] if command == "apply" else [str(file)])]
    env = {**os.environ, "REMIT_CONFIG": str(tmp_path / "none"), "REMIT_SERVER": "http://127.0.0.1:1", "REMIT_TOKEN": "x"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode in (1, 2), done
    assert not mark.exists()
    assert "Traceback" not in done.stderr
    assert "evil.yaml" in done.stdout + done.stderr
