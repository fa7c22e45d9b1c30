"""Tests of the source revision in reports."""

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
    author = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for args in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *args], check=True)
    return package


@pytest.fixture(autouse=True)
def clear_cache() -> None:
    revision.cache_clear()


def test_clean_tree_is_named_by_12_digits_of_its_commit(package: Path) -> None:
    assert re.fullmatch(r"[0-9a-f]{12}", revision(package))


def test_uncommitted_changes_are_marked(package: Path) -> None:
    clean = revision(package)
    for change in ("code.py", "new.py"):
        (package / change).write_text("changed = True\n")
        revision.cache_clear()
        assert revision(package) == f"{clean}+changes"
        subprocess.run(["git", "-C", str(package), "checkout", "-q", "."], check=True)
        subprocess.run(["git", "-C", str(package), "clean", "-q", "-f"], check=True)
    revision.cache_clear()
    assert revision(package) == clean


def test_changes_outside_the_package_are_ignored(package: Path) -> None:
    clean = revision(package)
    (package.parent / "notes.txt").write_text("x")
    revision.cache_clear()
    assert revision(package) == clean
    assert revision(package.parent) == f"{clean}+changes"


def test_revision_is_cached_per_process(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = revision(package)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert revision(package) == first


def test_version_is_used_without_git_or_repository(package: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert revision(tmp_path_factory.mktemp("elsewhere")) == __version__
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nonexistent")
        assert revision(package) == __version__
