"""Writes the generated documentation pages, or checks that they are up to date.

python -m remit.docgen.generate            write
python -m remit.docgen.generate --check    exit 1 and name the outdated pages

The content of the pages is in component_pages.py and reference_pages.py.
"""

from __future__ import annotations

from pathlib import Path

import click

from remit.docgen.reference_pages import PAGES

DOCS = Path(__file__).resolve().parents[3] / "docs"


def outdated_pages(directory: Path) -> list[str]:
    """Return the names of pages that are missing or differ from what would be written now."""
    return [name for name, page in PAGES.items() if _text(directory / name) != page()]


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a page is out of date.")
@click.option("--into", type=click.Path(path_type=Path, file_okay=False), default=DOCS, help="Directory of the pages.")
def docs(check: bool, into: Path) -> None:
    """Write the documentation pages that are generated from the code, or check them."""
    if not into.is_dir():
        raise click.UsageError(f"--into: {into} is not a directory; pass the docs/ directory of a checkout of the repository")
    changed = outdated_pages(into)
    if check:
        for name in changed:
            click.echo(f"{into / name} is out of date; run `make docs`")
        raise SystemExit(1 if changed else 0)
    for name in changed:
        (into / name).write_text(PAGES[name](), encoding="utf-8")
        click.echo(f"wrote {into / name}")
    if not changed:
        click.echo(f"{len(PAGES)} pages are up to date")


if __name__ == "__main__":
    docs()
