"""`token create`, `token list`, `token revoke`.

Makes, lists and revokes tokens. A new one is made here and shown once: the server is told its digest alone.
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
from remit.cli.session.server_call import Asked, ask, asks_server
from remit.model.identity import TokenRole
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.model.identity import Token

TERMS: Final = {"join": "1h", "agent": "365d", "scheduler": "365d", "controllers": "365d"}
TERM: Final = "90d"
TERM_MS_MAX: Final = 3_650 * 86_400_000


@click.group(
    no_args_is_help=True,
    epilog=examples(
        "remit token create --role member --tenant risk --for ann     she reads and writes what is risk's",
        "remit token create --role viewer --for prometheus            it reads all tenants', and changes nothing",
        "remit token create --role join --node n7                     for `remit agent --join`, once, within the hour",
        "remit token create --role scheduler > scheduler.token        for `remit scheduler --token-file`",
        "remit token list",
        "remit token revoke member-ann",
    ),
)
def token() -> None:
    """Who may ask a server, as what, and until when.

    What is kept of a token is its digest: one that was lost is not found again, but revoked, and another made. A role is one of
    admin (everything), member (of a tenant: its work, secrets and configs), viewer (reads; of one tenant, or of all), agent and
    join (of nodes), scheduler and controllers.
    """


@token.command(
    "create",
    epilog=examples(
        "remit token create --role member --tenant risk --for ann --expires 30d",
        "remit token create --role admin --for grace --name grace-laptop",
        "remit token create --role member --tenant risk --for ci -o json      with its name and its end, for scripts",
    ),
)
@click.option("--role", type=click.Choice(get_args(TokenRole)), required=True, help="As what its holder asks.")
@click.option(
    "--for", "subject", default="", metavar="WHO", help="Whom it is for, as the audit calls them.  [default: its name]"
)
@click.option(
    "--node", "nodes", multiple=True, metavar="NAME", help="For agents and joining: a node of theirs; say it for each."
)
@click.option("--name", default="", help="What the token is called.  [default: its role, and whom it is for]")
@click.option("--expires", default="", metavar="DURATION", help=f"When it ends.  [default: {TERM}; a join token's 1h]")
@click.option("-o", "--output", type=click.Choice(["token", "json"]), default="token", show_default=True)
@asks_server()
def create(asked: Asked, role: TokenRole, subject: str, nodes: tuple[str, ...], name: str, expires: str, output: str) -> None:
    """Make a token, and print it: this once.

    The token is the last line on stdout, and all else goes to stderr: so it can be sent into a file. A member's, and a viewer's
    if it is to be one tenant's, is of the tenant that --tenant names.
    """
    from remit.cli.session.token_files import new_token
    from remit.world.randomness import RandomIds

    ids = RandomIds()
    made = new_token(ids)
    mine = asked.reach.tenant if role == "member" or (role == "viewer" and asked.tenant_said) else ""
    called = name or _called(role, subject, mine, ids.nonce()[:6])
    thing = _declared(made, called, role, subject, mine, nodes, expires or TERMS.get(role, TERM))
    ask(asked, lambda api: _create(api, thing))
    if role == "join" and output == "token":
        click.echo(_joining(asked, thing), err=True)
    _tell(thing, made, output)


def _joining(asked: Asked, thing: Token) -> str:
    """The whole line to copy, with what the server is known by; but not the token, which may be on its way into a file."""
    named = _played(thing.spec.nodes)
    if not named:
        return "an agent's nodes are NAME, or NAME-1 to NAME-N: make a join token of each other one, and run an agent with it"
    words = ["remit", "agent", "--server", asked.reach.server, "--join", "FILE", "--data", "agent", *named]
    if asked.reach.ca_file:
        from remit.world.net.certificates import CertificateError, certificate_digest

        with suppress(CertificateError, OSError):
            words += ["--ca-digest", certificate_digest(Path(asked.reach.ca_file).read_bytes())]
    return f"on that machine, with the token in FILE: {shlex.join(words)}"


def _played(nodes: Sequence[str]) -> list[str]:
    """By which options an agent has just these nodes; none if no agent can."""
    if len(nodes) == 1:
        return ["--name", nodes[0]]
    name = nodes[0].rpartition("-")[0] if nodes else ""
    if not name or set(nodes) != {f"{name}-{number}" for number in range(1, len(nodes) + 1)}:
        return []
    return ["--name", name, "--nodes", str(len(nodes))]


def _called(role: str, subject: str, tenant: str, nonce: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", f"{role}-{tenant}-{subject}".lower()).strip("-")
    return f"{words[:50].rstrip('-')}-{nonce}"


def _declared(
    made: str, called: str, role: TokenRole, subject: str, tenant: str, nodes: tuple[str, ...], expires: str
) -> Token:
    from remit.model.identity import Token, TokenSpec, expiry_after, token_digest
    from remit.model.manifests.validation import validate
    from remit.model.metadata import Metadata
    from remit.model.resources import parse_duration
    from remit.world.clock import BootClock

    try:
        term_ms = parse_duration(expires)
    except ValueError as error:
        raise click.BadParameter(f"{escaped(str(error))}; write one such as 30d", param_hint="--expires") from error
    if not 0 < term_ms <= TERM_MS_MAX:
        raise click.BadParameter("a token lasts for some time, and for ten years at most", param_hint="--expires")
    spec = TokenSpec(
        role=role,
        digest=token_digest(made),
        expires=expiry_after(BootClock().wall(), term_ms),
        subject=subject,
        tenant=tenant,
        nodes=tuple(sorted(set(nodes))),
    )
    thing = Token(metadata=Metadata(name=called), spec=spec)
    for problem in validate(thing):
        raise click.UsageError(escaped(str(problem)))
    return thing


async def _create(api: Api, thing: Token) -> None:
    await api.create(thing)


def _tell(thing: Token, made: str, output: str) -> None:
    spec, name = thing.spec, thing.metadata.name
    if output == "json":
        import msgspec

        told = {"name": name, "token": made, "role": spec.role, "tenant": spec.tenant, "expires": spec.expires}
        click.echo(msgspec.json.encode(told).decode())
        return
    of = f" of tenant {spec.tenant}" if spec.tenant else f" of {', '.join(spec.nodes[:3])}" if spec.nodes else ""
    click.echo(f"token {name}: {spec.role}{of}, until {spec.expires}; it is not shown again", err=True)
    click.echo(made)


@token.command("list", epilog=examples("remit token list", "remit token list -o wide      with the door that each is for"))
@click.option(
    "-o", "--output", type=click.Choice(["table", "wide", "json", "yaml", "name"]), default="table", show_default=True
)
@asks_server()
def list_(asked: Asked, output: str) -> None:
    """List the tokens: whose they are, for what, and when they end."""
    from remit.cli.output.object_list import Wish, show

    ask(asked, lambda api: show(api, asked, ["Token"], [], Wish(output)))


@token.command("revoke", epilog=examples("remit token revoke member-risk-ann-k3x2a7", "remit token revoke NAME NAME ..."))
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@asks_server()
def revoke(asked: Asked, names: tuple[str, ...]) -> None:
    """End tokens, for good: nobody is let in by them any more, and whatever their holders are being told ends."""
    ask(asked, lambda api: _revoke(api, names))


async def _revoke(api: Api, names: tuple[str, ...]) -> None:
    from remit.model.identity import Token

    for name in names:
        await api.patch(Token, name, {"spec": {"revoked": True}})
        click.echo(f"token {escaped(name)} revoked")
