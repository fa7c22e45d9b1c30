"""Output and exit codes of commands against a real server, whose store was written by an authority and a scheduler.

No controllers and no agents run, so pending replicas stay pending and bound replicas never start.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remit.commitment.rulings.workloads import INITIAL_REPLICAS_MAX
from remit.model.manifests.reader import read
from tests.integration.cli.scope_data import MORE, write_scope
from tests.integration.cli.server_process import REMIT, Scope

TERMINAL = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""


@pytest.fixture(scope="module")
def scope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scope]:
    """Workload web with 4 of 6 replicas bound, a gang without enough quota and GPUs, and a job that fits on no node."""
    root = tmp_path_factory.mktemp("asked")
    write_scope(root / "data")
    result = Scope(root)
    try:
        yield result
    finally:
        result.process.terminate()
        assert result.process.wait(20) == 0
        assert result.process.stdout is not None
        result.process.stdout.close()


# -- reading -------------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_get_workloads_shows_the_limit_of_each(scope: Scope) -> None:
    lines = scope.output("get", "wl", "-A").splitlines()
    assert lines[0].split() == ["TENANT", "NAME", "TYPE", "READY/DONE", "STAGES", "LIMITED", "BY", "AGE"]
    web = next(line for line in lines if " web " in line)
    assert "0/6" in web and "bound 4, queued 2" in web and "no_room: " in web
    assert any("over_quota: tenant/lab has too little quota left" in line for line in lines)


@pytest.mark.smoke
def test_get_replicas_shows_pending_reasons(scope: Scope) -> None:
    text = scope.output("get", "replicas")
    assert re.search(r"web-0 +bound +n[12] +1 ", text)
    assert re.search(r"web-5 +pending +- +1 +- +no_room: ", text)
    assert (
        scope.output("get", "rp", "--field-selector", "status.phase=pending", "-o", "name") == "replica/web-4\nreplica/web-5\n"
    )


def test_get_nodes_shows_requests_and_capacity(scope: Scope) -> None:
    text = scope.output("get", "nodes", "n1", "n3")
    assert re.search(r"n1 +ready +eu +eu-a +std +6/8 +8Gi/32Gi +2", text)
    assert "ready,cordoned" in text


def test_json_list_is_one_document_with_api_field_names(scope: Scope) -> None:
    result = scope.json("get", "workloads", "-A")
    assert (result["apiVersion"], result["kind"]) == ("remit/v1", "WorkloadList")
    assert result["metadata"]["revision"] > 0
    assert {item["metadata"]["name"] for item in result["items"]} >= {"web", "train", "big"}
    assert scope.json("get", "node", "n1")["spec"]["capacity"] == {"cpu": "8", "memory": "32Gi"}
    assert scope.json("get", "wl,no")["kind"] == "List"


def test_yaml_output_applies_unchanged(scope: Scope) -> None:
    text = scope.output("get", "workload", "web", "-o", "yaml")
    assert not read(text.encode(), "web.yaml").problems
    assert scope.output("apply", "-f", "-", stdin=text) == "workload/web unchanged\n"
    assert scope.output("diff", "-f", "-", stdin=text) == ""


def test_get_all_lists_workloads_and_replicas(scope: Scope) -> None:
    text = scope.output("get", "all")
    assert "workload/web " in text and "replica/web-0 " in text


def test_unknown_name_gets_a_suggestion(scope: Scope) -> None:
    assert scope.error("get", "workload", "wbe").splitlines() == [
        'Error: workload "wbe" not found in tenant shop',
        "  did you mean web?",
    ]
    assert "tenant lab has one; use -t lab" in scope.error("get", "workload", "train")
    assert scope.output("get", "workload/lab/train", "-o", "name") == "workload/lab/train\n"


@pytest.mark.smoke
def test_describe_has_all_sections(scope: Scope) -> None:
    text = scope.output("describe", "workload", "web")
    for part in (
        "limited by:   no_room",
        "\nReplicas\n",
        "\nSpec\n",
        "\nExplanation\n",
        "unblocks:",
        "\nEvents\n",
        "  Bound  ",
    ):
        assert part in text, part
    assert "6 of 8 requested" in scope.output("describe", "node/n1")
    assert "why here:" in scope.output("describe", "replica", "web-0")


def test_explain_and_capacity_agree_between_server_and_data_directory(scope: Scope) -> None:
    text = scope.output("explain", "workload/web")
    assert "reason=no_room" in text and "nearest fit:" in text and "unblocks:" in text
    assert "it violates 2 rules there now" in scope.output("explain", "replica/web-4", "--node", "n3")
    result, offline = (
        scope.json("explain", "replica/web-4"),
        scope.json("explain", "replica/web-4", "--data", str(scope.root / "data")),
    )
    assert (
        result["waits"]["passage"] == offline["waits"]["passage"]
        and result["waits"]["unblocks"] == offline["waits"]["unblocks"]
    )
    assert scope.json("capacity", "-f", str(MORE))["hard"]["replicas"] == 4
    scope.output("capacity", "-f", str(MORE), "--count", "50", code=1)
    assert "did you mean web?" in scope.error("explain", "workload/wbe")
    assert "no node" in scope.error("explain", "replica/web-4", "--node", "n99")


@pytest.mark.smoke
def test_events_are_filtered_by_object_and_type(scope: Scope) -> None:
    text = scope.output("events", "--for", "replica/web-0")
    assert text.splitlines()[0].split() == ["TYPE", "REASON", "AGE", "FROM", "MESSAGE"]
    assert any("Bound" in line and "bound to n" in line for line in text.splitlines())
    assert "REGARDING" in scope.output("events", "--type", "warning").splitlines()[0]
    assert all(item["type"] == "Warning" for item in scope.json("events", "--type", "Warning")["items"])


def test_top_shows_dashes_without_reports(scope: Scope) -> None:
    assert re.search(r"n1 +- +- +6/8 ", scope.output("top", "nodes"))
    assert scope.json("top", "replicas")["kind"] == "ReplicaTopList"


def test_table_fits_the_terminal_width(scope: Scope) -> None:
    args = [sys.executable, "-c", TERMINAL, "sh", "-c", f"stty cols 80; {REMIT} get wl -A"]
    env = {**scope.env, "TERM": "xterm"}
    env.pop("NO_COLOR")
    done = subprocess.run(args, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=60)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert plain != done.stdout and "…" in plain
    assert max(len(line.rstrip("\r")) for line in plain.splitlines()) <= 80


# -- writing ------------------------------------------------------------------------------------------------------------------

JOB = """
apiVersion: remit/v1
kind: Workload
metadata: {name: NAME, tenant: shop, labels: {app: try}}
spec: {type: job, replicas: MANY, template: {command: ["true"], resources: {cpu: CPU, memory: 1Gi}}}
"""


MANY = INITIAL_REPLICAS_MAX + 1
"""Too many to be created together with the workload, so the workload has no replicas and is deleted at once."""


def job(name: str, cpu: str = "1", replicas: int = 2) -> str:
    return JOB.replace("NAME", name).replace("CPU", f'"{cpu}"').replace("MANY", str(replicas))


@pytest.mark.smoke
def test_plan_is_applied_exactly_or_refused_if_stale(scope: Scope) -> None:
    text = scope.output("plan", "-f", "-", stdin=job("planned"))
    assert "+ workload/planned  create" in text and "2 of 2 new replicas would be placed" in text
    text = scope.output("plan", "-f", "-", stdin=job("planned", replicas=MANY), code=3)
    result = re.search(r"--if-unchanged ([0-9]+)", text)
    assert result is not None
    made = scope.output("apply", "-f", "-", "--if-unchanged", result.group(1), stdin=job("planned", replicas=MANY))
    assert made == "workload/planned created\n"
    done = scope.run("apply", "-f", "-", "--if-unchanged", result.group(1), stdin=job("planned", "2", MANY))
    assert done.returncode == 1 and "has changed since revision" in done.stderr and "plan again" in done.stderr
    differs = scope.output("diff", "-f", "-", stdin=job("planned", "2", MANY), code=1)
    assert differs == "~ workload/planned  replace\n    ~ spec.template.resources.cpu: 1 -> 2\n"
    assert scope.output("diff", "-f", "-", stdin=job("planned", replicas=MANY)) == ""
    assert scope.output("delete", "workload", "planned") == "workload/planned deleted\n"


def test_unplaceable_plan_exits_with_3_and_a_reason(scope: Scope) -> None:
    text = scope.output("plan", "-f", "-", stdin=job("huge", "20"), code=3)
    assert "0 of 2 new replicas would be placed" in text and "no_room (never)" in text and "unblocks if" in text


def test_one_invalid_manifest_prevents_the_whole_apply(scope: Scope, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(job("good"))
    bad.write_text(job("bad").replace("replicas: 2", "replicas: two"))
    done = scope.run("apply", "-f", str(tmp_path))
    assert done.returncode == 1 and "bad.yaml:5:" in done.stdout and "nothing was sent" in done.stderr
    assert scope.error("get", "workload", "good").startswith('Error: workload "good" not found')
    assert scope.run("apply", "-f", str(tmp_path / "none.yaml")).returncode == 2
    assert scope.run("diff", "-f", str(bad)).returncode == 2
    good.write_text(job("same"))
    bad.write_text(job("same"))
    assert "already declared in" in scope.run("apply", "-f", str(tmp_path)).stderr


def test_refused_object_is_named_in_the_error(scope: Scope) -> None:
    done = scope.run("apply", "-f", "-", stdin=job("lost").replace("tenant: shop", "tenant: nobody"))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: workload/nobody/lost: ") and "nobody" in done.stderr


def test_wait_for_unplaced_workload_exits_with_3(scope: Scope) -> None:
    done = scope.run("wait", "workload/web", "--for=ready", "--timeout", "300ms")
    assert done.returncode == 3
    assert "limited by no_room" in done.stderr and "find out why: remit explain workload/web" in done.stderr
    done = scope.run("apply", "-f", "-", "--wait", "--timeout", "300ms", stdin=job("made", replicas=MANY))
    assert done.returncode == 3 and "missing: replicas have not been created yet" in done.stderr
    assert "workload/made: done 0 of 101 desired" in done.stderr
    assert scope.output("delete", "wl", "made", "--wait").splitlines()[-1] == "workload/made is deleted"


def test_wait_timeout_prints_the_status_of_the_goal(scope: Scope) -> None:
    assert scope.output("wait", "replica/web-0", "--for=phase=bound") == "replica/web-0 has phase=bound\n"
    done = scope.run("wait", "workload/web", "--for=condition=Available", "--timeout", "200ms")
    assert done.returncode == 1 and "has no condition Available yet" in done.stderr
    assert "did you mean serving?" in scope.error("wait", "rp/web-0", "--for=phase=servng", code=2)
    assert "unknown goal" in scope.error("wait", "rp/web-0", "--for=luck", code=2)
    assert "did you mean web?" in scope.error("wait", "workload/wbe", "--for=ready")
    assert scope.output("wait", "workload/wbe", "--for=delete") == "workload/wbe is deleted\n"
    assert "not a duration" in scope.error("wait", "rp/web-0", "--for=ready", "--timeout", "soon", code=2)


def test_scale_cordon_drain_and_uncordon_change_the_spec(scope: Scope) -> None:
    assert scope.output("scale", "web", "--replicas", "7") == "workload/web scaled from 6 to 7\n"
    assert scope.output("scale", "web", "--replicas", "6") == "workload/web scaled from 7 to 6\n"
    assert scope.output("cordon", "g1", "n1").splitlines() == ["node/g1 cordoned", "node/n1 cordoned"]
    assert scope.output("cordon", "n1") == "node/n1 already cordoned\n"
    done = scope.run("drain", "n1", "--deadline", "30m", "--force", "--wait", "--timeout", "200ms")
    assert done.returncode == 1 and re.search(r"2 replicas left: shop/web-[0-9] bound, shop/web-[0-9] bound", done.stderr)
    spec = scope.json("get", "node", "n1")["spec"]
    assert (spec["draining"], spec["drainForce"], spec["drainDeadline"]) == (True, True, "30m")
    scope.output("uncordon", "n1", "g1")
    assert not {"draining", "drainForce", "unschedulable"} & scope.json("get", "node", "n1")["spec"].keys()
    assert 'node "n9" not found' in scope.error("cordon", "n2", "n9")
    assert "unschedulable" not in scope.json("get", "node", "n2")["spec"]


def test_delete_by_label_and_file_deletes_all_matches(scope: Scope, tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(f"{job('one', replicas=MANY)}---{job('two', replicas=MANY)}")
    scope.output("apply", "-f", str(file))
    assert scope.output("get", "wl", "-l", "app=try", "-o", "name") == "workload/one\nworkload/two\n"
    assert sorted(scope.output("delete", "wl", "-l", "app=try").splitlines()) == [
        "workload/one deleted",
        "workload/two deleted",
    ]
    scope.output("apply", "-f", str(file))
    assert scope.output("delete", "-f", str(file)).splitlines() == ["workload/two deleted", "workload/one deleted"]
    assert scope.run("delete", "wl", "one").returncode == 1
    assert scope.run("delete", "wl", "one", "--ignore-not-found").returncode == 0
    assert scope.run("delete", "wl").returncode == 2


def test_watch_prints_created_and_deleted_objects(scope: Scope) -> None:
    command = [REMIT, "get", "workloads", "-w", "-o", "json", "--field-selector", "metadata.name=seen"]
    watch = subprocess.Popen(command, env=scope.env, stdout=subprocess.PIPE, text=True)
    table = subprocess.Popen([REMIT, "get", "wl", "-w"], env=scope.env, stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None and table.stdout is not None
    try:
        heading = table.stdout.readline()
        assert heading.split()[0] == "NAME"
        scope.output("apply", "-f", "-", stdin=job("seen", replicas=MANY))
        first = json.loads(watch.stdout.readline())
        assert (first["type"], first["object"]["metadata"]["name"]) == ("changed", "seen")
        scope.output("delete", "wl", "seen")
        while (last := json.loads(watch.stdout.readline()))["type"] != "deleted":
            pass
        assert last["object"]["metadata"] == {"name": "seen", "tenant": "shop"}
        rows: list[str] = []
        while not rows or "deleted" not in rows[-1]:
            rows.append(table.stdout.readline())
        assert any(re.match(rf"seen +job +0/{MANY} +none +missing", row) for row in rows) and rows[-1].startswith("seen")
    finally:
        for item in (watch, table):
            item.terminate()
            item.wait(10)
            if item.stdout is not None:
                item.stdout.close()


# -- errors ----------------------------------------------------------------------------------------------------------- --------


def test_unreachable_server_fails_at_once_with_a_fix(scope: Scope) -> None:
    output = scope.error("get", "nodes", "--server", "http://127.0.0.1:1", "--token-file", str(scope.token))
    assert output.startswith("Error: no server answers at http://127.0.0.1:1") and "`remit up`" in output


def test_unknown_token_is_refused_with_a_fix(scope: Scope, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x" * 32)
    output = scope.error("get", "nodes", "--token-file", str(tmp_path / "token"))
    assert "token" in output and "remit context list" in output


def test_invalid_selector_is_refused_with_a_fix(scope: Scope) -> None:
    output = scope.error("get", "nodes", "-l", "app in (")
    assert output.startswith("Error: ") and len(output.splitlines()) == 2


def test_invalid_arguments_are_usage_errors(scope: Scope) -> None:
    assert "the corresponding kind is replicas" in scope.error("get", "pods", code=2)
    assert "cannot be combined" in scope.error("get", "wl", "-A", "-t", "shop", code=2)
    assert "one kind at a time" in scope.error("get", "wl,rp", "-w", code=2)


def test_logs_of_unstarted_replicas_fail_with_a_fix(scope: Scope) -> None:
    assert "has no log yet" in scope.error("logs", "replica/web-5")
    assert "no replica of workload web has started" in scope.error("logs", "web")
    assert "no workload or replica" in scope.error("logs", "nothing")


def test_version_prints_client_and_server(scope: Scope) -> None:
    result = scope.json("version")
    assert result["client"] == result["server"] and result["url"] == scope.url


def test_no_headers_and_sort_by_print_sorted_rows(scope: Scope) -> None:
    lines = scope.output("get", "-t", "lab", "wl", "--no-headers", "--sort-by", "spec.replicas").splitlines()
    assert [line.split()[0] for line in lines] == ["big", "train"]
