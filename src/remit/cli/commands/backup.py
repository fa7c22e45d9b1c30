"""Commands `backup` and `restore`: copy the store of a running server to a file, and create a store from such a file.

The store makes the copy and rewrites it as a new incarnation (store/sqlite/backup.py). This module transfers the file,
protects existing data, and prints what the operator has to do after a restore.
"""

from __future__ import annotations

import os
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from remit.cli.main import examples
from remit.cli.session.server_call import CommandContext, CommandError, call_server, server_options
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.model.kinds import Token
    from remit.store.chain import ReplacedStore, RestoreReport
    from remit.store.sqlite.backup import BackupLabel

SHOWN_MAX: Final = 20
TOGETHER: Final = 10
"""Token names per printed `remit token revoke` command."""
DRAFT: Final = "backup-unpacked.sqlite"
KEEPS: Final = frozenset(("owner", "token", "seal.keys", "ca", "tls", "audit", DRAFT))
"""Entries that may exist in the data directory before a store is restored into it: files that the operator has put there, and
files that the server creates again.
"""


@click.command(
    epilog=examples(
        "remit backup remit-monday.tar                 back up the server of the current context",
        "remit backup /backups/$(date +%F).tar --server https://remit-1.example:7420 --token-file admin.token",
    )
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@server_options()
def backup(context: CommandContext, file: Path, force: bool) -> None:
    """Copy the store of a running server to FILE.

    The copy is consistent as of one revision, and the server keeps serving requests meanwhile. FILE is created only after
    the copy was verified. It contains neither tokens nor the keys that seal secrets: keep a copy of the server's seal.keys
    in another place.
    """
    if file.exists() and not force:
        raise CommandError(f"{escaped(str(file))} already exists", "choose another file, or overwrite it with --force")
    label = call_server(context, lambda api: _fetch(api, file))
    many = f"{label.bytes} bytes, sha256 {label.sha256[:16]}…"
    click.echo(f"{escaped(str(file))}: {label.scope} at revision {label.revision}, {many}")


async def _fetch(api: Api, file: Path) -> BackupLabel:
    from remit.store.protocol import StoreError
    from remit.store.sqlite.backup import extract_backup

    draft = file.with_name(f".{file.name}.part")
    check_file = file.with_name(f".{file.name}.check")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as out:
            async with aclosing(api.backup()) as pieces:
                async for piece in pieces:
                    out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        label = extract_backup(draft, check_file)
        draft.replace(file)
        return label
    except StoreError as error:
        raise CommandError("the backup was incomplete and has been deleted", "check the server's log and try again") from error
    finally:
        draft.unlink(missing_ok=True)
        check_file.unlink(missing_ok=True)


@click.command(
    epilog=examples(
        "remit restore remit-monday.tar --data ./data              into a new directory; then `remit server --data ./data`",
        "remit restore remit-monday.tar --data ./data --force      replace the store there; the old file is kept",
    )
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Data directory of the server; created if absent.",
)
@click.option(
    "--force", is_flag=True, help="Replace an existing store. Its file is kept, and changes after the backup are listed."
)
def restore(file: Path, data: Path, force: bool) -> None:
    """Create the store of a stopped server from a backup, as a new incarnation of its scope.

    Replicas may have started or stopped after the backup was made. Until nodes report, all replicas are unknown, replicas
    that must never run twice are not placed, and grants from other scopes are void. The data directory of a `remit up`
    server is DATA/server.
    """
    from remit.store.protocol import StoreError
    from remit.world.randomness import RandomIds

    _check_place(data, force)
    try:
        label, restored = _restored(file, data, RandomIds().incarnation())
    except StoreError as error:
        raise CommandError(escaped(str(error))) from error
    _print_report(file, data, label, restored)


def _check_place(data: Path, force: bool) -> None:
    from remit.store.sqlite.database_file import FILE_NAME

    if force or not data.exists():
        return
    there = sorted(path.name for path in data.iterdir() if path.name not in KEEPS)
    if not there:
        return
    fix = "choose another --data, or replace it with --force: the old store is kept under another name"
    if FILE_NAME in there:
        raise CommandError(f"{escaped(str(data))} already has a store", fix)
    raise CommandError(f"{escaped(str(data))} is not empty: {escaped(', '.join(there[:5]))}", fix)


def _restored(file: Path, data: Path, incarnation: str) -> tuple[BackupLabel | None, RestoreReport]:
    from remit.store.sqlite.backup import extract_backup
    from remit.store.sqlite.backup import restore as put_back
    from remit.store.sqlite.database_file import SQLITE_MAGIC
    from remit.store.sqlite.directory_lock import (
        LOCK_NAME,
        PRIVATE_DIRECTORY,
        DirectoryLock,
        create_private_file,
        translating_errors,
    )

    with file.open("rb") as database:
        bare = database.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    if bare:  # a copy of the database file, which has no label
        return None, put_back(file, data, incarnation=incarnation)
    if (data / LOCK_NAME).exists():  # fails if a server runs; a new lock file would be left in an unused directory
        DirectoryLock(data).release()
    draft, missing = data / DRAFT, [path for path in (data, *data.parents) if not path.exists()]
    try:
        with translating_errors(data):
            data.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            create_private_file(draft)
        try:
            label = extract_backup(file, draft)
            return label, put_back(draft, data, incarnation=incarnation)
        finally:
            draft.unlink(missing_ok=True)
    except BaseException:
        with suppress(OSError):  # directories that are not empty stay
            for path in missing:
                path.rmdir()
        raise


def _print_revived(data: Path, replaced: ReplacedStore | None) -> None:
    """Print which tokens the restore has made valid again. The backup does not contain later revocations; the replaced store
    does, if it is readable.
    """
    echo = click.echo
    if replaced is None or replaced.unreadable:
        echo("tokens that were revoked after the backup are valid again: find them with `remit token list` and")
        echo("  `remit audit`, then run `remit token revoke NAME...`")
        return
    revived = _revived(Path(replaced.kept_at), data)
    if revived:
        echo(
            f"{len(revived)} tokens that were revoked or used after the backup are valid again."
            " Revoke them when the server runs:"
        )
        for start in range(0, len(revived), TOGETHER):
            echo(f"    remit token revoke {escaped(' '.join(revived[start : start + TOGETHER]))}")


def _revived(old: Path, data: Path) -> list[str]:
    """Return the tokens that are valid in the restored store and were revoked, used or deleted in the replaced one."""
    from remit.store.sqlite.database_file import FILE_NAME

    before, now = _tokens(old), _tokens(data / FILE_NAME)
    already_invalid = {name for name, token in now.items() if token.spec.revoked or token.spec.spent}
    invalidated = {name for name in now if name not in before or before[name].spec.revoked or before[name].spec.spent}
    return sorted(invalidated - already_invalid)


def _tokens(file: Path) -> dict[str, Token]:
    from remit.model.kinds import Token
    from remit.model.objects import decode, key_of
    from remit.store.protocol import PAGE_ROWS_MAX
    from remit.store.sqlite.database_file import DatabaseFile

    tokens: dict[str, Token] = {}
    database, after, has_more = DatabaseFile(file), "", True
    try:
        while has_more:
            page = database.range(key_of("Token", ""), after, PAGE_ROWS_MAX, 0)
            for row in page.rows:
                obj, after = decode(row.value), row.key
                if isinstance(obj, Token):
                    tokens[obj.metadata.name] = obj
            has_more = page.more
    finally:
        database.checkpoint()
        database.close()
    return tokens


def _print_report(file: Path, data: Path, label: BackupLabel | None, restored: RestoreReport) -> None:
    from remit.model.objects import DECLARED

    echo = click.echo
    if label is not None:
        echo(f"restored {label.scope} as of {label.taken}, revision {label.revision}, backed up by Remit {label.version}")
    echo(f"the store is at revision {restored.revision}, incarnation {restored.head.incarnation}")
    replaced = restored.replaced
    if replaced is not None:
        echo(f"the replaced store is kept at {escaped(replaced.kept_at)}")
        if replaced.unreadable:
            echo(f"  it cannot be read: {escaped(replaced.unreadable)}")
        elif replaced.changed_count:
            echo(f"  {replaced.changed_count} rows changed there after the backup; the restored store lacks these changes")
            kinds = {kind.lower() for kind in DECLARED}
            lost = [key for key in replaced.changed if key.partition("/")[0] in kinds]
            for key in lost[:SHOWN_MAX]:
                echo(f"    {escaped(key)}")
            if len(lost) > SHOWN_MAX:
                echo(f"    and {len(lost) - SHOWN_MAX} more declared objects")
    if not (data / "seal.keys").exists():
        echo(f"secrets cannot be read without their keys: copy seal.keys of the old server to {escaped(str(data))}")
    _print_revived(data, replaced)
    echo(f"start the server: remit server --data {escaped(str(data))}")
    echo("replicas are unknown until their nodes report; running replicas are then recovered, and none runs twice")
