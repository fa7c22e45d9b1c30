"""Commands for workloads against a complete control plane: apply, inspect, move, delete."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.integration.cli.up_process import REMIT, Ups

WEB = """
apiVersion: remit/v1
kind: Workload
metadata: {name: web, tenant: default, labels: {app: web}}
spec:
  type: service
  replicas: 3
  template:
    command:
    - sh
    - -c
    - 'echo hello; printf "\\033]0;title\\007\\n" >&2; exec python3 -m http.server --bind 127.0.0.1 $(PORT_http)'
    ports: [{name: http}]
    resources: {cpu: 50m, memory: 64Mi}
    probes: {ready: {tcp: {port: http}, period: 200ms}}
    stopGrace: 1s
"""
SUMS = """
apiVersion: remit/v1
kind: Workload
metadata: {name: sums, tenant: default}
spec:
  type: job
  replicas: 2
  completions: 3
  template: {command: [sh, -c, "echo summed"], resources: {cpu: 50m, memory: 32Mi}}
"""
HUGE = """
apiVersion: remit/v1
kind: Workload
metadata: {name: huge, tenant: default}
spec:
  type: service
  template: {command: [sleep, "9"], resources: {cpu: "64", memory: 32Mi}}
"""


@pytest.fixture(scope="module")
def ups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ups]:
    items = Ups(tmp_path_factory.mktemp("working"))
    try:
        items.start("--nodes", "3", "--cpu", "2", "--memory", "2Gi")
        items.until("the context is stored", lambda: Path(items.env["REMIT_CONFIG"]).exists())
        items.ready(3)
        yield items
    finally:
        items.end()


def output_of(ups: Ups, *args: str, stdin: str = "", code: int = 0) -> str:
    done = ups.remit(*args, stdin=stdin)
    assert done.returncode == code, (args, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture
def web(ups: Ups) -> str:
    output_of(ups, "apply", "-f", "-", "--wait", stdin=WEB)
    return "web"


@pytest.mark.smoke
def test_applied_service_becomes_ready_and_its_endpoints_respond(ups: Ups, web: str) -> None:
    assert re.search(r"web +service +3/3 +serving 3 +-", output_of(ups, "get", "wl"))
    items = json.loads(output_of(ups, "get", "endpoints", "-o", "json"))["items"]
    assert len(items) == 3
    with urlopen(f"http://{items[0]['host']}:{items[0]['ports']['http']}/", timeout=10) as answer:
        assert answer.status == 200
    assert output_of(ups, "rollout", "status", web) == "workload/web is rolled out\n"
    assert output_of(ups, "wait", "workload/web", "--for=condition=Available") == "workload/web has condition=Available\n"


@pytest.mark.smoke
def test_logs_of_a_workload_prefix_each_line_with_the_replica(ups: Ups, web: str) -> None:
    assert output_of(ups, "logs", "replica/web-0", "--stream", "stdout").splitlines()[0] == "hello"
    lines = output_of(ups, "logs", web, "--stream", "stdout").splitlines()
    assert sorted(line for line in lines if line.endswith("| hello")) == [f"web-{n} | hello" for n in range(3)]
    assert "\x1b]0;title\x07" in output_of(ups, "logs", "web-0", "--stream", "stderr")  # output to a pipe is unchanged


def test_logs_follow_prints_new_output_of_all_replicas(ups: Ups, web: str) -> None:
    process = subprocess.Popen([REMIT, "logs", web, "-f"], env=ups.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        names: set[str] = set()
        while len(names) < 3:
            name, _, text = process.stdout.readline().partition(" | ")
            names |= {name} if text == "hello\n" else set()
        assert names == {"web-0", "web-1", "web-2"}
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def test_top_shows_usage_reported_by_nodes(ups: Ups, web: str) -> None:
    ups.until("nodes report usage", lambda: "never" not in output_of(ups, "top", "nodes"))
    items = json.loads(output_of(ups, "top", "replicas", "-o", "json"))["items"]
    assert {item["replica"] for item in items} >= {"web-0", "web-1", "web-2"}
    assert all(item["memoryBytes"] > 0 for item in items if item["workload"] == web)


@pytest.mark.smoke
def test_scale_with_wait_returns_when_all_serve(ups: Ups, web: str) -> None:
    done = ups.remit("scale", web, "--replicas", "4", "--wait")
    assert done.returncode == 0 and "serving 4 of 4" in done.stderr, done.stderr
    output_of(ups, "scale", web, "--replicas", "3", "--wait")


def test_drained_node_is_empty_and_uncordon_makes_it_schedulable(ups: Ups, web: str) -> None:
    node = json.loads(output_of(ups, "get", "replica", "web-0", "-o", "json"))["status"]["node"]
    assert output_of(ups, "drain", node, "--wait").splitlines() == [f"node/{node} draining", f"node/{node} is empty"]
    output_of(ups, "wait", "workload/web", "--for=ready")
    assert node not in [item["status"]["node"] for item in json.loads(output_of(ups, "get", "rp", "-o", "json"))["items"]]
    assert output_of(ups, "uncordon", node) == f"node/{node} uncordoned\n"


def test_job_completes_and_is_deleted(ups: Ups) -> None:
    output_of(ups, "apply", "-f", "-", stdin=SUMS)
    assert output_of(ups, "wait", "workload/sums", "--for=complete") == "workload/sums is complete\n"
    assert re.search(r"sums +job +3/3 +done 3 ", output_of(ups, "get", "wl", "sums"))
    assert sorted(output_of(ups, "logs", "sums").splitlines()) == [f"sums-{n} | summed" for n in range(3)]
    assert output_of(ups, "delete", "wl", "sums", "--wait").splitlines()[-1] == "workload/sums is deleted"


def test_unplaceable_workload_is_reported_by_plan_apply_and_get(ups: Ups) -> None:
    assert "no_room (never)" in output_of(ups, "plan", "-f", "-", stdin=HUGE, code=3)
    done = ups.remit("apply", "-f", "-", "--wait", "--timeout", "3s", stdin=HUGE)
    assert done.returncode == 3 and "limited by no_room" in done.stderr and "remit explain workload/huge" in done.stderr
    assert re.search(r"huge-0 +pending +- +1 +- +no_room: ", output_of(ups, "get", "rp"))
    assert "verdict=never" in output_of(ups, "explain", "workload/huge")
    output_of(ups, "delete", "wl", "huge", "--wait")


def test_delete_with_wait_leaves_no_replicas(ups: Ups, web: str) -> None:
    assert output_of(ups, "delete", "workload", web, "--wait").splitlines() == [
        "workload/web marked for deletion; it is deleted once its replicas have stopped",
        "workload/web is deleted",
    ]
    assert json.loads(output_of(ups, "get", "replicas", "-o", "json"))["items"] == []
    assert " Removed " in output_of(ups, "events", "--for", "replica/web-0")
