"""Support bundles contain the diagnostics, and no secrets."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from remit.cli.local.doctor import Redactor
from tests.integration.cli.up_process import Ups

pytestmark = pytest.mark.smoke

CANARY = "c4n4ry"
HOSTILE = f"""
apiVersion: remit/v1
kind: Secret
metadata: {{name: db, tenant: default}}
spec: {{data: {{password: {CANARY}-of-a-secret}}}}
---
apiVersion: remit/v1
kind: Config
metadata: {{name: settings, tenant: default}}
spec: {{data: {{MODE: {CANARY}-of-a-config}}}}
---
apiVersion: remit/v1
kind: Workload
metadata:
  name: sleeper
  tenant: default
  annotations: {{note: {CANARY}-of-an-annotation}}
spec:
  type: service
  replicas: 1
  template:
    command: [sleep, "3600", "--{CANARY}-of-a-command"]
    env: {{PASSWORD: {CANARY}-of-an-environment}}
    resources: {{cpu: 10m, memory: 16Mi}}
"""


@pytest.fixture
def ups(tmp_path: Path) -> Iterator[Ups]:
    files = Ups(tmp_path)
    try:
        yield files
    finally:
        files.end()


def parts(file: Path) -> dict[str, str]:
    with tarfile.open(file) as tar:
        return {member.name.removeprefix("remit-support/"): tar.extractfile(member).read().decode() for member in tar}  # type: ignore[union-attr]


def test_bundle_contains_diagnostics_and_no_secrets(ups: Ups, tmp_path: Path) -> None:
    """A21."""
    ups.start("--nodes", "1", "--log-level", "debug")
    ups.until("the context is stored", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(1)
    applied = ups.remit("apply", "-f", "-", stdin=HOSTILE)
    assert applied.returncode == 0, applied.stderr
    token = (ups.data / "server" / "token").read_text().strip()
    ups.remit("get", "workload", token)  # a pasted token ends up in a request path, and so in the request log
    ups.remit("get", "workload", f"remit_{'k7' * 20}")
    with (ups.data / "agent.log").open("a") as log:
        log.write(f"it said: Authorization: Bearer {CANARY}-of-a-log password={CANARY}-in-words https://ann:{CANARY}@host/\n")

    file = tmp_path / "report.tar.gz"
    done = ups.remit("support-bundle", "-o", str(file), "--data", str(ups.data))
    assert done.returncode == 0, done.stderr
    assert file.stat().st_mode & 0o777 == 0o600 and file.stat().st_size < 4 << 20
    files = parts(file)
    for private in (
        CANARY,
        token,
        "k7" * 20,
        sha256(token.encode()).hexdigest(),
        (ups.data / "server" / "seal.keys").read_text()[:20],
    ):
        leaks = [name for name, text in files.items() if private in text]
        assert not leaks, f"{private!r} is in {leaks}"

    assert json.loads(files["status.json"])["scope"] == "local"
    support = json.loads(files["support.json"])
    assert support["counts"]["secret"] == 1 and support["tasks"] and support["threads"] and support["settings"]["leads"] is True
    assert any("accepted" in line for line in support["log"])
    assert "remit_replicas{" in files["metrics.txt"] and json.loads(files["nodes.json"])["items"]
    assert json.loads(files["workloads.json"])["items"][0]["metadata"]["name"] == "sleeper"
    assert json.loads(files["account.json"])["items"] and "logs/agent.log" in files and json.loads(files["doctor.json"])
    assert ups.remit("support-bundle", "-o", str(file)).returncode == 1  # the file exists


def test_redactor_removes_known_and_recognisable_secrets() -> None:
    clean = Redactor(("a-known-word",))
    redacted = clean(
        "x.json", json.dumps({"spec": {"env": {"A": CANARY}, "data": CANARY, "token": CANARY, "name": "web"}}).encode()
    )
    assert CANARY.encode() not in redacted and b"web" in redacted
    text = f"remit_{'a1' * 12} Bearer {CANARY} {'ab' * 32} a-known-word token={CANARY}"
    text += f" -----BEGIN KEY-----\n{CANARY}\n-----END KEY-----"
    redacted_text = clean("x.txt", text.encode()).decode()
    assert (
        CANARY not in redacted_text
        and "ab" * 16 not in redacted_text
        and "a1a1" not in redacted_text
        and "a-known-word" not in redacted_text
    )
    truncated = clean("x.json", b'{"half": "remit_' + b"z9" * 20)
    assert b"z9z9" not in truncated
    assert len(clean("x.txt", b"y" * (8 << 20))) <= 4 << 20
