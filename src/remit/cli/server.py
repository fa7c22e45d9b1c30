"""How is a server run? Its data, its token and its address are made ready here; what it does is put together in assembly.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from remit.assembly import served
from remit.cli.main import examples
from remit.cli.running import Complaints, ListenType, Logging, beat_option, log_options, run_until_ended
from remit.cli.securing import tls_options
from remit.cli.token_files import token_in
from remit.law.tempo import Tempo
from remit.model.problems import escaped
from remit.store.protocol import StoreError
from remit.world.binding import Listen
from remit.world.chronicle import Form, Level
from remit.world.production import production
from remit.world.promises import WorldError

if TYPE_CHECKING:
    from remit.world.tls_keys import Secured

TOKEN_NAME: Final = "token"  # noqa: S105 - of a file


@click.command(
    epilog=examples(
        "remit server --data ./data                          at 127.0.0.1:7420, with a token in ./data/token",
        "remit server --data ./data --listen 127.0.0.1:0     at any port that is free",
        "remit server --data ./data --listen 10.0.0.5:7420 --tls --tls-name remit.example    for other machines too",
    )
)
@click.option(
    "--data", required=True, type=click.Path(path_type=Path, file_okay=False), help="Directory of the store; made if absent."
)
@click.option(
    "--listen",
    type=ListenType(),
    default="127.0.0.1:7420",
    show_default=True,
    help="Where the API answers; beyond this machine with --tls only.",
)
@click.option("--scope", default="local", show_default=True, help="The name of what this server is the authority of.")
@click.option("--name", default="server", show_default=True, help="The name of this server among those of its scope.")
@click.option(
    "--token-file", type=click.Path(path_type=Path, dir_okay=False), help="Who may ask; made if absent.  [default: DATA/token]"
)
@beat_option
@tls_options
@log_options
def server(
    data: Path,
    listen: Listen,
    scope: str,
    name: str,
    token_file: Path | None,
    beat_ms: int,
    secured: Secured | None,
    log_format: Form | None,
    log_level: Level,
) -> None:
    """Run a server: the authority of a scope, on a SQLite store, with its HTTP API.

    It ends at SIGTERM or Ctrl-C, once everything that it has taken is answered.
    """
    place = token_file or data / TOKEN_NAME
    try:
        logging = Logging(log_format, log_level)
        run_until_ended(lambda: serve(data, listen, scope, name, place, Tempo(beat_ms), logging, secured), quick=True)
    except (StoreError, WorldError) as error:
        raise click.ClickException(escaped(str(error))) from error


async def serve(
    data: Path,
    listen: Listen,
    scope: str,
    name: str,
    token_file: Path,
    tempo: Tempo,
    logging: Logging = Logging(),
    secured: Secured | None = None,
) -> None:
    world = production()
    say = Complaints(logging.of("server", world.clock))
    try:
        token, new = token_in(token_file, world.ids)
        async with served(
            data,
            world,
            scope=scope,
            name=name,
            listen=listen,
            token=token,
            tempo=tempo,
            complain=say.bug,
            log=say.log,
            secured=secured,
            tell=say,
        ) as one:
            believed = f", its authority in {escaped(str(one.ca_file))}" if one.ca_file else ""
            click.echo(f"remit server: {scope} at {one.url}, token in {escaped(str(token_file))}{believed}")
            if new:
                tell_admin(token)
            await asyncio.Event().wait()
    finally:
        await world.offload.close()


def tell_admin(token: str) -> None:
    """Once: the first token is how all the others are made."""
    click.echo(f"remit: the first admin's token, shown this once: {token}\n  make others with `remit token create`")
