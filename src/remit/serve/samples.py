"""What does a manifest of each kind look like? One short example each, for whoever reads the API's description."""

from __future__ import annotations

from typing import Any, Final

from remit.model.fields import API_VERSION


def _manifest(kind: str, name: str, spec: dict[str, Any], tenant: str = "") -> dict[str, Any]:
    metadata = {"name": name, "tenant": tenant} if tenant else {"name": name}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


_PLACES: Final = {"region": "eu-central", "capacity": {"cpu": "32", "memory": "128Gi"}}
_TEMPLATE: Final = {
    "command": ["python3", "-m", "http.server", "$(PORT_http)"],
    "ports": [{"name": "http"}],
    "resources": {"cpu": "500m", "memory": "256Mi"},
    "probes": {"ready": {"http": {"port": "http", "path": "/"}, "period": "2s"}},
}

MANIFESTS: Final[dict[str, dict[str, Any]]] = {
    "Region": _manifest("Region", "eu-central", {"zones": ["eu-central-a", "eu-central-b"]}),
    "Node": _manifest("Node", "node-7", {**_PLACES, "zone": "eu-central-a"}),
    "NodePool": _manifest("NodePool", "general", {**_PLACES, "zones": ["eu-central-a"], "max": 20}),
    "Tenant": _manifest("Tenant", "risk", {"quota": {"cpu": "200", "memory": "512Gi"}}),
    "PriorityClass": _manifest("PriorityClass", "critical", {"value": 1000}),
    "Policy": _manifest(
        "Policy",
        "residency",
        {"rules": [{"match": {"tenants": ["risk"]}, "allow": {"regions": ["eu-central"]}, "reason": "data stays in the EU"}]},
    ),
    "Workload": _manifest("Workload", "risk-api", {"type": "service", "replicas": 4, "template": _TEMPLATE}, "risk"),
    "Secret": _manifest("Secret", "risk-db", {"data": {"password": "a word that nobody knows"}}, "risk"),
    "Config": _manifest("Config", "risk-settings", {"data": {"MODE": "live"}}, "risk"),
    "Allotment": _manifest(
        "Allotment", "risk-api-eu-west", {"workload": "risk-api", "region": "eu-west", "replicas": 2}, "risk"
    ),
    "Override": _manifest(
        "Override",
        "avoid-zone-b",
        {
            "effect": "avoid",
            "scope": {"zones": ["eu-central-b"]},
            "ttl": "30m",
            "reason": "its switch is being replaced",
            "author": "ann",
        },
    ),
    "Token": _manifest(
        "Token",
        "member-risk-ann",
        {"role": "member", "tenant": "risk", "subject": "ann", "digest": "0" * 64, "expires": "2027-01-31T12:00:00Z"},
    ),
}
"""One of each declared kind; the reader of manifests takes them all."""

NAMES: Final = {"tenant": "risk", "name": "risk-api", "service": "risk-api"}
"""What stands in a path, if a kind says nothing else."""
