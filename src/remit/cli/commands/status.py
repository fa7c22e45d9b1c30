"""`status`, `version`.

Prints what a server says of it; nothing is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from remit import __version__
from remit.cli.main import examples
from remit.cli.session.contexts import Flags, Unconfigured
from remit.cli.session.server_call import FAILED, Asked, ask, asks_server
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.model.wire.api_types import ScopeStatus


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
    from remit.cli.output.console import console, until_nobody_reads
    from remit.cli.output.explanations import line
    from remit.cli.output.serialization import json_text

    found = ask(asked, lambda api: api.status())
    with until_nobody_reads():
        if output == "json":
            sys.stdout.write(json_text(found))
        else:
            from remit.cli.output.console import BAD

            out = console()
            for lead, words in told(found, asked.reach.server):
                line(out, lead, words, BAD if lead == NOBODY else "")
    if found.idle:
        sys.exit(FAILED)


NOBODY = "nobody acts"


def told(found: ScopeStatus, url: str) -> Iterator[tuple[str, str]]:
    """What each line is about, and what it says."""
    from remit.cli.output.object_columns import span

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


@click.command(
    epilog=examples(
        "remit version               of this program, and of the server if one is named",
        "remit version --client      of this program alone",
        "remit version -o json",
    )
)
@click.option("--client", is_flag=True, help="Ask no server.")
@click.option("--context", default="", metavar="NAME", help="The server, by its name in `remit context list`.")
@click.option("--server", default="", metavar="URL", help="The server itself; else REMIT_SERVER, or the context's.")
@click.option("--token-file", default="", metavar="FILE", help="The file with the token for it.")
@click.option("--ca-file", default="", metavar="FILE", help="Who signs for it at https; else REMIT_CA_FILE, the context's.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def version(client: bool, context: str, server: str, token_file: str, ca_file: str, output: str) -> None:
    """Print the version of this program, and of the server if one is named."""
    import json

    told = {"client": __version__}
    if output == "text":
        click.echo(f"remit   {__version__}")
    if not client:
        try:
            reach = Flags(context, server, token_file, ca_file=ca_file).reach()
        except Unconfigured:
            if context or server:
                raise
            reach = None
        if reach is not None:
            status = ask(Asked(reach), lambda api: api.status())
            told |= {"server": status.version, "scope": status.scope, "leader": status.leader, "url": reach.server}
            if output == "text":
                click.echo(escaped(f"server  {status.version or 'unknown'}  scope {status.scope} at {reach.server}"))
    if output == "json":
        click.echo(json.dumps(told))
