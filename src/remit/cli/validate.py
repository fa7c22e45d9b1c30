"""Which of these files could be applied? Reads files and prints; what is wrong with them is decided in model/manifests.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from remit.cli.main import examples
from remit.model.documents import JSON_BYTES_MAX
from remit.model.problems import Problem, escaped

ENDINGS = (".yaml", ".yml", ".json")

OK, PROBLEMS, MISUSE = 0, 1, 2


@click.command(
    epilog=examples(
        "remit validate risk-api.yaml",
        "remit validate examples/ more/*.json      directories are searched for .yaml, .yml and .json",
        "helm template chart | remit validate -    - is what comes through a pipe",
        "remit validate --json examples/           one JSON object for each problem",
    )
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(allow_dash=True))
@click.option("--json", "as_json", is_flag=True, help="Print each problem as one JSON object on a line of its own.")
@click.option("-q", "--quiet", is_flag=True, help="Print only problems, no summary.")
def validate(files: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Check manifests and tell every problem, with its place and cure.

    Nothing is applied, and no server is asked. Exits with 0 if all is well, 1 if there are problems, and 2 if a file cannot
    be read.
    """
    from remit.model.manifests import read  # after --help: it loads every kind

    count = objects = problems = unread = 0
    for name in _found(files):
        count += 1
        data = _bytes(name)
        if data is None:
            unread += 1
            continue
        manifests = read(data, "<stdin>" if name == "-" else name)
        objects += len(manifests.objects)
        problems += len(manifests.problems)
        for problem in manifests.problems:
            _print(problem, as_json=as_json)
    if not quiet and count > unread:
        told = f"{_many(problems, 'problem')} in" if problems else f"{_many(objects, 'object')} without a problem in"
        unread_too = f"; {_many(unread, 'file')} could not be read" if unread else ""
        # Beside --json the summary is for eyes only: what reads the lines should meet nothing but JSON.
        click.secho(f"{told} {_many(count - unread, 'file')}{unread_too}", err=as_json, bold=True, color=_colour())
    sys.exit(MISUSE if unread else PROBLEMS if problems else OK)


def _found(names: tuple[str, ...]) -> Iterator[str]:
    """The files meant, each once: a directory stands for the manifests below it, hidden ones left out."""
    seen: dict[str, None] = {}
    for name in names:
        if name == "-" or not Path(name).is_dir():
            seen.setdefault(name)
            continue
        below = list(_below(name))
        if not below:
            raise click.UsageError(f"no {', '.join(ENDINGS)} file below {escaped(name)}")
        seen.update(dict.fromkeys(below))
    yield from seen


def _below(name: str) -> Iterator[str]:
    for root, directories, files in os.walk(name):
        directories[:] = sorted(directory for directory in directories if not directory.startswith("."))
        for file in sorted(files):
            if file.lower().endswith(ENDINGS) and not file.startswith("."):
                yield str(Path(root) / file)


def _bytes(name: str) -> bytes | None:
    """No more than the reader looks at: /dev/zero is refused like any other file that is too large."""
    try:
        if name == "-":
            return sys.stdin.buffer.read(JSON_BYTES_MAX + 1)
        with Path(name).open("rb") as file:
            return file.read(JSON_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        click.echo(f"{escaped(name)}: {escaped(why)}", err=True)
        return None


def _print(problem: Problem, *, as_json: bool) -> None:
    if as_json:
        import json

        click.echo(json.dumps({name: getattr(problem, name) for name in Problem.__struct_fields__}))
        return
    place = click.style(f"{escaped(problem.file)}:{problem.line}:{problem.column}:", bold=True)
    path = click.style(f" {problem.path}:", fg="cyan") if problem.path else ""
    cure = click.style(f"; {problem.cure}", fg="green") if problem.cure else ""
    click.echo(f"{place}{path} {problem.message}{cure}", color=_colour())


def _colour() -> bool | None:
    """None: click decides, by whether this is a terminal."""
    return False if os.environ.get("NO_COLOR") else None


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
