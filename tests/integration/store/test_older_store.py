"""Data directories written by an earlier revision of version 0.1.0 open, serve their objects and take writes.

`data/server-0.1.0.tar.gz` holds the directory of a server with services, jobs, a GPU job, a policy, an override and a secret.
`data/server-0.1.0-kinds.tar.xz` holds one with every declared kind, replicas in several phases after a rollout and a failed
job, and `objects.json`: all objects as the API of that revision listed them.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remit.model.kinds.registry import DEFINITIONS
from tests.integration.serve.server_process import Server

DATA = Path(__file__).with_name("data")
WORKLOADS = {"sums": "job", "too-big": "job", "trainer": "job", "web": "service"}
OLDER_KINDS = [definition for definition in DEFINITIONS if definition.is_declared]
"""Declared kinds, all of which that revision had. A kind added later is to be left out here."""
EMPTY = {"/v1/grants", "/v1/peers", "/v1/summaries"}
"""Kinds of objects between scopes, of which that scope had none."""


def extract(name: str, directory: Path) -> None:
    """Extract a kept directory without its admin token, which expires: a server makes a new one if it finds none."""
    with tarfile.open(DATA / name) as archive:
        archive.extractall(directory, [member for member in archive if Path(member.name).name != "token"])


@pytest.mark.smoke
def test_store_of_an_earlier_revision_opens_and_takes_writes(tmp_path: Path) -> None:
    extract("server-0.1.0.tar.gz", tmp_path)
    with Server(tmp_path / "server") as server:
        server.until_ready()
        stored = server.must("GET", "/v1/tenants/shop/workloads")["items"]
        assert {item["metadata"]["name"]: item["spec"]["type"] for item in stored} == WORKLOADS
        replicas = server.must("GET", "/v1/tenants/shop/replicas")["items"]
        phases = {item["metadata"]["name"]: item.get("status", {}).get("phase", "pending") for item in replicas}
        assert phases["trainer-0"] != "pending" and phases["too-big-0"] == "pending"
        assert [item["metadata"]["name"] for item in server.must("GET", "/v1/policies")["items"]] == ["recovery"]
        assert [item["metadata"]["name"] for item in server.must("GET", "/v1/overrides")["items"]] == ["avoid-west"]
        explained = server.must("GET", "/v1/tenants/shop/workloads/too-big/explain")
        assert explained["name"] == "too-big"

        web = server.must("GET", "/v1/tenants/shop/workloads/web")
        web["spec"]["replicas"] = 3
        changed = server.must("PUT", "/v1/tenants/shop/workloads/web", {k: v for k, v in web.items() if k != "status"})
        assert (changed["spec"]["replicas"], changed["metadata"]["generation"]) == (3, web["metadata"]["generation"] + 1)
        code, errors = server.end()
        assert code == 0, errors
    with Server(tmp_path / "server") as server:
        server.until_ready()
        assert server.must("GET", "/v1/tenants/shop/workloads/web")["spec"]["replicas"] == 3


@pytest.fixture(scope="module")
def kinds_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, list[Any]]]]:
    """A server on the directory with every kind, and the lists that the earlier revision answered."""
    directory = tmp_path_factory.mktemp("older")
    extract("server-0.1.0-kinds.tar.xz", directory)
    listed = json.loads((directory / "server-kinds" / "objects.json").read_text())
    with Server(directory / "server-kinds") as server:
        server.until_ready()
        yield server, listed


def missing(expected: Any, actual: Any, path: str = "") -> list[str]:
    """Paths of values of `expected` that `actual` lacks or has otherwise. Further fields of `actual` are allowed."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        return [line for name, value in expected.items() for line in missing(value, actual.get(name), f"{path}.{name}")]
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        return [line for index, (value, other) in pairs for line in missing(value, other, f"{path}[{index}]")]
    return [] if expected == actual else [f"{path}: {expected!r} -> {actual!r}"]


def test_every_object_of_an_earlier_revision_is_served_with_all_its_values(
    kinds_server: tuple[Server, dict[str, list[Any]]],
) -> None:
    server, listed = kinds_server
    assert {path for path, items in listed.items() if not items} == EMPTY
    assert {f"/v1/{definition.plural}" for definition in OLDER_KINDS} <= set(listed) - EMPTY
    for path, items in listed.items():
        served = server.must("GET", path)["items"]
        if path == "/v1/tokens":  # without the new admin token, see `extract`
            kept = {item["metadata"]["name"] for item in items}
            served = [item for item in served if item["metadata"]["name"] in kept]
        assert missing(items, served, path) == []


def test_declared_objects_of_an_earlier_revision_take_a_label(kinds_server: tuple[Server, dict[str, list[Any]]]) -> None:
    server, listed = kinds_server
    for definition in OLDER_KINDS:
        if definition.kind == "Override":  # its term has ended since, and an ended override is only deleted
            continue
        item = listed[f"/v1/{definition.plural}"][0]
        tenant = f"/tenants/{item['metadata']['tenant']}" if definition.tenanted else ""
        path = f"/v1{tenant}/{definition.plural}/{item['metadata']['name']}"
        patch = {"metadata": {"labels": {**item["metadata"].get("labels", {}), "kept": "yes"}}}
        reply = server.ask("PATCH", path, patch, **{"Content-Type": "application/merge-patch+json"})
        assert reply.status == 200, (path, reply)
        assert server.must("GET", path)["metadata"]["labels"]["kept"] == "yes"
