"""Cache of decoded rows: entries equal what decoding gives, and their number is bounded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from msgspec.structs import replace

from remit.commitment.batch import _is_surely_decodable
from remit.model import objects
from remit.model.claims import Apply
from remit.model.kinds import Workload, WorkloadStatus
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.validation import validate
from remit.model.metadata import RecordMetadata
from remit.model.objects import cache_decoded, decode, decode_cached, encode
from remit.model.records import Generation, GenerationSpec, Phase, Replica, ReplicaSpec, ReplicaStatus
from tests.properties.authority_world import USER, Scope, scope_test, workload
from tests.properties.manifest_strategies import manifests


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, AnyObject]:
    known: dict[bytes, AnyObject] = {}
    monkeypatch.setattr(objects, "_decoded", known)
    return known


def generation_of(workload: Workload, number: int) -> Generation:
    meta = workload.metadata
    spec = GenerationSpec(workload=meta.name, generation=number, labels=dict(meta.labels), spec=workload.spec)
    return Generation(metadata=RecordMetadata(name=f"{meta.name}/{number:08d}", tenant=meta.tenant, uid="u"), spec=spec)


def check_round_trip(obj: AnyObject) -> None:
    row = encode(obj)
    assert decode(row) == obj and encode(decode(row)) == row


TEMPLATES = st.fixed_dictionaries(
    {"command": st.just(["run"])},
    optional={
        "resources": st.fixed_dictionaries(
            {"cpu": st.sampled_from(["1", "1000m", "250m", 2])}, optional={"memory": st.sampled_from(["1Gi", "1024Mi", "1G"])}
        ),
        "env": st.dictionaries(st.sampled_from(["A", "B"]), st.sampled_from(["", "x", "\u00e4"])),
        "stopGrace": st.sampled_from(["30s", "1m30s", "90s"]),
        "ports": st.sampled_from([[], [{"name": "http"}]]),
    },
)
SPECS = st.fixed_dictionaries(
    {"type": st.sampled_from(["job", "service"]), "template": TEMPLATES},
    optional={
        "replicas": st.integers(0, 9),
        "priorityClass": st.just("high"),
        "replace": st.sampled_from(["fenced", "eager"]),
        "fence": st.sampled_from(["5m", "300s"]),
        "placement": st.sampled_from([{}, {"topologySpread": [{"topologyKey": "node"}]}]),
    },
)
PLAIN = st.builds(
    lambda labels, spec: {
        "apiVersion": "remit/v1",
        "kind": "Workload",
        "metadata": {"name": "w", "tenant": "t1", **labels},
        "spec": spec,
    },
    st.sampled_from([{}, {"labels": {}}, {"labels": {"b": "1", "a": ""}}, {"annotations": {"a": "b"}}]),
    SPECS,
)


@given(PLAIN | manifests(("Workload",)), st.integers(1, 99))
def test_surely_decodable_workload_and_generation_round_trip(manifest: Any, number: int) -> None:
    try:
        obj = decode(msgspec.json.encode(manifest))
    except (msgspec.MsgspecError, ValueError):
        return
    assert isinstance(obj, Workload)
    problems = validate(obj)
    plain = not problems and not obj.metadata.annotations
    stamped = replace(obj, status=WorkloadStatus(), metadata=replace(obj.metadata, uid="u", generation=number, created="now"))
    for one in (stamped, generation_of(stamped, number)):
        sure = _is_surely_decodable(one)
        if sure:
            check_round_trip(one)
        event(f"{type(one).__name__}: {sure}, plain: {plain}")


@given(st.sampled_from(Phase), st.integers(1, 9), st.integers(0, 9), st.sampled_from(["", "n1"]), st.integers(-5, 5))
def test_replica_without_free_text_is_surely_decodable(
    phase: Phase, attempt: int, failures: int, on: str, priority: int
) -> None:
    status = ReplicaStatus(phase=phase, attempt=attempt, failures=failures, node=on, grants=("tenant/t1",) if on else ())
    spec = ReplicaSpec(workload="w", generation=1, index=failures, priority=priority)
    one = Replica(metadata=RecordMetadata(name="w-0", tenant="t1", uid="u"), spec=spec, status=status)
    assert _is_surely_decodable(one)
    check_round_trip(one)
    assert not _is_surely_decodable(replace(one, status=replace(status, reason="words")))


@scope_test
async def test_authority_caches_rows_as_they_decode(scope: Scope) -> None:
    with pytest.MonkeyPatch.context() as patch:
        known: dict[bytes, AnyObject] = {}
        patch.setattr(objects, "_decoded", known)
        await scope.must(USER, Apply(workload("w", replicas=2), fill=True))
        kinds = [type(obj).__name__ for obj in known.values()]
        assert {name: kinds.count(name) for name in kinds} == {"Workload": 1, "Generation": 1, "Replica": 2}
        for row, obj in known.items():
            assert decode(row) == obj
            assert decode_cached(row) is obj


def test_equal_bytes_share_object_unless_too_long(empty_cache: dict[bytes, AnyObject]) -> None:
    row = encode(workload("w"))
    assert decode_cached(row) is decode_cached(row) and len(empty_cache) == 1
    long = workload("w", labels={f"l{n}": "x" * 60 for n in range(64)})
    row = encode(replace(long, metadata=replace(long.metadata, annotations={"a": "x" * objects.DECODED_BYTES_MAX})))
    assert decode_cached(row) == decode_cached(row) and len(empty_cache) == 1


def test_oldest_entries_are_dropped_over_limit(empty_cache: dict[bytes, AnyObject], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "DECODED_MAX", 64)
    made = workload("w")
    rows = [b"%d" % number for number in range(1_000)]
    for row in rows:
        cache_decoded(row, made)
        assert len(empty_cache) <= 64 and row in empty_cache
    assert list(empty_cache) == rows[-len(empty_cache) :] and len(empty_cache) >= 56
    with pytest.raises(msgspec.DecodeError):
        decode_cached(b"not a row")
    assert b"not a row" not in empty_cache


def test_encoded_spec_is_cached_unless_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: dict[int, tuple[object, bytes]] = {}
    monkeypatch.setattr(objects, "_encoded_specs", cache)
    small = workload("small").spec
    large = replace(small, template=replace(small.template, command=("x" * objects.SPEC_BYTES_MAX,)))
    for _ in range(2):
        assert objects.encode_spec(small) == encode(small) and objects.encode_spec(large) == encode(large)
    assert [spec for spec, _ in cache.values()] == [small]
