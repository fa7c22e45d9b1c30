"""Is what is written for editors read back as the same, and is what Remit reports left out of what is declared?"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from remit.cli.output.serialization import json_text, manifest_text, to_builtins, yaml_text
from remit.model.kinds import (
    Config,
    DataSpec,
    Node,
    NodeSpec,
    Secret,
    SecretSpec,
    Template,
    Workload,
    WorkloadSpec,
    WorkloadStatus,
)
from remit.model.manifests.documents import DocumentNode as Read
from remit.model.manifests.documents import read_documents
from remit.model.manifests.reader import read
from remit.model.metadata import Condition, Metadata, RecordMetadata
from remit.model.objects import DECLARED
from remit.model.problems import Problems
from remit.model.records import Phase, Replica, ReplicaSpec, ReplicaStatus
from remit.model.resources import Amount
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
def test_whatever_is_written_is_read_back_the_same(value: dict[str, Any]) -> None:
    problems = Problems("x.yaml")
    text = yaml_text(value)
    if "\0" in text or "\\x00" in text:
        return  # the reader refuses it, in whatever spelling
    documents = read_documents(text.encode(), "x.yaml", problems)
    assert not problems.sorted_problems(), (text, problems.sorted_problems())
    assert [value_of(one) for one in documents] == [value]


@given(manifests(tuple(kind for kind in DECLARED if kind != "Secret")))
def test_what_could_be_applied_can_be_applied_again_from_its_yaml(value: dict[str, Any]) -> None:
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


def test_what_remit_reports_is_told_in_comments_and_not_declared() -> None:
    text = manifest_text(workload())
    assert "# status:\n#   conditions:\n#     - type: Available\n" in text.replace("#   - ", "#     - ").replace(
        "#     type", "#     - type"
    )
    assert "\nstatus:" not in text and "\n  uid:" not in text and "# revision: 12\n" in text
    made = read(text.encode(), "web.yaml")
    assert not made.problems
    bare = replace(workload(), metadata=Metadata(name="web", tenant="risk"), status=WorkloadStatus())
    assert made.objects == (bare,)


def test_where_something_stands_is_said_also_where_it_is_the_default() -> None:
    """The health of a node, and the phase of a replica, as over HTTP."""
    waits = Replica(metadata=RecordMetadata(name="a-0", tenant="t", uid="u"), spec=ReplicaSpec(workload="a", generation=1))
    assert to_builtins(waits)["status"] == {"phase": "pending"}
    runs = to_builtins(replace(waits, status=ReplicaStatus(phase=Phase.RUNNING, node="n1")))
    assert runs["status"] == {"phase": "running", "node": "n1"}
    size = NodeSpec(region="r", zone="r-a", capacity=Amount.parse({"cpu": "1", "memory": "1Gi"}))
    assert to_builtins(Node(metadata=Metadata(name="n1"), spec=size))["status"] == {"health": "joining"}
    assert not to_builtins(replace(workload(), status=WorkloadStatus())).get("status"), "a workload stands nowhere"


def test_a_secret_that_is_not_shown_cannot_be_applied_as_an_empty_one() -> None:
    text = manifest_text(Secret(metadata=Metadata(name="key", tenant="risk"), spec=SecretSpec(data={"password": ""})))
    assert "password: null" in text
    assert "is empty" in read(text.encode(), "key.yaml").problems[0].message


def test_text_in_lines_stays_in_lines() -> None:
    made = Config(metadata=Metadata(name="c", tenant="t"), spec=DataSpec(data={"a.conf": "one\n  two\n\nthree\n"}))
    assert "    a.conf: |\n      one\n        two\n\n      three\n" in manifest_text(made)


def test_a_record_of_remits_own_is_told_whole() -> None:
    made = Replica(
        metadata=RecordMetadata(name="web-0", tenant="risk", revision=9),
        spec=ReplicaSpec(workload="web", generation=1),
        status=ReplicaStatus(phase=Phase.SERVING, node="n1"),
    )
    text = manifest_text(made)
    assert text.startswith("apiVersion: remit/v1\nkind: Replica\nmetadata:\n") and "\nstatus:\n  phase: serving\n" in text
    assert to_builtins(made)["metadata"] == {"name": "web-0", "tenant": "risk", "revision": 9}
