"""Is every kind known by all its names, and what others call it told?"""

from __future__ import annotations

import click
import pytest
from click.shell_completion import ShellComplete

from remit.cli.main import remit
from remit.cli.session.kind_names import ENDPOINTS, WORDS, Meant, is_owned, kind_of, thing_meant, things_meant
from remit.model.objects import KINDS, PLURALS, TENANTED


def test_the_words_are_those_of_the_model() -> None:
    assert {word.kind for word in WORDS} == set(KINDS)
    assert {word.kind for word in WORDS if word.owned} == TENANTED
    assert {word.kind: word.many for word in WORDS} == PLURALS


def test_no_word_means_two_kinds() -> None:
    words = [name for word in WORDS for name in (word.kind.lower(), word.many, *word.short)]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(("word", "kind"), [("wl", "Workload"), ("Replicas", "Replica"), ("no", "Node"), ("ep", ENDPOINTS)])
def test_a_kind_is_known_by_many_names(word: str, kind: str) -> None:
    assert kind_of(word) == kind


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
        kind_of(word)
    assert cure in told.value.message and "\x1b" not in told.value.message


def test_objects_are_named_in_two_ways() -> None:
    assert things_meant(["wl"]) == (["Workload"], [])
    assert things_meant(["wl,rp"]) == (["Workload", "Replica"], [])
    assert things_meant(["wl", "a", "b"]) == ([], [Meant("Workload", "a"), Meant("Workload", "b")])
    assert things_meant(["wl/a", "node/b"]) == ([], [Meant("Workload", "a"), Meant("Node", "b")])
    assert thing_meant("workload/risk/web") == Meant("Workload", "web", "risk")
    assert thing_meant("generation/web/00000001") == Meant("Generation", "web/00000001")
    assert thing_meant("n7", "Node") == Meant("Node", "n7")
    assert is_owned(ENDPOINTS)


@pytest.mark.parametrize("words", [["wl,rp", "a"], ["wl", "a", "node/b"], ["node/x/y"], ["wl/"], ["wl", ""], [","]])
def test_what_names_nothing_is_refused(words: list[str]) -> None:
    with pytest.raises(click.UsageError):
        things_meant(words)


def test_the_shell_completes_kinds() -> None:
    found = ShellComplete(remit, {}, "remit", "_REMIT_COMPLETE").get_completions(["get"], "wo")
    assert [one.value for one in found] == ["workloads", "workload"]
