"""How does a scope stand, and does everybody act who should? Prints what a server says of it; nothing is changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from remit.cli.main import examples
from remit.cli.reaching import FAILED, Asked, ask, asks_server

if TYPE_CHECKING:
    from remit.model.answers import ScopeStatus


@click.command(
    epilog=examples(
        "remit status                who leads, what there is, and who should act and does not",
        "remit status -o json        for programs: `idle` has the leases that nobody holds",
    )
)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@asks_server()
def status(asked: Asked, output: str) -> None:
    """Say how the scope stands, and who should act and does not.

    Without a scheduler nothing is placed, and without controllers nothing is replaced, rolled out or removed; what runs goes
    on. Exits with 1 if nobody holds the lease of one of them, with the cure. A leader that is new waits for a term before it
    says so: until then they may be about to begin.
    """
    from remit.cli.explain_shown import line
    from remit.cli.told import console, until_nobody_reads
    from remit.cli.written import json_text

    found = ask(asked, lambda api: api.status())
    with until_nobody_reads():
        if output == "json":
            sys.stdout.write(json_text(found))
        else:
            from remit.cli.columns import BAD

            out = console()
            for lead, words in told(found, asked.reach.server):
                line(out, lead, words, BAD if lead == NOBODY else "")
    if found.idle:
        sys.exit(FAILED)


NOBODY = "nobody acts"


def told(found: ScopeStatus, url: str) -> Iterator[tuple[str, str]]:
    """What each line is about, and what it says."""
    from remit.cli.listed import span

    yield "scope", f"{found.scope} at {url}, Remit {found.version or 'unknown'}"
    yield "leader", f"{found.leader or 'not known'}, epoch {found.epoch}, revision {found.revision}"
    yield "server", f"up for {span(found.uptime_ms // 1000)}"
    yield "nodes", counted(found.nodes)
    yield "replicas", counted(found.replicas)
    if not found.idle:
        yield "acting", "nobody is known to be missing"
    for number, one in enumerate(found.idle):
        yield NOBODY, one.why
        after = found.idle[number + 1] if number + 1 < len(found.idle) else None
        if after is None or after.cure != one.cure:
            yield "cure", one.cure


def counted(many: Mapping[str, int]) -> str:
    return ", ".join(f"{word} {count:,}" for word, count in many.items()) or "none"
