"""Startup progress: forbidden artifact sources and host paths get 422, and explanations include the node's progress."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from remit.model.records import Replica
from remit.model.wire.agent_messages import NodeState, RunState
from remit.proposal.explain.result_types import ReplicaExplanation, WorkloadExplanation
from remit.proposal.explain.subjects import RecordedHistory, explain_replica, explain_workload
from remit.serve.diagnostics.explanations import add_startup_progress, add_workload_startup_progress
from tests.unit.proposal.cluster_fixtures import RULES
from tests.unit.proposal.explain.pending_cases import CASES
from tests.unit.serve.in_memory_server import Api, api, http_test, tenant, workload

__all__ = ["api"]
DIGEST = "0" * 64
PATH = "/v1/tenants/acme/workloads"


def manifest(**template: Any) -> dict[str, Any]:
    made = workload("asks")
    made["spec"]["template"].update(template)
    return made


@http_test
async def test_artifact_source_in_local_network_gets_422(api: Api) -> None:
    """A32."""
    await api.must("POST", "/v1/tenants", tenant())
    for source in (
        "http://169.254.169.254/latest/meta-data/iam",
        "http://localhost/a",
        "http://127.0.0.1:7420/v1/nodes",
        "http://[::ffff:169.254.169.254]/",
        "http://2130706433/",
        "http://metadata.google.internal/",
    ):
        answer = await api.ask("POST", PATH, manifest(artifacts=[{"source": source, "sha256": DIGEST}]))
        assert answer.status == 422
        problem = answer.json
        assert problem["field"] == "spec.template.artifacts[0].source"
        assert "artifacts may not be fetched from this host" in problem["detail"]
        assert problem["cure"] == "use a public host, or let a policy permit it in permit.artifactHosts"
    answer = await api.ask("GET", f"{PATH}/asks")
    assert answer.status == 404
    api.server.audit.flush_counts(all_=True)
    items = (await api.must("GET", "/v1/audit?limit=1000"))["items"]
    assert sum(item.get("count", 1) for item in items if item.get("status") == 422 or item.get("code") == "invalid") >= 1, items


@http_test
async def test_host_path_without_policy_gets_422(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    body = manifest(volumes=[{"name": "v", "path": "v", "host": {"path": "/etc"}}])
    answer = await api.ask("POST", PATH, body)
    assert (answer.status, answer.json["field"]) == (422, "spec.template.volumes[0].host.path")
    policy = {
        "apiVersion": "remit/v1",
        "kind": "Policy",
        "metadata": {"name": "lent"},
        "spec": {"rules": [{"match": {"tenants": ["acme"]}, "permit": {"hostPaths": ["/etc"]}}]},
    }
    await api.must("POST", "/v1/policies", policy)
    await api.must("POST", PATH, body)


# -- progress reported by nodes ------------------------------------------------------------------------------------------------


class ReportedRuns:
    """An authority to which nodes have reported these runs."""

    def __init__(self, *runs: RunState) -> None:
        self.runs = runs

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return [NodeState("n1", runs=self.runs)]


def replica_explanation(phase: str) -> ReplicaExplanation:
    cluster = next(iter(CASES.values()))[2]()
    row = cluster.objects["replica/t1/w-0"]
    assert isinstance(row, Replica)
    explanation = explain_replica(cluster.view(), row, 1, RecordedHistory(), RULES)
    return replace(explanation, tenant="t", name="w-0", phase=phase, node="n1", attempt=2)


def workload_explanation(limit: str, detail: str = "") -> WorkloadExplanation:
    cluster = next(iter(CASES.values()))[2]()
    return replace(
        explain_workload(cluster.view(), None, "t1", "w", RecordedHistory(), RULES), tenant="t", limit=limit, detail=detail
    )


FETCHES = RunState("replica/t/w-0", "u", 2, said="fetching 12 of 80 MiB of https://x")


@pytest.mark.parametrize(
    ("phase", "run", "progress"),
    [
        ("starting", FETCHES, FETCHES.said),
        ("running", replace(FETCHES, pid=7, said="its ready probe failed"), "its ready probe failed"),
        ("serving", FETCHES, ""),
        ("starting", replace(FETCHES, attempt=1), ""),
        ("starting", replace(FETCHES, replica="replica/u/w-0"), ""),
    ],
)
def test_explanation_of_starting_replica_includes_node_progress(phase: str, run: RunState, progress: str) -> None:
    explanation = asyncio.run(add_startup_progress(replica_explanation(phase), ReportedRuns(run)))  # type: ignore[arg-type]
    assert explanation.said == progress


def test_workload_held_up_by_fetch_reports_progress() -> None:
    other = replace(FETCHES, replica="replica/t/w-1", said="waits for the same file, which another replica fetches")
    unrelated = replace(FETCHES, replica="replica/t/w-two-0")

    def explanation(found: WorkloadExplanation) -> str:
        return asyncio.run(add_workload_startup_progress(found, ReportedRuns(other, FETCHES, unrelated))).detail  # type: ignore[arg-type]

    assert explanation(workload_explanation("starting")) == "w-0 is fetching 12 of 80 MiB of https://x (and 1 more)"
    assert explanation(workload_explanation("no_room")) == ""
    assert explanation(workload_explanation("starting", "a rollout waits")) == "a rollout waits"
