"""Effects of hostile work on the agent, on other files and on a reader's terminal: A29, A30, A31 and A37.

Against a whole control plane: the hostile parts are what a tenant may declare, and what its processes do and write.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from remit.world.clock import BootClock
from remit.world.interfaces import ProcessSpec
from remit.world.process.runner import ProcessRunner
from tests.integration.cli.up_process import REMIT, Ups

SECRET: Final = "what nobody may read"
STEERING: Final = "\x1b]0;title\x07\x1b[2J\x1b[31m\r\u202e"


@pytest.fixture(scope="module")
def ups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ups]:
    found = Ups(tmp_path_factory.mktemp("work"))
    try:
        found.start("--nodes", "1", "--cpu", "4", "--memory", "4Gi")
        found.until("the context is there", lambda: Path(found.env["REMIT_CONFIG"]).exists())
        found.ready(1)
        yield found
    finally:
        found.end()


def declare(ups: Ups, name: str, *command: str, kind: str = "service", **more: Any) -> None:
    metadata = {"name": name, "tenant": "default", "annotations": more.pop("annotations", {})}
    template = {"command": command, "resources": {"cpu": "50m", "memory": "64Mi"}, "stopGrace": "1s", **more}
    manifest = {
        "apiVersion": "remit/v1",
        "kind": "Workload",
        "metadata": metadata,
        "spec": {"type": kind, "template": template},
    }
    done = ups.remit("apply", "-f", "-", stdin=json.dumps(manifest))
    assert done.returncode == 0, done


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def logs(ups: Ups, name: str) -> str:
    """Every byte, including invalid UTF-8."""
    done = subprocess.run([REMIT, "logs", name], env=ups.env, capture_output=True, check=False, timeout=60)
    return done.stdout.decode(errors="replace")


def wait_for_log(ups: Ups, name: str, text: str) -> str:
    ups.until(f"{name} says {text}", lambda: text in logs(ups, name))
    return logs(ups, name)


def test_row_29_planted_symlink_is_not_followed(ups: Ups, tmp_path: Path) -> None:
    """The work replaces its own log, and an older piece of it, by symlinks."""
    target = tmp_path / "secret"
    target.write_text(SECRET)
    script = (
        "out=$(readlink /proc/$$/fd/1); echo planted >&2; "
        f"ln -sf {target} $out.x; mv $out.x $out; ln -s {target} $out@0000000000000000; exec sleep 300"
    )
    declare(ups, "planter", *shell(script))
    output = wait_for_log(ups, "planter-0", "planted")
    assert SECRET not in output
    assert target.read_text() == SECRET


def test_row_29_symlink_in_work_directory_is_not_followed_on_removal(ups: Ups, tmp_path: Path) -> None:
    """Removing an attempt's directory removes its contents, not what links in it point to."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text(SECRET)
    declare(ups, "linker", *shell(f"ln -s {victim} there; ln -s {victim}/file file; echo linked; exec sleep 300"))
    wait_for_log(ups, "linker-0", "linked")
    assert ups.remit("delete", "workload/linker").returncode == 0
    work = ups.data / "agent" / "work"
    ups.until("its directory is gone", lambda: not any((place / "there").is_symlink() for place in work.iterdir()))
    assert (victim / "file").read_text() == SECRET


def test_row_30_shell_metacharacters_stay_literal(ups: Ups) -> None:
    arguments = (";$(id)", "`id`", "$(touch /nowhere)", "a|b", "&&", "\n", "$HOME", "*")
    declare(ups, "literal", "printf", "<%s>", *arguments, kind="job")
    output = wait_for_log(ups, "literal-0", "<*>")
    assert output == "".join(f"<{text}>" for text in arguments)
    declare(ups, "beside", "sleep", "300")
    ups.until("it runs", lambda: ups.remit("exec", "beside", "--", "true").returncode == 0)
    done = ups.remit("exec", "beside", "--", "printf", "<%s>", *arguments)
    assert done.stdout == output


@pytest.mark.smoke
def test_row_31_loader_variables_reach_only_the_work(ups: Ups) -> None:
    """A missing library makes a loader complain, which shows every process that loads it."""
    env = {"LD_PRELOAD": "/nowhere/evil.so", "LD_AUDIT": "/nowhere/audit.so", "PYTHONPATH": "/nowhere", "PYTHONSTARTUP": "/x"}
    declare(ups, "loaded", *shell("echo it has $LD_PRELOAD $PYTHONPATH; exec sleep 300"), env=env)
    output = wait_for_log(ups, "loaded-0", "it has /nowhere/evil.so /nowhere")
    assert "cannot be preloaded" in output, "the work itself must be started with it"
    for which in ("agent", "keeper"):
        environ = Path(f"/proc/{ups.pid(which)}/environ").read_bytes()
        assert b"evil.so" not in environ
        assert b"/nowhere" not in environ
    assert "evil.so" not in (ups.data / "agent" / "run" / "keeper.log").read_text()
    assert "evil.so" not in (ups.data / "agent.log").read_text()
    done = ups.remit("exec", "loaded", "--", "true")
    assert done.returncode == 0
    assert done.stderr.count("'/nowhere/evil.so' from LD_PRELOAD cannot be preloaded") == 1, (
        "the process that starts a command must not load it"
    )


def test_row_31_bubblewrap_is_started_without_loader_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, seen = tmp_path / "bin" / "bwrap", tmp_path / "seen"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat /proc/$$/environ > {seen}.env\ncat /proc/$$/cmdline > {seen}.argv\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    steering = {
        "LD_PRELOAD": "/evil.so",
        "LD_LIBRARY_PATH": "/evil",
        "GCONV_PATH": "/evil",
        "GLIBC_TUNABLES": "x=1",
        "TMPDIR": "/x",
    }

    async def scenario() -> None:
        runner = ProcessRunner(BootClock())
        running = await runner.start(ProcessSpec(("true",), {"PATH": os.defpath, "MODE": "live", **steering}, sandbox="bwrap"))
        async with asyncio.timeout(20):
            await runner.wait(running)

    asyncio.run(scenario())
    environ = Path(f"{seen}.env").read_text().split("\0")
    argv = Path(f"{seen}.argv").read_text().split("\0")
    assert "MODE=live" in environ
    assert not [one for one in environ if one.partition("=")[0] in steering]
    for name, text in steering.items():
        at = argv.index(name)
        assert (argv[at - 1], argv[at + 1]) == ("--setenv", text)
        assert at < argv.index("--")


def test_row_37_output_and_names_cannot_control_terminal(ups: Ups) -> None:
    """Names and messages are escaped even into a pipe; only log output is passed on unchanged."""
    hostile = f"first{STEERING}\nsecond"
    declare(ups, "loud", *shell(f"printf '%s\\n' '{STEERING}said'; exec sleep 300"), annotations={"note": hostile})
    declare(ups, "broken", f"/no/such{STEERING}\nprogram", kind="job", annotations={"note": hostile})
    wait_for_log(ups, "loud-0", "said")
    ups.until("that it cannot start is told", lambda: "no/such" in ups.remit("describe", "workload/broken").stdout)
    for arguments in (
        ("get", "workloads"),
        ("get", "replicas", "-o", "wide"),
        ("get", "workloads", "-o", "yaml"),
        ("get", "workloads", "-o", "json"),
        ("describe", "workload/loud"),
        ("describe", "workload/broken"),
        ("describe", "replica/broken-0"),
        ("explain", "workload/broken"),
        ("explain", "replica/broken-0"),
        ("events",),
        ("events", "workload/broken"),
        ("top", "replicas"),
        ("wait", "workload/broken", "--for=condition=Complete", "--timeout", "1s"),
    ):
        done = ups.remit(*arguments)
        output = done.stdout + done.stderr
        assert "Traceback" not in output, arguments
        for letter in "\x1b\x07\r\u202e":
            assert letter not in output, (arguments, output)
    assert "\x1b]0;title\x07" in logs(ups, "loud-0"), "log bytes are passed on unchanged into a pipe"
