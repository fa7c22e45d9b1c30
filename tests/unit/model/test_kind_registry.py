"""Tests that the registry of kinds is consistent: every table of kinds is derived from it."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from remit.model.kinds.definition import KindDefinition
from remit.model.kinds.registry import DEFINITIONS, AnyObject
from remit.model.manifests.reader import read
from remit.model.metadata import Metadata
from remit.observation.reflector import ALL_RANGES

DECLARED = [definition for definition in DEFINITIONS if definition.is_declared]
OTHER_KEYS = ("batch", "head", "incarnation")
"""First parts of keys that are not objects."""


def kind_of(definition: KindDefinition) -> str:
    return definition.kind


def test_every_kind_has_one_definition() -> None:
    structs = [definition.struct for definition in DEFINITIONS]
    assert len(structs) == len(set(structs)) and set(structs) == set(get_args(AnyObject))
    assert all(definition.struct.__name__ == definition.kind for definition in DEFINITIONS)


def test_prefixes_plurals_and_names_are_unique() -> None:
    prefixes = [*(definition.prefix for definition in DEFINITIONS), *OTHER_KEYS]
    assert len(prefixes) == len(set(prefixes))
    plurals = [definition.plural for definition in DEFINITIONS]
    assert len(plurals) == len(set(plurals))


@pytest.mark.parametrize("definition", DECLARED, ids=kind_of)
def test_declared_kind_has_a_summary__a_valid_sample_and_a_status_with_conditions(definition: KindDefinition) -> None:
    assert definition.summary and definition.columns
    manifests = read(json.dumps(definition.example).encode(), "sample.json")
    assert not manifests.problems
    (obj,) = manifests.objects
    assert isinstance(obj.metadata, Metadata) and bool(obj.metadata.tenant) is definition.tenanted
    assert getattr(definition.initial_status, "conditions", None) == ()


def test_kind_comes_after_the_kinds_it_refers_to() -> None:
    order = [definition.kind for definition in DEFINITIONS]
    for definition in DEFINITIONS:
        for reference in definition.references:
            assert order.index(reference.kind) < order.index(definition.kind)


def test_every_kind_is_in_a_listed_range__and_batches_in_none() -> None:
    for definition in DEFINITIONS:
        key = f"{definition.prefix}/name"
        assert sum(key.startswith(range_.prefix) and key > range_.after for range_ in ALL_RANGES) == 1, key
    batch = "batch/0000000000000001"
    assert not any(batch.startswith(range_.prefix) and batch > range_.after for range_ in ALL_RANGES)
