"""Contract of secret files, real and simulated: files by attempt, replaced whole, gone when removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from remit.simulate.world.disk import SimSecretFiles
from remit.world.files.secret_files import SecretFiles, TmpfsSecretFiles

X, Y = PurePosixPath("a/x"), PurePosixPath("b")


@pytest.fixture(params=["real", "simulated"])
def secret_files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SecretFiles]:
    if request.param == "simulated":
        yield SimSecretFiles()
        return
    (tmp_path / "memory").mkdir()
    yield TmpfsSecretFiles(tmp_path / "agent", tmp_path / "agent" / "vault", tmp_path / "memory")


def test_secret_files_exist_under_their_name_until_removed(secret_files: SecretFiles) -> None:
    assert not secret_files.has("u1.1") and secret_files.names() == ()
    assert secret_files.put("u1.1", {X: b"1"}, "") == secret_files.path_of("u1.1")
    secret_files.put("u2.1", {Y: b"2"}, "")
    assert secret_files.has("u1.1") and sorted(secret_files.names()) == ["u1.1", "u2.1"]
    assert secret_files.path_of("u1.1") != secret_files.path_of("u2.1")
    secret_files.put("u1.1", {Y: b"3"}, "")
    assert sorted(secret_files.names()) == ["u1.1", "u2.1"]
    secret_files.remove("u1.1")
    secret_files.remove("u1.1")
    secret_files.remove("never.1")
    assert not secret_files.has("u1.1") and secret_files.names() == ("u2.1",)
