"""Label selectors and topology domains, on one object and on columns.

Label matching is the only rule with two forms: on the labels of one node, and on one column per label key. Both forms use
`admits`, which evaluates one expression on one value (None: the label is absent). The column form evaluates it once for each
distinct value, so the two forms differ only in speed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from remit.model.kinds import Node, NodeExpression, Placement

_INTEGER = re.compile("[+-]?[0-9]{1,63}")


class LabelColumn(NamedTuple):
    """One label key over all nodes: `ids[i]` is an index into `values`, or -1 if the node does not have the label."""

    ids: npt.NDArray[np.int64]
    values: Sequence[str]


def expressions(placement: Placement) -> tuple[NodeExpression, ...]:
    """Returns all requirements of a placement on node labels."""
    selected = tuple(NodeExpression(key=k, operator="In", values=(v,)) for k, v in sorted(placement.node_selector.items()))
    return selected + placement.expressions


def admits(expression: NodeExpression, value: str | None) -> bool:
    match expression.operator:
        case "In":
            return value is not None and value in expression.values
        case "NotIn":
            return value is None or value not in expression.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            number, limit = _integer(value), _integer(expression.values[0] if expression.values else None)
            if number is None or limit is None:
                return False
            return number > limit if expression.operator == "Gt" else number < limit


def match_labels(expressions: Sequence[NodeExpression], labels: Mapping[str, str]) -> bool:
    return all(admits(expression, labels.get(expression.key)) for expression in expressions)


def match_columns(
    expressions: Sequence[NodeExpression], columns: Mapping[str, LabelColumn], rows: int
) -> npt.NDArray[np.bool_]:
    matched = np.ones(rows, dtype=np.bool_)
    for expression in expressions:
        column = columns.get(expression.key)
        if column is None:
            matched &= admits(expression, None)
            continue
        # The result for an absent label is last, so that the id -1 selects it.
        answers = [admits(expression, value) for value in column.values] + [admits(expression, None)]
        matched &= np.array(answers, dtype=np.bool_)[column.ids]
    return matched


def selects(selector: Mapping[str, str] | Sequence[tuple[str, str]], labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches a replica with these labels."""
    pairs = selector.items() if isinstance(selector, Mapping) else selector
    return all(labels.get(key) == value for key, value in pairs)


def domain_of(node: Node, key: str) -> str:
    """Returns the topology domain of a node; empty if it is in none. The keys node, zone, region and pool never refer to labels
    of the same name.
    """
    match key:
        case "node":
            return node.metadata.name
        case "zone":
            return node.spec.zone
        case "region":
            return node.spec.region
        case "pool":
            return node.spec.pool
        case _:
            return node.metadata.labels.get(key, "")


def _integer(text: str | None) -> int | None:
    # int() accepts more, such as `1_000`, which is a valid label value but not a number to a human reader.
    return int(text) if text is not None and _INTEGER.fullmatch(text) else None
