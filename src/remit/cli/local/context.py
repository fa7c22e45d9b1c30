"""Commands `context` and `completion`: manage named servers, and print the shell completion script. No server is called."""

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
        "remit context list                                       list the contexts; * marks the current one",
        "remit context set prod --server https://remit.example:7420 --token-file ~/.remit-token",
        "remit context use prod                                   make it the current context",
        "remit get nodes --context local                          use another context for one command",
    ),
)
def context() -> None:
    """Manage named servers (contexts) and choose the current one.

    Contexts are stored in ~/.config/remit/config.yaml, or in the file REMIT_CONFIG. Flags take precedence over the environment
    (REMIT_SERVER, REMIT_TOKEN, REMIT_TOKEN_FILE, REMIT_CA_FILE, REMIT_TENANT, REMIT_CONTEXT), and that over the file.
    """


@context.command(
    "list",
    epilog=examples("remit context list", "remit context list -o name      names only, for scripts"),
)
@click.option(
    "-o", "--output", type=click.Choice(["table", "json", "name"]), default="table", show_default=True, help="Output format."
)
def list_(output: str) -> None:
    """List the contexts; * marks the current one. Tokens are not shown."""
    path = config_path()
    contexts = load_contexts(path)
    if output == "name":
        for ctx in contexts.contexts:
            click.echo(escaped(ctx.name))
    elif output == "json":
        without_tokens = [msgspec.structs.replace(ctx, token="") for ctx in contexts.contexts]
        click.echo(msgspec.json.encode(Contexts(tuple(without_tokens), contexts.current)).decode())
    elif not contexts.contexts:
        click.echo(f"{escaped(str(path))} contains no context; `remit up` or `remit context set` creates one", err=True)
    else:
        _show(contexts)


def _show(contexts: Contexts) -> None:
    from remit.cli.output.console import Column, Sheet, console, until_broken_pipe

    columns = (Column(""), Column("NAME"), Column("SERVER"), Column("TENANT"), Column("TOKEN", fluid=True))
    rows = [
        ["*" if ctx.name == contexts.current else "", ctx.name, ctx.server, ctx.tenant or "default", _describe_token(ctx)]
        for ctx in contexts.contexts
    ]
    with until_broken_pipe():
        Sheet(console(), columns).show(rows)


def _describe_token(ctx: Context) -> str:
    return ctx.token_file or ("stored inline" if ctx.token else "none")


@context.command(
    epilog=examples(
        "remit context set prod --server https://remit.example:7420 --token-file token --ca-file ca.pem",
        "remit context set prod --tenant risk        change the tenant of an existing context",
        "remit context set ann --like prod --token-file ann.token --tenant risk     the same server with another token",
    )
)
@click.argument("name")
@click.option("--server", default="", metavar="URL", help="URL of the server, such as http://127.0.0.1:7420.")
@click.option(
    "--like", default="", metavar="NAME", help="Copy server and CA certificate from another context, but not its token."
)
@click.option("--token-file", default="", metavar="FILE", help="File with the access token; it is read at each use.")
@click.option("--ca-file", default="", metavar="FILE", help="CA certificate for https. Default: CA certificates of the system.")
@click.option("-t", "-n", "--tenant", default="", help="Default tenant.")
@click.option("--use", is_flag=True, help="Make it the current context. The first context always becomes current.")
def set(name: str, server: str, like: str, token_file: str, ca_file: str, tenant: str, use: bool) -> None:
    """Create a context, or change the given settings of an existing one."""
    _check_name(name)
    path = config_path()
    contexts = load_contexts(path)
    existing = contexts.get(name)
    if like:
        template = contexts.named(like)
        server, ca_file = server or template.server, ca_file or template.ca_file
    if existing is None and not server:
        raise click.UsageError(f"context {escaped(name)} does not exist yet; give its server with --server URL or --like NAME")
    if token_file:
        read_token(token_file, "--token-file")
        token_file = str(Path(token_file).expanduser().absolute())
    if ca_file:
        ca_file = str(Path(ca_file).expanduser().absolute())
    base = existing or Context(name, "")
    if server and existing is not None and server_url(server) != server_url(existing.server) and not token_file:
        base = Context(name, "", tenant=existing.tenant)  # never send a token to another server
    new = Context(
        name,
        server_url(server) if server else base.server,
        token="" if token_file else base.token,
        token_file=token_file or base.token_file,
        tenant=tenant or base.tenant,
        ca_file=ca_file or base.ca_file,
    )
    save_contexts(path, with_context(contexts, new, use=use or not contexts.current))
    click.echo(f"context {name} {'set' if existing is None else 'changed'}")


def _check_name(name: str) -> None:
    import re

    from remit.model.metadata import DNS_NAME

    if not re.search(DNS_NAME, name):
        raise click.UsageError(f"{escaped(name)} is not a valid context name; use a-z, 0-9, - and .")


@context.command(epilog=examples("remit context use prod"))
@click.argument("name")
def use(name: str) -> None:
    """Make a context the current one."""
    path = config_path()
    contexts = load_contexts(path)
    found = contexts.named(name)
    save_contexts(path, Contexts(contexts.contexts, found.name))
    click.echo(f"current context is {escaped(found.name)}: {escaped(found.server)}")


@context.command(epilog=examples("remit context remove prod"))
@click.argument("name")
def remove(name: str) -> None:
    """Remove a context. Server and token file are not changed."""
    path = config_path()
    contexts = load_contexts(path)
    found = contexts.named(name)
    remaining = tuple(ctx for ctx in contexts.contexts if ctx is not found)
    save_contexts(path, Contexts(remaining, "" if contexts.current == found.name else contexts.current))
    note = (
        "; there is no current context now, choose one with `remit context use`"
        if contexts.current == found.name and remaining
        else ""
    )
    click.echo(f"context {escaped(found.name)} removed{note}")


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
    """Print the completion script for SHELL."""
    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise click.ClickException(f"click has no completion for {shell}")
    head = "#compdef remit\n" if shell == "zsh" else ""  # zsh expects it on the first line
    script = completion_class(remit, {}, "remit", "_REMIT_COMPLETE").source().strip().removeprefix("#compdef remit").strip()
    click.echo(f"{head}# Install with: {INSTALL_COMMANDS[shell]}\n{script}")
