"""`remit exec` against a complete control plane: streams, exit codes, terminal, interrupt and end of the replica."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.cli.up_process import REMIT, Ups

WEB = """
apiVersion: remit/v1
kind: Workload
metadata: {name: web, tenant: default}
spec:
  type: service
  replicas: 2
  template:
    command: [sh, -c, "while :; do sleep 0.2; done"]
    env: {MODE: live, LD_PRELOAD: /no/such/library.so}
    resources: {cpu: 50m, memory: 64Mi}
    stopGrace: 30s
"""


@pytest.fixture(scope="module")
def ups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ups]:
    found = Ups(tmp_path_factory.mktemp("exec"))
    try:
        found.start("--nodes", "1", "--cpu", "2", "--memory", "2Gi")
        found.until("the context is stored", lambda: Path(found.env["REMIT_CONFIG"]).exists())
        found.ready(1)
        done = found.remit("apply", "-f", "-", "--wait", stdin=WEB)
        assert done.returncode == 0, done
        yield found
    finally:
        found.end()


def run(ups: Ups, *args: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    done = subprocess.run([REMIT, "exec", *args], input=stdin, env=ups.env, capture_output=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.mark.smoke
def test_command_has_the_replica_environment_and_its_exit_code_is_returned(ups: Ups) -> None:
    code, out, err = run(ups, "web-0", "--", "sh", "-c", "echo $REMIT_REPLICA $MODE; pwd; echo wrong >&2; exit 7")
    assert code == 7
    assert re.fullmatch(rb"replica/default/web-0 live\n/.*/(agent/work|remit-rooms/[0-9a-f]+)/.*\.1\n", out)
    assert "wrong\n" in err
    assert run(ups, "web", "--", "printf", "%s|", ";$(id)", "`id`", "-x")[1] == b";$(id)|`id`|-x|"
    assert run(ups, "web-1", "--", "sh", "-c", "kill -9 $$")[0] == 137


def test_stdin_is_passed_completely_with_end_of_file(ups: Ups) -> None:
    data = os.urandom(2 << 20)
    assert run(ups, "-i", "web", "--", "cat", stdin=data)[:2] == (0, data)
    assert run(ups, "-i", "web", "--", "wc", "-c", stdin=b"")[1].strip() == b"0"
    assert run(ups, "web", "--", "cat", stdin=b"nobody asked for this")[:2] == (0, b"")


def test_command_that_cannot_run_exits_with_125_and_a_reason(ups: Ups) -> None:
    for args, message in (
        (("web", "--", "no-such-program"), "no-such-program cannot be run"),
        (("web-9", "--", "true"), "web-9"),
        (("--attempt", "9", "web-0", "--", "true"), "attempt 9"),
    ):
        code, out, err = run(ups, *args)
        assert (code, out) == (125, b""), err
        assert message in err
    assert run(ups, "-t", "web", "--", "true")[0] == 2, "stdin is not a terminal"
    assert run(ups, "node/x", "--", "true")[0] == 2


def sleeping(seconds: str) -> bool:
    """Return whether a process `sleep SECONDS` exists."""
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and (process / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                return True
    return False


def test_interrupted_exec_stops_the_command_and_its_children(ups: Ups) -> None:
    seconds = [
        f"300.{os.getpid()}{number}"
        for number in (1, 2)
        # Unique arguments identify the processes, because a sandbox hides their pids.
    ]
    args = [REMIT, "exec", "web-0", "--", "sh", "-c", f"setsid sleep {seconds[0]} & sleep {seconds[1]}"]
    process = subprocess.Popen(args, env=ups.env, stdout=subprocess.PIPE, text=True)
    try:
        ups.until("both run", lambda: all(map(sleeping, seconds)))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (130, -signal.SIGINT)
        ups.until("both are stopped", lambda: not any(map(sleeping, seconds)))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


class Terminal:
    def __init__(self, ups: Ups, *args: str) -> None:
        self.pid, self._keys = pty.fork()
        if self.pid == 0:
            os.execve(REMIT, [REMIT, "exec", *args], {**ups.env, "TERM": "xterm-256color"})
        self.output = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._keys, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._keys, keys)

    def until(self, word: bytes) -> None:
        until = time.monotonic() + 30
        while word not in self.output:
            assert time.monotonic() < until, self.output
            if select.select([self._keys], [], [], 0.2)[0]:
                self.output += os.read(self._keys, 4_096)

    def end(self) -> int:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            if select.select([self._keys], [], [], 0.2)[0]:
                try:
                    self.output += os.read(self._keys, 4_096)
                except OSError:
                    break
        os.close(self._keys)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_remote_terminal_has_size_and_signals_of_the_local_one(ups: Ups) -> None:
    terminal = Terminal(ups, "-it", "web", "--", "sh")
    terminal.resize(33, 111)
    terminal.type(b"stty size; echo $TERM\n")
    terminal.until(b"xterm-256color\r\n")
    assert b"33 111" in terminal.output
    terminal.resize(44, 122)
    time.sleep(0.5)
    terminal.type(b"stty size\n")
    terminal.until(b"44 122")
    terminal.type(b"sleep 100\n")
    terminal.until(b"sleep 100\r\n")
    time.sleep(0.5)
    terminal.type(b"\x03")
    terminal.type(b"echo it was $?\n")
    terminal.until(b"it was 130")
    terminal.type(b"exit 9\n")
    assert terminal.end() == 9


def test_output_without_tty_is_escaped_unless_raw(ups: Ups) -> None:
    args = ("web", "--", "printf", r"\033]0;title\007\033[31mred\033[0m\n")
    escaped, raw = Terminal(ups, *args), Terminal(ups, "--raw", *args)
    assert (escaped.end(), raw.end()) == (0, 0)
    assert b"\\x1b]0;title\\x07red\r\n" in escaped.output
    assert b"\x1b" not in escaped.output
    assert b"\x1b]0;title\x07\x1b[31mred\x1b[0m\r\n" in raw.output
    assert run(ups, *args)[1] == b"\x1b]0;title\x07\x1b[31mred\x1b[0m\n", "output to a pipe must be unchanged"


def test_command_ends_with_its_replica_even_if_it_ignores_sigterm(ups: Ups) -> None:
    args = [REMIT, "exec", "web-1", "--", "sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"]
    process = subprocess.Popen(args, env=ups.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    start = time.monotonic()
    assert ups.remit("scale", "web", "--replicas", "1").returncode == 0
    _, err = process.communicate(timeout=25)
    assert process.returncode == 137, err
    assert "replica" in err
    assert time.monotonic() - start < 20, "it must end with the process of the replica, not after its grace period"
    code, _, err = run(ups, "web-1", "--", "true")
    assert code == 125, err
