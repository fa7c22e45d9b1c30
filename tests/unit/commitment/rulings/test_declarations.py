"""Validation of declared objects by the authority; stored objects stay readable."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from remit.model import objects
from remit.model.claims import Apply, Code, Refused, Spawn
from remit.model.kinds import Config, DataSpec, DeviceRequest, Node, NodeHealth, NodeStatus, Region, Rollout
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.validation import validate
from remit.model.metadata import Metadata
from remit.model.resources import Amount
from tests.properties.authority_world import OPERATOR, USER, Scope, node, priority_class, scope_test, tenant, workload


async def refusal_detail(scope: Scope, obj: AnyObject, code: Code = Code.INVALID) -> str:
    (verdict,) = await scope.ask(OPERATOR, Apply(obj))
    assert isinstance(verdict, Refused) and verdict.code is code, verdict
    return verdict.detail


def with_labels(labels: dict[str, str]) -> Node:
    return replace(node("n1"), metadata=Metadata(name="n1", labels=labels))


@scope_test
async def test_refusal_names_field_fault_and_cure(scope: Scope) -> None:
    reserved = '"remit/x" is reserved: only Remit sets names that start with remit/; choose another prefix, or none'
    assert (
        await refusal_detail(scope, with_labels({"remit/x": "y"}), Code.RESERVED) == f'metadata.labels["remit/x"]: {reserved}'
    )
    high = priority_class("vip", 1_000_000_001)
    assert (await refusal_detail(scope, high, Code.RESERVED)).endswith(
        "priorities above 1000000000 are used by Remit itself; use at most 1000000000"
    )
    crowd = workload("w", replicas=1, gang=2, priority="A B")
    assert (await refusal_detail(scope, crowd)).startswith(
        "spec.gang.min: gang.min 2 is more than the 1 replicas; use at most 1"
    )
    assert "spec.priorityClass: " in await refusal_detail(scope, crowd), "lists every other fault too"


@scope_test
async def test_object_built_without_decoder_is_validated(scope: Scope) -> None:
    assert await refusal_detail(scope, Region(metadata=Metadata(name="Bad Name"))) == (
        'metadata.name: "Bad Name" is not a DNS label; did you mean bad-name?'
    )
    assert (await refusal_detail(scope, Region(metadata=Metadata(name="a\0b")))).startswith(
        'metadata.name: "a\\x00b" is not a DNS label'
    )
    assert (await refusal_detail(scope, replace(workload("w"), spec=replace(workload("w").spec, replicas=-1)))).startswith(
        "spec.replicas: -1 is too small"
    )
    short = replace(tenant("t3"), spec=replace(tenant("t3").spec, quota=Amount({"cpu": -5})))
    assert await refusal_detail(scope, short) == "spec.quota.cpu: a quantity cannot be negative; write 0 or more"


@scope_test
async def test_share_and_whole_devices_of_one_kind_are_refused(scope: Scope) -> None:
    both = (DeviceRequest(kind="gpu", count=1), DeviceRequest(kind="gpu", share="1m"))
    assert (await refusal_detail(scope, workload("w", devices=both))).startswith(
        "spec.template.devices: a share and whole devices"
    )


@scope_test
async def test_status_and_stamps_sent_by_client_are_ignored(scope: Scope) -> None:
    """A client that reads, changes and sends back an object sends these too."""
    stamped = Metadata(name="n1", uid="mine", generation=9, revision=9, deleting=True)
    await scope.must(OPERATOR, Apply(replace(node("n1"), metadata=stamped, status=NodeStatus(health=NodeHealth.LOST))))
    assert scope.row("node/n1")["metadata"]["uid"] != "mine"


@scope_test
async def test_object_over_size_limit_is_refused(scope: Scope) -> None:
    large = Config(metadata=Metadata(name="c", tenant="t1"), spec=DataSpec(data={f"k{n}": "x" * 60_000 for n in range(20)}))
    assert (await refusal_detail(scope, large)).endswith(
        "bytes are too many; use at most 1048576: split it into several objects"
    )


@scope_test
async def test_job_has_no_surge_capacity(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("j", replicas=2, type_="job")))
    assert await scope.refused(scope.actors["workloads"], Spawn("t1", "j", 1, 0, 3)) is Code.LIMIT


def test_equal_objects_get_same_validation_however_built() -> None:
    """The encoder omits defaults by equality, not identity; validation must not differ."""
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
def test_object_stored_before_validation_rule_stays_readable(stored: dict[str, Any]) -> None:
    obj = objects.decode(json.dumps(stored).encode())
    assert validate(obj), "today it would be refused"
    assert objects.decode(objects.encode(obj)) == obj


def test_empty_allow_list_is_never_written_and_refused_when_read() -> None:
    policy = {"kind": "Policy", "metadata": {"name": "p"}, "spec": {"rules": [{"allow": {"zones": ["a"]}}]}}
    obj = objects.decode(json.dumps(policy).encode())
    assert b"regions" not in objects.encode(obj)
    policy["spec"] = {"rules": [{"allow": {"zones": ["a"], "regions": []}}]}
    with pytest.raises(ValueError, match="regions"):
        objects.decode(json.dumps(policy).encode())
