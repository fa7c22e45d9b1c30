"""Writes the generated documentation pages and client/blocking.py, or checks that they are up to date.

python -m remit.docgen.generate            write
python -m remit.docgen.generate --check    exit 1 and name the outdated files

The content of the pages is in component_pages.py and reference_pages.py, that of the module in blocking_api.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from remit.docgen import blocking_api
from remit.docgen.reference_pages import PAGES

DOCS = Path(__file__).resolve().parents[3] / "docs"
BLOCKING_API = Path(__file__).resolve().parents[1] / "client" / "blocking.py"


def outdated_files(directory: Path) -> dict[Path, Callable[[], str]]:
    """Return the files that are missing or differ from what would be written now. client/blocking.py is
    included only if `directory` is `DOCS`.
    """
    files = {directory / name: page for name, page in PAGES.items()}
    if directory == DOCS:
        files[BLOCKING_API] = blocking_api.module_text
    return {path: content for path, content in files.items() if _text(path) != content()}


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a file is out of date.")
@click.option("--into", type=click.Path(path_type=Path, file_okay=False), default=DOCS, help="Directory of the pages.")
def docs(check: bool, into: Path) -> None:
    """Write the documentation pages that are generated from the code, or check them."""
    if not into.is_dir():
        raise click.UsageError(f"--into: {into} is not a directory; pass the docs/ directory of a checkout of the repository")
    changed = outdated_files(into)
    if check:
        for path in changed:
            click.echo(f"{path} is out of date; run `make docs`")
        raise SystemExit(1 if changed else 0)
    for path, content in changed.items():
        path.write_text(content(), encoding="utf-8")
        click.echo(f"wrote {path}")
    if not changed:
        click.echo("every generated file is up to date")


if __name__ == "__main__":
    docs()
