"""Documentation pages: links resolve, every page is listed, generated pages are up to date, cited faults exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.tidy.source_tree import ROOT, pages

LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:")
FENCE = re.compile(r"```.*?```", re.DOTALL)


def slug(heading: str) -> str:
    """The anchor of a heading as Markdown renderers make it."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text())
    return {slug(found) for found in re.findall(r"^#+\s+(.*)$", text, re.MULTILINE)} | set(
        re.findall(r"<a id=\"([^\"]+)\"", text)
    )


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    return [found for pair in LINK.findall(text) for found in pair if found and not ELSEWHERE.match(found)]


def test_every_link_between_pages_resolves() -> None:
    problems = []
    for page in pages():
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or not target.is_relative_to(ROOT):
                problems.append(f"{page.relative_to(ROOT)}: {link} does not exist")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                problems.append(f"{page.relative_to(ROOT)}: {link} has no such heading")
    assert not problems, "\n".join(problems)


def test_every_docs_page_is_listed_in_index() -> None:
    docs = ROOT / "docs"
    index = docs / "index.md"
    listed = {(docs / link.partition("#")[0]).resolve() for link in links(index)}
    missing = [page.relative_to(docs).as_posix() for page in sorted(docs.rglob("*.md")) if page != index and page not in listed]
    assert not missing, f"docs/index.md does not list {missing}"


def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, "-m", "remit.docgen.generate", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run `make docs`\n{done.stdout}{done.stderr}"


def test_faults_page_names_tests_that_cite_its_rows() -> None:
    command = [sys.executable, "tools/citations.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run `make docs`\n{done.stdout}{done.stderr}"


def test_every_fault_cited_by_tests_is_in_faults_page() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    known = set(re.findall(r"^\| (F\d\d) \|", page, re.MULTILINE))
    problems = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        if file.is_relative_to(Path(__file__).parent):
            continue
        unknown = sorted(set(re.findall(r"\bF\d\d\b", file.read_text())) - known)
        if unknown:
            problems.append(f"{file.relative_to(ROOT)} cites {', '.join(unknown)}")
    assert not problems, "\n".join(problems)


def test_faults_page_is_complete_and_its_tests_exist() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    counts = {letter: re.findall(rf"^\| ({letter}\d+) \|", page, re.MULTILINE) for letter in "FSLA"}
    assert counts["F"] == [f"F{n:02}" for n in range(1, 46)]
    assert counts["S"] == [f"S{n}" for n in range(1, 31)]
    assert counts["L"] == [f"L{n}" for n in range(1, 15)]
    assert counts["A"] == [f"A{n:02}" for n in range(1, 43)]
    named = re.findall(r"`(tests/[^`:]+)(?:::[^`]*)?`", page)
    assert not [name for name in named if not (ROOT / name).exists()]
    threats = {
        threat for row in re.findall(r"^\| F\d\d \|.*$", page, re.MULTILINE) for threat in re.findall(r"\b[SL]\d+\b", row)
    }
    assert threats <= {*counts["S"], *counts["L"]}


def test_every_test_folder_belongs_to_group() -> None:
    groups = (ROOT / "tools" / "groups.py").read_text()
    folders = {file.relative_to(ROOT / "tests").parts[0] for file in (ROOT / "tests").rglob("test_*.py")}
    missing = [folder for folder in sorted(folders) if f'"tests/{folder}"' not in groups]
    assert not missing, f"tools/groups.py never runs {missing}"
