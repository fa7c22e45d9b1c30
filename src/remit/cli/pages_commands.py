"""What does every command say of itself? The page of the command line, out of the commands' own help."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Final

import click

from remit.cli.main import COMMANDS, remit

SOURCE: Final = "src/remit/cli/"

FOREWORD: Final = """\
`remit COMMAND --help` says the same in a terminal. Commands that ask a server find it in this order: a flag (`--server`, or
`--context` for one that is known by a name), the environment (`REMIT_SERVER`, `REMIT_CONTEXT`), the file of `remit context`
(`~/.config/remit/config.yaml`, or what `REMIT_CONFIG` names). Its token comes from `--token-file`, `REMIT_TOKEN`,
`REMIT_TOKEN_FILE` or the context; the token of a context is sent to the server of that context and to no other. The tenant
comes from `-t`, `REMIT_TENANT` or the context, and is `default` if nobody says.

| exit code | means |
|---|---|
| 0 | it was done |
| 1 | it was not: the server refused it, could not be reached, or time was up; of `diff`, that something differs |
| 2 | the command was misused, a file cannot be read, or no server is named |
| 3 | work was not placed (`apply --wait`, `plan`, `wait`, `scale --wait`, `rollout status`) |
| 130 | it was interrupted |

Into a terminal go colours and tables that keep to its width; anywhere else the same tables, whole and plain. `-o json` is one
document without colours, with the names that the API gives; `-o yaml` is what `remit apply` takes back, with what Remit
reports of an object below it in comments. `NO_COLOR` is heeded."""


def commands_page() -> str:
    """All of it but its title."""
    group = click.Context(remit, info_name="remit")
    rows = [f"| [`{name}`](#remit-{name}) | {lazy.summary} |" for name, lazy in COMMANDS.items() if _found(group, name)]
    parts = [FOREWORD, "## Commands", "\n".join(["| command | does |", "|---|---|", *rows])]
    for name in COMMANDS:
        command = _found(group, name)
        if command is not None:
            parts += _sections(command, f"remit {name}", 2)
    return "\n\n".join(parts)


def _found(group: click.Context, name: str) -> click.Command | None:
    """None, if it is hidden, or no part of this installation."""
    if not COMMANDS[name].summary:
        return None
    try:
        command = remit.get_command(group, name)
    except click.ClickException:
        return None
    return None if command is None or command.hidden else command


def _sections(command: click.Command, path: str, depth: int) -> Iterator[str]:
    # The names of --help are kept by a command once they were asked for: so they are asked for as the program asks.
    context = click.Context(command, info_name=path, help_option_names=remit.context_settings["help_option_names"])
    yield f"{'#' * depth} {path}"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "")
    formatter = click.HelpFormatter(width=110, max_width=110)
    command.format_usage(context, formatter)
    if not isinstance(command, click.Group):
        command.format_options(context, formatter)
    yield f"```text\n{formatter.getvalue().strip()}\n```"
    examples = (command.epilog or "").removeprefix("\b\nExamples:\n")
    if examples:
        yield f"```text\n{inspect.cleandoc(examples)}\n```"
    if isinstance(command, click.Group):
        for name, below in sorted(command.commands.items()):
            yield from _sections(below, f"{path} {name}", depth + 1)
