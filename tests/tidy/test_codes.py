"""Every refusal code is asserted by a test that submits a claim to the authority."""

from __future__ import annotations

import ast

from remit.model.claims import Code
from tests.tidy.source_tree import ROOT

PROPOSER_CODES = {"OVERRIDE"}
"""Codes that keep a proposer from claiming and are no rules of the authority."""

AUTHORITY_TESTS = ROOT / "tests" / "unit" / "commitment"


def asserted_codes(text: str) -> set[str]:
    """Codes in assertions of this text: `Code.NAME`, anywhere inside."""
    return {
        node.attr
        for statement in ast.walk(ast.parse(text))
        if isinstance(statement, ast.Assert)
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Code"
    }


def test_every_refusal_code_is_asserted_by_authority_tests() -> None:
    seen = {name for file in sorted(AUTHORITY_TESTS.rglob("test_*.py")) for name in asserted_codes(file.read_text())}
    missing = [code.name for code in Code if code.name not in seen | PROPOSER_CODES]
    assert not missing, f"no test of the authority asserts {', '.join(missing)}"
    assert seen <= {code.name for code in Code}


def test_codes_outside_assertions_do_not_count() -> None:
    assert asserted_codes("x = Code.ROLE\nassert f(Code.WAIT) is None and y is Code.FENCE, Code.PHASE") == {
        "WAIT",
        "FENCE",
        "PHASE",
    }
