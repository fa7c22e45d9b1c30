"""What can work do to the agent, to others' files and to the reader's terminal? A29, A30, A31 and A37.

Against a whole control plane: what is hostile here is what a tenant may declare, and what its processes do and say.
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
from tests.integration.cli.test_up import REMIT, Ups

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
    thing = {"apiVersion": "remit/v1", "kind": "Workload", "metadata": metadata, "spec": {"type": kind, "template": template}}
    done = ups.remit("apply", "-f", "-", stdin=json.dumps(thing))
    assert done.returncode == 0, done


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def logs(ups: Ups, name: str) -> str:
    """Every byte, also those that are no text."""
    done = subprocess.run([REMIT, "logs", name], env=ups.env, capture_output=True, check=False, timeout=60)
    return done.stdout.decode(errors="replace")


def until_logged(ups: Ups, name: str, word: str) -> str:
    ups.until(f"{name} says {word}", lambda: word in logs(ups, name))
    return logs(ups, name)


def test_row_29__a_planted_symlink_is_not_followed(ups: Ups, tmp_path: Path) -> None:
    """The work puts links in the place of its own log, and of an older piece of it."""
    target = tmp_path / "secret"
    target.write_text(SECRET)
    script = (
        "out=$(readlink /proc/$$/fd/1); echo planted >&2; "
        f"ln -sf {target} $out.x; mv $out.x $out; ln -s {target} $out@0000000000000000; exec sleep 300"
    )
    declare(ups, "planter", *shell(script))
    told = until_logged(ups, "planter-0", "planted")
    assert SECRET not in told
    assert target.read_text() == SECRET


def test_row_29__a_link_in_the_work_directory_leads_nobody_out_of_it(ups: Ups, tmp_path: Path) -> None:
    """What is removed with the directory of a copy is what is in it, and not what it points at."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text(SECRET)
    declare(ups, "linker", *shell(f"ln -s {victim} there; ln -s {victim}/file file; echo linked; exec sleep 300"))
    until_logged(ups, "linker-0", "linked")
    assert ups.remit("delete", "workload/linker").returncode == 0
    work = ups.data / "agent" / "work"
    ups.until("its directory is gone", lambda: not any((place / "there").is_symlink() for place in work.iterdir()))
    assert (victim / "file").read_text() == SECRET


def test_row_30__what_a_shell_would_read_is_literal(ups: Ups) -> None:
    words = (";$(id)", "`id`", "$(touch /nowhere)", "a|b", "&&", "\n", "$HOME", "*")
    declare(ups, "literal", "printf", "<%s>", *words, kind="job")
    told = until_logged(ups, "literal-0", "<*>")
    assert told == "".join(f"<{word}>" for word in words)
    declare(ups, "beside", "sleep", "300")
    ups.until("it runs", lambda: ups.remit("exec", "beside", "--", "true").returncode == 0)
    done = ups.remit("exec", "beside", "--", "printf", "<%s>", *words)
    assert done.stdout == told


@pytest.mark.smoke
def test_row_31__what_steers_a_loader_reaches_the_task_alone(ups: Ups) -> None:
    """A library that is not there makes a loader complain: so it shows who has heeded it."""
    env = {"LD_PRELOAD": "/nowhere/evil.so", "LD_AUDIT": "/nowhere/audit.so", "PYTHONPATH": "/nowhere", "PYTHONSTARTUP": "/x"}
    declare(ups, "loaded", *shell("echo it has $LD_PRELOAD $PYTHONPATH; exec sleep 300"), env=env)
    told = until_logged(ups, "loaded-0", "it has /nowhere/evil.so /nowhere")
    assert "cannot be preloaded" in told, "the task itself is started with it"
    for which in ("agent", "keeper"):
        environ = Path(f"/proc/{ups.pid(which)}/environ").read_bytes()
        assert b"evil.so" not in environ
        assert b"/nowhere" not in environ
    assert "evil.so" not in (ups.data / "agent" / "run" / "keeper.log").read_text()
    assert "evil.so" not in (ups.data / "agent.log").read_text()
    done = ups.remit("exec", "loaded", "--", "true")
    assert done.returncode == 0
    assert done.stderr.count("'/nowhere/evil.so' from LD_PRELOAD cannot be preloaded") == 1, (
        "what begins a command does not heed it"
    )


def test_row_31__bubblewrap_itself_is_started_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    async def scene() -> None:
        runner = ProcessRunner(BootClock())
        running = await runner.start(ProcessSpec(("true",), {"PATH": os.defpath, "MODE": "live", **steering}, sandbox="bwrap"))
        async with asyncio.timeout(20):
            await runner.wait(running)

    asyncio.run(scene())
    environ = Path(f"{seen}.env").read_text().split("\0")
    argv = Path(f"{seen}.argv").read_text().split("\0")
    assert "MODE=live" in environ
    assert not [one for one in environ if one.partition("=")[0] in steering]
    for name, text in steering.items():
        at = argv.index(name)
        assert (argv[at - 1], argv[at + 1]) == ("--setenv", text)
        assert at < argv.index("--")


def test_row_37__nothing_that_work_or_its_author_says_steers_a_terminal(ups: Ups) -> None:
    """Into a pipe, where no terminal is, the words of people are escaped all the same; only what was logged is as it was."""
    hostile = f"first{STEERING}\nsecond"
    declare(ups, "loud", *shell(f"printf '%s\\n' '{STEERING}said'; exec sleep 300"), annotations={"note": hostile})
    declare(ups, "broken", f"/no/such{STEERING}\nprogram", kind="job", annotations={"note": hostile})
    until_logged(ups, "loud-0", "said")
    ups.until("that it cannot start is told", lambda: "no/such" in ups.remit("describe", "workload/broken").stdout)
    for words in (
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
        done = ups.remit(*words)
        told = done.stdout + done.stderr
        assert "Traceback" not in told, words
        for letter in "\x1b\x07\r\u202e":
            assert letter not in told, (words, told)
    assert "\x1b]0;title\x07" in logs(ups, "loud-0"), "into a pipe every byte goes as it was written"
