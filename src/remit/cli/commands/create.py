"""`create secret`, `create config`, `secrets rotate`.

Puts them together, and sends them; no value is ever printed.

Asks the server, part by part, until it is done; ended before that, the same goes on.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from remit.cli.main import examples
from remit.cli.session.server_call import FAILED, OK, Asked, Failure, ask, asks_server
from remit.model.metadata import FILE_NAME
from remit.model.problems import escaped, quoted
from remit.model.secrets import PLAIN_CHARS_MAX

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.model.secrets import Config, Secret

STDIN: Final = "-"
_BYTES_MAX: Final = 4 * PLAIN_CHARS_MAX


@click.group(no_args_is_help=True, epilog=examples("remit create secret db --from-file password=-"))
def create() -> None:
    """Make a secret or a config from files and words."""


def _given(command: Callable[..., None]) -> Callable[..., None]:
    """What both are made of."""
    options = (
        click.argument("name", metavar="NAME"),
        click.option(
            "--from-file", "files", multiple=True, metavar="[KEY=]FILE",
            help="A value from a file, or from - for a pipe; the key is the file's name if none is said.",
        ),
        click.option(
            "--from-literal", "words", multiple=True, metavar="KEY=VALUE",
            help="A value as it is written here, which whoever lists processes can see meanwhile.",
        ),
        click.option("--replace", is_flag=True, help="Put it in the place of the one that there is."),
    )  # fmt: skip
    made: Any = command
    for option in reversed(options):
        made = option(made)
    decorated: Callable[..., None] = made
    return decorated


@create.command(
    epilog=examples(
        "remit create secret db --from-file password=-             from a pipe: nobody sees it on the way",
        "remit create secret tls --from-file tls.crt --from-file tls.key",
        "remit create secret db --from-literal user=ann --replace",
    )
)
@_given
@asks_server()
def secret(asked: Asked, name: str, files: tuple[str, ...], words: tuple[str, ...], replace: bool) -> None:
    """Make the secret NAME. The server seals its values; nobody is shown them again."""
    from remit.model.metadata import Metadata
    from remit.model.secrets import Secret, SecretSpec

    thing = Secret(metadata=Metadata(name=name), spec=SecretSpec(data=data_of(files, words)))
    ask(asked, lambda api: _send(api, asked, thing, replace))


@create.command(
    epilog=examples(
        "remit create config settings --from-file app.toml", "remit create config settings --from-literal MODE=live"
    )
)
@_given
@asks_server()
def config(asked: Asked, name: str, files: tuple[str, ...], words: tuple[str, ...], replace: bool) -> None:
    """Make the config NAME."""
    from remit.model.metadata import Metadata
    from remit.model.secrets import Config, DataSpec

    thing = Config(metadata=Metadata(name=name), spec=DataSpec(data=data_of(files, words)))
    ask(asked, lambda api: _send(api, asked, thing, replace))


async def _send(api: Api, asked: Asked, thing: Secret | Config, replace: bool) -> None:
    from remit.cli.session.object_lookup import said_path

    made = await (api.replace(thing) if replace else api.create(thing))
    path = said_path(asked, type(made).__name__, made.metadata.name, made.metadata.tenant)
    many = len(thing.spec.data)
    told = "replaced" if replace and made.metadata.generation > 1 else "created"
    click.echo(f"{escaped(path)} {told}, with {many} key{'' if many == 1 else 's'}")


def data_of(files: Sequence[str], words: Sequence[str]) -> dict[str, str]:
    """The values by key. What is wrong names the key, and never the value."""
    if sum(one.partition("=")[2] == STDIN or one == STDIN for one in files) > 1:
        raise click.UsageError("only one value can come from -")
    data: dict[str, str] = {}
    for one in files:
        key, said, file = one.partition("=")
        if not said:
            key, file = Path(one).name, one
        _add(data, key, _read(key, file))
    for one in words:
        key, said, value = one.partition("=")
        if not said:
            raise click.UsageError("--from-literal is KEY=VALUE, and one of them has no =; it is not shown: it may be secret")
        _add(data, key, value)
    if not data:
        raise click.UsageError("it would hold nothing; say --from-file KEY=FILE or --from-literal KEY=VALUE")
    return data


def _add(data: dict[str, str], key: str, value: str) -> None:
    if not re.search(FILE_NAME, key):
        raise click.UsageError(f"{quoted(key)} is no key; use letters, digits, -, _ and ., as in a file's name")
    if key in data:
        raise click.UsageError(f"the key {key} is said twice; keep one of the two")
    if len(value) > PLAIN_CHARS_MAX:
        raise click.UsageError(f"{key} has {len(value)} characters, and {PLAIN_CHARS_MAX} are the most")
    data[key] = value


def _read(key: str, file: str) -> str:
    if file == STDIN:
        if key == STDIN:
            raise click.UsageError("a value from - needs a key; write --from-file KEY=-")
        read = sys.stdin.buffer.read(_BYTES_MAX + 1)
    else:
        try:
            with Path(file).open("rb") as opened:
                read = opened.read(_BYTES_MAX + 1)
        except OSError as error:
            raise click.UsageError(f"{escaped(file)}: {escaped(error.strerror or str(error))}") from None
    try:
        text = read.decode()
        if "\0" in text:
            raise ValueError
    except ValueError:
        raise Failure(
            f"{escaped(key)} is not text, and only that can be kept", "write it as text first, as by base64"
        ) from None
    return text


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
