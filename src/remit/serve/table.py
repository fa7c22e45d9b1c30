"""Which routes does a server have? All of them, in one table; what each does is beside it."""

from __future__ import annotations

from typing import Final

from remit.serve import describing, evidence, programs, resources, standing
from remit.serve.routes import Route

ROUTES: Final[tuple[Route, ...]] = (
    *resources.ROUTES,
    *evidence.ROUTES,
    *programs.ROUTES,
    *standing.ROUTES,
    *describing.routes(lambda: ROUTES),
)
