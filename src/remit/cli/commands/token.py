"""Commands `token create`, `token list` and `token revoke`.

A token is generated here and printed once; the server receives only its digest.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import click

from remit.cli.main import examples
from remit.cli.session.server_call import CommandContext, call_server, server_options
from remit.model.kinds import TokenRole
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.model.kinds import Token

TERMS: Final = {"join": "1h", "agent": "365d", "scheduler": "365d", "controllers": "365d"}
TERM: Final = "90d"
TERM_MS_MAX: Final = 3_650 * 86_400_000


@click.group(
    no_args_is_help=True,
    epilog=examples(
        "remit token create --role member --tenant risk --for ann     read and write objects of tenant risk",
        "remit token create --role viewer --for prometheus            read-only access to all tenants",
        "remit token create --role join --node n7                     for `remit agent --join`: one use, valid for 1h",
        "remit token create --role scheduler > scheduler.token        for `remit scheduler --token-file`",
        "remit token list",
        "remit token revoke member-ann",
    ),
)
def token() -> None:
    """Create, list and revoke access tokens.

    The server stores only the digest of a token. A lost token cannot be recovered: revoke it and create another. Roles:
    admin (everything), member (workloads, secrets and configs of one tenant), viewer (read-only; one tenant or all), agent
    and join (for nodes), scheduler, controllers.
    """


@token.command(
    "create",
    epilog=examples(
        "remit token create --role member --tenant risk --for ann --expires 30d",
        "remit token create --role admin --for grace --name grace-laptop",
        "remit token create --role member --tenant risk --for ci -o json      with name and expiry, for scripts",
    ),
)
@click.option("--role", type=click.Choice(get_args(TokenRole)), required=True, help="Role of the token.")
@click.option(
    "--for",
    "subject",
    default="",
    metavar="WHO",
    help="User or program the token is for, shown in the audit log.  [default: the name of the token]",
)
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="Node of an agent or join token. Repeatable.")
@click.option("--name", default="", help="Name of the token.  [default: role, tenant and subject, with a random suffix]")
@click.option(
    "--expires",
    default="",
    metavar="DURATION",
    help=f"Lifetime.  [default: {TERM}; join 1h; agent, scheduler and controllers 365d]",
)
@click.option("-o", "--output", type=click.Choice(["token", "json"]), default="token", show_default=True, help="Output format.")
@server_options()
def create(
    context: CommandContext, role: TokenRole, subject: str, nodes: tuple[str, ...], name: str, expires: str, output: str
) -> None:
    """Create a token and print it. It is not shown again.

    The token is the last line on stdout and everything else goes to stderr, so stdout can be redirected to a file. --tenant
    sets the tenant of a member token, and restricts a viewer token to that tenant.
    """
    from remit.cli.session.token_files import generate_token
    from remit.world.randomness import RandomIds

    ids = RandomIds()
    secret = generate_token(ids)
    tenant_ = context.address.tenant if role == "member" or (role == "viewer" and context.tenant_given) else ""
    token_name = name or _token_name(role, subject, tenant_, ids.nonce()[:6])
    obj = _build_token(secret, token_name, role, subject, tenant_, nodes, expires or TERMS.get(role, TERM))
    call_server(context, lambda api: _create(api, obj))
    if role == "join" and output == "token":
        click.echo(_join_hint(context, obj), err=True)
    _print_token(obj, secret, output)


def _join_hint(context: CommandContext, obj: Token) -> str:
    """Return the agent command to copy, with the digest of the server's certificate. The token itself is left out, because
    stdout with the token may be redirected to a file while this text appears on the terminal.
    """
    node_args = _node_args(obj.spec.nodes)
    if not node_args:
        return "one agent hosts node NAME, or NAME-1 to NAME-N: create one join token per agent, and run an agent with each"
    args = ["remit", "agent", "--server", context.address.server, "--join", "FILE", "--data", "agent", *node_args]
    if context.address.ca_file:
        from remit.world.net.certificates import CertificateError, certificate_digest

        with suppress(CertificateError, OSError):
            args += ["--ca-digest", certificate_digest(Path(context.address.ca_file).read_bytes())]
    return f"run on the node's machine, with the token in FILE: {shlex.join(args)}"


def _node_args(nodes: Sequence[str]) -> list[str]:
    """Return the options that make an agent host exactly these nodes; empty if there are no such options."""
    if len(nodes) == 1:
        return ["--name", nodes[0]]
    name = nodes[0].rpartition("-")[0] if nodes else ""
    if not name or set(nodes) != {f"{name}-{number}" for number in range(1, len(nodes) + 1)}:
        return []
    return ["--name", name, "--nodes", str(len(nodes))]


def _token_name(role: str, subject: str, tenant: str, nonce: str) -> str:
    args = re.sub(r"[^a-z0-9]+", "-", f"{role}-{tenant}-{subject}".lower()).strip("-")
    return f"{args[:50].rstrip('-')}-{nonce}"


def _build_token(
    secret: str, token_name: str, role: TokenRole, subject: str, tenant: str, nodes: tuple[str, ...], expires: str
) -> Token:
    from remit.model.identity import expiry_after, token_digest
    from remit.model.kinds import Token, TokenSpec
    from remit.model.manifests.validation import validate
    from remit.model.metadata import Metadata
    from remit.model.resources import parse_duration
    from remit.world.clock import BootClock

    try:
        term_ms = parse_duration(expires)
    except ValueError as error:
        raise click.BadParameter(f"{escaped(str(error))}; use a duration such as 30d", param_hint="--expires") from error
    if not 0 < term_ms <= TERM_MS_MAX:
        raise click.BadParameter("the lifetime must be more than 0 and at most 3650d", param_hint="--expires")
    spec = TokenSpec(
        role=role,
        digest=token_digest(secret),
        expires=expiry_after(BootClock().wall(), term_ms),
        subject=subject,
        tenant=tenant,
        nodes=tuple(sorted(set(nodes))),
    )
    obj = Token(metadata=Metadata(name=token_name), spec=spec)
    for problem in validate(obj):
        raise click.UsageError(escaped(str(problem)))
    return obj


async def _create(api: Api, obj: Token) -> None:
    await api.create(obj)


def _print_token(obj: Token, secret: str, output: str) -> None:
    spec, name = obj.spec, obj.metadata.name
    if output == "json":
        import msgspec

        fields = {"name": name, "token": secret, "role": spec.role, "tenant": spec.tenant, "expires": spec.expires}
        click.echo(msgspec.json.encode(fields).decode())
        return
    owner = f" of tenant {spec.tenant}" if spec.tenant else f" of {', '.join(spec.nodes[:3])}" if spec.nodes else ""
    click.echo(f"token {name}: {spec.role}{owner}, expires {spec.expires}; it is not shown again", err=True)
    click.echo(secret)


@token.command("list", epilog=examples("remit token list", "remit token list -o wide      also print the audience of each"))
@click.option(
    "-o", "--output", type=click.Choice(["table", "wide", "json", "yaml", "name"]), default="table", show_default=True
)
@server_options()
def list_(context: CommandContext, output: str) -> None:
    """List tokens with role, subject and expiry."""
    from remit.cli.output.object_list import ListOptions, show

    call_server(context, lambda api: show(api, context, ["Token"], [], ListOptions(output)))


@token.command("revoke", epilog=examples("remit token revoke member-risk-ann-k3x2a7", "remit token revoke NAME NAME ..."))
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@server_options()
def revoke(context: CommandContext, names: tuple[str, ...]) -> None:
    """Revoke tokens permanently. Requests with them are rejected, and their open watches and streams end."""
    call_server(context, lambda api: _revoke(api, names))


async def _revoke(api: Api, names: tuple[str, ...]) -> None:
    from remit.model.kinds import Token

    for name in names:
        await api.patch(Token, name, {"spec": {"revoked": True}})
        click.echo(f"token {escaped(name)} revoked")
