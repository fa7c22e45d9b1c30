"""JSON Schema agrees with the reader, as far as single values are concerned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from remit.model import objects
from remit.model.kinds.registry import BY_KIND
from remit.model.manifests.json_schema import schema, schema_of_all

EXAMPLES = Path(__file__).parents[4] / "examples"
BAD = Path(__file__).parents[3] / "bad"

BETWEEN_VALUES = {
    "available-too-many", "daemon-with-replicas", "declared-twice", "device-asks-nothing", "device-count-and-share",
    "device-named-twice", "exists-with-value", "gang-over-regions", "gang-too-large", "in-without-values",
    "override-nowhere", "pool-min-over-max", "port-named-twice", "port-not-declared", "probe-port", "probe-two-ways",
    "rollout-stuck", "policy-without-effect", "service-with-retries", "share-and-whole", "spread-twice", "standby-at-home",
}  # fmt: skip
"""Files of tests/bad without any wrong single value."""
BEYOND_PATTERNS = {"token-never-ends", "fine-cpu", "infinite-number", "memory-overflow", "override-for-ever", "schedule-never"}
"""A single value is wrong, but only by calculation."""
GONE_WHEN_LOADED = {"duplicate-key", "empty", "merge-key", "yaml-1.1"}
"""Only the text is wrong; another parser accepts it."""


def loaded(path: Path) -> list[Any]:
    if path.suffix == ".json":
        value = json.loads(path.read_bytes())
        return value if isinstance(value, list) else [value]
    return list(YAML(typ="safe", pure=True).load_all(path.read_text()))


@pytest.fixture(scope="module")
def any_kind() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema_of_all())


@pytest.mark.parametrize("kind", sorted(objects.KINDS))
def test_schema_of_each_kind_is_valid(kind: str) -> None:
    written = schema(kind)
    jsonschema.Draft202012Validator.check_schema(written)
    root = written["$defs"][kind]
    assert root["additionalProperties"] is False
    assert {"apiVersion", "kind"} <= set(root["required"])
    json.dumps(written)


def test_each_declared_kind_has_summary() -> None:
    assert all(BY_KIND[kind].summary for kind in objects.DECLARED)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.name)
def test_every_example_satisfies_its_schema(path: Path, any_kind: jsonschema.Draft202012Validator) -> None:
    for document in loaded(path):
        for validator in (jsonschema.Draft202012Validator(schema(document["kind"])), any_kind):
            assert list(validator.iter_errors(document)) == []


@pytest.mark.parametrize("path", sorted(BAD.glob("*.[yj][as]*")), ids=lambda path: path.name)
def test_bad_manifest_with_wrong_value_fails_schema(path: Path, any_kind: jsonschema.Draft202012Validator) -> None:
    if "alias" in path.name:
        return  # expanding the aliases would take for ever
    try:
        documents = loaded(path)
    except (YAMLError, ValueError, RecursionError):
        return  # not even data
    satisfied = all(any_kind.is_valid(document) for document in documents)
    assert satisfied == (path.stem in BETWEEN_VALUES | BEYOND_PATTERNS | GONE_WHEN_LOADED)


def test_schema_defaults_use_manifest_syntax() -> None:
    template = schema("Workload")["$defs"]["Template"]["properties"]
    assert template["stopGrace"]["default"] == "30s"
    assert msgspec.json.encode(schema("Workload"))
