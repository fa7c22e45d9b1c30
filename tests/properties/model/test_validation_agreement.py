"""Property: the manifest reader and the authority's validation refuse the same objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, assume, event, given
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from remit.commitment.rulings.registry import DETAIL_CHARS_MAX
from remit.model import objects
from remit.model.claims import Apply, Code, Refused
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.json_schema import schema
from remit.model.manifests.reader import read
from remit.model.manifests.validation import to_manifest, validate
from tests.properties.authority_world import OPERATOR, populated_scope, run
from tests.properties.effort import tries
from tests.properties.manifest_strategies import manifests

BAD = Path(__file__).parents[2] / "bad"

NO_OBJECT = {
    "declared-twice.yaml",
    "second-line.ndjson",
    "no-api-version.yaml",
    "own-record.yaml",
    "status-written.yaml",
    "cpu-in-bytes.yaml",
}
"""Faults between documents, or in parts that objects do not keep: defaults, stamps, kind, units."""


def decoded(document: Any) -> AnyObject | None:
    """As sent by a client without the reader; None if the decoder refuses it."""
    try:
        return objects.decode(json.dumps(document).encode())
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None


def problems(document: Any) -> list[str]:
    return [problem.description for problem in read(json.dumps(document).encode(), "f.json").problems]


def bad_documents() -> dict[str, Any]:
    """Files of tests/bad that reach the authority: they parse and decode."""
    found = {}
    for path in sorted(BAD.iterdir()):
        if path.suffix == ".toml" or path.name in NO_OBJECT or "alias" in path.name:
            continue
        try:
            documents = list(YAML(typ="safe", pure=True).load_all(path.read_bytes().decode()))
        except (YAMLError, UnicodeDecodeError, ValueError, RecursionError):
            continue
        decoded_objects = [decoded(document) for document in documents]
        faults = [
            document for document, obj in zip(documents, decoded_objects, strict=True) if obj is not None and problems(document)
        ]
        if faults:
            found[path.name] = faults[0]
    return found


DOCUMENTS = bad_documents()


def test_many_bad_manifests_reach_authority() -> None:
    """Otherwise the test below would be vacuous."""
    assert len(DOCUMENTS) >= 28, sorted(DOCUMENTS)
    assert {"reserved-label.yaml", "priority-reserved.yaml", "gpu-in-resources.yaml", "port-named-twice.yaml"} <= set(DOCUMENTS)


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_bad_manifest_is_refused_by_authority_with_path_and_cure(name: str) -> None:
    obj = decoded(DOCUMENTS[name])
    assert obj is not None

    async def run_scenario() -> None:
        scope = await populated_scope()
        try:
            before = await scope.dump()
            (verdict,) = await scope.ask(OPERATOR, Apply(obj))
            assert isinstance(verdict, Refused) and verdict.code is (Code.RESERVED if "reserved" in name else Code.INVALID)
            reported, expected = verdict.detail.split(" | "), sorted(problems(DOCUMENTS[name]))
            if len(verdict.detail) > DETAIL_CHARS_MAX:  # details are limited: the last problem is cut, and some are omitted
                assert any(one.startswith(reported[-1].removesuffix("…")) for one in expected)
                assert len(reported) > 3 and set(reported[:-1]) <= set(expected)
            else:
                assert sorted(reported) == expected
            assert await scope.dump() == before
        finally:
            await scope.close()

    run(run_scenario())


@tries(150, 400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(manifests((*objects.DECLARED, "Policy", "Workload", "Workload", "Workload")))
def test_reader_and_authority_agree_on_decodable_documents(document: dict[str, Any]) -> None:
    obj = decoded(document)
    assume(obj is not None)
    assert obj is not None
    refused = validate(obj)
    event(f"{document['kind']} {'refused' if refused else 'accepted'}")
    manifest = to_manifest(obj)
    if not refused:
        again = read(json.dumps(manifest).encode(), "f.json")
        assert again.problems == ()
        assert again.objects == (obj,)
        jsonschema.Draft202012Validator(schema(document["kind"])).validate(manifest)
    elif manifest == document:
        assert sorted(problems(document)) == sorted(problem.description for problem in refused)
    assert validate(obj) == refused, "repeatable"


@tries(100, 200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(manifests((*objects.DECLARED, "Policy", "Workload", "Workload", "Workload")))
def test_object_refused_by_reader_is_refused_by_authority(document: dict[str, Any]) -> None:
    """Except for written-out defaults, which objects do not preserve."""
    obj = decoded(document)
    assume(obj is not None)
    assert obj is not None
    if problems(document) and not validate(obj):
        assert not problems(to_manifest(obj))
        assert to_manifest(obj) != document
