"""Does the quick start with TLS and two tenants go as a new user would go through it? With real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.test_up import Ups

EXAMPLES = Path(__file__).parents[3] / "examples" / "quickstart"


@pytest.fixture
def ups(tmp_path: Path) -> Iterator[Ups]:
    found = Ups(tmp_path)
    try:
        yield found
    finally:
        found.end()


def asked(address: str, word: str = "") -> int:
    request = urllib.request.Request(f"http://{address}/", headers={"X-Word": word} if word else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def test_two_tenants_over_tls__a_service_from_an_artifact_with_a_secret__and_the_agent_keeps_its_certificate(
    ups: Ups, tmp_path: Path
) -> None:
    shelf, calling = tmp_path / "shelf", ups.data / "agent" / "run" / "joined" / "calling.pem"
    first = ups.start("--tls", "--artifact-dir", str(shelf))
    ups.until("the context is there", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    assert shelf.is_dir(), "a directory that was not there is made"
    ups.ready(1)
    before = calling.read_bytes()

    assert ups.remit("apply", "-f", str(EXAMPLES / "tenants.yaml")).returncode == 0
    for name, tenant in (("ann", "risk"), ("bob", "shop")):
        made = ups.remit("token", "create", "--role", "member", "--tenant", tenant, "--for", name)
        assert made.returncode == 0, made.stderr
        (tmp_path / name).write_text(made.stdout)
    as_ann, as_bob = (
        ("--token-file", str(tmp_path / who), "--tenant", home) for who, home in (("ann", "risk"), ("bob", "shop"))
    )

    assert ups.remit("create", "secret", "greeter", "--from-literal", "word=sesame", *as_ann).returncode == 0
    manifest = subprocess.run(
        [sys.executable, str(EXAMPLES / "greeter.py"), str(shelf), "risk"], capture_output=True, text=True, check=True
    )
    applied = ups.remit("apply", "-f", "-", "--wait", *as_ann, stdin=manifest.stdout)
    assert applied.returncode == 0, applied.stderr
    found = json.loads(ups.remit("get", "endpoints", "-o", "json", *as_ann).stdout)["items"]
    address = f"{found[0]['host']}:{found[0]['ports']['http']}"
    assert (asked(address, "sesame"), asked(address), asked(address, "wrong")) == (200, 403, 403)

    for words in (["get", "workloads", "-A"], ["get", "replicas", "-A"], ["get", "secrets", "-A"], ["get", "endpoints", "-A"]):
        seen = ups.remit(*words, "-o", "json", *as_bob[:2])
        assert seen.returncode == 0 and json.loads(seen.stdout)["items"] == [], (words, seen)
    for words in (["describe", "workload/greeter"], ["logs", "greeter"], ["delete", "workload/greeter", "--yes"]):
        refused = ups.remit(*words, "--token-file", str(tmp_path / "bob"), "--tenant", "risk")
        assert refused.returncode != 0 and "sesame" not in refused.stdout + refused.stderr, words
    assert asked(address, "sesame") == 200

    first.kill()
    first.wait()
    ups.start("--tls", "--artifact-dir", str(shelf))
    ups.until("it answers again", lambda: ups.remit("get", "nodes").returncode == 0)
    assert calling.read_bytes() == before, "what is good is kept: its agent runs on with it"
    assert asked(address, "sesame") == 200
