"""Secrets and configs against a real server: no secret value appears in any output or file."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.scope_data import write_scope
from tests.integration.cli.server_process import Scope

CANARY = "canary-7c1f-of-a-secret"


@pytest.fixture(scope="module")
def scope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scope]:
    root = tmp_path_factory.mktemp("sealed")
    write_scope(root / "data")
    leaks = Scope(root)
    try:
        yield leaks
    finally:
        leaks.process.terminate()
        assert leaks.process.wait(20) == 0
        assert leaks.process.stdout is not None
        leaks.process.stdout.close()


def manifest(value: str) -> str:
    return f"""
apiVersion: remit/v1
kind: Secret
metadata: {{name: db, tenant: shop}}
spec: {{data: {{password: {value}}}}}
"""


def test_secret_value_appears_in_no_output_and_no_file(scope: Scope) -> None:
    """A21."""
    outputs = [
        scope.output("create", "secret", "db", "--from-file", "password=-", "--from-literal", "user=ann", stdin=CANARY),
        scope.output("get", "secrets"),
        scope.output("get", "secrets", "-o", "json"),
        scope.output("get", "secret", "db", "-o", "yaml"),
        scope.output("describe", "secret/db"),
        scope.output("plan", "-f", "-", stdin=manifest(CANARY + "-new")),
        scope.output("diff", "-f", "-", code=1, stdin=manifest(CANARY + "-new")),
        scope.output("apply", "-f", "-", stdin=manifest(CANARY + "-new")),
        scope.output("apply", "-f", "-", stdin=manifest(CANARY + "-new")),
        scope.output("events"),
        scope.output("audit"),
        scope.output("backup", str(scope.root / "kept.backup")),
        scope.output("support-bundle", "--output", str(scope.root / "bundle.tar.gz")),
        scope.output("secrets", "rotate"),
        scope.output("secrets", "rotate", "--forget"),
        scope.output("get", "secrets"),
    ]
    assert outputs[0] == "secret/db created, with 2 keys\n"
    assert f"password ({len(CANARY)} B), user (3 B)" in outputs[1]
    assert "spec.data.password" in outputs[6] and "(hidden)" in outputs[6]
    assert "replaced" in outputs[7] and "unchanged" in outputs[8]
    assert outputs[13].startswith("1 secrets resealed with a new key, ") and "keys that can unseal: 2" in outputs[13]
    assert "keys that can unseal: 1" in outputs[14]
    for text in outputs:
        assert CANARY not in text and "remit:sealed" not in text
    leaks = [path for path in sorted(scope.root.rglob("*")) if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert not leaks, "no file may contain the value: store, write-ahead log, audit, keys, backup"
    keys = (scope.root / "data" / "seal.keys").read_bytes().split()
    assert not any(key in (scope.root / "kept.backup").read_bytes() for key in keys)
    with tarfile.open(scope.root / "bundle.tar.gz") as bundle:
        parts = [part.read() for one in bundle if (part := bundle.extractfile(one)) is not None]
    assert parts and not any(word in part for part in parts for word in (CANARY.encode(), *keys))
    assert (scope.root / "data" / "seal.keys").stat().st_mode & 0o777 == 0o600


@pytest.mark.smoke
def test_refused_secret_is_reported_without_its_value(scope: Scope, tmp_path: Path) -> None:
    for invalid in ("[canary-list]", "47114711", "{canary: map}"):
        done = scope.run("apply", "-f", "-", stdin=manifest(invalid))
        assert done.returncode == 1, done
        assert "canary" not in done.stdout + done.stderr and "4711" not in done.stdout + done.stderr, done.stderr
    twice = ("--from-literal", "a=1", "--from-literal", "a=2")
    assert "is given twice" in scope.error("create", "secret", "x", *twice, code=2)


def test_config_is_created_replaced_and_read_after_a_restart(scope: Scope, tmp_path: Path) -> None:
    (tmp_path / "app.toml").write_text("mode = 'live'\n")
    file = str(tmp_path / "app.toml")
    assert scope.output("create", "config", "app", "--from-file", file) == "config/app created, with 1 key\n"
    assert "exists" in scope.error("create", "config", "app", "--from-literal", "a=b")
    assert scope.output("create", "config", "app", "--from-literal", "a=b", "--replace") == "config/app replaced, with 1 key\n"
    assert scope.json("get", "config", "app")["spec"]["data"] == {"a": "b"}
    before = scope.json("get", "workload", "web")["metadata"]["generation"]
    output = scope.output("rollout", "restart", "web")
    assert f"workload/web: rollout of generation {before + 1} started" in output
    assert scope.json("get", "workload", "web")["metadata"]["generation"] == before + 1
