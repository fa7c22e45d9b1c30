"""Are secrets made, shown and turned as people do it, and is no value of them anywhere? A real server, and all of its files."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.test_explain import settled
from tests.integration.cli.test_read_commands import Scope

CANARY = "canary-7c1f-that-nobody-may-see"


@pytest.fixture(scope="module")
def scope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scope]:
    root = tmp_path_factory.mktemp("sealed")
    settled(root / "data")
    found = Scope(root)
    try:
        yield found
    finally:
        found.process.terminate()
        assert found.process.wait(20) == 0
        assert found.process.stdout is not None
        found.process.stdout.close()


def manifest(value: str) -> str:
    return f"""
apiVersion: remit/v1
kind: Secret
metadata: {{name: db, tenant: shop}}
spec: {{data: {{password: {value}}}}}
"""


def test_a_secret_is_made_shown_by_its_keys_and_turned__and_its_value_is_nowhere(scope: Scope) -> None:
    """A21."""
    said = [
        scope.told("create", "secret", "db", "--from-file", "password=-", "--from-literal", "user=ann", stdin=CANARY),
        scope.told("get", "secrets"),
        scope.told("get", "secrets", "-o", "json"),
        scope.told("get", "secret", "db", "-o", "yaml"),
        scope.told("describe", "secret/db"),
        scope.told("plan", "-f", "-", stdin=manifest(CANARY + "-new")),
        scope.told("diff", "-f", "-", code=1, stdin=manifest(CANARY + "-new")),
        scope.told("apply", "-f", "-", stdin=manifest(CANARY + "-new")),
        scope.told("apply", "-f", "-", stdin=manifest(CANARY + "-new")),
        scope.told("events"),
        scope.told("audit"),
        scope.told("backup", str(scope.root / "kept.backup")),
        scope.told("support-bundle", "--output", str(scope.root / "bundle.tar.gz")),
        scope.told("secrets", "rotate"),
        scope.told("secrets", "rotate", "--forget"),
        scope.told("get", "secrets"),
    ]
    assert said[0] == "secret/db created, with 2 keys\n"
    assert f"password ({len(CANARY)} B), user (3 B)" in said[1]
    assert "spec.data.password" in said[6] and "(hidden)" in said[6]
    assert "replaced" in said[7] and "unchanged" in said[8]
    assert said[13].startswith("1 secrets are sealed with a new key, ") and "; 2 can be opened with" in said[13]
    assert "; 1 can be opened with" in said[14]
    for text in said:
        assert CANARY not in text and "remit:sealed" not in text
    found = [path for path in sorted(scope.root.rglob("*")) if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert not found, "no file of the server has it: store, log of writes, audit, keys; nor a backup"
    keys = (scope.root / "data" / "seal.keys").read_bytes().split()
    assert not any(key in (scope.root / "kept.backup").read_bytes() for key in keys)
    with tarfile.open(scope.root / "bundle.tar.gz") as bundle:
        parts = [part.read() for one in bundle if (part := bundle.extractfile(one)) is not None]
    assert parts and not any(word in part for part in parts for word in (CANARY.encode(), *keys))
    assert (scope.root / "data" / "seal.keys").stat().st_mode & 0o777 == 0o600


@pytest.mark.smoke
def test_a_refusal_says_no_value_again(scope: Scope, tmp_path: Path) -> None:
    for wrong in ("[canary-list]", "47114711", "{canary: map}"):
        done = scope.run("apply", "-f", "-", stdin=manifest(wrong))
        assert done.returncode == 1, done
        assert "canary" not in done.stdout + done.stderr and "4711" not in done.stdout + done.stderr, done.stderr
    twice = ("--from-literal", "a=1", "--from-literal", "a=2")
    assert "is said twice" in scope.complained("create", "secret", "x", *twice, code=2)


def test_a_config_is_made_and_replaced_and_work_begins_anew_with_it(scope: Scope, tmp_path: Path) -> None:
    (tmp_path / "app.toml").write_text("mode = 'live'\n")
    file = str(tmp_path / "app.toml")
    assert scope.told("create", "config", "app", "--from-file", file) == "config/app created, with 1 key\n"
    assert "exists" in scope.complained("create", "config", "app", "--from-literal", "a=b")
    assert scope.told("create", "config", "app", "--from-literal", "a=b", "--replace") == "config/app replaced, with 1 key\n"
    assert scope.json("get", "config", "app")["spec"]["data"] == {"a": "b"}
    before = scope.json("get", "workload", "web")["metadata"]["generation"]
    told = scope.told("rollout", "restart", "web")
    assert f"begins anew, as generation {before + 1}" in told
    assert scope.json("get", "workload", "web")["metadata"]["generation"] == before + 1
