"""Which objects do these files declare? All of them together, or none if anything is wrong with one. No server is asked."""

from __future__ import annotations

import sys
from typing import Final

import click

from remit.cli.validate import found_files, read_bytes, tell, tell_unread
from remit.model.manifests import read
from remit.model.objects import AnyObject, key
from remit.model.problems import escaped

PROBLEMS: Final = 1
MISUSE: Final = 2


def declared(files: tuple[str, ...], tenant: str = "") -> list[AnyObject]:
    """In the order of the files. Every problem is told as `remit validate` tells it, and then nothing is answered.

    With a `tenant`, what belongs to another is refused: who says whose things are meant should not touch others'.
    """
    found = found_files(files)
    things: dict[str, AnyObject] = {}
    whence: dict[str, str] = {}
    unread, problems = len(found.unread), 0
    for name, why in found.unread.items():
        tell_unread(name, why)
    for name in found.files:
        data = read_bytes(name)
        if data is None:
            unread += 1
            continue
        manifests = read(data, "<stdin>" if name == "-" else name)
        problems += len(manifests.problems)
        for problem in manifests.problems:
            tell(problem)
        for thing in manifests.objects:
            problems += _twice(whence, key(thing), name)
            things[key(thing)] = thing
    if unread or problems:
        click.echo("nothing was sent: mend this first", err=True)
        sys.exit(MISUSE if unread else PROBLEMS)
    if tenant:
        _check_owner(things.values(), tenant)
    return list(things.values())


def _twice(whence: dict[str, str], path: str, file: str) -> int:
    first = whence.setdefault(path, file)
    if first == file:
        return 0
    click.echo(f"{escaped(file)}: {path} is already declared in {escaped(first)}; keep one of the two", err=True)
    return 1


def _check_owner(things: object, tenant: str) -> None:
    for thing in things:  # type: ignore[attr-defined]
        owner = thing.metadata.tenant
        if owner and owner != tenant:
            raise click.UsageError(
                f"{key(thing)} is of tenant {owner}, and --tenant says {escaped(tenant)}; leave --tenant out"
            )
