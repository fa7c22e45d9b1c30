"""Tests of `remit validate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from remit.cli.main import remit

ROOT = Path(__file__).parents[4]
EXAMPLES = ROOT / "examples"
BAD = ROOT / "tests" / "bad"
GOOD = "apiVersion: remit/v1\nkind: Region\nmetadata: {name: a}\n"


def validate(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(remit, ["validate", *arguments], input=stdin, prog_name="remit")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    result = validate(str(path))
    assert result.exit_code == 0
    assert "without problems in 1 file" in result.output


@pytest.mark.parametrize("path", [path for path in sorted(BAD.iterdir()) if path.suffix != ".toml"], ids=lambda path: path.name)
def test_every_invalid_manifest_exits_with_1_and_a_location(path: Path) -> None:
    result = validate(str(path))
    assert result.exit_code == 1
    assert f"{path}:" in result.stdout


def test_directory_includes_visible_manifests_below_it_once(tmp_path: Path) -> None:
    (tmp_path / "deep" / ".hidden").mkdir(parents=True)
    (tmp_path / "a.yaml").write_text(GOOD)
    (tmp_path / "deep" / "b.YML").write_text(GOOD)
    (tmp_path / "deep" / "notes.txt").write_text("not a manifest")
    (tmp_path / "deep" / ".hidden" / "c.yaml").write_text("nor this")
    result = validate(str(tmp_path), str(tmp_path / "a.yaml"))
    assert result.exit_code == 0
    assert result.output == "2 objects without problems in 2 files\n"


def test_directory_without_manifests_is_a_usage_error(tmp_path: Path) -> None:
    result = validate(str(tmp_path))
    assert result.exit_code == 2
    assert "no .yaml, .yml, .json, .ndjson, .jsonl file below" in result.output


def test_missing_file_exits_with_2_after_checking_the_others() -> None:
    result = validate("nowhere.yaml", str(BAD / "empty.yaml"))
    assert result.exit_code == 2
    assert "nowhere.yaml: No such file" in result.stderr
    assert "the file is empty" in result.stdout


def test_dash_reads_stdin() -> None:
    assert validate("-", stdin=GOOD).exit_code == 0
    result = validate("-", stdin='{"kind": "Region"}')
    assert result.exit_code == 1
    assert result.stdout.startswith("<stdin>:1:1: ")


def test_json_output_contains_only_json_lines() -> None:
    result = validate("--json", str(BAD / "many-problems.yaml"), str(EXAMPLES))
    problems = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(problems) == 5
    assert set(problems[0]) == {"file", "line", "column", "path", "message", "cure", "reserved"}
    assert "5 problems in" in result.stderr


def test_quiet_prints_nothing_for_valid_files() -> None:
    result = validate("-q", str(EXAMPLES))
    assert (result.exit_code, result.output) == (0, "")


def test_no_argument_is_a_usage_error() -> None:
    assert validate().exit_code == 2


def test_control_characters_in_names_and_content_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J.yaml"
    path.write_text(GOOD + 'spec: {"\\e]0;owned\\a": 1, zones: ["\\e[31m"]}\n')
    result = validate(str(path))
    assert result.exit_code == 1
    assert "\x1b" not in result.output
    assert "\\x1b[2J" in result.output


def test_endless_file_is_refused() -> None:
    result = validate("/dev/zero")
    assert result.exit_code == 1


def test_character_outside_the_terminal_encoding_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(GOOD + "spec: {zones→: [a]}\n")
    environment = {"PYTHONIOENCODING": "latin-1", "PATH": "/usr/bin:/bin"}
    program = [sys.executable, "-m", "remit.cli.main", "validate", str(path)]
    done = subprocess.run(program, capture_output=True, env=environment, check=False)
    assert done.returncode == 1
    assert b'spec["zones\\u2192"]' in done.stdout


def test_json_lines_files_are_found_in_directories(tmp_path: Path) -> None:
    for name in ("a.ndjson", "b.jsonl"):
        (tmp_path / name).write_text(f'{{"apiVersion": "remit/v1", "kind": "Region", "metadata": {{"name": "{name[0]}"}}}}\n')
    assert validate(str(tmp_path)).output == "2 objects without problems in 2 files\n"


def test_unreadable_directory_exits_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.yaml").write_text(GOOD)
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    result = validate(str(tmp_path))
    assert result.exit_code == 2
    assert "closed: Permission denied" in result.stderr
    assert "1 object without problems in 1 file; 1 file could not be read" in result.stdout


def test_pipe_and_dangling_link_in_a_directory_exit_with_2(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.yaml")
    (tmp_path / "gone.yaml").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a.yaml").write_text(GOOD)
    result = validate(str(tmp_path))
    assert result.exit_code == 2
    assert "x.yaml: not a regular file, so it was skipped" in result.stderr
    assert "gone.yaml: No such file" in result.stderr
    assert "1 object without problems in 1 file; 2 files could not be read" in result.stdout


def test_empty_file_name_is_a_usage_error() -> None:
    result = validate("")
    assert result.exit_code == 2
    assert "a file name is empty" in result.stderr


def test_closed_stdin_is_reported() -> None:
    program = f"exec {sys.executable} -m remit.cli.main validate - <&-"
    done = subprocess.run(["/bin/sh", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "<stdin>: standard input is closed\n")
