"""Which of these files could be applied? Reads files and prints; what is wrong with them is decided in model/manifests.py."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import NamedTuple

import click

from remit.cli.main import examples
from remit.model.documents import JSON_BYTES_MAX
from remit.model.problems import Problem, escaped

ENDINGS = (".yaml", ".yml", ".json", ".ndjson", ".jsonl")

OK, PROBLEMS, MISUSE = 0, 1, 2


@click.command(
    epilog=examples(
        "remit validate risk-api.yaml",
        "remit validate examples/ more/*.json      directories are searched for YAML and JSON by their endings",
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

    found = found_files(files)
    count = unread = len(found.unread)
    objects = problems = 0
    for name, why in found.unread.items():
        tell_unread(name, why)
    for name in found.files:
        count += 1
        data = read_bytes(name)
        if data is None:
            unread += 1
            continue
        manifests = read(data, "<stdin>" if name == "-" else name)
        objects += len(manifests.objects)
        problems += len(manifests.problems)
        for problem in manifests.problems:
            tell(problem, as_json=as_json)
    if not quiet and count > unread:
        told = f"{_many(problems, 'problem')} in" if problems else f"{_many(objects, 'object')} without a problem in"
        unread_too = f"; {_many(unread, 'file')} could not be read" if unread else ""
        # Beside --json the summary is for eyes only: what reads the lines should meet nothing but JSON.
        click.secho(f"{told} {_many(count - unread, 'file')}{unread_too}", err=as_json, bold=True, color=_colour())
    sys.exit(MISUSE if unread else PROBLEMS if problems else OK)


class Found(NamedTuple):
    """The files meant, each once, and what stood in the way of finding more, with the reason."""

    files: dict[str, None]
    unread: dict[str, str]


def found_files(names: tuple[str, ...]) -> Found:
    """A directory stands for the manifests below it, hidden ones left out."""
    found = Found({}, {})
    for name in names:
        if not name:
            raise click.UsageError("a file name is empty (is a variable of your script unset?); write . for this directory")
        if name == "-" or not _is_directory(name):
            found.files.setdefault(name)
        elif not _search(name, found):
            raise click.UsageError(f"no {', '.join(ENDINGS)} file below {escaped(name)}")
    return found


def _is_directory(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):
        return False  # opening it will say why


def _search(name: str, found: Found) -> bool:
    """Is there any manifest below this directory, or anything that may hide one?"""

    def refused(error: OSError) -> None:
        found.unread.setdefault(str(error.filename or name), error.strerror or str(error))

    before = len(found.unread)
    any_file = False
    for root, directories, files in os.walk(name, onerror=refused):
        directories[:] = sorted(directory for directory in directories if not directory.startswith("."))
        for file in sorted(files):
            if not file.lower().endswith(ENDINGS) or file.startswith("."):
                continue
            any_file = True
            path = str(Path(root) / file)
            try:
                regular = stat.S_ISREG(Path(path).stat().st_mode)
            except OSError as error:
                refused(error)
                continue
            if regular:
                found.files.setdefault(path)
            else:  # a pipe that nobody writes to would never end; who means it can name it
                found.unread.setdefault(path, "not a regular file, so it was skipped")
    return any_file or len(found.unread) > before


def read_bytes(name: str) -> bytes | None:
    """No more than the reader looks at: /dev/zero is refused like any other file that is too large."""
    try:
        if name == "-":
            if sys.stdin is None:  # closed by the shell, as in `remit validate - <&-`
                raise ValueError("standard input is closed")
            return sys.stdin.buffer.read(JSON_BYTES_MAX + 1)
        with Path(name).open("rb") as file:
            return file.read(JSON_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        tell_unread("<stdin>" if name == "-" else name, why)
        return None


def tell_unread(name: str, why: str) -> None:
    click.echo(f"{escaped(name)}: {escaped(why)}", err=True)


def tell(problem: Problem, *, as_json: bool = False) -> None:
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
