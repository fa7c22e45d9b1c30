"""Do a machine's vault and its simulated twin keep one promise? Files by copy, replaced whole, gone when they are removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from remit.simulate.world.disk import SimSecretFiles
from remit.world.files.secret_files import SecretFiles, TmpfsSecretFiles

X, Y = PurePosixPath("a/x"), PurePosixPath("b")


@pytest.fixture(params=["real", "simulated"])
def vault(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SecretFiles]:
    if request.param == "simulated":
        yield SimSecretFiles()
        return
    (tmp_path / "memory").mkdir()
    yield TmpfsSecretFiles(tmp_path / "agent", tmp_path / "agent" / "vault", tmp_path / "memory")


def test_what_is_put_is_there_under_its_name_until_it_is_removed(vault: SecretFiles) -> None:
    assert not vault.has("u1.1") and vault.names() == ()
    assert vault.put("u1.1", {X: b"1"}, "") == vault.path_of("u1.1")
    vault.put("u2.1", {Y: b"2"}, "")
    assert vault.has("u1.1") and sorted(vault.names()) == ["u1.1", "u2.1"]
    assert vault.path_of("u1.1") != vault.path_of("u2.1")
    vault.put("u1.1", {Y: b"3"}, "")
    assert sorted(vault.names()) == ["u1.1", "u2.1"]
    vault.remove("u1.1")
    vault.remove("u1.1")
    vault.remove("never.1")
    assert not vault.has("u1.1") and vault.names() == ("u2.1",)
