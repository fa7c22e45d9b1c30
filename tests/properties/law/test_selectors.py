"""Property: label matching on one node and on columns agree."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from remit.law.selectors import LabelColumn, admits, expressions, match_columns, match_labels
from remit.model.kinds import NodeExpression, Placement
from tests.unit.law import strategies as draws
from tests.unit.law.fit_oracle import matches


def columns_of(rows: list[dict[str, str]]) -> dict[str, LabelColumn]:
    made = {}
    for key in sorted({key for row in rows for key in row}):
        values = sorted({row[key] for row in rows if key in row})
        ids = [values.index(row[key]) if key in row else -1 for row in rows]
        made[key] = LabelColumn(np.array(ids, dtype=np.int64), values)
    return made


many = st.lists(draws.labels, max_size=6)
expression_lists = st.lists(draws.expressions, max_size=4)


@given(many, expression_lists)
@settings(max_examples=300)
def test_column_match_equals_match_per_row(rows: list[dict[str, str]], requested: list[NodeExpression]) -> None:
    found = match_columns(requested, columns_of(rows), len(rows))
    assert found.dtype == np.bool_
    assert found.tolist() == [match_labels(requested, row) for row in rows]


@given(draws.labels, draws.expressions)
@settings(max_examples=300)
def test_expression_operator_equals_oracle(labels: dict[str, str], expression: NodeExpression) -> None:
    assert admits(expression, labels.get(expression.key)) == matches(expression, labels)


@given(draws.labels, draws.expressions)
def test_opposite_operators_exclude_each_other(labels: dict[str, str], expression: NodeExpression) -> None:
    value = labels.get(expression.key)

    def with_operator(operator: str) -> bool:
        return admits(NodeExpression(key=expression.key, operator=operator, values=expression.values), value)  # type: ignore[arg-type]

    assert with_operator("In") != with_operator("NotIn")
    assert with_operator("Exists") != with_operator("DoesNotExist")
    assert not (with_operator("Gt") and with_operator("Lt"))


@given(st.dictionaries(draws.one_of(draws.LABEL_KEYS), draws.one_of(draws.LABEL_VALUES), max_size=3), draws.labels)
def test_node_selector_requires_all_pairs(selector: dict[str, str], labels: dict[str, str]) -> None:
    requested = expressions(Placement(node_selector=selector))
    assert match_labels(requested, labels) == (selector.items() <= labels.items())
