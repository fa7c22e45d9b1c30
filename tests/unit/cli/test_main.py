"""Tests of the command group: help, suggestions, lazy imports, interrupts and closed streams."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from remit.cli.main import COMMANDS, remit


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(remit, arguments, prog_name="remit")
    return result.exit_code, result.output


def test_help_lists_every_command_with_examples() -> None:
    code, output = run("--help")
    assert code == 0
    for name, lazy in COMMANDS.items():
        assert (f"  {name} " in output) is bool(lazy.summary), "commands without a summary are hidden"
    assert "    remit validate examples/ " in output


@pytest.mark.parametrize("name", ["validate", "schema", "completion", "simulate", "explain", "capacity"])
def test_command_help_has_examples(name: str) -> None:
    code, output = run(name, "--help")
    assert code == 0
    assert "Examples:\n    " in output


def test_misspelt_command_gets_a_suggestion() -> None:
    code, output = run("vaildate", "x")
    assert code == 2
    assert "did you mean validate?" in output


def test_unknown_command_points_to_help() -> None:
    code, output = run("\x1b[31mxyzzy")
    assert code == 2
    assert "--help" in output
    assert "\x1b" not in output


def test_version_option_prints_the_version() -> None:
    assert run("--version") == (0, "remit, version 0.1.0\n")


def test_schema_prints_kinds_and_suggests_similar_ones() -> None:
    assert "Workload " in run("schema")[1]
    assert run("schema", "workload")[1].startswith('{\n  "$schema"')
    assert '"discriminator"' in run("schema", "--all")[1]
    code, output = run("schema", "Worklod")
    assert code == 2
    assert "did you mean Workload?" in output
    assert run("schema", "Node", "--all")[0] == 2


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_prints_a_script_with_install_command(shell: str) -> None:
    code, output = run("completion", shell)
    assert code == 0
    assert f"# Install with: remit completion {shell}" in output
    assert "_REMIT_COMPLETE" in output
    assert output.startswith("#compdef remit\n") == (shell == "zsh")


def test_help_imports_no_heavy_modules() -> None:
    code = "import sys; sys.argv = ['remit', '--help']\nfrom remit.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    heavy = "print([name for name in ('numpy', 'rich', 'ruamel.yaml', 'apsw', 'asyncio') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + heavy], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full exists only on Linux")
@pytest.mark.parametrize("arguments", [["--help"], ["schema", "--all"], ["validate", "-"]])
def test_full_disk_is_a_one_line_error(arguments: list[str]) -> None:
    program = [sys.executable, "-m", "remit.cli.main", *arguments]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, input=b"a: 1\n", check=False)
    assert done.returncode == 2
    assert done.stderr == b"remit: No space left on device\n"


def test_closed_pipe_prints_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    program = [sys.executable, "-m", "remit.cli.main", "schema", "Workload"]
    done = subprocess.run(program, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("arguments", [["--help"], ["schema", "--all"], ["bench", "simulate", "--quick", "--json"]])
def test_closed_stdout_is_a_one_line_error(arguments: list[str]) -> None:
    command = f"{shlex.join([sys.executable, '-m', 'remit.cli', *arguments])} >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False, timeout=20)
    assert (done.returncode, done.stderr) == (2, b"remit: stdout is closed; use >/dev/null to discard the output\n")


def test_interrupted_command_exits_with_130() -> None:
    program = [sys.executable, "-m", "remit.cli", "validate", "-"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(0.7)  # it waits for stdin
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    assert (process.returncode, out, errors) == (130, b"", b"interrupted\n")


DROPPED = """
    class Target: pass
    def dropped(_):
        raise KeyboardInterrupt
    target = Target()
    ref = weakref.ref(target, dropped)
    del target
    while True: pass
"""
BETWEEN = """
    async def work(): pass
    coroutine = work()
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize("body", [DROPPED, BETWEEN], ids=["in a weakref callback", "between a coroutine and its task"])
def test_interrupt_lost_by_python_still_exits_with_130(body: str) -> None:
    code = f"""
import click, sys, weakref
from remit.cli import main
def body():{body}
main.COMMANDS["hang"] = main.LazyCommand("__main__", "hang", "")
hang = click.Command("hang", callback=body)
sys.argv = ["remit", "hang"]
main.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_bench_with_a_missing_directory_is_a_usage_error() -> None:
    code, output = run("bench", "commit", "--data", "/nonexistent")
    assert code == 2
    assert "Directory '/nonexistent' does not exist" in output


def test_shell_completes_kinds_of_schema() -> None:
    environment = {**os.environ, "_REMIT_COMPLETE": "zsh_complete", "COMP_WORDS": "remit schema w", "COMP_CWORD": "2"}
    program = [sys.executable, "-c", "from remit.cli.main import main; main()"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert "Workload" in done.stdout.splitlines()
    assert "Region" not in done.stdout
