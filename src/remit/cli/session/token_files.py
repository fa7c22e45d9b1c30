"""Token files readable by their owner only.

For its owner's eyes alone; what a token allows is known elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from remit.model.identity import TOKEN_PREFIX
from remit.model.kinds import TokenRole
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
    file: Path, desk: ServerContext, role: TokenRole, *, subject: str, nodes: Sequence[str] = ()
) -> str:
    """The token of a component that this process starts itself: the one in the file while that is good, else a new one."""
    from remit.serve.auth.enrollment import ensure_bootstrap_token

    ids = desk.world.ids
    token, _ = read_or_create_token(file, ids)
    if not await ensure_bootstrap_token(desk, token, role, subject=subject, nodes=nodes):
        token, _ = read_or_create_token(file, ids, anew=True)
        await ensure_bootstrap_token(desk, token, role, subject=subject, nodes=nodes)
    return token


async def ensure_issued_token(file: Path, api: Api, ids: Ids, role: TokenRole, *, nodes: Sequence[str] = ()) -> str:
    """The token in a file, which is made with its file if there is none: an admin tells the server of it."""
    from remit.model.identity import expiry_after, token_digest
    from remit.model.kinds import Token, TokenSpec
    from remit.model.metadata import Metadata
    from remit.serve.auth.enrollment import BOOTSTRAP_TOKEN_TTL_MS, bootstrap_token_name
    from remit.world.clock import BootClock

    token, new = read_or_create_token(file, ids)
    if new:
        expires = expiry_after(BootClock().wall(), BOOTSTRAP_TOKEN_TTL_MS)
        spec = TokenSpec(role=role, digest=token_digest(token), expires=expires, subject=file.name, nodes=tuple(nodes))
        await api.create(Token(metadata=Metadata(name=bootstrap_token_name(role, token)), spec=spec))
    return token


def read_or_create_token(file: Path, ids: Ids, *, anew: bool = False) -> tuple[str, bool]:
    """The token of a file that only its owner may read, and whether it is new: there was none, or it is wanted `anew`."""
    file.parent.mkdir(0o700, parents=True, exist_ok=True)
    if anew:
        file.unlink(missing_ok=True)
    new = not file.exists()
    if new:
        # Written beside it first: whoever is killed over it leaves no file that is empty.
        beside = file.with_name(f"{file.name}.{ids.nonce()}")
        made = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(made, "w") as opened:
            opened.write(generate_token(ids) + "\n")
        with suppress(FileExistsError):  # somebody else was quicker: theirs stands
            os.link(beside, file)
        beside.unlink()
    return _read_token(file), new


def _read_token(file: Path) -> str:
    with file.open("rb") as opened:
        found = opened.read(TOKEN_BYTES_MAX + 1)
    token = found.decode("ascii", "replace").strip()
    if not 16 <= len(token) <= TOKEN_BYTES_MAX or not token.isprintable() or " " in token or not token.isascii():
        cure = "write 16 to 512 signs of ASCII into it, without spaces; or remove it, and one is made"
        raise click.ClickException(f"{escaped(str(file))} holds no token; {cure}")
    return token
