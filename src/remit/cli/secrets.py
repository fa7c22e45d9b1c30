"""How are the keys of secrets turned? Asks the server, part by part, until it is done; ended before that, the same goes on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from remit.cli.main import examples
from remit.cli.reaching import FAILED, OK, Asked, ask, asks_server
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api


@click.group(no_args_is_help=True, epilog=examples("remit secrets rotate", "remit secrets rotate --forget"))
def secrets() -> None:
    """The keys with which a server seals secrets. The secrets themselves: `remit get secrets`, `remit create secret`."""


@secrets.command(
    epilog=examples(
        "remit secrets rotate             a new key, and all secrets sealed anew with it",
        "remit secrets rotate --forget    and let go of the old keys: backups from before can then not be read",
    )
)
@click.option("--forget", is_flag=True, help="At the end, let go of every other key.")
@asks_server()
def rotate(asked: Asked, forget: bool) -> None:
    """Make a new key, and seal all secrets anew with it.

    Ended at any moment, it goes on where it was when it is asked again, and makes no second key before that is done.
    """
    sys.exit(ask(asked, lambda api: _rotate(api, forget)))


async def _rotate(api: Api, forget: bool) -> int:
    told = await api.rotate_secrets(new_key=True)
    made, done, left = told.made, told.resealed, list(told.left)
    while told.after:
        told = await api.rotate_secrets(after=told.after)
        done, left = done + told.resealed, left + list(told.left)
    if forget:
        told = await api.rotate_secrets(forget=True)
    how = "a new key" if made else "the key of a rotation that was not at its end"
    click.echo(f"{done} secrets are sealed with {how}, {told.key}; {len(told.keys)} can be opened with")
    for key in left:
        click.echo(f"Error: {escaped(key)} is sealed as it was: it is being deleted, or none of the keys opens it", err=True)
    return FAILED if left else OK
