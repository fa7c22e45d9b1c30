"""Creates and reads token files, which are readable by their owner only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from remit.model.identity import TOKEN_PREFIX, TokenRole
from remit.model.problems import escaped
from remit.world.interfaces import Ids

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.serve.server_context import ServerContext

TOKEN_BYTES_MAX: Final = 512
TOKEN_NONCES: Final = 3
"""240 bits."""


def generate_token(ids: Ids) -> str:
    return TOKEN_PREFIX + "".join(ids.nonce() for _ in range(TOKEN_NONCES))


async def ensure_component_token(
    file: Path, server: ServerContext, role: TokenRole, *, subject: str, nodes: Sequence[str] = ()
) -> str:
    """Return the token of a component that this process starts: that of the file if the server accepts it, else a new one."""
    from remit.serve.auth.enrollment import ensure_bootstrap_token

    ids = server.world.ids
    token, _ = read_or_create_token(file, ids)
    if not await ensure_bootstrap_token(server, token, role, subject=subject, nodes=nodes):
        token, _ = read_or_create_token(file, ids, replace=True)
        await ensure_bootstrap_token(server, token, role, subject=subject, nodes=nodes)
    return token


async def ensure_issued_token(file: Path, api: Api, ids: Ids, role: TokenRole, *, nodes: Sequence[str] = ()) -> str:
    """Return the token of the file. If the file does not exist, create it and register its token at the server; `api` needs the
    admin role.
    """
    from remit.model.identity import Token, TokenSpec, expiry_after, token_digest
    from remit.model.metadata import Metadata
    from remit.serve.auth.enrollment import BOOTSTRAP_TOKEN_TTL_MS, bootstrap_token_name
    from remit.world.clock import BootClock

    token, new = read_or_create_token(file, ids)
    if new:
        expires = expiry_after(BootClock().wall(), BOOTSTRAP_TOKEN_TTL_MS)
        spec = TokenSpec(role=role, digest=token_digest(token), expires=expires, subject=file.name, nodes=tuple(nodes))
        await api.create(Token(metadata=Metadata(name=bootstrap_token_name(role, token)), spec=spec))
    return token


def read_or_create_token(file: Path, ids: Ids, *, replace: bool = False) -> tuple[str, bool]:
    """Return the token of the file, and whether it was created now: because the file did not exist, or because of `replace`."""
    file.parent.mkdir(0o700, parents=True, exist_ok=True)
    if replace:
        file.unlink(missing_ok=True)
    new = not file.exists()
    if new:
        # Written to a temporary file first, so that a crash leaves no empty token file.
        temporary = file.with_name(f"{file.name}.{ids.nonce()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(generate_token(ids) + "\n")
        with suppress(FileExistsError):  # another process has created the file; its token is used
            os.link(temporary, file)
        temporary.unlink()
    return _read_token(file), new


def _read_token(file: Path) -> str:
    with file.open("rb") as opened:
        data = opened.read(TOKEN_BYTES_MAX + 1)
    token = data.decode("ascii", "replace").strip()
    if not 16 <= len(token) <= TOKEN_BYTES_MAX or not token.isprintable() or " " in token or not token.isascii():
        fix = "write 16 to 512 ASCII characters without spaces into it, or remove it to get a new token"
        raise click.ClickException(f"{escaped(str(file))} does not contain a token; {fix}")
    return token
