"""A data directory written by an earlier revision of version 0.1.0 opens, serves its objects and takes writes.

`data/server-0.1.0.tar.gz` holds the directory of a server with services, jobs, a GPU job, a policy, an override and a secret.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.integration.serve.server_process import Server

ARCHIVE = Path(__file__).with_name("data") / "server-0.1.0.tar.gz"
WORKLOADS = {"sums": "job", "too-big": "job", "trainer": "job", "web": "service"}


@pytest.mark.smoke
def test_store_of_an_earlier_revision_opens_and_takes_writes(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path)
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
