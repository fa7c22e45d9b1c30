"""Do the reader of manifests and the authority's door refuse the same objects? One set of rules, seen from both sides."""

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
from remit.model.manifests.json_schema import schema
from remit.model.manifests.reader import read
from remit.model.manifests.validation import to_manifest, validate
from tests.properties.authority_world import OPERATOR, furnished, run
from tests.properties.effort import tries
from tests.properties.manifest_strategies import manifests

BAD = Path(__file__).parents[1] / "bad"

NO_OBJECT = {
    "declared-twice.yaml",
    "second-line.ndjson",
    "no-api-version.yaml",
    "own-record.yaml",
    "status-written.yaml",
    "cpu-in-bytes.yaml",
}
"""Files whose fault is between documents, or in what an object does not keep: a default, a stamp, its kind, a unit."""


def decoded(document: Any) -> objects.AnyObject | None:
    """As a client without the reader sends it; None if the decoder refuses it already."""
    try:
        return objects.decode(json.dumps(document).encode())
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None


def problems(document: Any) -> list[str]:
    return [problem.description for problem in read(json.dumps(document).encode(), "f.json").problems]


def bad_documents() -> dict[str, Any]:
    """Those of tests/bad that come as far as the door: they are data, and they decode."""
    found = {}
    for path in sorted(BAD.iterdir()):
        if path.suffix == ".toml" or path.name in NO_OBJECT or "alias" in path.name:
            continue
        try:
            documents = list(YAML(typ="safe", pure=True).load_all(path.read_bytes().decode()))
        except (YAMLError, UnicodeDecodeError, ValueError, RecursionError):
            continue
        things = [decoded(document) for document in documents]
        faults = [
            document for document, thing in zip(documents, things, strict=True) if thing is not None and problems(document)
        ]
        if faults:
            found[path.name] = faults[0]
    return found


DOCUMENTS = bad_documents()


def test_many_bad_files_come_as_far_as_the_door() -> None:
    """Else the test below would ask nothing."""
    assert len(DOCUMENTS) >= 28, sorted(DOCUMENTS)
    assert {"reserved-label.yaml", "priority-reserved.yaml", "gpu-in-resources.yaml", "port-named-twice.yaml"} <= set(DOCUMENTS)


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_a_bad_file_is_refused_at_the_door_by_path_and_cure(name: str) -> None:
    thing = decoded(DOCUMENTS[name])
    assert thing is not None

    async def tell() -> None:
        scope = await furnished()
        try:
            before = await scope.dump()
            (verdict,) = await scope.ask(OPERATOR, Apply(thing))
            assert isinstance(verdict, Refused) and verdict.code is (Code.RESERVED if "reserved" in name else Code.INVALID)
            said, expected = verdict.detail.split(" | "), sorted(problems(DOCUMENTS[name]))
            if (
                len(verdict.detail) > DETAIL_CHARS_MAX
            ):  # a refusal is no page: the last that is said is cut, and some are not said
                assert any(one.startswith(said[-1].removesuffix("…")) for one in expected)
                assert len(said) > 3 and set(said[:-1]) <= set(expected)
            else:
                assert sorted(said) == expected
            assert await scope.dump() == before
        finally:
            await scope.close()

    run(tell())


@tries(150, 400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(manifests((*objects.DECLARED, "Policy", "Workload", "Workload", "Workload")))
def test_the_door_and_the_reader_agree_on_whatever_decodes(document: dict[str, Any]) -> None:
    thing = decoded(document)
    assume(thing is not None)
    assert thing is not None
    refused = validate(thing)
    event(f"{document['kind']} {'refused' if refused else 'accepted'}")
    manifest = to_manifest(thing)
    if not refused:
        again = read(json.dumps(manifest).encode(), "f.json")
        assert again.problems == ()
        assert again.objects == (thing,)
        jsonschema.Draft202012Validator(schema(document["kind"])).validate(manifest)
    elif manifest == document:
        assert sorted(problems(document)) == sorted(problem.description for problem in refused)
    assert validate(thing) == refused, "and says it again"


@tries(100, 200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(manifests((*objects.DECLARED, "Policy", "Workload", "Workload", "Workload")))
def test_what_the_reader_refuses_the_door_refuses(document: dict[str, Any]) -> None:
    """Unless all that is wrong is a default that was written out: an object does not remember that."""
    thing = decoded(document)
    assume(thing is not None)
    assert thing is not None
    if problems(document) and not validate(thing):
        assert not problems(to_manifest(thing))
        assert to_manifest(thing) != document
