"""Does the schema say what the reader says, as far as one value at a time can?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from ruamel.yaml import YAML

from remit.model import objects
from remit.model.schema import SUMMARIES, schema, schema_of_all

EXAMPLES = Path(__file__).parents[3] / "examples"
BAD = Path(__file__).parents[2] / "bad"

STRUCTURAL = [
    "artifact-digest", "command-is-text", "devices-in-capacity", "duration-without-unit", "duration-words", "empty-spec",
    "gigabytes", "half-a-replica", "image", "label-value", "misspelt-choice", "misspelt-field", "misspelt-kind",
    "name-is-a-number", "name-right-to-left", "name-too-long", "name-with-capitals", "name-with-dots", "name-with-newline",
    "namespace", "negative-cpu", "negative-replicas", "no-api-version", "no-command", "no-kind", "no-tenant", "number-in-env",
    "own-record", "port-range", "status-written", "too-many-replicas", "wrong-api-version", "wrong-level", "yes-is-text",
]  # fmt: skip
"""Those of tests/bad that one value gives away."""


def loaded(path: Path) -> list[Any]:
    if path.suffix == ".json":
        value = json.loads(path.read_bytes())
        return value if isinstance(value, list) else [value]
    return list(YAML(typ="safe", pure=True).load_all(path.read_text()))


@pytest.fixture(scope="module")
def any_kind() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema_of_all())


@pytest.mark.parametrize("kind", sorted(objects.KINDS))
def test_each_kind_has_a_schema_that_is_one(kind: str) -> None:
    written = schema(kind)
    jsonschema.Draft202012Validator.check_schema(written)
    root = written["$defs"][kind]
    assert root["additionalProperties"] is False
    assert {"apiVersion", "kind"} <= set(root["required"])
    json.dumps(written)


def test_each_declared_kind_has_a_line_for_people() -> None:
    assert tuple(SUMMARIES) == objects.DECLARED


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_every_example_satisfies_its_schema(path: Path, any_kind: jsonschema.Draft202012Validator) -> None:
    for document in loaded(path):
        jsonschema.Draft202012Validator(schema(document["kind"])).validate(document)
        any_kind.validate(document)


@pytest.mark.parametrize("name", STRUCTURAL)
def test_what_one_value_gives_away_does_not_satisfy_it(name: str, any_kind: jsonschema.Draft202012Validator) -> None:
    assert not all(any_kind.is_valid(document) for document in loaded(BAD / f"{name}.yaml"))


def test_defaults_are_shown_as_they_are_written() -> None:
    template = schema("Workload")["$defs"]["Template"]["properties"]
    assert template["stopGrace"]["default"] == "30s"
    assert msgspec.json.encode(schema("Workload"))
