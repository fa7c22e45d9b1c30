"""Does the command line explain itself, guess what was meant, and load no more than it needs?"""

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


def test_help_lists_every_command_and_keeps_its_examples_in_lines() -> None:
    code, output = run("--help")
    assert code == 0
    for name, lazy in COMMANDS.items():
        assert (f"  {name} " in output) is bool(lazy.summary), "what has no summary is not for people to type"
    assert "    remit validate examples/ " in output


@pytest.mark.parametrize("name", ["validate", "schema", "completion", "simulate", "explain", "capacity"])
def test_each_command_has_examples(name: str) -> None:
    code, output = run(name, "--help")
    assert code == 0
    assert "Examples:\n    " in output


def test_a_misspelt_command_is_guessed() -> None:
    code, output = run("vaildate", "x")
    assert code == 2
    assert "did you mean validate?" in output


def test_a_command_that_is_like_none_points_to_the_list() -> None:
    code, output = run("\x1b[31mxyzzy")
    assert code == 2
    assert "--help" in output
    assert "\x1b" not in output


def test_version() -> None:
    assert run("--version") == (0, "remit, version 0.1.0\n")


def test_schema_lists_prints_and_guesses() -> None:
    assert "Workload " in run("schema")[1]
    assert run("schema", "workload")[1].startswith('{\n  "$schema"')
    assert '"discriminator"' in run("schema", "--all")[1]
    code, output = run("schema", "Worklod")
    assert code == 2
    assert "did you mean Workload?" in output
    assert run("schema", "Node", "--all")[0] == 2


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_prints_a_script_and_how_to_install_it(shell: str) -> None:
    code, output = run("completion", shell)
    assert code == 0
    assert f"# Install with: remit completion {shell}" in output
    assert "_REMIT_COMPLETE" in output
    assert output.startswith("#compdef remit\n") == (shell == "zsh")


def test_help_loads_neither_parser_nor_numbers() -> None:
    code = "import sys; sys.argv = ['remit', '--help']\nfrom remit.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    heavy = "print([name for name in ('numpy', 'rich', 'ruamel.yaml', 'apsw', 'asyncio') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + heavy], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is a device of Linux")
@pytest.mark.parametrize("arguments", [["--help"], ["schema", "--all"], ["validate", "-"]])
def test_a_full_disk_is_told_in_one_line(arguments: list[str]) -> None:
    program = [sys.executable, "-m", "remit.cli.main", *arguments]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, input=b"a: 1\n", check=False)
    assert done.returncode == 2
    assert done.stderr == b"remit: No space left on device\n"


def test_a_reader_that_has_seen_enough_is_no_mistake() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    program = [sys.executable, "-m", "remit.cli.main", "schema", "Workload"]
    done = subprocess.run(program, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("arguments", [["--help"], ["schema", "--all"], ["bench", "simulate", "--quick", "--json"]])
def test_a_closed_stdout_is_told_in_one_line(arguments: list[str]) -> None:
    command = f"{shlex.join([sys.executable, '-m', 'remit.cli', *arguments])} >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False, timeout=20)
    assert (done.returncode, done.stderr) == (2, b"remit: stdout is closed; use >/dev/null to discard the output\n")


def test_every_command_that_is_interrupted_ends_with_130() -> None:
    program = [sys.executable, "-m", "remit.cli", "validate", "-"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(0.7)  # it waits for manifests
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    assert (process.returncode, out, errors) == (130, b"", b"interrupted\n")


DROPPED = """
    class Thing: pass
    def dropped(_):
        raise KeyboardInterrupt
    thing = Thing()
    seen = weakref.ref(thing, dropped)
    del thing
    while True: pass
"""
BETWEEN = """
    async def work(): pass
    made = work()
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize("body", [DROPPED, BETWEEN], ids=["where Python drops it", "between a coroutine and its task"])
def test_an_interrupt_is_heard_and_nothing_else_is_said_wherever_it_falls(body: str) -> None:
    code = f"""
import click, sys, weakref
from remit.cli import main
def body():{body}
main.COMMANDS["hang"] = main.Lazy("__main__", "hang", "")
hang = click.Command("hang", callback=body)
sys.argv = ["remit", "hang"]
main.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_benchmark_is_told_where_it_cannot_write() -> None:
    code, output = run("bench", "commit", "--data", "/nonexistent")
    assert code == 2
    assert "Directory '/nonexistent' does not exist" in output


def test_the_shell_completes_kinds() -> None:
    environment = {**os.environ, "_REMIT_COMPLETE": "zsh_complete", "COMP_WORDS": "remit schema w", "COMP_CWORD": "2"}
    program = [sys.executable, "-c", "from remit.cli.main import main; main()"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert "Workload" in done.stdout.splitlines()
    assert "Region" not in done.stdout
