"""Table of all routes.

Each module defines its own routes next to their handlers; this module concatenates them.
"""

from __future__ import annotations

from typing import Final

from remit.serve import admin_routes
from remit.serve.auth import enrollment
from remit.serve.components import claim_routes, exec_sessions
from remit.serve.diagnostics import diagnostic_routes, status_routes
from remit.serve.http import api_docs
from remit.serve.http.routes import Route
from remit.serve.metrics import scrape_routes
from remit.serve.objects import object_routes

ROUTES: Final[tuple[Route, ...]] = (
    *object_routes.ROUTES,
    *diagnostic_routes.DIAGNOSTIC_ROUTES,
    *diagnostic_routes.AUDIT_ROUTES,
    *exec_sessions.ROUTES,
    *claim_routes.ROUTES,
    *enrollment.ROUTES,
    *admin_routes.ROTATION_ROUTES,
    *status_routes.STATUS_ROUTES,
    *scrape_routes.ROUTES,
    *admin_routes.BACKUP_ROUTES,
    *status_routes.SUPPORT_ROUTES,
    *api_docs.routes(lambda: ROUTES),
)
