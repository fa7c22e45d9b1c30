"""Backup of a running server and restore, with real processes."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from remit.cli.main import remit
from remit.store.sqlite.backup import BackupLabel, archive_head
from remit.store.sqlite.database_file import SQLITE_MAGIC
from tests.integration.cli.up_process import SERVICE, Ups, alive

JOB = """
apiVersion: remit/v1
kind: Workload
metadata: {name: NAME, tenant: default}
spec:
  type: job
  template:
    command: [sleep, "SECONDS"]
    resources: {cpu: 10m, memory: 16Mi}
    stopGrace: 1s
"""


@pytest.fixture
def ups(tmp_path: Path) -> Iterator[Ups]:
    pids = Ups(tmp_path)
    try:
        yield pids
    finally:
        pids.end()


class TenantWriter:
    """Creates tenants continuously and records the revision of each in `acknowledged`."""

    def __init__(self, data: Path) -> None:
        self._url = (data / "server" / "url").read_text().strip()
        self._token = (data / "server" / "token").read_text().strip()
        self.acknowledged: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> TenantWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _write(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            name = f"made-{number}"
            body = {"apiVersion": "remit/v1", "kind": "Tenant", "metadata": {"name": name}, "spec": {"quota": {"cpu": "1"}}}
            self.acknowledged[name] = self.request("POST", "/v1/tenants", body)["metadata"]["revision"]

    def request(self, method: str, path: str, body: object = None) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(self._url + path, data, headers, method=method), timeout=20
        ) as response:
            return json.loads(response.read())


def sleeping(seconds: str) -> list[int]:
    """Return the pids of processes `sleep SECONDS`."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                args = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if args[:2] == [b"sleep", seconds.encode()] and alive(int(entry.name)):
                pids.append(int(entry.name))
    return pids


def test_backup_under_load_is_restored_and_running_replicas_are_recovered_once(ups: Ups, tmp_path: Path) -> None:
    first = ups.start("--nodes", "1")
    ups.until("the context is stored", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(1)
    assert ups.remit("apply", "-f", "-", "--wait", stdin=SERVICE).returncode == 0
    job_manifest = JOB.replace("NAME", "kept").replace("SECONDS", "36171")
    assert ups.remit("apply", "-f", "-", stdin=job_manifest).returncode == 0
    ups.until("all run", lambda: len(ups.serving()) == 2 and len(sleeping("36171")) == 1)
    before, job = ups.serving(), sleeping("36171")

    for name in ("ann", "bob"):
        assert ups.remit("token", "create", "--role", "member", "--for", name, "--name", name).returncode == 0

    file = tmp_path / "scope.tar"
    with TenantWriter(ups.data) as writing:
        ups.until("tenants are written", lambda: len(writing.acknowledged) > 20)
        done = ups.remit("backup", str(file))
        assert done.returncode == 0, done.stderr
        count = len(writing.acknowledged)
        ups.until("more tenants are written", lambda: len(writing.acknowledged) > count)
    assert file.stat().st_mode & 0o777 == 0o600
    assert ups.remit("backup", str(file)).returncode == 1  # the file exists
    revision = int(done.stdout.split("revision ")[1].split(",")[0])
    late_manifest = JOB.replace("NAME", "late").replace("SECONDS", "36172")
    assert ups.remit("apply", "-f", "-", stdin=late_manifest).returncode == 0
    ups.until("the late job runs", lambda: len(sleeping("36172")) == 1)
    assert ups.remit("token", "revoke", "ann").returncode == 0

    server = ups.data / "server"
    locked = ups.remit("restore", str(file), "--data", str(server), "--force")
    assert locked.returncode == 1 and str(first.pid) in locked.stderr
    first.kill()
    first.wait()
    refused = ups.remit("restore", str(file), "--data", str(server))
    assert refused.returncode == 1 and "--force" in refused.stderr
    (tmp_path / "broken.tar").write_bytes(file.read_bytes()[:-5_000])
    broken = ups.remit("restore", str(tmp_path / "broken.tar"), "--data", str(server), "--force")
    assert broken.returncode == 1 and "nothing was changed" in broken.stderr
    restored = ups.remit("restore", str(file), "--data", str(server), "--force")
    assert restored.returncode == 0, restored.stderr
    assert "kept at" in restored.stdout and "tenant/made-" in restored.stdout
    assert "\n    remit token revoke ann\n" in restored.stdout, "only the token revoked after the backup must be listed"

    ups.start("--nodes", "1")
    ups.until("the server responds again", lambda: ups.remit("get", "nodes").returncode == 0)
    ups.until("the nodes report again", lambda: len(ups.serving()) == 2)
    assert ups.serving() == before and sleeping("36171") == job
    ups.until("the replica unknown to the restored scope is stopped", lambda: not sleeping("36172"))
    names = {item["metadata"]["name"] for item in ups.items("tenants")}
    assert {name for name, created_at in writing.acknowledged.items() if created_at <= revision} <= names
    assert not {name for name, created_at in writing.acknowledged.items() if created_at > revision} & names
    phases = {item["metadata"]["name"]: item["status"]["phase"] for item in ups.items("replicas")}
    assert phases["kept-0"] == "running" and sleeping("36171") == job
    assert "restored from a backup" in ups._log.read_text()


@pytest.mark.smoke
def test_backup_is_restored_into_a_new_directory(ups: Ups, tmp_path: Path) -> None:
    ups.start("--nodes", "0")
    ups.until("the context is stored", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    file = tmp_path / "scope.tar"
    assert ups.remit("backup", str(file)).returncode == 0
    elsewhere = tmp_path / "elsewhere"
    restored = ups.remit("restore", str(file), "--data", str(elsewhere))
    assert restored.returncode == 0, restored.stderr
    assert "seal.keys" in restored.stdout and f"remit server --data {elsewhere}" in restored.stdout
    assert elsewhere.stat().st_mode & 0o777 == 0o700
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    assert ups.remit("restore", str(file), "--data", str(tmp_path / "mine")).returncode == 1
    assert not list((ups.data / "server").glob("backup*"))


@pytest.mark.parametrize("target", ["new", "new/below", "empty"])
@pytest.mark.parametrize("damage", ["no tar", "cut off", "a store that is not ours"])
def test_invalid_backup_leaves_the_target_directory_unchanged(tmp_path: Path, target: str, damage: str) -> None:
    backup = tmp_path / "bad.tar"
    label = BackupLabel(
        version="0.1",
        scope="local",
        incarnation="i1",
        epoch=1,
        sequence=1,
        revision=7,
        taken="",
        bytes=1_000_000,
        sha256="0" * 64,
    )
    backup.write_bytes(
        {
            "no tar": b"dear reader",
            "cut off": archive_head(label) + bytes(5_000),
            "a store that is not ours": SQLITE_MAGIC + bytes(5_000),
        }[damage]
    )
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(remit, ["restore", str(backup), "--data", str(tmp_path / target)], prog_name="remit")
    assert result.exit_code == 1 and "bad.tar" in result.output, result.output
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bad.tar", "empty"]
