"""A real web server on loopback for files that work asks for, and archives of them. No test is in here."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

ALLOWED = ("--artifact-allow", "127.0.0.1")


class Server:
    """What it has by path. `asked` counts; while `held` is not set nothing but the first half of a file comes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.leads: dict[str, str] = {}
        self.fails: dict[str, int] = {}
        """By path: so many times it answers 503 first."""
        self.asked: list[str] = []
        self.held = asyncio.Event()
        self.held.set()
        self.url = ""

    def put(self, path: str, content: bytes) -> tuple[str, str]:
        """Its source and its digest."""
        self.files[path] = content
        return f"{self.url}{path}", hashlib.sha256(content).hexdigest()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.asked.append(path)
        if path in self.leads:
            return web.Response(status=302, headers={"Location": self.leads[path]})
        if self.fails.get(path, 0):
            self.fails[path] -= 1
            return web.Response(status=503)
        if path not in self.files:
            return web.Response(status=404)
        content = self.files[path]
        response = web.StreamResponse(headers={"Content-Length": str(len(content))})
        await response.prepare(request)
        half = len(content) // 2
        await response.write(content[:half])
        await self.held.wait()
        await response.write(content[half:])
        return response


@asynccontextmanager
async def shelf() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.add_routes([web.get("/{path:.*}", made.answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        made.held.set()
        await runner.cleanup()


def tarball(files: Mapping[str, bytes | str], mode: str = "w:gz") -> bytes:
    """Text is a script, bytes are data."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if isinstance(content, str) else 0o644
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()
