"""Which metrics are there, in words for readers? The page about them, out of the table that they are written by."""

from __future__ import annotations

from typing import Final

from remit.cli.pages_words import code, codes, page, table
from remit.serve.measuring import TENANTS_MAX
from remit.serve.meters import METERS

TITLES: Final = {
    "server": "## The server",
    "scheduler": "## The scheduler",
    "controllers": "## The controllers",
    "agent": "## The agent",
}
LABELS: Final = {
    "phase": "the phases of [the lifecycle](lifecycle.md)",
    "reason": "codes of [refusals](refusals.md), and `queued`; of evictions, the transition",
    "code": "codes of [refusals](refusals.md); of HTTP, the codes of [the API](api.md)",
    "did": "[operations](operations.md); `move NAME` for a transition",
    "route": "the `operationId` of the route in `/openapi.json`; `none` for a path that leads nowhere",
    "method": "GET, HEAD, POST, PUT, PATCH, DELETE, `other`",
    "status_class": "`2xx` to `5xx`; `gone` if the asker left",
    "tenant": f"the {TENANTS_MAX} that use most of their quota; no others are told",
    "resource": "`cpu` in cores, `memory` in bytes, `devices`, `other`",
    "quantile": "0.5, 0.9, 0.99 and 1 over all nodes",
    "controller": "the controllers of [their page](controllers.md)",
    "component": "`server`, `scheduler`, `controllers`",
    "flow": "`first` for what does not wait behind others, `tenants` for routes below a tenant, `scope` for the rest",
}


def metrics() -> str:
    parts: list[str] = []
    for part, title in TITLES.items():
        rows = [(code(one.name), one.type, codes(one.labels) or "-", one.help) for one in METERS.values() if one.part == part]
        parts += [title, table(("metric", "type", "labels", "what it says"), rows)]
    return page(
        "Metrics",
        "src/remit/serve/meters.py",
        "`GET /metrics` of a server, with a token, as Prometheus' text or as OpenMetrics, by the `Accept` header. In "
        "`remit up` the scheduler and the controllers are in the same process, and tell theirs there too. As processes of "
        "their own they, and an agent, tell theirs at `--metrics HOST:PORT`, on their own machine only and without a token.",
        "Most of it is looked up when somebody asks. What is counted on the way costs about a microsecond a request. Every "
        "label has a closed set of values, so the number of series does not depend on what anybody asks, creates or names. "
        "Beside these there are the usual `process_*` of the process.",
        "[deploy/prometheus](../deploy/prometheus) has a scrape configuration, alerts and a Grafana dashboard.",
        *parts,
        "## Labels",
        table(("label", "its values"), ((code(name), words) for name, words in LABELS.items())),
    )
