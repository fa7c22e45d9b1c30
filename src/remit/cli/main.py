"""Command group: lazily loaded commands, help, suggestions.

A command's module is loaded only when it is used, so `remit --help` stays quick.
"""

from __future__ import annotations

import os
import signal  # noqa: TID251 - the program's own end, when it is interrupted
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NamedTuple

import click

from remit import __version__
from remit.cli.__main__ import INTERRUPTED, leave_interrupted
from remit.cli.interrupts import insisting
from remit.model.problems import closest_name, did_you_mean, escaped, quoted

STDERR = 2
AGAIN_S = 0.001


class Lazy(NamedTuple):
    """Where a command is written, and its line in the help, which must not cost loading it; without one it is not listed."""

    module: str
    name: str
    summary: str


COMMANDS = {
    "up": Lazy("remit.cli.local.up", "up", "Run the whole control plane on this machine, with nodes to try things out."),
    "down": Lazy("remit.cli.local.down", "down", "End what `remit up` runs, with all its work."),
    "apply": Lazy("remit.cli.commands.apply", "apply", "Create or replace what manifests declare; wait until it stands."),
    "plan": Lazy("remit.cli.commands.apply", "plan", "Show what an apply would change, and where replicas would go."),
    "diff": Lazy("remit.cli.commands.apply", "diff", "Show how manifests differ from what is there."),
    "create": Lazy("remit.cli.commands.create", "create", "Make a secret or a config from files and words."),
    "get": Lazy("remit.cli.commands.get", "get", "List objects, with the reason why they wait; watch them change."),
    "status": Lazy("remit.cli.commands.status", "status", "Say how the scope stands, and who should act and does not."),
    "describe": Lazy("remit.cli.commands.get", "describe", "Tell all about one object: how it fares, what happened."),
    "explain": Lazy("remit.cli.commands.explain", "explain", "Say why work waits and what would help, or why it is there."),
    "capacity": Lazy("remit.cli.commands.capacity", "capacity", "Say how many more replicas fit, and what stops the next."),
    "logs": Lazy("remit.cli.commands.logs", "logs", "Print what a workload's replicas, or one replica, have written."),
    "exec": Lazy("remit.cli.commands.exec", "execute", "Run a command beside a replica, in its surroundings."),
    "events": Lazy("remit.cli.commands.events", "events", "Print what happened, to all or to one object."),
    "top": Lazy("remit.cli.commands.nodes", "top", "Show what nodes and replicas use just now."),
    "wait": Lazy("remit.cli.commands.rollout", "wait", "Wait until something is true of objects."),
    "scale": Lazy("remit.cli.commands.rollout", "scale", "Set how many replicas a workload should have."),
    "rollout": Lazy("remit.cli.commands.rollout", "rollout", "See how a workload's generation comes out, or begin anew."),
    "delete": Lazy("remit.cli.commands.apply", "delete", "Delete objects by name, as files declare them, or by labels."),
    "cordon": Lazy("remit.cli.commands.nodes", "cordon", "Place nothing new on nodes."),
    "uncordon": Lazy("remit.cli.commands.nodes", "uncordon", "Let nodes take work again."),
    "drain": Lazy("remit.cli.commands.nodes", "drain", "Empty nodes, within what each workload can spare."),
    "secrets": Lazy("remit.cli.commands.create", "secrets", "Turn the keys with which secrets are sealed."),
    "server": Lazy("remit.cli.local.server", "server", "Run a server: the authority of a scope, its store and its HTTP API."),
    "scheduler": Lazy("remit.cli.local.server", "scheduler", "Run a scheduler of a scope, as a process of its own."),
    "controllers": Lazy("remit.cli.local.server", "controllers", "Run a scope's controllers, as a process of their own."),
    "agent": Lazy("remit.cli.local.agent", "agent", "Run the work of this machine, as one node or as several."),
    "keeper": Lazy("remit.cli.local.down", "keeper", ""),
    "backup": Lazy("remit.cli.commands.backup", "backup", "Copy the store of a running server to a file."),
    "restore": Lazy("remit.cli.commands.backup", "restore", "Make a server's store from a backup, as a new incarnation."),
    "support-bundle": Lazy("remit.cli.local.doctor", "support_bundle", "Gather what a report about a fault needs, redacted."),
    "doctor": Lazy("remit.cli.local.doctor", "doctor", "Say what is missing on this machine, and the cure."),
    "context": Lazy("remit.cli.local.context", "context", "Servers by name, and which of them is meant."),
    "validate": Lazy(
        "remit.cli.local.validate", "validate", "Check manifests and tell every problem, with its place and cure."
    ),
    "schema": Lazy("remit.cli.local.validate", "schema", "Print the JSON Schema of a kind, for editors."),
    "demo": Lazy("remit.demo.demo_command", "demo", "See work run, be explained, and outlive a machine and the server."),
    "simulate": Lazy("remit.cli.local.simulate", "simulate", "Run scenarios in a world that fails, and check every promise."),
    "bench": Lazy("remit.bench.bench_command", "bench", "Measure this machine."),
    "token": Lazy("remit.cli.commands.token", "token", "Who may ask: make, list and revoke tokens."),
    "audit": Lazy("remit.cli.commands.events", "audit", "Print who did what, and who was refused."),
    "version": Lazy("remit.cli.commands.status", "version", "Print the version of this program and of the server."),
    "completion": Lazy("remit.cli.local.context", "completion", "Print the script that completes commands in your shell."),
}


SECTIONS = {
    "Begin": ("up", "down", "demo", "doctor", "context"),
    "Make it so": ("apply", "create", "plan", "diff", "validate", "schema", "scale", "rollout", "wait", "delete"),
    "Look": ("status", "get", "describe", "explain", "capacity", "logs", "exec", "events", "top"),
    "Nodes": ("cordon", "uncordon", "drain"),
    "People": ("token", "audit"),
    "Keys": ("secrets",),
    "Parts, each as a process of its own": ("server", "scheduler", "controllers", "agent"),
    "Keep it": ("backup", "restore", "support-bundle"),
    "Prove it": ("simulate", "bench"),
}
"""Where a command stands in the help; what is named nowhere stands at its end."""


class Commands(click.Group):
    """A group whose commands are named before they are loaded, and that guesses what a misspelt one meant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        try:
            with insisting():
                command = getattr(import_module(lazy.module), lazy.name)
        except ModuleNotFoundError as error:
            if error.name != lazy.module:
                raise
            raise click.ClickException(f"`remit {cmd_name}` is not part of this installation") from error
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{lazy.module}.{lazy.name} is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        told = {name: lazy.summary for name, lazy in COMMANDS.items() if lazy.summary}
        named = {name for names in SECTIONS.values() for name in names}
        rest = tuple(name for name in told if name not in named)
        width = max(map(len, told))
        for title, names in {**SECTIONS, "Besides": rest}.items():
            rows = [(f"{name:<{width}}", told[name]) for name in names if name in told]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            cure = did_you_mean(closest_name(args[0], COMMANDS)) or "`remit --help` lists them"
            ctx.fail(f"there is no command {quoted(args[0])}; {cure}")
        return super().resolve_command(ctx, args)

    def make_context(self, *words: Any, **more: Any) -> click.Context:
        with _ending_alike():
            return super().make_context(*words, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with _ending_alike():
            return super().invoke(ctx)


@contextmanager
def _ending_alike() -> Iterator[None]:
    """Interrupted from its first word on, every command ends with 130: click would say 1, which has meanings of its own."""
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):
            click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


def examples(*lines: str) -> str:
    """An epilog that keeps its line breaks."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        "remit apply -f web.yaml --wait    make it so, and see how far it is",
        "remit get workloads               what there is, and what limits each",
        "remit explain workload/web        why it waits, and what would help",
        "remit validate examples/          check every manifest below a directory",
        "remit get --help                  more about one command",
    ),
)
@click.version_option(__version__, "--version", "-V", prog_name="remit")
def remit() -> None:
    """Remit: a scheduler that can try, before an incident, what it promises for one.

    Commands that ask a server find it by --server, REMIT_SERVER or `remit context`. They exit with 0 if it was done, 1 if not,
    2 if they were misused, and 3 if work was not placed.
    """


def main() -> None:
    if sys.stderr is None:
        _silent_stderr()
    if sys.stdout is None:  # `>&-`: known now, and not after an hour whose result goes nowhere
        with suppress(OSError):
            click.echo("remit: stdout is closed; write >/dev/null to be told nothing", err=True)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a terminal that cannot show a letter gets its number, not a crash
            reconfigure(errors="backslashreplace")
    sys.unraisablehook = _hear_interrupts
    # An interrupt may fall between a coroutine and its task. Last, so that whoever asks for this warning gets it.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning, append=True)
    try:
        try:
            remit(prog_name="remit")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, and not after the last line of Python, where nobody could say what went wrong
    except SystemExit as end:
        if end.code == INTERRUPTED:
            leave_interrupted()
        raise
    except BrokenPipeError:
        drop_output()
        sys.exit(1)  # the reader has seen enough, as in `remit schema Workload | head`
    except OSError as error:
        drop_output()
        where = f"{escaped(str(error.filename))}: " if error.filename else ""
        with suppress(OSError):  # stderr may be on the same full disk
            click.echo(f"remit: {where}{escaped(error.strerror or str(error))}", err=True)
        sys.exit(2)


def _hear_interrupts(lost: sys.UnraisableHookArgs) -> None:
    """What is raised while Python drops an object goes nowhere, even an interrupt. That one comes again, a moment later."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    else:
        sys.__unraisablehook__(lost)


def _silent_stderr() -> None:
    """`2>&-`: nobody wants to hear. Its number is taken all the same, or the next file opened would get what is said."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != STDERR:
        os.dup2(nowhere, STDERR)
        os.close(nowhere)
    os.set_inheritable(STDERR, True)
    sys.stderr = open(STDERR, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115 - a number, for good


def drop_output() -> None:
    """What could not be written is given up: Python would try once more on its way out, and complain by itself."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    main()
