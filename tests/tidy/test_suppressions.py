"""No comment and no setting silences the limit on the complexity of a function."""

from __future__ import annotations

import io
import re
import tokenize
import tomllib
from collections.abc import Iterator

import pytest

from tests.tidy.source_tree import ROOT, SOURCE, TESTS, TOOLS, modules_below

LIMIT = "C901"
SUPPRESSION = re.compile(r"\bnoqa\b|\bruff\s*:", re.IGNORECASE)
WITHOUT_CODES = re.compile(r"#\s*((ruff|flake8)\s*:\s*)?noqa\b(?!\s*:)", re.IGNORECASE)


def silencing(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment that suppresses the limit by name, or every rule. Strings do not count."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or not SUPPRESSION.search(token.string):
            continue
        if LIMIT in token.string.upper() or WITHOUT_CODES.search(token.string):
            yield token.start[0], token.string


def test_no_comment_silences_complexity_limit() -> None:
    found = [
        f"{module.path}:{line}: {comment}"
        for folder in (SOURCE, TESTS, TOOLS)
        for module in modules_below(folder)
        for line, comment in silencing(module.text)
    ]
    assert not found, "split the function:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "comment",
    [
        *(
            "# noqa: C901",
            "# noqa:C901 - long",
            "# noqa: E501, C901",
            "# noqa: C901,E501",
            "# why  # noqa: C901",
            "# noqa",
            "#NOQA",
        ),
        *("# noqa - long", "# ruff: noqa", "# ruff: noqa: C901", "# flake8: noqa", "# ruff: ignore[C901]"),
        *("# ruff: disable[E501, C901]", "# ruff: file-ignore[C901]"),
    ],
)
def test_each_form_of_suppression_is_found(comment: str) -> None:
    assert list(silencing(f"x = 1\ndef f():  {comment}\n    pass\n")) == [(2, comment)]


@pytest.mark.parametrize(
    "line", ["x = 1  # noqa: E501", "x = '# noqa: C901'", "x = 1  # C901 is the limit", "# ruff: noqa: N802"]
)
def test_other_suppression_is_permitted(line: str) -> None:
    assert list(silencing(f"{line}\n")) == []


def test_no_setting_exempts_files_from_complexity_limit() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    exempt = [*lint["ignore"], *(code for codes in lint["per-file-ignores"].values() for code in codes)]
    assert LIMIT in lint["select"]
    assert not [code for code in exempt if LIMIT.startswith(code) or code == "ALL"]
