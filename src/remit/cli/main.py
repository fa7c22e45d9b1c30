"""Command group `remit`: lazily loaded commands, help sections and suggestions for misspelled commands.

The module of a command is imported only when the command is used, so that `remit --help` and shell completion stay fast.
"""

from __future__ import annotations

import os
import signal  # noqa: TID251 - handles interrupts of this program itself
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NamedTuple

import click

from remit import __version__
from remit.cli.__main__ import INTERRUPTED, leave_interrupted
from remit.cli.interrupts import persistent_interrupts
from remit.model.problems import closest_name, did_you_mean, escaped, quoted

STDERR = 2
SERVER_OPTIONS = ("--server", "--context", "--token-file", "--ca-file", "--tenant", "-t", "-n", "-A")
"""Options of commands that are often written before the command."""
AGAIN_S = 0.001


class LazyCommand(NamedTuple):
    """Location of a command and its line in `remit --help`. The line is kept here so that the help imports no command modules.
    Commands without a summary are not listed.
    """

    module: str
    name: str
    summary: str


COMMANDS = {
    "up": LazyCommand(
        "remit.cli.local.up", "up", "Run a complete control plane on this machine, with nodes for trying it out."
    ),
    "down": LazyCommand("remit.cli.local.down", "down", "Stop what `remit up` started, including all replicas."),
    "apply": LazyCommand(
        "remit.cli.commands.apply", "apply", "Create or replace objects from manifests; can wait until ready."
    ),
    "plan": LazyCommand("remit.cli.commands.apply", "plan", "Show what an apply would change and where replicas would go."),
    "diff": LazyCommand("remit.cli.commands.apply", "diff", "Show how manifests differ from the stored objects."),
    "create": LazyCommand("remit.cli.commands.create", "create", "Create a secret or a config from files and literal values."),
    "get": LazyCommand("remit.cli.commands.get", "get", "List objects with their pending reasons; watch changes."),
    "status": LazyCommand(
        "remit.cli.commands.status",
        "status",
        "Show the state of the scope (one control plane with its nodes) and unheld leases.",
    ),
    "describe": LazyCommand("remit.cli.commands.get", "describe", "Show all details of an object, with its events."),
    "explain": LazyCommand("remit.cli.commands.explain", "explain", "Explain why a replica is pending, or where it is."),
    "capacity": LazyCommand(
        "remit.cli.commands.capacity", "capacity", "Show how many more replicas fit, and what limits them."
    ),
    "logs": LazyCommand("remit.cli.commands.logs", "logs", "Print the output of a workload's replicas or of one replica."),
    "exec": LazyCommand("remit.cli.commands.exec", "execute", "Run a command next to a replica, in its sandbox."),
    "events": LazyCommand("remit.cli.commands.events", "events", "Print events of all objects or of one."),
    "top": LazyCommand("remit.cli.commands.nodes", "top", "Show current resource usage of nodes and replicas."),
    "wait": LazyCommand("remit.cli.commands.rollout", "wait", "Wait until objects reach a goal."),
    "scale": LazyCommand("remit.cli.commands.rollout", "scale", "Set the number of replicas of a workload."),
    "rollout": LazyCommand("remit.cli.commands.rollout", "rollout", "Show the progress of a rollout, or restart replicas."),
    "delete": LazyCommand("remit.cli.commands.apply", "delete", "Delete objects by name, by manifest or by label."),
    "cordon": LazyCommand("remit.cli.commands.nodes", "cordon", "Mark nodes unschedulable."),
    "uncordon": LazyCommand("remit.cli.commands.nodes", "uncordon", "Mark nodes schedulable again."),
    "drain": LazyCommand("remit.cli.commands.nodes", "drain", "Move all replicas off nodes, within disruption limits."),
    "secrets": LazyCommand("remit.cli.commands.create", "secrets", "Rotate the keys that seal secrets."),
    "server": LazyCommand(
        "remit.cli.local.server", "server", "Run a server: the authority of a scope, its store and its HTTP API."
    ),
    "scheduler": LazyCommand("remit.cli.local.server", "scheduler", "Run a scheduler of a scope as a separate process."),
    "controllers": LazyCommand(
        "remit.cli.local.server", "controllers", "Run the controllers of a scope as a separate process."
    ),
    "agent": LazyCommand("remit.cli.local.agent", "agent", "Run the agent of this machine, as one node or several."),
    "keeper": LazyCommand("remit.cli.local.down", "keeper", ""),
    "backup": LazyCommand("remit.cli.commands.backup", "backup", "Copy the store of a running server to a file."),
    "restore": LazyCommand(
        "remit.cli.commands.backup", "restore", "Create a server's store from a backup, as a new incarnation."
    ),
    "support-bundle": LazyCommand("remit.cli.local.doctor", "support_bundle", "Collect redacted diagnostics for a bug report."),
    "doctor": LazyCommand("remit.cli.local.doctor", "doctor", "Check this machine for missing requirements, with fixes."),
    "context": LazyCommand("remit.cli.local.context", "context", "Manage named servers and choose the current one."),
    "validate": LazyCommand(
        "remit.cli.local.validate", "validate", "Check manifests and print every problem with its location and fix."
    ),
    "schema": LazyCommand("remit.cli.local.validate", "schema", "Print the JSON Schema of a kind, for editors."),
    "demo": LazyCommand("remit.demo.demo_command", "demo", "Run a demo: explanations, and replicas that survive failures."),
    "simulate": LazyCommand(
        "remit.cli.local.simulate", "simulate", "Run scenarios with injected faults and check all invariants."
    ),
    "bench": LazyCommand("remit.bench.bench_command", "bench", "Run benchmarks on this machine."),
    "token": LazyCommand("remit.cli.commands.token", "token", "Create, list and revoke access tokens."),
    "audit": LazyCommand(
        "remit.cli.commands.events",
        "audit",
        "Print the audit log: what users changed, read or ran, and refused requests.",
    ),
    "version": LazyCommand("remit.cli.commands.status", "version", "Print the version of this program and of the server."),
    "completion": LazyCommand("remit.cli.local.context", "completion", "Print the completion script for your shell."),
}


SECTIONS = {
    "Getting started": ("up", "down", "demo", "doctor", "context"),
    "Manifests and workloads": ("apply", "create", "plan", "diff", "validate", "schema", "scale", "rollout", "wait", "delete"),
    "Inspection": ("status", "get", "describe", "explain", "capacity", "logs", "exec", "events", "top"),
    "Nodes": ("cordon", "uncordon", "drain"),
    "Access": ("token", "audit"),
    "Secret keys": ("secrets",),
    "Components as separate processes": ("server", "scheduler", "controllers", "agent"),
    "Backup and support": ("backup", "restore", "support-bundle"),
    "Simulation and benchmarks": ("simulate", "bench"),
}
"""Help sections and their commands, in order. Commands that are in no section are listed at the end."""


class Commands(click.Group):
    """Command group that imports a command on first use and suggests a similar name for an unknown command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        try:
            with persistent_interrupts():
                command = getattr(import_module(lazy.module), lazy.name)
        except ModuleNotFoundError as error:
            if error.name != lazy.module:
                raise
            raise click.ClickException(f"`remit {cmd_name}` is not part of this installation") from error
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{lazy.module}.{lazy.name} is not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        summaries = {name: lazy.summary for name, lazy in COMMANDS.items() if lazy.summary}
        named = {name for names in SECTIONS.values() for name in names}
        rest = tuple(name for name in summaries if name not in named)
        width = max(map(len, summaries))
        for title, names in {**SECTIONS, "Other": rest}.items():
            rows = [(f"{name:<{width}}", summaries[name]) for name in names if name in summaries]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            cure = did_you_mean(closest_name(args[0], COMMANDS)) or "`remit --help` lists all commands"
            ctx.fail(f"unknown command {quoted(args[0])}; {cure}")
        return super().resolve_command(ctx, args)

    def make_context(self, *words: Any, **more: Any) -> click.Context:
        with _exit_code_of_interrupts():
            try:
                return super().make_context(*words, **more)
            except click.NoSuchOption as error:
                if error.option_name in SERVER_OPTIONS:
                    raise click.UsageError(
                        f"{error.option_name} belongs after the command: remit COMMAND {error.option_name} ...", error.ctx
                    ) from error
                raise

    def invoke(self, ctx: click.Context) -> Any:
        with _exit_code_of_interrupts():
            return super().invoke(ctx)


@contextmanager
def _exit_code_of_interrupts() -> Iterator[None]:
    """Exit with 130 on an interrupt, from argument parsing on. click would exit with 1, which has other meanings here."""
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):
            click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


def examples(*lines: str) -> str:
    """Format an epilog for `--help` that keeps its line breaks."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        "remit apply -f web.yaml --wait    create or update a workload and show progress",
        "remit get workloads               list workloads and what limits each",
        "remit explain workload/web        why it is pending, and what would help",
        "remit validate examples/          check all manifests in a directory",
        "remit get --help                  help for one command",
    ),
)
@click.version_option(__version__, "--version", "-V", prog_name="remit")
def remit() -> None:
    """Remit: a scheduler and control plane whose behavior under failures can be simulated before an incident.

    Commands that call a server find it by --server, REMIT_SERVER or `remit context`. Exit codes: 0 success, 1 failure, 2
    usage error, 3 replicas could not be placed.
    """


def main() -> None:
    if sys.stderr is None:
        _open_null_stderr()
    if sys.stdout is None:  # closed by `>&-`: fail now rather than after a long run whose result is lost
        with suppress(OSError):
            click.echo("remit: stdout is closed; use >/dev/null to discard the output", err=True)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # characters that the encoding lacks are escaped instead of raising
            reconfigure(errors="backslashreplace")
    sys.unraisablehook = _redeliver_interrupt
    # An interrupt can arrive between the creation of a coroutine and of its task, and Python would warn about the coroutine.
    # The filter is appended, so that filters set by the user (`-W`, PYTHONWARNINGS) take precedence.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning, append=True)
    try:
        try:
            remit(prog_name="remit")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # flush here, where an error can still be reported
    except SystemExit as end:
        if end.code == INTERRUPTED:
            leave_interrupted()
        raise
    except BrokenPipeError:
        drop_output()
        sys.exit(1)  # the reader closed the pipe, as in `remit schema Workload | head`
    except OSError as error:
        drop_output()
        where = f"{escaped(str(error.filename))}: " if error.filename else ""
        with suppress(OSError):  # stderr may be on the same full disk
            click.echo(f"remit: {where}{escaped(error.strerror or str(error))}", err=True)
        sys.exit(2)


def _redeliver_interrupt(lost: sys.UnraisableHookArgs) -> None:
    """Deliver an interrupt again that was raised where Python ignores exceptions, such as a weakref callback. A timer raises it
    a moment later, in ordinary code.
    """
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    else:
        sys.__unraisablehook__(lost)


def _open_null_stderr() -> None:
    """Open /dev/null as stderr if it was closed (`2>&-`). Otherwise the next opened file would get descriptor 2 and receive
    error messages.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != STDERR:
        os.dup2(nowhere, STDERR)
        os.close(nowhere)
    os.set_inheritable(STDERR, True)
    sys.stderr = open(STDERR, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115 - stays open until exit


def drop_output() -> None:
    """Discard unwritten output. Otherwise Python flushes stdout again at exit and prints an error of its own."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    main()
