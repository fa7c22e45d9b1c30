"""Tests of kind names, `KIND/NAME` parsing and completion of kinds."""

from __future__ import annotations

import click
import pytest
from click.shell_completion import ShellComplete

from remit.cli.main import remit
from remit.cli.session.kind_names import (
    ENDPOINTS,
    ObjectRef,
    is_tenant_scoped,
    parse_kind,
    parse_object_ref,
    parse_object_refs,
)
from remit.model.kinds.registry import DEFINITIONS


def test_every_name_and_alias_is_unique() -> None:
    words = [name for kind in DEFINITIONS for name in (kind.prefix, kind.plural, *kind.aliases, *kind.foreign_names)]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(("word", "kind"), [("wl", "Workload"), ("Replicas", "Replica"), ("no", "Node"), ("ep", ENDPOINTS)])
def test_plural_alias_and_mixed_case_resolve_to_the_kind(word: str, kind: str) -> None:
    assert parse_kind(word) == kind


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("pods", "the corresponding kind is replicas"),
        ("ns", "the corresponding kind is tenants"),
        ("workloda", "did you mean workload"),
        ("\x1b[1m", "remit schema"),
    ],
)
def test_unknown_kind_is_refused_with_a_suggestion(word: str, fix: str) -> None:
    with pytest.raises(click.UsageError) as error:
        parse_kind(word)
    assert fix in error.value.message and "\x1b" not in error.value.message


def test_object_references_are_parsed_in_both_notations() -> None:
    assert parse_object_refs(["wl"]) == (["Workload"], [])
    assert parse_object_refs(["wl,rp"]) == (["Workload", "Replica"], [])
    assert parse_object_refs(["wl", "a", "b"]) == ([], [ObjectRef("Workload", "a"), ObjectRef("Workload", "b")])
    assert parse_object_refs(["wl/a", "node/b"]) == ([], [ObjectRef("Workload", "a"), ObjectRef("Node", "b")])
    assert parse_object_ref("workload/risk/web") == ObjectRef("Workload", "web", "risk")
    assert parse_object_ref("generation/web/00000001") == ObjectRef("Generation", "web/00000001")
    assert parse_object_ref("n7", "Node") == ObjectRef("Node", "n7")
    assert is_tenant_scoped(ENDPOINTS)


@pytest.mark.parametrize("words", [["wl,rp", "a"], ["wl", "a", "node/b"], ["node/x/y"], ["wl/"], ["wl", ""], [","]])
def test_ambiguous_or_empty_references_are_usage_errors(words: list[str]) -> None:
    with pytest.raises(click.UsageError):
        parse_object_refs(words)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["workload", "small/hugeq"], "write workload/small/hugeq, or workload hugeq -t small"),
        (["workload", "a", "node/b"], "write workload/NAME for all objects, or NAME for all"),
        (["node", "small/n1"], "write node/NAME for all objects, or NAME for all"),
    ],
)
def test_mixed_notations_are_refused_with_a_fix(words: list[str], fix: str) -> None:
    with pytest.raises(click.UsageError) as error:
        parse_object_refs(words)
    assert error.value.message.endswith(fix)


def test_shell_completion_suggests_kinds() -> None:
    completions = ShellComplete(remit, {}, "remit", "_REMIT_COMPLETE").get_completions(["get"], "wo")
    assert [item.value for item in completions] == ["workloads", "workload"]
