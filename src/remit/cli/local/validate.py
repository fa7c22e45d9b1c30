"""`validate`, `schema`; reads manifest files.

Reads files and prints; what is wrong with them is decided in model/manifests/reader.py.

All of them together, or none if anything is wrong with one. No server is asked.

Prints; the schema itself is made in model/manifests/json_schema.py.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from remit.cli.main import examples
from remit.model.manifests.documents import JSON_BYTES_MAX
from remit.model.manifests.reader import read
from remit.model.objects import AnyObject, key
from remit.model.problems import Problem, closest_name, did_you_mean, escaped, quoted

SUFFIXES = (".yaml", ".yml", ".json", ".ndjson", ".jsonl")

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
    from remit.model.manifests.reader import read  # after --help: it loads every kind

    found = find_manifest_files(files)
    count = unread = len(found.unread)
    objects = problems = 0
    for name, why in found.unread.items():
        report_unreadable(name, why)
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
            print_problem(problem, as_json=as_json)
    if not quiet and count > unread:
        told = f"{_plural(problems, 'problem')} in" if problems else f"{_plural(objects, 'object')} without a problem in"
        unread_too = f"; {_plural(unread, 'file')} could not be read" if unread else ""
        # Beside --json the summary is for eyes only: what reads the lines should meet nothing but JSON.
        click.secho(f"{told} {_plural(count - unread, 'file')}{unread_too}", err=as_json, bold=True, color=_colour())
    sys.exit(MISUSE if unread else PROBLEMS if problems else OK)


class ManifestFiles(NamedTuple):
    """The files meant, each once, and what stood in the way of finding more, with the reason."""

    files: dict[str, None]
    unread: dict[str, str]


def find_manifest_files(names: tuple[str, ...]) -> ManifestFiles:
    """A directory stands for the manifests below it, hidden ones left out."""
    found = ManifestFiles({}, {})
    for name in names:
        if not name:
            raise click.UsageError("a file name is empty (is a variable of your script unset?); write . for this directory")
        if name == "-" or not _is_directory(name):
            found.files.setdefault(name)
        elif not _search(name, found):
            raise click.UsageError(f"no {', '.join(SUFFIXES)} file below {escaped(name)}")
    return found


def _is_directory(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):
        return False  # opening it will say why


def _search(name: str, found: ManifestFiles) -> bool:
    """Is there any manifest below this directory, or anything that may hide one?"""

    def refused(error: OSError) -> None:
        found.unread.setdefault(str(error.filename or name), error.strerror or str(error))

    before = len(found.unread)
    any_file = False
    for root, directories, files in os.walk(name, onerror=refused):
        directories[:] = sorted(directory for directory in directories if not directory.startswith("."))
        for file in sorted(files):
            if not file.lower().endswith(SUFFIXES) or file.startswith("."):
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
        report_unreadable("<stdin>" if name == "-" else name, why)
        return None


def report_unreadable(name: str, why: str) -> None:
    click.echo(f"{escaped(name)}: {escaped(why)}", err=True)


def print_problem(problem: Problem, *, as_json: bool = False) -> None:
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


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def read_manifests(files: tuple[str, ...], tenant: str = "") -> list[AnyObject]:
    """In the order of the files. Every problem is told as `remit validate` tells it, and then nothing is answered.

    With a `tenant`, what belongs to another is refused: who says whose things are meant should not touch others'.
    """
    found = find_manifest_files(files)
    objects: dict[str, AnyObject] = {}
    whence: dict[str, str] = {}
    unread, problems = len(found.unread), 0
    for name, why in found.unread.items():
        report_unreadable(name, why)
    for name in found.files:
        data = read_bytes(name)
        if data is None:
            unread += 1
            continue
        manifests = read(data, "<stdin>" if name == "-" else name)
        problems += len(manifests.problems)
        for problem in manifests.problems:
            print_problem(problem)
        for obj in manifests.objects:
            problems += _report_duplicate(whence, key(obj), name)
            objects[key(obj)] = obj
    if unread or problems:
        click.echo("nothing was sent: mend this first", err=True)
        sys.exit(MISUSE if unread else PROBLEMS)
    if tenant:
        _check_tenant(objects.values(), tenant)
    return list(objects.values())


def _report_duplicate(whence: dict[str, str], path: str, file: str) -> int:
    first = whence.setdefault(path, file)
    if first == file:
        return 0
    click.echo(f"{escaped(file)}: {path} is already declared in {escaped(first)}; keep one of the two", err=True)
    return 1


def _check_tenant(objects: object, tenant: str) -> None:
    for obj in objects:  # type: ignore[attr-defined]
        owner = obj.metadata.tenant
        if owner and owner != tenant:
            raise click.UsageError(f"{key(obj)} is of tenant {owner}, and --tenant says {escaped(tenant)}; leave --tenant out")


def _complete_kind(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For the shell: the kinds that begin like this, in whatever case."""
    from remit.model.manifests.json_schema import SUMMARIES

    begun = incomplete.lower()
    return [CompletionItem(kind, help=summary) for kind, summary in SUMMARIES.items() if kind.lower().startswith(begun)]


@click.command(
    epilog=examples(
        "remit schema                            the kinds, each in a line",
        "remit schema Workload                   the schema of one",
        "remit schema --all > .remit.json        one for all kinds, then, for editors with yaml-language-server:",
        "# yaml-language-server: $schema=.remit.json      as the first line of a manifest",
    )
)
@click.argument("kind", required=False, shell_complete=_complete_kind)
@click.option("--all", "all_kinds", is_flag=True, help="One schema for every kind, chosen by its `kind`.")
def schema(kind: str | None, all_kinds: bool) -> None:
    """Print the JSON Schema of a KIND, for editors; without one, list the kinds."""
    from remit.model import objects
    from remit.model.manifests.json_schema import SUMMARIES, schema, schema_of_all

    if kind and all_kinds:
        raise click.UsageError("name a KIND, or write --all, but not both")
    if all_kinds:
        click.echo(json.dumps(schema_of_all(), indent=2))
    elif kind:
        by_lower = {name.lower(): name for name in objects.KINDS}
        known = by_lower.get(kind.lower())
        if known is None:
            cure = did_you_mean(closest_name(kind, objects.KINDS)) or f"known are {', '.join(objects.DECLARED)}"
            raise click.UsageError(f"there is no kind {quoted(kind)}; {cure}")
        click.echo(json.dumps(schema(known), indent=2))
    else:
        width = max(map(len, SUMMARIES))
        for name, summary in SUMMARIES.items():
            click.echo(f"{name:<{width}}  {summary}")
