"""How is a server to be reached over TLS? The options of those who serve; what comes of them is in world/tls_keys.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from remit.world.tls_keys import Secured


def tls_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds them to a command, which gets them together as `secured`; None: it speaks plain HTTP."""
    file = click.Path(path_type=Path, dir_okay=False, exists=True)

    @click.option("--tls", is_flag=True, help="Speak TLS, with an authority made here; needed beyond this machine.")
    @click.option("--tls-name", "tls_names", multiple=True, metavar="HOST", help="One more name it is known by.")
    @click.option("--tls-cert", type=file, help="A certificate of your own to answer with, instead of one made here.")
    @click.option("--tls-key", type=file, help="The key of --tls-cert.")
    @click.option("--tls-ca", type=file, help="Who has signed that certificate, for clients to believe; else the system's.")
    @functools.wraps(command)
    def taking(
        *,
        tls: bool,
        tls_names: tuple[str, ...],
        tls_cert: Path | None,
        tls_key: Path | None,
        tls_ca: Path | None,
        **others: Any,
    ) -> None:
        command(secured=_secured(tls, tls_names, tls_cert, tls_key, tls_ca), **others)

    return taking


def _secured(tls: bool, names: tuple[str, ...], certificate: Path | None, key: Path | None, ca: Path | None) -> Secured | None:
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together; name both, or neither")
    if certificate is None and ca is not None:
        raise click.UsageError("--tls-ca belongs to --tls-cert; without that, the authority is made here")
    if certificate is None and names and not tls:
        raise click.UsageError("--tls-name is for a certificate; say --tls as well")
    if certificate is None and not tls:
        return None
    from remit.world.tls_keys import OwnCertificate, Secured

    if certificate is None or key is None:
        return Secured(names)
    return Secured(names, OwnCertificate(certificate.absolute(), key.absolute(), ca.absolute() if ca else None))
