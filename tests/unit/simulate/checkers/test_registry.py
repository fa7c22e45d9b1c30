"""Registry of checks: every documented property has a check or a reason, and every check has a documented property."""

from __future__ import annotations

import re
from pathlib import Path

from remit.simulate.checkers import judge, liveness_checks
from remit.simulate.checkers.judge import EVENT_CHECKS, UNCHECKED_PROPERTIES, checks_by_property

PROPERTIES = {*(f"S{n}" for n in range(1, 31)), *(f"L{n}" for n in range(1, 15))}
NAMED = re.compile(r'"([a-z]+(?:_[a-z]+)+)",\s+"([SL]\d+)"')


def test_every_property_has_check_or_reason() -> None:
    assert not sorted(PROPERTIES - checks_by_property().keys() - UNCHECKED_PROPERTIES.keys())


def test_no_checked_property_has_reason() -> None:
    assert not sorted(UNCHECKED_PROPERTIES.keys() & checks_by_property().keys())
    assert UNCHECKED_PROPERTIES.keys() <= PROPERTIES


def test_every_checked_property_is_documented() -> None:
    assert not sorted(checks_by_property().keys() - PROPERTIES)


def test_no_check_serves_two_properties() -> None:
    names = [name for checks in checks_by_property().values() for name in checks]
    assert len(names) == len(set(names))


def test_event_checks_are_registered_under_their_names() -> None:
    """Such checks are named where they are made; a violation must never carry a name that the docs do not list."""
    texts = [Path(str(page.__file__)).read_text() for page in (judge, liveness_checks)]
    named = dict(pair for text in texts for pair in NAMED.findall(text))
    assert named == EVENT_CHECKS
