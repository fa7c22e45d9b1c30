"""Which routes does a server have? All of them, in one table; what each does is beside it."""

from __future__ import annotations

from typing import Final

from remit.serve import (
    audited,
    backing,
    describing,
    evidence,
    execs,
    joining,
    metering,
    programs,
    resources,
    rotating,
    standing,
    supporting,
)
from remit.serve.routes import Route

ROUTES: Final[tuple[Route, ...]] = (
    *resources.ROUTES,
    *evidence.ROUTES,
    *audited.ROUTES,
    *execs.ROUTES,
    *programs.ROUTES,
    *joining.ROUTES,
    *rotating.ROUTES,
    *standing.ROUTES,
    *metering.ROUTES,
    *backing.ROUTES,
    *supporting.ROUTES,
    *describing.routes(lambda: ROUTES),
)
