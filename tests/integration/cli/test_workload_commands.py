"""Can a person run work with these commands alone? Against a whole control plane: applied, seen, read, moved, ended."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.integration.cli.test_up import REMIT, Ups

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
    found = Ups(tmp_path_factory.mktemp("working"))
    try:
        found.start("--nodes", "3", "--cpu", "2", "--memory", "2Gi")
        found.until("the context is there", lambda: Path(found.env["REMIT_CONFIG"]).exists())
        found.ready(3)
        yield found
    finally:
        found.end()


def told(ups: Ups, *words: str, stdin: str = "", code: int = 0) -> str:
    done = ups.remit(*words, stdin=stdin)
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture
def web(ups: Ups) -> str:
    told(ups, "apply", "-f", "-", "--wait", stdin=WEB)
    return "web"


@pytest.mark.smoke
def test_apply_and_wait__it_serves_and_its_endpoints_answer(ups: Ups, web: str) -> None:
    assert re.search(r"web +service +3/3 +serving 3 +-", told(ups, "get", "wl"))
    found = json.loads(told(ups, "get", "endpoints", "-o", "json"))["items"]
    assert len(found) == 3
    with urlopen(f"http://{found[0]['host']}:{found[0]['ports']['http']}/", timeout=10) as answer:
        assert answer.status == 200
    assert told(ups, "rollout", "status", web) == "workload/web is rolled out\n"
    assert told(ups, "wait", "workload/web", "--for=condition=Available") == "workload/web has condition=Available\n"


@pytest.mark.smoke
def test_logs_of_one_and_of_all_each_line_with_its_name(ups: Ups, web: str) -> None:
    assert told(ups, "logs", "replica/web-0", "--stream", "stdout").splitlines()[0] == "hello"
    lines = told(ups, "logs", web, "--stream", "stdout").splitlines()
    assert sorted(line for line in lines if line.endswith("| hello")) == [f"web-{n} | hello" for n in range(3)]
    assert "\x1b]0;title\x07" in told(ups, "logs", "web-0", "--stream", "stderr")  # into a pipe, as it was written


def test_logs_are_followed(ups: Ups, web: str) -> None:
    process = subprocess.Popen([REMIT, "logs", web, "-f"], env=ups.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        seen: set[str] = set()
        while len(seen) < 3:
            name, _, text = process.stdout.readline().partition(" | ")
            seen |= {name} if text == "hello\n" else set()
        assert seen == {"web-0", "web-1", "web-2"}
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def test_what_is_used_is_told_by_the_nodes(ups: Ups, web: str) -> None:
    ups.until("nodes say what is used", lambda: "never" not in told(ups, "top", "nodes"))
    found = json.loads(told(ups, "top", "replicas", "-o", "json"))["items"]
    assert {one["replica"] for one in found} >= {"web-0", "web-1", "web-2"}
    assert all(one["memoryBytes"] > 0 for one in found if one["workload"] == web)


@pytest.mark.smoke
def test_scale_and_wait(ups: Ups, web: str) -> None:
    done = ups.remit("scale", web, "--replicas", "4", "--wait")
    assert done.returncode == 0 and "serving 4 of 4" in done.stderr, done.stderr
    told(ups, "scale", web, "--replicas", "3", "--wait")


def test_a_node_is_drained_and_taken_back(ups: Ups, web: str) -> None:
    node = json.loads(told(ups, "get", "replica", "web-0", "-o", "json"))["status"]["node"]
    assert told(ups, "drain", node, "--wait").splitlines() == [f"node/{node} drains", f"node/{node} is empty"]
    told(ups, "wait", "workload/web", "--for=ready")
    assert node not in [one["status"]["node"] for one in json.loads(told(ups, "get", "rp", "-o", "json"))["items"]]
    assert told(ups, "uncordon", node) == f"node/{node} takes work again\n"


def test_a_job_runs_to_its_end(ups: Ups) -> None:
    told(ups, "apply", "-f", "-", stdin=SUMS)
    assert told(ups, "wait", "workload/sums", "--for=complete") == "workload/sums is complete\n"
    assert re.search(r"sums +job +3/3 +done 3 ", told(ups, "get", "wl", "sums"))
    assert sorted(told(ups, "logs", "sums").splitlines()) == [f"sums-{n} | summed" for n in range(3)]
    assert told(ups, "delete", "wl", "sums", "--wait").splitlines()[-1] == "workload/sums is gone"


def test_what_has_no_place_is_told_by_plan_by_apply_and_in_the_list(ups: Ups) -> None:
    assert "no_room (never)" in told(ups, "plan", "-f", "-", stdin=HUGE, code=3)
    done = ups.remit("apply", "-f", "-", "--wait", "--timeout", "3s", stdin=HUGE)
    assert done.returncode == 3 and "limited by no_room" in done.stderr and "remit explain workload/huge" in done.stderr
    assert re.search(r"huge-0 +pending +- +1 +- +no_room: ", told(ups, "get", "rp"))
    assert "verdict=never" in told(ups, "explain", "workload/huge")
    told(ups, "delete", "wl", "huge", "--wait")


def test_delete_and_wait__nothing_is_left(ups: Ups, web: str) -> None:
    assert told(ups, "delete", "workload", web, "--wait").splitlines() == [
        "workload/web is going: deleted once what is left of it has ended",
        "workload/web is gone",
    ]
    assert json.loads(told(ups, "get", "replicas", "-o", "json"))["items"] == []
    assert "remove accepted" in told(ups, "events", "--for", "replica/web-0")
