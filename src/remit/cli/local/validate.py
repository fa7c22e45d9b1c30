"""Commands `validate` and `schema`; reading of manifest files for other commands.

No server is called. Validation is in model/manifests/reader.py, schemas are generated in model/manifests/json_schema.py.
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
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.documents import JSON_BYTES_MAX
from remit.model.manifests.reader import read
from remit.model.objects import key
from remit.model.problems import Problem, closest_name, did_you_mean, escaped, quoted

SUFFIXES = (".yaml", ".yml", ".json", ".ndjson", ".jsonl")

OK, PROBLEMS, MISUSE = 0, 1, 2


@click.command(
    epilog=examples(
        "remit validate risk-api.yaml",
        "remit validate examples/ more/*.json      search directories for YAML and JSON files",
        "helm template chart | remit validate -    read stdin",
        "remit validate --json examples/           one JSON object per problem",
    )
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(allow_dash=True))
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per problem.")
@click.option("-q", "--quiet", is_flag=True, help="Print only problems, no summary.")
def validate(files: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Check manifests and print every problem with its location and fix.

    Nothing is applied and no server is called. Exit codes: 0 if there are no problems, 1 if there are, 2 if a file cannot be
    read.
    """
    from remit.model.manifests.reader import read  # imported late: it loads all kinds

    manifest_files = find_manifest_files(files)
    count = unread = len(manifest_files.unreadable)
    objects = problems = 0
    for name, reason in manifest_files.unreadable.items():
        report_unreadable(name, reason)
    for name in manifest_files.files:
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
        summary = f"{_plural(problems, 'problem')} in" if problems else f"{_plural(objects, 'object')} without problems in"
        unread_text = f"; {_plural(unread, 'file')} could not be read" if unread else ""
        # With --json the summary goes to stderr, so that stdout contains only JSON.
        click.secho(f"{summary} {_plural(count - unread, 'file')}{unread_text}", err=as_json, bold=True, color=_colour())
    sys.exit(MISUSE if unread else PROBLEMS if problems else OK)


class ManifestFiles(NamedTuple):
    """Manifest files without duplicates, and unreadable paths with the reason."""

    files: dict[str, None]
    unreadable: dict[str, str]


def find_manifest_files(names: tuple[str, ...]) -> ManifestFiles:
    """Expand directories to the manifests below them, except hidden files."""
    manifest_files = ManifestFiles({}, {})
    for name in names:
        if not name:
            raise click.UsageError(
                "a file name is empty, perhaps from an unset shell variable; write . for the current directory"
            )
        if name == "-" or not _is_directory(name):
            manifest_files.files.setdefault(name)
        elif not _search(name, manifest_files):
            raise click.UsageError(f"no {', '.join(SUFFIXES)} file below {escaped(name)}")
    return manifest_files


def _is_directory(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):
        return False  # reading the file reports the error


def _search(name: str, manifest_files: ManifestFiles) -> bool:
    """Add the manifests below a directory. Returns False if it contains neither manifests nor unreadable entries."""

    def add_unreadable(error: OSError) -> None:
        manifest_files.unreadable.setdefault(str(error.filename or name), error.strerror or str(error))

    before = len(manifest_files.unreadable)
    any_file = False
    for root, directories, files in os.walk(name, onerror=add_unreadable):
        directories[:] = sorted(directory for directory in directories if not directory.startswith("."))
        for file in sorted(files):
            if not file.lower().endswith(SUFFIXES) or file.startswith("."):
                continue
            any_file = True
            path = str(Path(root) / file)
            try:
                regular = stat.S_ISREG(Path(path).stat().st_mode)
            except OSError as error:
                add_unreadable(error)
                continue
            if regular:
                manifest_files.files.setdefault(path)
            else:  # reading a pipe could block for ever; pipes must be named explicitly
                manifest_files.unreadable.setdefault(path, "not a regular file, so it was skipped")
    return any_file or len(manifest_files.unreadable) > before


def read_bytes(name: str) -> bytes | None:
    """Read a file, but not further than needed to detect that it is too large: it may be endless, such as /dev/zero."""
    try:
        if name == "-":
            if sys.stdin is None:  # closed by the shell, as in `remit validate - <&-`
                raise ValueError("standard input is closed")
            return sys.stdin.buffer.read(JSON_BYTES_MAX + 1)
        with Path(name).open("rb") as file:
            return file.read(JSON_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        report_unreadable("<stdin>" if name == "-" else name, reason)
        return None


def report_unreadable(name: str, reason: str) -> None:
    click.echo(f"{escaped(name)}: {escaped(reason)}", err=True)


def print_problem(problem: Problem, *, as_json: bool = False) -> None:
    if as_json:
        import json

        click.echo(json.dumps({name: getattr(problem, name) for name in Problem.__struct_fields__}))
        return
    place = click.style(f"{escaped(problem.file)}:{problem.line}:{problem.column}:", bold=True)
    path = click.style(f" {problem.path}:", fg="cyan") if problem.path else ""
    fix = click.style(f"; {problem.cure}", fg="green") if problem.cure else ""
    click.echo(f"{place}{path} {problem.message}{fix}", color=_colour())


def _colour() -> bool | None:
    """Return False with NO_COLOR; None lets click decide by whether the output is a terminal."""
    return False if os.environ.get("NO_COLOR") else None


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def read_manifests(files: tuple[str, ...], tenant: str = "") -> list[AnyObject]:
    """Read all manifests, in the order of the files. Problems are printed as by `remit validate`, and the program exits.

    With a `tenant`, objects of other tenants are refused: an explicit --tenant must not change them.
    """
    manifest_files = find_manifest_files(files)
    objects: dict[str, AnyObject] = {}
    first_file_of: dict[str, str] = {}
    unread, problems = len(manifest_files.unreadable), 0
    for name, reason in manifest_files.unreadable.items():
        report_unreadable(name, reason)
    for name in manifest_files.files:
        data = read_bytes(name)
        if data is None:
            unread += 1
            continue
        manifests = read(data, "<stdin>" if name == "-" else name)
        problems += len(manifests.problems)
        for problem in manifests.problems:
            print_problem(problem)
        for obj in manifests.objects:
            problems += _report_duplicate(first_file_of, key(obj), name)
            objects[key(obj)] = obj
    if unread or problems:
        click.echo("nothing was sent: fix these problems first", err=True)
        sys.exit(MISUSE if unread else PROBLEMS)
    if tenant:
        _check_tenant(objects.values(), tenant)
    return list(objects.values())


def _report_duplicate(first_file_of: dict[str, str], path: str, file: str) -> int:
    first = first_file_of.setdefault(path, file)
    if first == file:
        return 0
    click.echo(f"{escaped(file)}: {path} is already declared in {escaped(first)}; remove one of them", err=True)
    return 1


def _check_tenant(objects: object, tenant: str) -> None:
    for obj in objects:  # type: ignore[attr-defined]
        owner = obj.metadata.tenant
        if owner and owner != tenant:
            raise click.UsageError(
                f"{key(obj)} belongs to tenant {owner}, but --tenant is {escaped(tenant)}; leave --tenant out"
            )


def _complete_kind(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete kinds, ignoring case."""
    from remit.model.kinds.registry import DEFINITIONS

    prefix = incomplete.lower()
    declared = (definition for definition in DEFINITIONS if definition.is_declared)
    return [CompletionItem(one.kind, help=one.summary) for one in declared if one.prefix.startswith(prefix)]


@click.command(
    epilog=examples(
        "remit schema                            list the kinds",
        "remit schema Workload                   print the schema of one kind",
        "remit schema --all > .remit.json        one schema for all kinds; for yaml-language-server add",
        "# yaml-language-server: $schema=.remit.json      as first line of a manifest",
    )
)
@click.argument("kind", required=False, shell_complete=_complete_kind)
@click.option("--all", "all_kinds", is_flag=True, help="Print one schema that covers all kinds.")
def schema(kind: str | None, all_kinds: bool) -> None:
    """Print the JSON Schema of a KIND, for editors. Without KIND, list all kinds."""
    from remit.model import objects
    from remit.model.kinds.registry import DEFINITIONS
    from remit.model.manifests.json_schema import schema, schema_of_all

    if kind and all_kinds:
        raise click.UsageError("KIND and --all cannot be combined; leave one of them out")
    if all_kinds:
        click.echo(json.dumps(schema_of_all(), indent=2))
    elif kind:
        by_lower = {name.lower(): name for name in objects.KINDS}
        kind_name = by_lower.get(kind.lower())
        if kind_name is None:
            fix = did_you_mean(closest_name(kind, objects.KINDS)) or f"kinds are {', '.join(objects.DECLARED)}"
            raise click.UsageError(f"unknown kind {quoted(kind)}; {fix}")
        click.echo(json.dumps(schema(kind_name), indent=2))
    else:
        summaries = {definition.kind: definition.summary for definition in DEFINITIONS if definition.is_declared}
        width = max(map(len, summaries))
        for name, summary in summaries.items():
            click.echo(f"{name:<{width}}  {summary}")
