"""A TLS server whose agents get tokens and certificates valid for seconds: `... DIRECTORY SECONDS`. Contains no tests."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from remit.assembly import api_server
from remit.cli.session.token_files import read_or_create_token
from remit.law.timing import Timing
from remit.serve.auth import enrollment
from remit.world.net.certificates import CertificateLifetimes
from remit.world.net.connections import ListenAddress
from remit.world.net.server_keys import TlsOptions
from remit.world.production import production


async def main(data: Path, seconds: int) -> None:
    world = production()
    enrollment.AGENT_TOKEN_TTL_MS = seconds * 1000  # type: ignore[misc]
    token, _ = read_or_create_token(data / "token", world.ids)
    options = TlsOptions(lifetimes=CertificateLifetimes(agent_s=seconds))
    async with api_server(
        data,
        world,
        listen=ListenAddress(port=0),
        token=token,
        timing=Timing(200),
        tls_options=options,
        report_bug=lambda request, error: print(request, error),
    ) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
