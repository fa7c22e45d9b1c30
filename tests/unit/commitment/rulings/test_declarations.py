"""Is what is declared judged at the authority's own door, whoever sends it, and is what is there already left in peace?"""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from remit.model import objects
from remit.model.claims import Apply, Code, Refused, Spawn
from remit.model.kinds import Config, DataSpec, DeviceRequest, Node, NodeHealth, NodeStatus, Region, Rollout
from remit.model.manifests.validation import validate
from remit.model.metadata import Metadata
from remit.model.resources import Amount
from tests.properties.authority_world import OPERATOR, USER, Scope, node, priority_class, story, tenant, workload


async def told(scope: Scope, thing: objects.AnyObject, code: Code = Code.INVALID) -> str:
    (verdict,) = await scope.ask(OPERATOR, Apply(thing))
    assert isinstance(verdict, Refused) and verdict.code is code, verdict
    return verdict.detail


def with_labels(labels: dict[str, str]) -> Node:
    return replace(node("n1"), metadata=Metadata(name="n1", labels=labels))


@story
async def test_the_refusal_names_the_path_the_fault_and_the_cure(scope: Scope) -> None:
    reserved = '"remit/x" is reserved: only Remit sets names that start with remit/; choose another prefix, or none'
    assert await told(scope, with_labels({"remit/x": "y"}), Code.RESERVED) == f'metadata.labels["remit/x"]: {reserved}'
    high = priority_class("vip", 1_000_000_001)
    assert (await told(scope, high, Code.RESERVED)).endswith(
        "priorities above 1000000000 are used by Remit itself; use at most 1000000000"
    )
    crowd = workload("w", replicas=1, gang=2, priority="A B")
    assert (await told(scope, crowd)).startswith("spec.gang.min: gang.min 2 is more than the 1 replicas; use at most 1")
    assert "spec.priorityClass: " in await told(scope, crowd), "and every other fault beside it"


@story
async def test_what_was_built_without_a_decoder_is_judged_by_its_types_too(scope: Scope) -> None:
    assert await told(scope, Region(metadata=Metadata(name="Bad Name"))) == (
        'metadata.name: "Bad Name" is not a DNS label; did you mean bad-name?'
    )
    assert (await told(scope, Region(metadata=Metadata(name="a\0b")))).startswith('metadata.name: "a\\x00b" is not a DNS label')
    assert (await told(scope, replace(workload("w"), spec=replace(workload("w").spec, replicas=-1)))).startswith(
        "spec.replicas: -1 is too small"
    )
    short = replace(tenant("t3"), spec=replace(tenant("t3").spec, quota=Amount({"cpu": -5})))
    assert await told(scope, short) == "spec.quota.cpu: a quantity cannot be negative; write 0 or more"


@story
async def test_a_share_and_whole_devices_of_one_kind_exclude_each_other(scope: Scope) -> None:
    both = (DeviceRequest(kind="gpu", count=1), DeviceRequest(kind="gpu", share="1m"))
    assert (await told(scope, workload("w", devices=both))).startswith("spec.template.devices: a share and whole devices")


@story
async def test_what_the_authority_writes_over_is_not_held_against_anybody(scope: Scope) -> None:
    """A client that reads, changes and sends back sends the status and the stamps as well."""
    stamped = Metadata(name="n1", uid="mine", generation=9, revision=9, deleting=True)
    await scope.must(OPERATOR, Apply(replace(node("n1"), metadata=stamped, status=NodeStatus(health=NodeHealth.LOST))))
    assert scope.row("node/n1")["metadata"]["uid"] != "mine"


@story
async def test_an_object_too_large_to_be_written_out_and_read_is_not_taken(scope: Scope) -> None:
    large = Config(metadata=Metadata(name="c", tenant="t1"), spec=DataSpec(data={f"k{n}": "x" * 60_000 for n in range(20)}))
    assert (await told(scope, large)).endswith("bytes are too many; use at most 1048576: split it into several objects")


@story
async def test_a_job_is_not_rolled_over_and_has_no_room_for_a_surge(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("j", replicas=2, type_="job")))
    assert await scope.refused(scope.actors["workloads"], Spawn("t1", "j", 1, 0, 3)) is Code.LIMIT


def test_equal_objects_earn_one_verdict_however_they_were_built() -> None:
    """The encoder writes a default that is equal and not the very same; that must not tip the scale."""
    job = workload("j", type_="job")
    again = replace(job, spec=replace(job.spec, rollout=Rollout()))
    assert job == again
    assert validate(job) == validate(again) == ()


@pytest.mark.parametrize(
    "stored",
    [
        {"kind": "Region", "metadata": {"name": "a", "labels": {"remit/x": "y"}, "finalizers": ["remit/z"]}},
        {"kind": "PriorityClass", "metadata": {"name": "a"}, "spec": {"value": 1_500_000_000}},
        {"kind": "Node", "metadata": {"name": "a"}, "spec": {"region": "r", "zone": "z", "capacity": {"gpu": "1", "mem": "1"}}},
        {
            "kind": "Workload",
            "metadata": {"name": "a"},
            "spec": {"type": "service", "template": {"command": [" "]}, "retries": 9},
        },
        {
            "kind": "Workload",
            "metadata": {"name": "a", "tenant": "t"},
            "spec": {"type": "job", "template": {"command": ["a"]}, "schedule": "now", "priorityClass": "A B"},
        },
    ],
    ids=lambda stored: stored["kind"],
)
def test_what_was_stored_before_a_rule_stays_readable(stored: dict[str, Any]) -> None:
    thing = objects.decode(json.dumps(stored).encode())
    assert validate(thing), "nobody could declare it today"
    assert objects.decode(objects.encode(thing)) == thing


def test_no_row_was_ever_written_with_the_empty_list_that_the_decoder_refuses() -> None:
    policy = {"kind": "Policy", "metadata": {"name": "p"}, "spec": {"rules": [{"allow": {"zones": ["a"]}}]}}
    thing = objects.decode(json.dumps(policy).encode())
    assert b"regions" not in objects.encode(thing)
    policy["spec"] = {"rules": [{"allow": {"zones": ["a"], "regions": []}}]}
    with pytest.raises(ValueError, match="regions"):
        objects.decode(json.dumps(policy).encode())
