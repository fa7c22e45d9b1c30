"""Is every refusal seen? Each code is the answer to some claim in a test that asks through the authority's own door."""

from __future__ import annotations

import ast

from remit.model.claims import Code
from tests.tidy.source_tree import ROOT

PROPOSERS_OWN = {"OVERRIDE"}
"""What keeps a proposer from claiming, and is no rule of the authority."""

DOOR = ROOT / "tests" / "unit" / "commitment"


def asserted(text: str) -> set[str]:
    """The codes that stand in an assertion of it: `Code.NAME`, anywhere inside."""
    return {
        node.attr
        for statement in ast.walk(ast.parse(text))
        if isinstance(statement, ast.Assert)
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Code"
    }


def test_every_code_is_the_answer_to_some_claim() -> None:
    seen = {name for file in sorted(DOOR.rglob("test_*.py")) for name in asserted(file.read_text())}
    missing = [code.name for code in Code if code.name not in seen | PROPOSERS_OWN]
    assert not missing, f"no test of the authority asserts {', '.join(missing)}"
    assert seen <= {code.name for code in Code}


def test_only_assertions_count() -> None:
    assert asserted("x = Code.ROLE\nassert f(Code.WAIT) is None and y is Code.FENCE, Code.PHASE") == {"WAIT", "FENCE", "PHASE"}
