"""How is a server run? Its data, its token and its address are made ready here; what it does is put together in assembly.py."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from remit.assembly import served
from remit.cli.main import examples
from remit.cli.running import ListenType, beat_option, run_until_ended
from remit.law.tempo import Tempo
from remit.model.problems import escaped
from remit.store.protocol import StoreError
from remit.world.binding import Listen
from remit.world.production import production
from remit.world.promises import Ids, WorldError

TOKEN_NAME: Final = "token"  # noqa: S105 - of a file
TOKEN_BYTES_MAX: Final = 512
TOKEN_NONCES: Final = 3
"""240 bits."""


@click.command(
    epilog=examples(
        "remit server --data ./data                          at 127.0.0.1:7420, with a token in ./data/token",
        "remit server --data ./data --listen 127.0.0.1:0     at any port that is free",
    )
)
@click.option(
    "--data", required=True, type=click.Path(path_type=Path, file_okay=False), help="Directory of the store; made if absent."
)
@click.option(
    "--listen", type=ListenType(), default="127.0.0.1:7420", show_default=True, help="Where the API answers: this machine only."
)
@click.option("--scope", default="local", show_default=True, help="The name of what this server is the authority of.")
@click.option("--name", default="server", show_default=True, help="The name of this server among those of its scope.")
@click.option(
    "--token-file", type=click.Path(path_type=Path, dir_okay=False), help="Who may ask; made if absent.  [default: DATA/token]"
)
@beat_option
def server(data: Path, listen: Listen, scope: str, name: str, token_file: Path | None, beat_ms: int) -> None:
    """Run a server: the authority of a scope, on a SQLite store, with its HTTP API.

    It ends at SIGTERM or Ctrl-C, once everything that it has taken is answered.
    """
    place = token_file or data / TOKEN_NAME
    try:
        run_until_ended(lambda: serve(data, listen, scope, name, place, Tempo(beat_ms)), quick=True)
    except (StoreError, WorldError) as error:
        raise click.ClickException(escaped(str(error))) from error


async def serve(data: Path, listen: Listen, scope: str, name: str, token_file: Path, tempo: Tempo) -> None:
    world = production()
    try:
        token = token_in(token_file, world.ids)
        async with served(
            data, world, scope=scope, name=name, listen=listen, token=token, tempo=tempo, complain=complain
        ) as one:
            click.echo(f"remit server: {scope} at {one.url}, token in {escaped(str(token_file))}")
            await asyncio.Event().wait()
    finally:
        await world.offload.close()


def complain(asked: str, error: BaseException) -> None:
    """One line for each bug of ours: whoever asked was told only that there is one."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else ""
    click.echo(f"remit server: {asked}: {type(error).__name__}: {escaped(str(error))}{where}", err=True)


def token_in(file: Path, ids: Ids) -> str:
    """The token of a file that only its owner may read; a new one, if there is no such file."""
    file.parent.mkdir(0o700, parents=True, exist_ok=True)
    if not file.exists():
        # Written beside it first: whoever is killed over it leaves no file that is empty.
        beside = file.with_name(f"{file.name}.{ids.nonce()}")
        made = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(made, "w") as opened:
            opened.write("".join(ids.nonce() for _ in range(TOKEN_NONCES)) + "\n")
        with suppress(FileExistsError):  # somebody else was quicker: theirs stands
            os.link(beside, file)
        beside.unlink()
    return _read_token(file)


def _read_token(file: Path) -> str:
    with file.open("rb") as opened:
        found = opened.read(TOKEN_BYTES_MAX + 1)
    token = found.decode("ascii", "replace").strip()
    if not 16 <= len(token) <= TOKEN_BYTES_MAX or not token.isprintable() or " " in token or not token.isascii():
        cure = "write 16 to 512 signs of ASCII into it, without spaces; or remove it, and one is made"
        raise click.ClickException(f"{escaped(str(file))} holds no token; {cure}")
    return token
