"""Does a figure say by which code it was measured, also where that code is in no commit, or git is not there?"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from remit import __version__
from remit.cli.session.source_revision import revision


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a repository with one commit."""
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "code.py").write_text("")
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    return package


@pytest.fixture(autouse=True)
def forget() -> None:
    revision.cache_clear()


def test_a_commit_is_named_by_its_first_twelve(package: Path) -> None:
    assert re.fullmatch(r"[0-9a-f]{12}", revision(package))


def test_code_that_is_in_no_commit_is_marked(package: Path) -> None:
    clean = revision(package)
    for change in ("code.py", "new.py"):
        (package / change).write_text("changed = True\n")
        revision.cache_clear()
        assert revision(package) == f"{clean}+changes"
        subprocess.run(["git", "-C", str(package), "checkout", "-q", "."], check=True)
        subprocess.run(["git", "-C", str(package), "clean", "-q", "-f"], check=True)
    revision.cache_clear()
    assert revision(package) == clean


def test_what_lies_elsewhere_is_no_change_of_the_code(package: Path) -> None:
    clean = revision(package)
    (package.parent / "notes.txt").write_text("x")
    revision.cache_clear()
    assert revision(package) == clean
    assert revision(package.parent) == f"{clean}+changes"


def test_git_is_asked_once_a_process(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = revision(package)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert revision(package) == first


def test_without_git_or_a_repository_it_is_the_version(package: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert revision(tmp_path_factory.mktemp("elsewhere")) == __version__
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nonexistent")
        assert revision(package) == __version__
