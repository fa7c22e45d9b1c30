"""Is every promise judged, or is it said why not? The register against the page of promises, and against the checkers' text."""

from __future__ import annotations

import re
from pathlib import Path

from remit.simulate.checkers import judge, liveness_checks
from remit.simulate.checkers.judge import EVENT_CHECKS, UNCHECKED_PROPERTIES, checks_by_property

PROMISED = {*(f"S{n}" for n in range(1, 31)), *(f"L{n}" for n in range(1, 15))}
NAMED = re.compile(r'"([a-z]+(?:_[a-z]+)+)",\s+"([SL]\d+)"')


def test_every_promise_is_judged_or_has_a_reason() -> None:
    assert not sorted(PROMISED - checks_by_property().keys() - UNCHECKED_PROPERTIES.keys())


def test_no_reason_stands_for_a_promise_that_is_judged() -> None:
    assert not sorted(UNCHECKED_PROPERTIES.keys() & checks_by_property().keys())
    assert UNCHECKED_PROPERTIES.keys() <= PROMISED


def test_nothing_is_judged_that_was_not_promised() -> None:
    assert not sorted(checks_by_property().keys() - PROMISED)


def test_no_check_has_two_promises() -> None:
    names = [name for checks in checks_by_property().values() for name in checks]
    assert len(names) == len(set(names))


def test_what_the_judge_asks_by_itself_is_registered_as_it_is_named_there() -> None:
    """Such checks are named where they are made; a violation must never carry a name that the page does not know."""
    texts = [Path(str(page.__file__)).read_text() for page in (judge, liveness_checks)]
    named = dict(pair for text in texts for pair in NAMED.findall(text))
    assert named == EVENT_CHECKS
