"""Writes or checks generated pages (`python -m remit.docgen.generate`).

Writes them, or tells which drifted. What stands in them is made in pages.py.

python -m remit.docgen.generate            write
python -m remit.docgen.generate --check    exit 1 and name what drifted
"""

from __future__ import annotations

from pathlib import Path

import click

from remit.docgen.reference_pages import PAGES

DOCS = Path(__file__).resolve().parents[3] / "docs"


def drifted(directory: Path) -> list[str]:
    """The names of pages that are not there, or not as they would be written now."""
    return [name for name, page in PAGES.items() if _text(directory / name) != page()]


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a page is not as the code says.")
@click.option("--into", type=click.Path(path_type=Path, file_okay=False), default=DOCS, help="The directory of the pages.")
def docs(check: bool, into: Path) -> None:
    """Write the pages that are generated from the code, or check them."""
    if not into.is_dir():
        raise click.UsageError(
            f"{into} is no directory; the pages belong to a checkout of the repository: name its docs/ with --into"
        )
    changed = drifted(into)
    if check:
        for name in changed:
            click.echo(f"{into / name} is not what the code says; run `make docs`")
        raise SystemExit(1 if changed else 0)
    for name in changed:
        (into / name).write_text(PAGES[name](), encoding="utf-8")
        click.echo(f"wrote {into / name}")
    if not changed:
        click.echo(f"{len(PAGES)} pages are as the code says")


if __name__ == "__main__":
    docs()
