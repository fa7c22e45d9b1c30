"""What do commands print and how do they end against a real server? Its scope was written by a real authority and scheduler.

No controllers and no agents run: what waits goes on waiting, and what is bound never starts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remit.commitment.rulings.workloads import INITIAL_REPLICAS_MAX
from remit.model.manifests.reader import read
from tests.integration.cli.test_explain import MORE, settled

REMIT = str(Path(sys.executable).parent / "remit")
TERMINAL = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""


class Scope:
    """A server process, and commands that are run as people run them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {**os.environ, "REMIT_CONFIG": str(root / "config.yaml"), "NO_COLOR": "1", "REMIT_TENANT": "shop"}
        for name in ("REMIT_SERVER", "REMIT_TOKEN", "REMIT_TOKEN_FILE", "REMIT_CONTEXT", "FORCE_COLOR", "COLUMNS"):
            self.env.pop(name, None)
        command = [REMIT, "server", "--data", str(root / "data"), "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=self.env, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://[0-9.]+:[0-9]+", line)
        assert found is not None, line
        self.url = found.group()
        self.token = root / "data" / "token"
        self.told("context", "set", "here", "--server", self.url, "--token-file", str(self.token))

    def run(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [REMIT, *words]
        return subprocess.run(command, env=self.env, input=stdin, capture_output=True, text=True, check=False, timeout=60)

    def told(self, *words: str, code: int = 0, stdin: str = "") -> str:
        done = self.run(*words, stdin=stdin)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout

    def complained(self, *words: str, code: int = 1) -> str:
        done = self.run(*words)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stderr

    def json(self, *words: str) -> Any:
        return json.loads(self.told(*words, "-o", "json"))


@pytest.fixture(scope="module")
def scope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scope]:
    """Six of web, of which four found room; a gang that lacks quota and GPUs; a job that is too large."""
    root = tmp_path_factory.mktemp("asked")
    settled(root / "data")
    found = Scope(root)
    try:
        yield found
    finally:
        found.process.terminate()
        assert found.process.wait(20) == 0
        assert found.process.stdout is not None
        found.process.stdout.close()


# -- looking -------------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_list_of_workloads_says_what_limits_each(scope: Scope) -> None:
    lines = scope.told("get", "wl", "-A").splitlines()
    assert lines[0].split() == ["TENANT", "NAME", "TYPE", "READY", "STAGES", "LIMITED", "BY", "AGE"]
    web = next(line for line in lines if " web " in line)
    assert "0/6" in web and "bound 4, queued 2" in web and "no_room: " in web
    assert any("over_quota: tenant/lab has too little quota left" in line for line in lines)


@pytest.mark.smoke
def test_a_list_of_replicas_says_why_they_wait(scope: Scope) -> None:
    text = scope.told("get", "replicas")
    assert re.search(r"web-0 +bound +n[12] +1 ", text)
    assert re.search(r"web-5 +pending +- +1 +- +no_room: ", text)
    assert scope.told("get", "rp", "--field-selector", "status.phase=pending", "-o", "name") == "replica/web-4\nreplica/web-5\n"


def test_nodes_show_what_is_asked_of_them(scope: Scope) -> None:
    text = scope.told("get", "nodes", "n1", "n3")
    assert re.search(r"n1 +ready +eu +eu-a +std +6/8 +8Gi/32Gi +2", text)
    assert "ready,cordoned" in text


def test_a_list_for_programs_is_one_document_with_the_names_of_the_api(scope: Scope) -> None:
    found = scope.json("get", "workloads", "-A")
    assert (found["apiVersion"], found["kind"]) == ("remit/v1", "WorkloadList")
    assert found["metadata"]["revision"] > 0
    assert {one["metadata"]["name"] for one in found["items"]} >= {"web", "train", "big"}
    assert scope.json("get", "node", "n1")["spec"]["capacity"] == {"cpu": "8", "memory": "32Gi"}
    assert scope.json("get", "wl,no")["kind"] == "List"


def test_what_was_got_as_yaml_changes_nothing_when_it_is_applied(scope: Scope) -> None:
    text = scope.told("get", "workload", "web", "-o", "yaml")
    assert not read(text.encode(), "web.yaml").problems
    assert scope.told("apply", "-f", "-", stdin=text) == "workload/web unchanged\n"
    assert scope.told("diff", "-f", "-", stdin=text) == ""


def test_everything_of_a_tenant(scope: Scope) -> None:
    text = scope.told("get", "all")
    assert "workload/web " in text and "replica/web-0 " in text


def test_a_name_that_is_not_there_is_guessed(scope: Scope) -> None:
    assert scope.complained("get", "workload", "wbe").splitlines() == [
        'Error: there is no workload "wbe" in tenant shop',
        "  did you mean web?",
    ]
    assert "tenant lab has one: say -t lab" in scope.complained("get", "workload", "train")
    assert scope.told("get", "workload/lab/train", "-o", "name") == "workload/lab/train\n"


@pytest.mark.smoke
def test_describe_is_all_on_one_page(scope: Scope) -> None:
    text = scope.told("describe", "workload", "web")
    for part in (
        "limited by:   no_room",
        "\nReplicas\n",
        "\nSpec\n",
        "\nWhy\n",
        "unblocks:",
        "\nWhat happened\n",
        "bind accepted",
    ):
        assert part in text, part
    assert "6 of 8 asked for" in scope.told("describe", "node/n1")
    assert "why here:" in scope.told("describe", "replica", "web-0")


def test_explain_and_capacity_say_over_http_what_they_say_of_the_data(scope: Scope) -> None:
    text = scope.told("explain", "workload/web")
    assert "reason=no_room" in text and "nearest fit:" in text and "unblocks:" in text
    assert "it breaks 2 rules there now" in scope.told("explain", "replica/web-4", "--node", "n3")
    found, seen = (
        scope.json("explain", "replica/web-4"),
        scope.json("explain", "replica/web-4", "--data", str(scope.root / "data")),
    )
    assert found["waits"]["passage"] == seen["waits"]["passage"] and found["waits"]["unblocks"] == seen["waits"]["unblocks"]
    assert scope.json("capacity", "-f", str(MORE))["hard"]["replicas"] == 4
    scope.told("capacity", "-f", str(MORE), "--count", "50", code=1)
    assert "did you mean web?" in scope.complained("explain", "workload/wbe")
    assert "no node" in scope.complained("explain", "replica/web-4", "--node", "n99")


@pytest.mark.smoke
def test_events_of_all_and_of_one(scope: Scope) -> None:
    text = scope.told("events", "--for", "replica/web-0")
    assert text.splitlines()[0].split() == ["TYPE", "REASON", "AGE", "FROM", "MESSAGE"]
    assert "bind accepted" in text
    assert "REGARDING" in scope.told("events", "--type", "warning").splitlines()[0]
    assert all(one["type"] == "Warning" for one in scope.json("events", "--type", "Warning")["items"])


def test_nobody_has_said_what_is_used(scope: Scope) -> None:
    assert re.search(r"n1 +- +- +6/8 ", scope.told("top", "nodes"))
    assert scope.json("top", "replicas")["kind"] == "ReplicaTopList"


def test_a_terminal_gets_lines_that_fit_it(scope: Scope) -> None:
    words = [sys.executable, "-c", TERMINAL, "sh", "-c", f"stty cols 80; {REMIT} get wl -A"]
    env = {**scope.env, "TERM": "xterm"}
    env.pop("NO_COLOR")
    done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=60)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert plain != done.stdout and "…" in plain
    assert max(len(line.rstrip("\r")) for line in plain.splitlines()) <= 80


# -- changing ------------------------------------------------------------------------------------------------------------------

JOB = """
apiVersion: remit/v1
kind: Workload
metadata: {name: NAME, tenant: shop, labels: {app: try}}
spec: {type: job, replicas: MANY, template: {command: ["true"], resources: {cpu: CPU, memory: 1Gi}}}
"""


MANY = INITIAL_REPLICAS_MAX + 1
"""So many that none of them comes with its workload: nobody here would end those, and it goes as soon as it is deleted."""


def job(name: str, cpu: str = "1", replicas: int = 2) -> str:
    return JOB.replace("NAME", name).replace("CPU", f'"{cpu}"').replace("MANY", str(replicas))


@pytest.mark.smoke
def test_a_plan_is_applied_exactly_or_not_at_all(scope: Scope) -> None:
    text = scope.told("plan", "-f", "-", stdin=job("planned"))
    assert "+ workload/planned  create" in text and "2 of 2 new replicas would be placed" in text
    text = scope.told("plan", "-f", "-", stdin=job("planned", replicas=MANY), code=3)
    found = re.search(r"--if-unchanged ([0-9]+)", text)
    assert found is not None
    made = scope.told("apply", "-f", "-", "--if-unchanged", found.group(1), stdin=job("planned", replicas=MANY))
    assert made == "workload/planned created\n"
    done = scope.run("apply", "-f", "-", "--if-unchanged", found.group(1), stdin=job("planned", "2", MANY))
    assert done.returncode == 1 and "has changed since revision" in done.stderr and "plan again" in done.stderr
    differs = scope.told("diff", "-f", "-", stdin=job("planned", "2", MANY), code=1)
    assert differs == "~ workload/planned  replace\n    ~ spec.template.resources.cpu: 1 -> 2\n"
    assert scope.told("diff", "-f", "-", stdin=job("planned", replicas=MANY)) == ""
    assert scope.told("delete", "workload", "planned") == "workload/planned deleted\n"


def test_a_plan_that_would_not_be_placed_says_why_and_exits_with_3(scope: Scope) -> None:
    text = scope.told("plan", "-f", "-", stdin=job("huge", "20"), code=3)
    assert "0 of 2 new replicas would be placed" in text and "no_room (never)" in text and "unblocks if" in text


def test_nothing_is_applied_if_anything_is_wrong(scope: Scope, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(job("good"))
    bad.write_text(job("bad").replace("replicas: 2", "replicas: two"))
    done = scope.run("apply", "-f", str(tmp_path))
    assert done.returncode == 1 and "bad.yaml:5:" in done.stdout and "nothing was sent" in done.stderr
    assert scope.complained("get", "workload", "good").startswith("Error: there is no workload")
    assert scope.run("apply", "-f", str(tmp_path / "none.yaml")).returncode == 2
    assert scope.run("diff", "-f", str(bad)).returncode == 2
    good.write_text(job("same"))
    bad.write_text(job("same"))
    assert "already declared in" in scope.run("apply", "-f", str(tmp_path)).stderr


def test_a_refusal_of_the_authority_names_what_and_the_cure(scope: Scope) -> None:
    done = scope.run("apply", "-f", "-", stdin=job("lost").replace("tenant: shop", "tenant: nobody"))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: workload/nobody/lost: ") and "nobody" in done.stderr


def test_waiting_for_work_without_a_place_exits_with_3(scope: Scope) -> None:
    done = scope.run("wait", "workload/web", "--for=ready", "--timeout", "300ms")
    assert done.returncode == 3
    assert "limited by no_room" in done.stderr and "ask why: remit explain workload/web" in done.stderr
    done = scope.run("apply", "-f", "-", "--wait", "--timeout", "300ms", stdin=job("made", replicas=MANY))
    assert done.returncode == 3 and "replicas that are not made yet" in done.stderr
    assert scope.told("delete", "wl", "made", "--wait").splitlines()[-1] == "workload/made is gone"


def test_waiting_tells_where_it_stands_when_time_is_up(scope: Scope) -> None:
    assert scope.told("wait", "replica/web-0", "--for=phase=bound") == "replica/web-0 has phase=bound\n"
    done = scope.run("wait", "workload/web", "--for=condition=Available", "--timeout", "200ms")
    assert done.returncode == 1 and "nothing is said of Available yet" in done.stderr
    assert "did you mean serving?" in scope.complained("wait", "rp/web-0", "--for=phase=servng", code=2)
    assert "cannot be waited for" in scope.complained("wait", "rp/web-0", "--for=luck", code=2)
    assert "did you mean web?" in scope.complained("wait", "workload/wbe", "--for=ready")
    assert scope.told("wait", "workload/wbe", "--for=delete") == "workload/wbe is gone\n"
    assert "not a duration" in scope.complained("wait", "rp/web-0", "--for=ready", "--timeout", "soon", code=2)


def test_scale_cordon_drain_and_back(scope: Scope) -> None:
    assert scope.told("scale", "web", "--replicas", "7") == "workload/web scaled from 6 to 7\n"
    assert scope.told("scale", "web", "--replicas", "6") == "workload/web scaled from 7 to 6\n"
    assert scope.told("cordon", "g1", "n1").splitlines() == ["node/g1 cordoned", "node/n1 cordoned"]
    assert scope.told("cordon", "n1") == "node/n1 cordoned already\n"
    done = scope.run("drain", "n1", "--deadline", "30m", "--force", "--wait", "--timeout", "200ms")
    assert done.returncode == 1 and re.search(r"2 left: shop/web-[0-9] bound, shop/web-[0-9] bound", done.stderr)
    spec = scope.json("get", "node", "n1")["spec"]
    assert (spec["draining"], spec["drainForce"], spec["drainDeadline"]) == (True, True, "30m")
    scope.told("uncordon", "n1", "g1")
    assert not {"draining", "drainForce", "unschedulable"} & scope.json("get", "node", "n1")["spec"].keys()
    assert 'there is no node "n9"' in scope.complained("cordon", "n2", "n9")
    assert "unschedulable" not in scope.json("get", "node", "n2")["spec"]


def test_delete_by_label_and_by_file(scope: Scope, tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(f"{job('one', replicas=MANY)}---{job('two', replicas=MANY)}")
    scope.told("apply", "-f", str(file))
    assert scope.told("get", "wl", "-l", "app=try", "-o", "name") == "workload/one\nworkload/two\n"
    assert sorted(scope.told("delete", "wl", "-l", "app=try").splitlines()) == ["workload/one deleted", "workload/two deleted"]
    scope.told("apply", "-f", str(file))
    assert scope.told("delete", "-f", str(file)).splitlines() == ["workload/two deleted", "workload/one deleted"]
    assert scope.run("delete", "wl", "one").returncode == 1
    assert scope.run("delete", "wl", "one", "--ignore-not-found").returncode == 0
    assert scope.run("delete", "wl").returncode == 2


def test_a_watch_tells_what_comes_and_what_goes(scope: Scope) -> None:
    command = [REMIT, "get", "workloads", "-w", "-o", "json", "--field-selector", "metadata.name=seen"]
    watch = subprocess.Popen(command, env=scope.env, stdout=subprocess.PIPE, text=True)
    table = subprocess.Popen([REMIT, "get", "wl", "-w"], env=scope.env, stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None and table.stdout is not None
    try:
        head = table.stdout.readline()
        assert head.split()[0] == "NAME"
        scope.told("apply", "-f", "-", stdin=job("seen", replicas=MANY))
        first = json.loads(watch.stdout.readline())
        assert (first["type"], first["object"]["metadata"]["name"]) == ("changed", "seen")
        scope.told("delete", "wl", "seen")
        while (last := json.loads(watch.stdout.readline()))["type"] != "deleted":
            pass
        assert last["object"]["metadata"] == {"name": "seen", "tenant": "shop"}
        rows: list[str] = []
        while not rows or "gone" not in rows[-1]:
            rows.append(table.stdout.readline())
        assert any(re.match(rf"seen +job +0/{MANY} +none +missing", row) for row in rows) and rows[-1].startswith("seen")
    finally:
        for one in (watch, table):
            one.terminate()
            one.wait(10)
            if one.stdout is not None:
                one.stdout.close()


# -- what goes wrong -----------------------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_told_at_once(scope: Scope) -> None:
    told = scope.complained("get", "nodes", "--server", "http://127.0.0.1:1", "--token-file", str(scope.token))
    assert told.startswith("Error: no server answers at http://127.0.0.1:1") and "`remit up`" in told


def test_a_wrong_token_is_told(scope: Scope, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x" * 32)
    told = scope.complained("get", "nodes", "--token-file", str(tmp_path / "token"))
    assert "token" in told and "remit context list" in told


def test_a_wrong_selector_is_told_with_its_cure(scope: Scope) -> None:
    told = scope.complained("get", "nodes", "-l", "app in (")
    assert told.startswith("Error: ") and len(told.splitlines()) == 2


def test_what_is_no_kind_and_no_use_is_misuse(scope: Scope) -> None:
    assert "here they are replicas" in scope.complained("get", "pods", code=2)
    assert "one of the two" in scope.complained("get", "wl", "-A", "-t", "shop", code=2)
    assert "one kind can be watched" in scope.complained("get", "wl,rp", "-w", code=2)


def test_work_that_never_ran_has_no_log(scope: Scope) -> None:
    assert "has written nothing yet" in scope.complained("logs", "replica/web-5")
    assert "no replica of workload web has begun to run" in scope.complained("logs", "web")
    assert "neither a workload nor a replica" in scope.complained("logs", "nothing")


def test_versions_of_both_ends(scope: Scope) -> None:
    found = scope.json("version")
    assert found["client"] == found["server"] and found["url"] == scope.url


def test_rows_alone_in_an_order_of_choice(scope: Scope) -> None:
    lines = scope.told("get", "-t", "lab", "wl", "--no-headers", "--sort-by", "spec.replicas").splitlines()
    assert [line.split()[0] for line in lines] == ["big", "train"]
