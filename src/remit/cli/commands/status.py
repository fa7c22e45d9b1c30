"""Commands `status` and `version`: print the state of a scope, and the versions of client and server.

Both only read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from remit import __version__
from remit.cli.main import examples
from remit.cli.session.contexts import ContextError, ServerFlags
from remit.cli.session.server_call import FAILED, CommandContext, call_server, server_options
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.model.wire.api_types import ScopeStatus


@click.command(
    epilog=examples(
        "remit status                leader, nodes, replicas and unheld leases",
        "remit status -o json        JSON; `idle` lists the leases that are not held",
    )
)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format.")
@server_options()
def status(context: CommandContext, output: str) -> None:
    """Show the state of the scope (one control plane with its nodes), and scheduler or controller leases that are not held.

    Without a scheduler nothing is placed. Without controllers nothing is replaced, rolled out or removed. Running replicas
    continue in both cases. Exits with 1 if the lease of the scheduler or of a controller is not held, and prints the fix. A new
    leader reports an unheld lease only after one lease term, because the holder may still renew until then.
    """
    from remit.cli.output.console import console, until_broken_pipe
    from remit.cli.output.explanations import line
    from remit.cli.output.serialization import json_text

    scope_status = call_server(context, lambda api: api.status())
    with until_broken_pipe():
        if output == "json":
            sys.stdout.write(json_text(scope_status))
        else:
            from remit.cli.output.console import BAD

            out = console()
            for label, text in lines(scope_status, context.address.server):
                line(out, label, text, BAD if label == WARNING else "")
    if scope_status.idle:
        sys.exit(FAILED)


WARNING = "warning"
ENDED = {"released": "ended"}
"""Words of phases whose name would be misread: a released replica has ended, and its capacity is free."""


def lines(scope_status: ScopeStatus, url: str) -> Iterator[tuple[str, str]]:
    """Yield label and text of each output line."""
    from remit.cli.output.object_columns import format_span

    yield "scope", f"{scope_status.scope} at {url}, Remit {scope_status.version or 'unknown'}"
    yield "leader", f"{scope_status.leader or 'unknown'}, epoch {scope_status.epoch}, revision {scope_status.revision}"
    yield "server", f"up for {format_span(scope_status.uptime_ms // 1000)}"
    yield "nodes", format_counts(scope_status.nodes)
    yield "replicas", format_counts({ENDED.get(phase, phase): count for phase, count in scope_status.replicas.items()})
    if not scope_status.idle:
        yield "leases", "all held"
    for number, lease in enumerate(scope_status.idle):
        yield WARNING, lease.why
        following = scope_status.idle[number + 1] if number + 1 < len(scope_status.idle) else None
        if following is None or following.cure != lease.cure:
            yield "fix", lease.cure


def format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{word} {count:,}" for word, count in counts.items()) or "none"


@click.command(
    epilog=examples(
        "remit version               this program, and the server if one is configured",
        "remit version --client      this program only",
        "remit version -o json",
    )
)
@click.option("--client", is_flag=True, help="Do not call a server.")
@click.option("--context", default="", metavar="NAME", help="Server by its context name, see `remit context list`.")
@click.option("--server", default="", metavar="URL", help="URL of the server. Default: REMIT_SERVER, then the context.")
@click.option("--token-file", default="", metavar="FILE", help="File with the access token.")
@click.option(
    "--ca-file", default="", metavar="FILE", help="CA certificate for https. Default: REMIT_CA_FILE, then the context."
)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format.")
def version(client: bool, context: str, server: str, token_file: str, ca_file: str, output: str) -> None:
    """Print the version of this program, and of the server if one is configured."""
    import json

    result = {"client": __version__}
    if output == "text":
        click.echo(f"remit   {__version__}")
    if not client:
        try:
            address = ServerFlags(context, server, token_file, ca_file=ca_file).resolve()
        except ContextError:
            if context or server:
                raise
            address = None
        if address is not None:
            status = call_server(CommandContext(address), lambda api: api.status())
            result |= {"server": status.version, "scope": status.scope, "leader": status.leader, "url": address.server}
            if output == "text":
                click.echo(escaped(f"server  {status.version or 'unknown'}  scope {status.scope} at {address.server}"))
    if output == "json":
        click.echo(json.dumps(result))
