"""Which version is this, and which is the server's?"""

from __future__ import annotations

import click

from remit import __version__
from remit.cli.contexts import Flags, Unconfigured
from remit.cli.main import examples
from remit.cli.reaching import Asked, ask
from remit.model.problems import escaped


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
