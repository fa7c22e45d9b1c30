"""`backup`, `restore`.

A copy of a running server; a directory made from it. No rules.
"""

from __future__ import annotations

import os
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from remit.cli.main import examples
from remit.cli.session.server_call import Asked, Failure, ask, asks_server
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.model.identity import Token
    from remit.store.chain import ReplacedStore, RestoreReport
    from remit.store.sqlite.backup import BackupLabel

SHOWN_MAX: Final = 20
TOGETHER: Final = 10
"""So many names in one command to copy."""
DRAFT: Final = "backup-unpacked.sqlite"
KEEPS: Final = frozenset(("owner", "token", "seal.keys", "ca", "tls", "audit", DRAFT))
"""What may stand in a directory before a store is restored into it: what an operator has put there, and what is made anew."""


@click.command(
    epilog=examples(
        "remit backup remit-monday.tar                 of the server that is meant, while it runs",
        "remit backup /backups/$(date +%F).tar --server https://remit-1.example:7420 --token-file admin.token",
    )
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@asks_server()
def backup(asked: Asked, file: Path, force: bool) -> None:
    """Copy the store of a running server to FILE.

    The copy is consistent, as of one revision, and nobody waits for it. It is verified before FILE is there. The keys that
    secrets are sealed with are not in it, and neither is any token: keep the server's seal.keys in another place.
    """
    if file.exists() and not force:
        raise Failure(f"{escaped(str(file))} exists already", "name another file, or say --force")
    label = ask(asked, lambda api: _fetch(api, file))
    many = f"{label.bytes} bytes, sha256 {label.sha256[:16]}…"
    click.echo(f"{escaped(str(file))}: {label.scope} at revision {label.revision}, {many}")


async def _fetch(api: Api, file: Path) -> BackupLabel:
    from remit.store.protocol import StoreError
    from remit.store.sqlite.backup import extract_backup

    draft = file.with_name(f".{file.name}.part")
    beside = file.with_name(f".{file.name}.check")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as out:
            async with aclosing(api.backup()) as pieces:
                async for piece in pieces:
                    out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        label = extract_backup(draft, beside)
        draft.replace(file)
        return label
    except StoreError as error:
        raise Failure("the copy did not come whole, and was thrown away", "look at the server's log, and try again") from error
    finally:
        draft.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)


@click.command(
    epilog=examples(
        "remit restore remit-monday.tar --data ./data              into a new directory; then `remit server --data ./data`",
        "remit restore remit-monday.tar --data ./data --force      in the place of the store there, which is kept aside",
    )
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--data", required=True, type=click.Path(path_type=Path, file_okay=False), help="Directory of the server; made if absent."
)
@click.option("--force", is_flag=True, help="Although a store is there; it is kept aside, and what it knew more is listed.")
def restore(file: Path, data: Path, force: bool) -> None:
    """Make the store of a server that is not running from a backup, as a new incarnation of its scope.

    What ran when the backup was made may have ended since, and other work may run: until nodes report, replicas are unknown,
    nothing that must never run twice is placed, and grants of other scopes are void. `remit up` has it in DATA/server.
    """
    from remit.store.protocol import StoreError
    from remit.world.randomness import RandomIds

    _check_place(data, force)
    try:
        label, restored = _restored(file, data, RandomIds().incarnation())
    except StoreError as error:
        raise Failure(escaped(str(error))) from error
    _tell(file, data, label, restored)


def _check_place(data: Path, force: bool) -> None:
    from remit.store.sqlite.database_file import FILE_NAME

    if force or not data.exists():
        return
    there = sorted(path.name for path in data.iterdir() if path.name not in KEEPS)
    if not there:
        return
    cure = "name another --data, or say --force: the store there is kept aside"
    if FILE_NAME in there:
        raise Failure(f"{escaped(str(data))} has a store already", cure)
    raise Failure(f"{escaped(str(data))} is not empty: {escaped(', '.join(there[:5]))}", cure)


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

    with file.open("rb") as opened:
        bare = opened.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    if bare:  # what a store copied of itself, without a label
        return None, put_back(file, data, incarnation=incarnation)
    if (data / LOCK_NAME).exists():  # else nobody owns it, and it stays as it is until the backup is known to be whole
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
        with suppress(OSError):  # what has something in it stays
            for path in missing:
                path.rmdir()
        raise


def _tell_revived(data: Path, replaced: ReplacedStore | None) -> None:
    """A backup knows nothing of what was revoked after it. What the store that it replaces knew of that can be said by name."""
    say = click.echo
    if replaced is None or replaced.unreadable:
        say("tokens that were revoked after the backup are valid again: see `remit token list`, and `remit audit` on who")
        say("  revoked which; then `remit token revoke NAME...`")
        return
    revived = _revived(Path(replaced.kept_at), data)
    if revived:
        say(f"{len(revived)} tokens that were ended after the backup are valid again. Once it runs, end them once more:")
        for start in range(0, len(revived), TOGETHER):
            say(f"    remit token revoke {escaped(' '.join(revived[start : start + TOGETHER]))}")


def _revived(old: Path, data: Path) -> list[str]:
    """Tokens that are good by the store that there is now, and were revoked, used or deleted by the one before."""
    from remit.store.sqlite.database_file import FILE_NAME

    before, now = _tokens(old), _tokens(data / FILE_NAME)
    over = {name for name, token in now.items() if token.spec.revoked or token.spec.spent}
    ended = {name for name in now if name not in before or before[name].spec.revoked or before[name].spec.spent}
    return sorted(ended - over)


def _tokens(file: Path) -> dict[str, Token]:
    from remit.model.identity import Token
    from remit.model.objects import decode, key_of
    from remit.store.protocol import PAGE_ROWS_MAX
    from remit.store.sqlite.database_file import DatabaseFile

    found: dict[str, Token] = {}
    opened, after, more = DatabaseFile(file), "", True
    try:
        while more:
            page = opened.range(key_of("Token", ""), after, PAGE_ROWS_MAX, 0)
            for row in page.rows:
                thing, after = decode(row.value), row.key
                if isinstance(thing, Token):
                    found[thing.metadata.name] = thing
            more = page.more
    finally:
        opened.checkpoint()
        opened.close()
    return found


def _tell(file: Path, data: Path, label: BackupLabel | None, restored: RestoreReport) -> None:
    from remit.model.objects import DECLARED

    say = click.echo
    if label is not None:
        say(f"restored {label.scope} as of {label.taken}, revision {label.revision}, made by Remit {label.version}")
    say(f"the store stands at revision {restored.revision}, incarnation {restored.head.incarnation}")
    replaced = restored.replaced
    if replaced is not None:
        say(f"the store that was there is kept at {escaped(replaced.kept_at)}")
        if replaced.unreadable:
            say(f"  it cannot be read: {escaped(replaced.unreadable)}")
        elif replaced.changed_count:
            say(f"  {replaced.changed_count} rows were changed there after the backup, and are as they were before")
            words = {kind.lower() for kind in DECLARED}
            lost = [key for key in replaced.changed if key.partition("/")[0] in words]
            for key in lost[:SHOWN_MAX]:
                say(f"    {escaped(key)}")
            if len(lost) > SHOWN_MAX:
                say(f"    and {len(lost) - SHOWN_MAX} more that people had declared")
    if not (data / "seal.keys").exists():
        say(f"secrets: put the seal.keys of the old server into {escaped(str(data))}, or they cannot be read")
    _tell_revived(data, replaced)
    say(f"start it: remit server --data {escaped(str(data))}")
    say("until its nodes report, replicas are unknown; what they run is found again, and nothing runs twice")
