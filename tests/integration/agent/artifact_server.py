"""A real web server on loopback for artifacts, and archives to serve. Contains no tests."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

ALLOWED = ("--artifact-allow", "127.0.0.1")


class ArtifactServer:
    """Files by path. `asked` counts requests; while `held` is not set, only the first half of a file is sent."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.failures: dict[str, int] = {}
        """Number of 503 answers by path before the file is served."""
        self.requests: list[str] = []
        self.released = asyncio.Event()
        self.released.set()
        self.url = ""

    def put(self, path: str, content: bytes) -> tuple[str, str]:
        """Add a file; return its source and digest."""
        self.files[path] = content
        return f"{self.url}{path}", hashlib.sha256(content).hexdigest()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.requests.append(path)
        if path in self.redirects:
            return web.Response(status=302, headers={"Location": self.redirects[path]})
        if self.failures.get(path, 0):
            self.failures[path] -= 1
            return web.Response(status=503)
        if path not in self.files:
            return web.Response(status=404)
        content = self.files[path]
        response = web.StreamResponse(headers={"Content-Length": str(len(content))})
        await response.prepare(request)
        half = len(content) // 2
        await response.write(content[:half])
        await self.released.wait()
        await response.write(content[half:])
        return response


@asynccontextmanager
async def artifact_server() -> AsyncIterator[ArtifactServer]:
    made = ArtifactServer()
    app = web.Application()
    app.add_routes([web.get("/{path:.*}", made.answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        made.released.set()
        await runner.cleanup()


def tarball(files: Mapping[str, bytes | str], mode: str = "w:gz") -> bytes:
    """Text becomes an executable script, bytes become data."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if isinstance(content, str) else 0o644
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()
