"""Is every kind known by all its names, and what others call it told?"""

from __future__ import annotations

import click
import pytest
from click.shell_completion import ShellComplete

from remit.cli.main import remit
from remit.cli.session.kind_names import (
    ENDPOINTS,
    KIND_NAMES,
    ObjectRef,
    is_tenant_scoped,
    parse_kind,
    parse_object_ref,
    parse_object_refs,
)
from remit.model.objects import KINDS, PLURALS, TENANTED


def test_the_words_are_those_of_the_model() -> None:
    assert {word.kind for word in KIND_NAMES} == set(KINDS)
    assert {word.kind for word in KIND_NAMES if word.owned} == TENANTED
    assert {word.kind: word.many for word in KIND_NAMES} == PLURALS


def test_no_word_means_two_kinds() -> None:
    words = [name for word in KIND_NAMES for name in (word.kind.lower(), word.many, *word.short)]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(("word", "kind"), [("wl", "Workload"), ("Replicas", "Replica"), ("no", "Node"), ("ep", ENDPOINTS)])
def test_a_kind_is_known_by_many_names(word: str, kind: str) -> None:
    assert parse_kind(word) == kind


@pytest.mark.parametrize(
    ("word", "cure"),
    [
        ("pods", "here they are replicas"),
        ("ns", "here they are tenants"),
        ("workloda", "did you mean workload"),
        ("\x1b[1m", "remit schema"),
    ],
)
def test_what_is_no_kind_is_answered_with_what_was_meant(word: str, cure: str) -> None:
    with pytest.raises(click.UsageError) as told:
        parse_kind(word)
    assert cure in told.value.message and "\x1b" not in told.value.message


def test_objects_are_named_in_two_ways() -> None:
    assert parse_object_refs(["wl"]) == (["Workload"], [])
    assert parse_object_refs(["wl,rp"]) == (["Workload", "Replica"], [])
    assert parse_object_refs(["wl", "a", "b"]) == ([], [ObjectRef("Workload", "a"), ObjectRef("Workload", "b")])
    assert parse_object_refs(["wl/a", "node/b"]) == ([], [ObjectRef("Workload", "a"), ObjectRef("Node", "b")])
    assert parse_object_ref("workload/risk/web") == ObjectRef("Workload", "web", "risk")
    assert parse_object_ref("generation/web/00000001") == ObjectRef("Generation", "web/00000001")
    assert parse_object_ref("n7", "Node") == ObjectRef("Node", "n7")
    assert is_tenant_scoped(ENDPOINTS)


@pytest.mark.parametrize("words", [["wl,rp", "a"], ["wl", "a", "node/b"], ["node/x/y"], ["wl/"], ["wl", ""], [","]])
def test_what_names_nothing_is_refused(words: list[str]) -> None:
    with pytest.raises(click.UsageError):
        parse_object_refs(words)


def test_the_shell_completes_kinds() -> None:
    found = ShellComplete(remit, {}, "remit", "_REMIT_COMPLETE").get_completions(["get"], "wo")
    assert [one.value for one in found] == ["workloads", "workload"]
