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

    address: ServerAddress
    all_tenants: bool = False
    tenant_given: bool = False

    @property
    def tenant(self) -> str:
        """Of which tenant things are listed; empty means all."""
        return "" if self.all_tenants else self.address.tenant


def server_options(
    *, all_tenants: bool = False, without_short_t: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
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
            address = ServerFlags(context, server, token_file, tenant, ca_file).resolve()
            return command(CommandContext(address, all_tenants, bool(tenant)), *words, **options)

        made: Any = run
        if all_tenants:
            made = click.option("-A", "--all-tenants", is_flag=True, help="Of every tenant.")(made)
        for option in reversed((_tenant_option("-n") if without_short_t else _tenant_option("-t", "-n"), *_SERVER_OPTIONS)):
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


def call_server(context: CommandContext, operation: Callable[[Api], Coroutine[Any, Any, T]]) -> T:
    """What `deed` answers. What the server or the way there does to it is told in two lines."""
    from remit.client.api import Api, ApiError, Unanswered

    async def within() -> T:
        await _check_reachable(context.address)
        address = context.address
        async with Api(address.server, address.token, tenant=address.tenant, trust=address.trust) as api:
            return await operation(api)

    try:
        return asyncio.run(_unwrap_exception_group(within()))
    except ApiError as error:
        raise command_error(error) from error
    except Unanswered as error:
        raise CommandError(
            escaped(f"{context.address.server} does not answer: {error.reason}"), _fix_for_no_answer(error)
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


async def _check_reachable(address: ServerAddress) -> None:
    """Is anybody there? A program asks again for a while; a person would rather know at once."""
    from remit.client.http_transport import HttpTransport, UntrustedCertificate
    from remit.world.interfaces import LinkError
    from remit.world.net.tls import TlsFileError

    try:
        wire = HttpTransport(address.token, address.trust)
    except TlsFileError as error:
        raise CommandError(escaped(error.cause), escaped(error.cure)) from error
    try:
        await wire.call("GET", f"{address.server}/healthz")
    except UntrustedCertificate as error:
        raise CommandError(escaped(error.cause), escaped(error.cure)) from error
    except LinkError as error:
        named = f"context {address.context}" if address.context else "--server"
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
        if "was revoked" in said or " expired at " in said:
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
