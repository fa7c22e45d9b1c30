"""Commands `create secret`, `create config` and `secrets rotate`.

No secret value is ever printed, neither in output nor in errors. A rotation is a series of requests that can be interrupted:
the next `secrets rotate` continues it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from remit.cli.main import examples
from remit.cli.session.server_call import FAILED, OK, CommandContext, CommandError, call_server, server_options
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
    """Create a secret or a config from files and literal values."""


def _data_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument and options that `create secret` and `create config` share."""
    options = (
        click.argument("name", metavar="NAME"),
        click.option(
            "--from-file", "files", multiple=True, metavar="[KEY=]FILE",
            help="Value from a file, or from stdin if FILE is -. Default key: the file name. Repeatable.",
        ),
        click.option(
            "--from-literal", "literals", multiple=True, metavar="KEY=VALUE",
            help="Literal value. Other users can see it in the process list while this runs. Repeatable.",
        ),
        click.option("--replace", is_flag=True, help="Replace an existing object."),
    )  # fmt: skip
    stored: Any = command
    for option in reversed(options):
        stored = option(stored)
    decorated: Callable[..., None] = stored
    return decorated


@create.command(
    epilog=examples(
        "remit create secret db --from-file password=-             read from stdin: not in the process list or history",
        "remit create secret tls --from-file tls.crt --from-file tls.key",
        "remit create secret db --from-literal user=ann --replace",
    )
)
@_data_options
@server_options()
def secret(context: CommandContext, name: str, files: tuple[str, ...], literals: tuple[str, ...], replace: bool) -> None:
    """Create the secret NAME. The server seals its values and never returns them."""
    from remit.model.metadata import Metadata
    from remit.model.secrets import Secret, SecretSpec

    obj = Secret(metadata=Metadata(name=name), spec=SecretSpec(data=data_of(files, literals)))
    call_server(context, lambda api: _send(api, context, obj, replace))


@create.command(
    epilog=examples(
        "remit create config settings --from-file app.toml", "remit create config settings --from-literal MODE=live"
    )
)
@_data_options
@server_options()
def config(context: CommandContext, name: str, files: tuple[str, ...], literals: tuple[str, ...], replace: bool) -> None:
    """Create the config NAME."""
    from remit.model.metadata import Metadata
    from remit.model.secrets import Config, DataSpec

    obj = Config(metadata=Metadata(name=name), spec=DataSpec(data=data_of(files, literals)))
    call_server(context, lambda api: _send(api, context, obj, replace))


async def _send(api: Api, context: CommandContext, obj: Secret | Config, replace: bool) -> None:
    from remit.cli.session.object_lookup import display_name

    stored = await (api.replace(obj) if replace else api.create(obj))
    path = display_name(context, type(stored).__name__, stored.metadata.name, stored.metadata.tenant)
    count = len(obj.spec.data)
    answer = "replaced" if replace and stored.metadata.generation > 1 else "created"
    click.echo(f"{escaped(path)} {answer}, with {count} key{'' if count == 1 else 's'}")


def data_of(files: Sequence[str], literals: Sequence[str]) -> dict[str, str]:
    """Return the values by key. Errors name the key and never the value, because the value may be secret."""
    if sum(file.partition("=")[2] == STDIN or file == STDIN for file in files) > 1:
        raise click.UsageError("only one --from-file can read stdin (-); read the others from files")
    data: dict[str, str] = {}
    for argument in files:
        key, separator, file = argument.partition("=")
        if not separator:
            key, file = Path(argument).name, argument
        _add(data, key, _read(key, file))
    for literal in literals:
        key, separator, value = literal.partition("=")
        if not separator:
            raise click.UsageError("--from-literal: one value has no =; write KEY=VALUE (not shown here, it may be secret)")
        _add(data, key, value)
    if not data:
        raise click.UsageError("no data given; add --from-file KEY=FILE or --from-literal KEY=VALUE")
    return data


def _add(data: dict[str, str], key: str, value: str) -> None:
    if not re.search(FILE_NAME, key):
        raise click.UsageError(f"{quoted(key)} is not a valid key; use letters, digits, -, _ and .")
    if key in data:
        raise click.UsageError(f"key {key} is given twice; remove one")
    if len(value) > PLAIN_CHARS_MAX:
        raise click.UsageError(f"{key} has {len(value)} characters, the limit is {PLAIN_CHARS_MAX}; shorten it")
    data[key] = value


def _read(key: str, file: str) -> str:
    if file == STDIN:
        if key == STDIN:
            raise click.UsageError("a value from stdin needs a key; write --from-file KEY=-")
        data = sys.stdin.buffer.read(_BYTES_MAX + 1)
    else:
        try:
            with Path(file).open("rb") as opened:
                data = opened.read(_BYTES_MAX + 1)
        except OSError as error:
            raise click.UsageError(f"{escaped(file)}: {escaped(error.strerror or str(error))}") from None
    try:
        text = data.decode()
        if "\0" in text:
            raise ValueError
    except ValueError:
        raise CommandError(f"{escaped(key)} is not UTF-8 text", "encode it as text first, for example with base64") from None
    return text


@click.group(no_args_is_help=True, epilog=examples("remit secrets rotate", "remit secrets rotate --forget"))
def secrets() -> None:
    """Manage the keys that seal secrets. For the secrets themselves see `remit get secrets` and `remit create secret`."""


@secrets.command(
    epilog=examples(
        "remit secrets rotate             create a new key and reseal all secrets with it",
        "remit secrets rotate --forget    also delete the old keys: secrets in older backups become unreadable",
    )
)
@click.option("--forget", is_flag=True, help="Delete all other keys at the end.")
@server_options()
def rotate(context: CommandContext, forget: bool) -> None:
    """Create a new sealing key and reseal all secrets with it.

    If it is interrupted, run it again: it continues where it stopped, and creates no second key before all secrets are
    resealed.
    """
    sys.exit(call_server(context, lambda api: _rotate(api, forget)))


async def _rotate(api: Api, forget: bool) -> int:
    answer = await api.rotate_secrets(new_key=True)
    stored, done, not_sealed = answer.made, answer.resealed, list(answer.left)
    while answer.after:
        answer = await api.rotate_secrets(after=answer.after)
        done, not_sealed = done + answer.resealed, not_sealed + list(answer.left)
    if forget:
        answer = await api.rotate_secrets(forget=True)
    key_text = "a new key" if stored else "the key of an unfinished rotation"
    click.echo(f"{done} secrets resealed with {key_text}, {answer.key}; keys that can unseal: {len(answer.keys)}")
    for key in not_sealed:
        click.echo(f"Error: {escaped(key)} was not resealed: it is being deleted, or no key can unseal it", err=True)
    return FAILED if not_sealed else OK
