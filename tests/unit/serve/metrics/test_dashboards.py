"""Alerts, dashboard and scrape configuration refer only to metrics, labels and routes that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from ruamel.yaml import YAML

from remit.serve.http.route_table import ROUTES
from remit.serve.metrics.exposition import METRICS
from tests.tidy.source_tree import ROOT

CONFIG_DIR = ROOT / "deploy" / "prometheus"
NAME = re.compile(r"\bremit_[a-z_]+")
SELECTOR = re.compile(r"\b(remit_[a-z_]+)\{([^}]*)\}")
GROUPING = re.compile(r"by \(([a-z_, ]*)\)")


def yaml(name: str) -> Any:
    return YAML(typ="safe", pure=True).load((CONFIG_DIR / name).read_text())


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml("remit-alerts.yml")["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((CONFIG_DIR / "grafana-remit.json").read_text())["panels"]
    return found


def expressions() -> list[str]:
    return [rule["expr"] for rule in alerts()] + [target["expr"] for panel in panels() for target in panel["targets"]]


def meter(name: str) -> str:
    for ending in ("_bucket", "_count", "_sum"):
        if name.endswith(ending) and METRICS.get(name.removesuffix(ending), METRICS["remit_replicas"]).type == "histogram":
            return name.removesuffix(ending)
    return name


@pytest.mark.parametrize("expression", expressions())
def test_expressions_use_known_metrics_and_labels(expression: str) -> None:
    names = [meter(name) for name in NAME.findall(expression)]
    assert names and not [name for name in names if name not in METRICS]
    for name, selector in SELECTOR.findall(expression):
        labels = {part.split("=")[0].strip(" !~") for part in selector.split(",")}
        assert labels <= {*METRICS[meter(name)].labels, "le"}
    for grouping in GROUPING.findall(expression):
        known = {"le", *(label for name in names for label in METRICS[name].labels)}
        assert {label.strip() for label in grouping.split(",")} <= known
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
    for name in NAME.findall(expression):
        if METRICS[meter(name)].type == "counter":
            assert re.search(rf"(rate|increase)\({name}", expression), f"{name} is a counter: use its rate"


def test_every_alert_has_summary_fix_and_severity() -> None:
    assert len(alerts()) >= 5
    for rule in alerts():
        assert rule["annotations"]["summary"] and rule["annotations"]["cure"] and rule["labels"]["severity"] in ("page", "warn")


def test_panels_have_unique_ids_titles_and_positions() -> None:
    assert len({panel["id"] for panel in panels()}) == len({panel["title"] for panel in panels()}) == len(panels())
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()}
    assert len(places) == len(panels())


def test_scraped_paths_are_served() -> None:
    paths = {route.path for route in ROUTES}
    jobs = {job["job_name"]: job for job in yaml("prometheus.yml")["scrape_configs"]}
    assert "/metrics" in paths  # Prometheus' default
    for job in jobs.values():
        for found in job.get("http_sd_configs", ()):
            assert re.sub(r"^https://[^/]+|\?.*$", "", found["url"]) in paths
    assert {"remit-server", "remit-services", "remit-nodes"} <= set(jobs)
