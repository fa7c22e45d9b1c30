"""The quick start with TLS and two tenants, with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.up_process import Ups

EXAMPLES = Path(__file__).parents[3] / "examples" / "quickstart"


@pytest.fixture
def ups(tmp_path: Path) -> Iterator[Ups]:
    items = Ups(tmp_path)
    try:
        yield items
    finally:
        items.end()


def http_status(address: str, word: str = "") -> int:
    request = urllib.request.Request(f"http://{address}/", headers={"X-Word": word} if word else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def test_quickstart_over_tls_isolates_tenants_and_keeps_the_agent_certificate(ups: Ups, tmp_path: Path) -> None:
    artifact_dir, certificate = tmp_path / "shelf", ups.data / "agent" / "run" / "joined" / "calling.pem"
    first = ups.start("--tls", "--artifact-dir", str(artifact_dir))
    ups.until("the context is stored", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    assert artifact_dir.is_dir(), "a missing artifact directory must be created"
    ups.ready(1)
    before = certificate.read_bytes()

    assert ups.remit("apply", "-f", str(EXAMPLES / "tenants.yaml")).returncode == 0
    for name, tenant in (("ann", "risk"), ("bob", "shop")):
        created = ups.remit("token", "create", "--role", "member", "--tenant", tenant, "--for", name)
        assert created.returncode == 0, created.stderr
        (tmp_path / name).write_text(created.stdout)
    as_ann, as_bob = (
        ("--token-file", str(tmp_path / name_), "--tenant", tenant_) for name_, tenant_ in (("ann", "risk"), ("bob", "shop"))
    )

    assert ups.remit("create", "secret", "greeter", "--from-literal", "word=sesame", *as_ann).returncode == 0
    manifest = subprocess.run(
        [sys.executable, str(EXAMPLES / "greeter.py"), str(artifact_dir), "risk"], capture_output=True, text=True, check=True
    )
    applied = ups.remit("apply", "-f", "-", "--wait", *as_ann, stdin=manifest.stdout)
    assert applied.returncode == 0, applied.stderr
    items = json.loads(ups.remit("get", "endpoints", "-o", "json", *as_ann).stdout)["items"]
    address = f"{items[0]['host']}:{items[0]['ports']['http']}"
    assert (http_status(address, "sesame"), http_status(address), http_status(address, "wrong")) == (200, 403, 403)

    for args in (["get", "workloads", "-A"], ["get", "replicas", "-A"], ["get", "secrets", "-A"], ["get", "endpoints", "-A"]):
        result = ups.remit(*args, "-o", "json", *as_bob[:2])
        assert result.returncode == 0 and json.loads(result.stdout)["items"] == [], (args, result)
    for args in (["describe", "workload/greeter"], ["logs", "greeter"], ["delete", "workload/greeter", "--yes"]):
        refused = ups.remit(*args, "--token-file", str(tmp_path / "bob"), "--tenant", "risk")
        assert refused.returncode != 0 and "sesame" not in refused.stdout + refused.stderr, args
    assert http_status(address, "sesame") == 200

    first.kill()
    first.wait()
    ups.start("--tls", "--artifact-dir", str(artifact_dir))
    ups.until("the server responds again", lambda: ups.remit("get", "nodes").returncode == 0)
    assert certificate.read_bytes() == before, "a valid certificate must be reused"
    assert http_status(address, "sesame") == 200
