"""Operators of node expressions and label selectors at their edge cases."""

from __future__ import annotations

from typing import Any

import pytest

from remit.law.selectors import admits, match_columns, selects
from remit.model.kinds import NodeExpression


@pytest.mark.parametrize(
    ("operator", "values", "value", "admitted"),
    [
        ("In", ("a", "b"), "a", True),
        ("In", ("a", "b"), None, False),
        ("In", (), "a", False),
        ("In", ("",), "", True),
        ("In", ("",), None, False),
        ("NotIn", ("a",), "a", False),
        ("NotIn", ("a",), None, True),
        ("NotIn", (), "a", True),
        ("Exists", (), "", True),
        ("Exists", (), None, False),
        ("DoesNotExist", (), "", False),
        ("DoesNotExist", (), None, True),
        ("Gt", ("9",), "10", True),
        ("Gt", ("10",), "10", False),
        ("Lt", ("10",), "9", True),
        ("Lt", ("10",), "10", False),
        ("Lt", ("10",), "007", True),
        ("Gt", ("0",), None, False),
        ("Gt", (), "1", False),
        ("Gt", ("0",), "1_000", False),
        ("Lt", ("1_000",), "1", False),
        ("Gt", ("0",), "1.5", False),
        ("Gt", ("0",), "٣", False),
        ("Gt", ("0",), "", False),
    ],
)
def test_expression_admits_label_value(operator: Any, values: tuple[str, ...], value: str | None, admitted: bool) -> None:
    assert admits(NodeExpression(key="k", operator=operator, values=values), value) is admitted


def test_empty_selector_selects_everything() -> None:
    assert selects({}, {}) and selects((), {"app": "x"})


def test_selector_needs_all_pairs_as_mapping_or_tuples() -> None:
    labels = {"app": "x", "tier": "1"}
    assert selects({"app": "x", "tier": "1"}, labels) and selects((("app", "x"), ("tier", "1")), labels)
    assert not selects({"app": "x", "tier": "2"}, labels) and not selects((("app", "x"), ("zone", "1")), labels)


def test_match_columns_of_no_nodes_is_empty() -> None:
    assert match_columns([NodeExpression(key="k", operator="Exists")], {}, 0).tolist() == []
