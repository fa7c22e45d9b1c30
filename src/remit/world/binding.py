"""At which address of this machine does a process listen? A socket that is bound; who is answered there is not known.

Loopback only, unless whoever calls is spoken to over TLS: a token that goes over a network in the clear is everybody's.
"""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address
from typing import Final, NamedTuple

from remit.world.promises import NotServed

BACKLOG: Final = 1_024
STALLED_MS_MAX: Final = 60_000
LOCALHOST: Final = "localhost"
_SELF: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - every address, and the one among them that is always there


class Listen(NamedTuple):
    """Where to listen; port 0 is any that is free."""

    host: str = "127.0.0.1"
    port: int = 7420


class Bound:
    """A socket that nobody else has; `url` is where it is reached. `secure`: only over TLS."""

    def __init__(self, listen: Listen, *, secure: bool = False) -> None:
        self.secure = secure
        self.socket = _bind(listen, secure)
        self.host, self.port = self.socket.getsockname()[:2]

    @property
    def url(self) -> str:
        """From this machine, if it is reached at every address."""
        host = _SELF.get(self.host, self.host)
        return f"{'https' if self.secure else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def close(self) -> None:
        self.socket.close()


def _bind(listen: Listen, secure: bool) -> socket.socket:
    host = "127.0.0.1" if listen.host == LOCALHOST else listen.host
    try:
        address = ip_address(host)
    except ValueError:
        raise NotServed(f"{listen.host!r} is no address", "use an address of this machine, or localhost") from None
    if not address.is_loopback and not secure:
        cause = f"{listen.host} can be reached from other machines, where tokens would go in the clear"
        raise NotServed(cause, "say --tls, which makes a certificate authority and all that it needs; or listen on 127.0.0.1")
    found = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Every connection that is taken here has this from it: one whose far side takes nothing does not stay for ever.
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS_MAX)
        found.bind((host, listen.port))
        found.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        found.close()
        place = f"{listen.host}:{listen.port}"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise NotServed(f"somebody listens at {place} already", "end that one, or use another --listen") from error
        raise NotServed(f"cannot listen at {place} ({error})", "use another --listen") from error
    found.setblocking(False)
    return found
