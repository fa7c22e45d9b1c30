"""Server flags, calls and error reporting of a command.

One door for every command that asks one.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click

from remit.cli.session.contexts import ServerAddress, ServerFlags
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api, ApiError, Unanswered
    from remit.model.wire.api_types import ProblemAnswer

T = TypeVar("T")

OK: Final = 0
FAILED: Final = 1
MISUSE: Final = 2
NOT_PLACED: Final = 3
PROBLEMS_SHOWN: Final = 20
UNAUTHENTICATED: Final = 401
TOKEN_INVALID: Final = frozenset({"token_revoked", "token_expired"})
"""Reasons for which a new token is needed."""


class CommandError(click.ClickException):
    """It was not done. The first line says what, the next what to do about it."""

    exit_code = FAILED

    def __init__(self, what: str, cure: str = "") -> None:
        super().__init__(what + (f"\n  {cure}" if cure else ""))


class UnplacedError(CommandError):
    """Work of it has no place."""

    exit_code = NOT_PLACED


class CommandContext(NamedTuple):
    """What every command knows: where to ask, and whether all tenants' things are meant."""

    reach: ServerAddress
    everyone: bool = False
    tenant_said: bool = False

    @property
    def tenant(self) -> str:
        """Of which tenant things are listed; empty means all."""
        return "" if self.everyone else self.reach.tenant


def server_options(*, everyone: bool = False, t_taken: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The flags of every command that asks a server; what they come to is the command's first argument. `t_taken`: -t means
    something else there.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(
            *words: Any,
            context: str,
            server: str,
            token_file: str,
            ca_file: str,
            tenant: str,
            all_tenants: bool = False,
            **options: Any,
        ) -> Any:
            if tenant and all_tenants:
                raise click.UsageError("--tenant names one, and --all-tenants means every one; write one of the two")
            reach = ServerFlags(context, server, token_file, tenant, ca_file).reach()
            return command(CommandContext(reach, all_tenants, bool(tenant)), *words, **options)

        made: Any = run
        if everyone:
            made = click.option("-A", "--all-tenants", is_flag=True, help="Of every tenant.")(made)
        for option in reversed((_tenant_option("-n") if t_taken else _tenant_option("-t", "-n"), *_SERVER_OPTIONS)):
            made = option(made)
        decorated: Callable[..., None] = made
        return decorated

    return decorate


def _tenant_option(*letters: str) -> Callable[[Any], Any]:
    return click.option(*letters, "--tenant", default="", metavar="TENANT", help="Whose; else REMIT_TENANT, or the context's.")


_SERVER_OPTIONS: Final = (
    click.option("--context", default="", metavar="NAME", help="The server, by its name in `remit context list`."),
    click.option("--server", default="", metavar="URL", help="The server itself; else REMIT_SERVER, or the context's."),
    click.option("--token-file", default="", metavar="FILE", help="The file with the token for it."),
    click.option("--ca-file", default="", metavar="FILE", help="Who signs for it at https; else REMIT_CA_FILE, the context's."),
)


def call_server(asked: CommandContext, deed: Callable[[Api], Coroutine[Any, Any, T]]) -> T:
    """What `deed` answers. What the server or the way there does to it is told in two lines."""
    from remit.client.api import Api, ApiError, Unanswered

    async def within() -> T:
        await _check_reachable(asked.reach)
        reach = asked.reach
        async with Api(reach.server, reach.token, tenant=reach.tenant, trust=reach.trust) as api:
            return await deed(api)

    try:
        return asyncio.run(_unwrap_exception_group(within()))
    except ApiError as error:
        raise command_error(error) from error
    except Unanswered as error:
        raise CommandError(
            escaped(f"{asked.reach.server} does not answer: {error.reason}"), _fix_for_no_answer(error)
        ) from error


async def _unwrap_exception_group(work: Coroutine[Any, Any, T]) -> T:
    """What failed first among tasks that ran side by side is told as if it had run by itself."""
    try:
        return await work
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from group


async def _check_reachable(reach: ServerAddress) -> None:
    """Is anybody there? A program asks again for a while; a person would rather know at once."""
    from remit.client.http_transport import HttpTransport, UntrustedCertificate
    from remit.world.interfaces import LinkError
    from remit.world.net.tls import TlsFileError

    try:
        wire = HttpTransport(reach.token, reach.trust)
    except TlsFileError as error:
        raise CommandError(escaped(error.cause), escaped(error.cure)) from error
    try:
        await wire.call("GET", f"{reach.server}/healthz")
    except UntrustedCertificate as error:
        raise CommandError(escaped(error.cause), escaped(error.cure)) from error
    except LinkError as error:
        named = f"context {reach.context}" if reach.context else "--server"
        cure = f"start it with `remit up`, or name another server: that was {named}"
        raise CommandError(escaped(error.cause), escaped(cure)) from error
    finally:
        await wire.close()


def _fix_for_no_answer(error: Unanswered) -> str:
    if error.silent and error.operation_id:
        return "it may have happened: look with `remit get`, and ask again if it has not"
    return "nothing was changed: ask again later"


def print_problem_answer(about: str, problem: ProblemAnswer | None) -> None:
    """Why one of many was not done."""
    from remit.client.api_caller import ApiError

    told = command_error(ApiError.of(problem), about) if problem is not None else CommandError(f"{about}: refused")
    click.echo(f"Error: {told.format_message()}", err=True)


def command_error(error: ApiError, about: str = "") -> CommandError:
    """The server's words, with every problem that it found."""
    said = error.detail or error.code or str(error)
    if error.field and not error.problems and not said.startswith(f"{error.field}: "):
        said = f"{error.field}: {said}"
    what = f"{about}: {said}" if about else said
    if error.status == UNAUTHENTICATED:
        if error.reason in TOKEN_INVALID:
            return CommandError(
                escaped(what), "let an admin make another (`remit token create`), and name its file with --token-file"
            )
        return CommandError(
            escaped(what), "the token is not this server's: see `remit context list`, or name it with --token-file"
        )
    lines = [escaped(what)]
    for problem in error.problems[:PROBLEMS_SHOWN]:
        place = f"{problem.field}: " if problem.field else ""
        cure = f"; {problem.cure}" if problem.cure else ""
        lines.append(f"  {escaped(place + problem.message + cure)}")
    if len(error.problems) > PROBLEMS_SHOWN:
        lines.append(f"  and {len(error.problems) - PROBLEMS_SHOWN} more")
    return CommandError("\n".join(lines), escaped(error.cure))
