"""Under which path does the HTTP API keep an object? One spelling for the server, its description and the client. No I/O."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

from remit.model.objects import KINDS, TENANTED

_UNUSUAL: Final = {"Policy": "policies", "PriorityClass": "priorityclasses", "Summary": "summaries"}

PLURALS: Final = {kind: _UNUSUAL.get(kind, f"{kind.lower()}s") for kind in KINDS}
"""How each kind is spelt in a path."""

BY_PLURAL: Final = {plural: kind for kind, plural in PLURALS.items()}


_PLAIN: Final = re.compile(r"[A-Za-z0-9_.~-]+").fullmatch


def _escaped(name: str) -> str:
    return name if _PLAIN(name) else quote(name, safe="")


def collection_path(kind: str, tenant: str = "") -> str:
    """Where a kind is listed and created; without a tenant, all tenants' of a kind that is tenanted."""
    plural = PLURALS[kind]
    return f"/v1/tenants/{_escaped(tenant)}/{plural}" if tenant and kind in TENANTED else f"/v1/{plural}"


def object_path(kind: str, name: str, tenant: str = "") -> str:
    """Where one object is. What people name needs no escaping; the authority's own records may be called anything."""
    return f"{collection_path(kind, tenant)}/{_escaped(name)}"
