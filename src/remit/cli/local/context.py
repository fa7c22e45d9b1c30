"""`context`, `completion`.

Reads and writes the file of contexts; no server is asked.

Prints click's own script, with a line on where to put it.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from click.shell_completion import get_completion_class

from remit.cli.main import examples, remit
from remit.cli.session.contexts import (
    Context,
    Contexts,
    config_path,
    load_contexts,
    read_token,
    save_and_use_context,
    save_contexts,
    server_url,
    with_context,
)
from remit.model.problems import escaped


@click.group(
    no_args_is_help=True,
    epilog=examples(
        "remit context list                                       those that are known; * is in use",
        "remit context set prod --server https://remit.example:7420 --token-file ~/.remit-token",
        "remit context use prod                                   from now on, unless another is named",
        "remit get nodes --context local                          another one, only this time",
    ),
)
def context() -> None:
    """Servers by name, and which of them is meant when no other is named.

    They are kept in ~/.config/remit/config.yaml, or in the file that REMIT_CONFIG names. A flag comes before the environment
    (REMIT_SERVER, REMIT_TOKEN, REMIT_TOKEN_FILE, REMIT_CA_FILE, REMIT_TENANT, REMIT_CONTEXT), and that before the file.
    """


@context.command(
    "list",
    epilog=examples("remit context list", "remit context list -o name      names only, for scripts"),
)
@click.option("-o", "--output", type=click.Choice(["table", "json", "name"]), default="table", show_default=True)
def list_(output: str) -> None:
    """List the contexts; the one in use has a *. Tokens are not shown."""
    path = config_path()
    known = load_contexts(path)
    if output == "name":
        for ctx in known.contexts:
            click.echo(escaped(ctx.name))
    elif output == "json":
        shown = [msgspec.structs.replace(ctx, token="") for ctx in known.contexts]
        click.echo(msgspec.json.encode(Contexts(tuple(shown), known.current)).decode())
    elif not known.contexts:
        click.echo(f"{escaped(str(path))} has no context; `remit up` makes one, and so does `remit context set`", err=True)
    else:
        _show(known)


def _show(known: Contexts) -> None:
    from remit.cli.output.console import Column, Sheet, console, until_broken_pipe

    heads = (Column(""), Column("NAME"), Column("SERVER"), Column("TENANT"), Column("TOKEN", fluid=True))
    rows = [
        ["*" if ctx.name == known.current else "", ctx.name, ctx.server, ctx.tenant or "default", _describe_token(ctx)]
        for ctx in known.contexts
    ]
    with until_broken_pipe():
        Sheet(console(), heads).show(rows)


def _describe_token(one: Context) -> str:
    return one.token_file or ("kept here" if one.token else "none")


@context.command(
    epilog=examples(
        "remit context set prod --server https://remit.example:7420 --token-file token --ca-file ca.pem",
        "remit context set prod --tenant risk        change one thing of a context that is there",
        "remit context set ann --like prod --token-file ann.token --tenant risk     the same server, as somebody else",
    )
)
@click.argument("name")
@click.option("--server", default="", metavar="URL", help="Where it is, such as http://127.0.0.1:7420.")
@click.option("--like", default="", metavar="NAME", help="The server, and its authority, of another context; not its token.")
@click.option("--token-file", default="", metavar="FILE", help="The file with the token; it is read at each use.")
@click.option("--ca-file", default="", metavar="FILE", help="The certificate of its authority, if the system knows it not.")
@click.option("-t", "-n", "--tenant", default="", help="Whose things are meant if nobody says.")
@click.option("--use", is_flag=True, help="Use it from now on. The first one is used anyway.")
def set(name: str, server: str, like: str, token_file: str, ca_file: str, tenant: str, use: bool) -> None:
    """Make a context, or change what is named of one."""
    _check_name(name)
    path = config_path()
    known = load_contexts(path)
    before = known.get(name)
    if like:
        other = known.named(like)
        server, ca_file = server or other.server, ca_file or other.ca_file
    if before is None and not server:
        raise click.UsageError(f"there is no context {escaped(name)} yet; name its server with --server URL, or --like NAME")
    if token_file:
        read_token(token_file, "--token-file")
        token_file = str(Path(token_file).expanduser().absolute())
    if ca_file:
        ca_file = str(Path(ca_file).expanduser().absolute())
    base = before or Context(name, "")
    if server and before is not None and server_url(server) != server_url(before.server) and not token_file:
        base = Context(name, "", tenant=before.tenant)  # a token goes to the server that it was given for
    made = Context(
        name,
        server_url(server) if server else base.server,
        token="" if token_file else base.token,
        token_file=token_file or base.token_file,
        tenant=tenant or base.tenant,
        ca_file=ca_file or base.ca_file,
    )
    save_contexts(path, with_context(known, made, use=use or not known.current))
    click.echo(f"context {name} {'set' if before is None else 'changed'}")


def _check_name(name: str) -> None:
    import re

    from remit.model.metadata import DNS_NAME

    if not re.search(DNS_NAME, name):
        raise click.UsageError(f"{escaped(name)} is no name for a context; use a-z, 0-9, - and .")


@context.command(epilog=examples("remit context use prod"))
@click.argument("name")
def use(name: str) -> None:
    """Use a context from now on, unless another is named."""
    path = config_path()
    known = load_contexts(path)
    found = known.named(name)
    save_contexts(path, Contexts(known.contexts, found.name))
    click.echo(f"using {escaped(found.name)}: {escaped(found.server)}")


@context.command(epilog=examples("remit context remove prod"))
@click.argument("name")
def remove(name: str) -> None:
    """Forget a context. The server and the file of its token stay as they are."""
    path = config_path()
    known = load_contexts(path)
    found = known.named(name)
    left = tuple(ctx for ctx in known.contexts if ctx is not found)
    save_contexts(path, Contexts(left, "" if known.current == found.name else known.current))
    in_use = "; none is in use now, choose one with `remit context use`" if known.current == found.name and left else ""
    click.echo(f"context {escaped(found.name)} removed{in_use}")


__all__ = ["context", "save_and_use_context"]


INSTALL_COMMANDS = {
    "bash": "remit completion bash > ~/.local/share/bash-completion/completions/remit",
    "zsh": "remit completion zsh > ~/.zfunc/_remit     (with ~/.zfunc in fpath, before compinit)",
    "fish": "remit completion fish > ~/.config/fish/completions/remit.fish",
}


@click.command(
    epilog=examples(
        'eval "$(remit completion bash)"      try it in this shell',
        *INSTALL_COMMANDS.values(),
    )
)
@click.argument("shell", type=click.Choice(list(INSTALL_COMMANDS)))
def completion(shell: str) -> None:
    """Print the script that completes commands in your SHELL."""
    maker = get_completion_class(shell)
    if maker is None:
        raise click.ClickException(f"click has no completion for {shell}")
    head = "#compdef remit\n" if shell == "zsh" else ""  # zsh reads it only from the first line
    script = maker(remit, {}, "remit", "_REMIT_COMPLETE").source().strip().removeprefix("#compdef remit").strip()
    click.echo(f"{head}# Install with: {INSTALL_COMMANDS[shell]}\n{script}")
