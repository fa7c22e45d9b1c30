"""Do alerts, dashboard and scrape configuration ask for what there is? Each metric and label that they name is in the table."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from ruamel.yaml import YAML

from remit.serve.http.route_table import ROUTES
from remit.serve.metrics.exposition import METRICS
from tests.tidy.source_tree import ROOT

PLACE = ROOT / "deploy" / "prometheus"
NAME = re.compile(r"\bremit_[a-z_]+")
SELECTOR = re.compile(r"\b(remit_[a-z_]+)\{([^}]*)\}")
GROUPING = re.compile(r"by \(([a-z_, ]*)\)")


def yaml(name: str) -> Any:
    return YAML(typ="safe", pure=True).load((PLACE / name).read_text())


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml("remit-alerts.yml")["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((PLACE / "grafana-remit.json").read_text())["panels"]
    return found


def asked() -> list[str]:
    return [rule["expr"] for rule in alerts()] + [target["expr"] for panel in panels() for target in panel["targets"]]


def meter(name: str) -> str:
    for ending in ("_bucket", "_count", "_sum"):
        if name.endswith(ending) and METRICS.get(name.removesuffix(ending), METRICS["remit_replicas"]).type == "histogram":
            return name.removesuffix(ending)
    return name


@pytest.mark.parametrize("expression", asked())
def test_every_metric_and_label_that_is_asked_for_is_told(expression: str) -> None:
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
            assert re.search(rf"(rate|increase)\({name}", expression), f"{name} only ever grows: ask for its rate"


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    assert len(alerts()) >= 5
    for rule in alerts():
        assert rule["annotations"]["summary"] and rule["annotations"]["cure"] and rule["labels"]["severity"] in ("page", "warn")


def test_panels_have_numbers_titles_and_places_of_their_own() -> None:
    assert len({panel["id"] for panel in panels()}) == len({panel["title"] for panel in panels()}) == len(panels())
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()}
    assert len(places) == len(panels())


def test_what_is_scraped_is_served() -> None:
    paths = {route.path for route in ROUTES}
    jobs = {job["job_name"]: job for job in yaml("prometheus.yml")["scrape_configs"]}
    assert "/metrics" in paths  # Prometheus' own default
    for job in jobs.values():
        for found in job.get("http_sd_configs", ()):
            assert re.sub(r"^https://[^/]+|\?.*$", "", found["url"]) in paths
    assert {"remit-server", "remit-services", "remit-nodes"} <= set(jobs)
