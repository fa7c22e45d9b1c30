"""Tests of JSON and YAML output."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from remit.cli.output.serialization import json_text, manifest_text, to_builtins, yaml_text
from remit.model.kinds import Node, NodeSpec, Template, Workload, WorkloadSpec, WorkloadStatus
from remit.model.manifests.documents import DocumentNode as Read
from remit.model.manifests.documents import read_documents
from remit.model.manifests.reader import read
from remit.model.metadata import Condition, Metadata, RecordMetadata
from remit.model.objects import DECLARED
from remit.model.problems import Problems
from remit.model.records import Phase, Replica, ReplicaSpec, ReplicaStatus
from remit.model.resources import Amount
from remit.model.secrets import Config, DataSpec, Secret, SecretSpec
from tests.properties.manifest_strategies import manifests

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.text(" \t\n#:-{}[]&*!|>'\"%@`,?=ax01", max_size=12),
    st.sampled_from(
        ["yes", "No", "null", "~", "1", "0x1f", "1e3", ".inf", "2026-01-01", "a: b", "a\nb\n", "a\n\n b", "- a", "on"]
    ),
)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-(1 << 53), 1 << 53), st.booleans()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def value_of(node: Read) -> Any:
    if node.type == "mapping":
        return {key: value_of(entry.value) for key, entry in node.fields.items()}
    return [value_of(item) for item in node.items] if node.type == "list" else node.scalar


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
def test_yaml_round_trip_preserves_every_value(value: dict[str, Any]) -> None:
    problems = Problems("x.yaml")
    text = yaml_text(value)
    if "\0" in text or "\\x00" in text:
        return  # the reader refuses NUL in every notation
    documents = read_documents(text.encode(), "x.yaml", problems)
    assert not problems.sorted_problems(), (text, problems.sorted_problems())
    assert [value_of(document) for document in documents] == [value]


@given(manifests(tuple(kind for kind in DECLARED if kind != "Secret")))
def test_manifest_yaml_can_be_applied_again_unchanged(value: dict[str, Any]) -> None:
    first = read(json_text(value).encode(), "x.json")
    if first.problems:
        return
    again = read(manifest_text(first.objects[0]).encode(), "x.yaml")
    assert not again.problems, (manifest_text(first.objects[0]), again.problems)
    assert again.objects == first.objects


def workload() -> Workload:
    return Workload(
        metadata=Metadata(name="web", tenant="risk", uid="u1", generation=3, revision=12),
        spec=WorkloadSpec(type="service", template=Template(command=("true",)), replicas=2),
        status=WorkloadStatus((Condition(type="Available", status="True"),)),
    )


def test_reported_fields_are_comments_in_manifest_yaml() -> None:
    text = manifest_text(workload())
    assert "# status:\n#   conditions:\n#     - type: Available\n" in text.replace("#   - ", "#     - ").replace(
        "#     type", "#     - type"
    )
    assert "\nstatus:" not in text and "\n  uid:" not in text and "# revision: 12\n" in text
    obj = read(text.encode(), "web.yaml")
    assert not obj.problems
    declared = replace(workload(), metadata=Metadata(name="web", tenant="risk"), status=WorkloadStatus())
    assert obj.objects == (declared,)


def test_default_phase_and_health_are_included() -> None:
    """As in the API: the health of a node and the phase of a replica."""
    pending = Replica(metadata=RecordMetadata(name="a-0", tenant="t", uid="u"), spec=ReplicaSpec(workload="a", generation=1))
    assert to_builtins(pending)["status"] == {"phase": "pending"}
    running = to_builtins(replace(pending, status=ReplicaStatus(phase=Phase.RUNNING, node="n1")))
    assert running["status"] == {"phase": "running", "node": "n1"}
    size = NodeSpec(region="r", zone="r-a", capacity=Amount.parse({"cpu": "1", "memory": "1Gi"}))
    assert to_builtins(Node(metadata=Metadata(name="n1"), spec=size))["status"] == {"health": "joining"}
    assert not to_builtins(replace(workload(), status=WorkloadStatus())).get("status"), "a workload has no phase"


def test_secret_yaml_has_null_values_that_apply_refuses() -> None:
    text = manifest_text(Secret(metadata=Metadata(name="key", tenant="risk"), spec=SecretSpec(data={"password": ""})))
    assert "password: null" in text
    assert "is empty" in read(text.encode(), "key.yaml").problems[0].message


def test_multiline_text_is_a_block_scalar() -> None:
    obj = Config(metadata=Metadata(name="c", tenant="t"), spec=DataSpec(data={"a.conf": "one\n  two\n\nthree\n"}))
    assert "    a.conf: |\n      one\n        two\n\n      three\n" in manifest_text(obj)


def test_records_are_printed_with_status() -> None:
    obj = Replica(
        metadata=RecordMetadata(name="web-0", tenant="risk", revision=9),
        spec=ReplicaSpec(workload="web", generation=1),
        status=ReplicaStatus(phase=Phase.SERVING, node="n1"),
    )
    text = manifest_text(obj)
    assert text.startswith("apiVersion: remit/v1\nkind: Replica\nmetadata:\n") and "\nstatus:\n  phase: serving\n" in text
    assert to_builtins(obj)["metadata"] == {"name": "web-0", "tenant": "risk", "revision": 9}
