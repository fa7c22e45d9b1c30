"""Users of two tenants with their tokens, for tests over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

from remit.model.identity import token_digest
from tests.unit.serve.in_memory_server import Api, tenant, workload

ANN, BOB, LOU, EVE = "a-token-of-ann-of-acme", "a-token-of-bob-of-bolt", "a-token-of-lou-of-acme", "a-token-that-sees-all"


def token(name: str, text: str, role: str, **spec: Any) -> dict[str, Any]:
    spec = {"role": role, "digest": token_digest(text), "expires": "2999-01-01T00:00:00Z", "subject": name, **spec}
    return {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": name}, "spec": spec}


async def create_users(api: Api) -> None:
    """Two tenants with a workload each: member ann and viewer lou of acme, member bob of bolt, viewer eve of all."""
    for name in ("acme", "bolt"):
        await api.must("POST", "/v1/tenants", tenant(name))
        await api.must("POST", f"/v1/tenants/{name}/workloads", workload(f"of-{name}", name, replicas=0))
    made = (
        ("ann", ANN, "member", "acme"),
        ("bob", BOB, "member", "bolt"),
        ("lou", LOU, "viewer", "acme"),
        ("eve", EVE, "viewer", ""),
    )
    for name, text, role, home in made:
        await api.must("POST", "/v1/tokens", token(name, text, role, **({"tenant": home} if home else {})))
    await wait_for_token(api, EVE)


async def wait_for_token(api: Api, text: str, *, good: bool = True) -> None:
    """Tokens reach the watch cache with a delay."""
    async with asyncio.timeout(5):
        while ((await api.get("/v1/status", token=text)).status == 200) != good:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.002)
