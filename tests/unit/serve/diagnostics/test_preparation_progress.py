"""Is what a workload may not ask for refused over HTTP, and what its node says of it told where it is explained?"""

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
from tests.unit.proposal.explain.test_pending import CASES
from tests.unit.serve.in_memory_server import Api, api, story, tenant, workload

__all__ = ["api"]
DIGEST = "0" * 64
PATH = "/v1/tenants/acme/workloads"


def asking(**template: Any) -> dict[str, Any]:
    made = workload("asks")
    made["spec"]["template"].update(template)
    return made


@story
async def test_a_source_of_the_nodes_own_network_is_answered_with_422(api: Api) -> None:
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
        answer = await api.ask("POST", PATH, asking(artifacts=[{"source": source, "sha256": DIGEST}]))
        assert answer.status == 422
        told = answer.json
        assert told["field"] == "spec.template.artifacts[0].source"
        assert "artifacts may not be fetched from this host" in told["detail"]
        assert told["cure"] == "use a public host, or let a policy permit it in permit.artifactHosts"
    answer = await api.ask("GET", f"{PATH}/asks")
    assert answer.status == 404
    api.desk.audit.flush_counts(all_=True)
    items = (await api.must("GET", "/v1/audit?limit=1000"))["items"]
    assert sum(item.get("count", 1) for item in items if item.get("status") == 422 or item.get("code") == "invalid") >= 1, items


@story
async def test_a_path_of_the_nodes_that_no_policy_permits_is_answered_with_422(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    asks = asking(volumes=[{"name": "v", "path": "v", "host": {"path": "/etc"}}])
    answer = await api.ask("POST", PATH, asks)
    assert (answer.status, answer.json["field"]) == (422, "spec.template.volumes[0].host.path")
    policy = {
        "apiVersion": "remit/v1",
        "kind": "Policy",
        "metadata": {"name": "lent"},
        "spec": {"rules": [{"match": {"tenants": ["acme"]}, "permit": {"hostPaths": ["/etc"]}}]},
    }
    await api.must("POST", "/v1/policies", policy)
    await api.must("POST", PATH, asks)


# -- what nodes say meanwhile ------------------------------------------------------------------------------------------------


class Told:
    """An authority that has heard this of its nodes."""

    def __init__(self, *runs: RunState) -> None:
        self.runs = runs

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return [NodeState("n1", runs=self.runs)]


def replica_told(phase: str) -> ReplicaExplanation:
    cluster = next(iter(CASES.values()))[2]()
    row = cluster.things["replica/t1/w-0"]
    assert isinstance(row, Replica)
    told = explain_replica(cluster.view(), row, 1, RecordedHistory(), RULES)
    return replace(told, tenant="t", name="w-0", phase=phase, node="n1", attempt=2)


def workload_told(limit: str, detail: str = "") -> WorkloadExplanation:
    cluster = next(iter(CASES.values()))[2]()
    return replace(
        explain_workload(cluster.view(), None, "t1", "w", RecordedHistory(), RULES), tenant="t", limit=limit, detail=detail
    )


FETCHES = RunState("replica/t/w-0", "u", 2, said="fetching 12 of 80 MiB of https://x")


@pytest.mark.parametrize(
    ("phase", "run", "said"),
    [
        ("starting", FETCHES, FETCHES.said),
        ("running", replace(FETCHES, pid=7, said="its ready probe failed"), "its ready probe failed"),
        ("serving", FETCHES, ""),
        ("starting", replace(FETCHES, attempt=1), ""),
        ("starting", replace(FETCHES, replica="replica/u/w-0"), ""),
    ],
)
def test_a_replica_on_its_way_is_told_with_what_its_node_says(phase: str, run: RunState, said: str) -> None:
    told = asyncio.run(add_startup_progress(replica_told(phase), Told(run)))  # type: ignore[arg-type]
    assert told.said == said


def test_a_workload_that_is_held_up_by_a_fetch_says_so() -> None:
    other = replace(FETCHES, replica="replica/t/w-1", said="waits for the same file, which another replica fetches")
    stranger = replace(FETCHES, replica="replica/t/w-two-0")

    def told(found: WorkloadExplanation) -> str:
        return asyncio.run(add_workload_startup_progress(found, Told(other, FETCHES, stranger))).detail  # type: ignore[arg-type]

    assert told(workload_told("starting")) == "w-0 is fetching 12 of 80 MiB of https://x (and 1 more)"
    assert told(workload_told("no_room")) == ""
    assert told(workload_told("starting", "a rollout waits")) == "a rollout waits"
