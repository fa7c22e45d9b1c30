"""Server options of commands, the call to the server, and the reporting of its errors.

Every command that calls a server does it through `call_server`.
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
    """A command failed. The first line of the message is the error, the next one the fix."""

    exit_code = FAILED

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message + (f"\n  {fix}" if fix else ""))


class UnplacedError(CommandError):
    """A command failed because replicas could not be placed."""

    exit_code = NOT_PLACED


class CommandContext(NamedTuple):
    """Server and tenants that a command works on. `tenant_given`: the tenant was given as an option."""

    address: ServerAddress
    all_tenants: bool = False
    tenant_given: bool = False

    @property
    def tenant(self) -> str:
        """Tenant whose objects are listed; empty means all tenants."""
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
            *args: Any,
            context: str,
            server: str,
            token_file: str,
            ca_file: str,
            tenant: str,
            all_tenants: bool = False,
            **options: Any,
        ) -> Any:
            if tenant and all_tenants:
                raise click.UsageError("--tenant and --all-tenants cannot be combined; leave one of them out")
            address = ServerFlags(context, server, token_file, tenant, ca_file).resolve()
            return command(CommandContext(address, all_tenants, bool(tenant)), *args, **options)

        decorated_command: Any = run
        if all_tenants:
            decorated_command = click.option("-A", "--all-tenants", is_flag=True, help="All tenants.")(decorated_command)
        for option in reversed((_tenant_option("-n") if without_short_t else _tenant_option("-t", "-n"), *_SERVER_OPTIONS)):
            decorated_command = option(decorated_command)
        decorated: Callable[..., None] = decorated_command
        return decorated

    return decorate


def _tenant_option(*short_options: str) -> Callable[[Any], Any]:
    return click.option(
        *short_options, "--tenant", default="", metavar="TENANT", help="Tenant. Default: REMIT_TENANT, then the context."
    )


_SERVER_OPTIONS: Final = (
    click.option("--context", default="", metavar="NAME", help="Server by its context name, see `remit context list`."),
    click.option("--server", default="", metavar="URL", help="URL of the server. Default: REMIT_SERVER, then the context."),
    click.option("--token-file", default="", metavar="FILE", help="File with the access token."),
    click.option(
        "--ca-file", default="", metavar="FILE", help="CA certificate for https. Default: REMIT_CA_FILE, then the context."
    ),
)


def call_server(context: CommandContext, operation: Callable[[Api], Coroutine[Any, Any, T]]) -> T:
    """Run `operation` with an API client and return its result. Errors of server and network become a `CommandError`."""
    from remit.client.api import Api, ApiError, Unanswered

    async def call() -> T:
        await _check_reachable(context.address)
        address = context.address
        async with Api(address.server, address.token, tenant=address.tenant, trust=address.trust) as api:
            return await operation(api)

    try:
        return asyncio.run(_unwrap_exception_group(call()))
    except ApiError as error:
        raise command_error(error) from error
    except Unanswered as error:
        raise CommandError(
            escaped(f"{context.address.server} does not respond: {error.reason}"), _fix_for_no_answer(error)
        ) from error


async def _unwrap_exception_group(work: Coroutine[Any, Any, T]) -> T:
    """Raise the first exception of a group of concurrent tasks without its group."""
    try:
        return await work
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from group


async def _check_reachable(address: ServerAddress) -> None:
    """Fail at once if no server listens. The API client would retry for a while, which is right for programs only."""
    from remit.client.http_transport import HttpTransport, UntrustedCertificate
    from remit.world.interfaces import LinkError
    from remit.world.net.tls import TlsFileError

    try:
        transport = HttpTransport(address.token, address.trust)
    except TlsFileError as error:
        raise CommandError(escaped(error.cause), escaped(error.cure)) from error
    try:
        await transport.call("GET", f"{address.server}/healthz")
    except UntrustedCertificate as error:
        raise CommandError(escaped(error.cause), escaped(error.cure)) from error
    except LinkError as error:
        named = f"context {address.context}" if address.context else "--server or REMIT_SERVER"
        fix = f"start a server with `remit up`, or use another one; the URL comes from {named}"
        raise CommandError(escaped(error.cause), escaped(fix)) from error
    finally:
        await transport.close()


def _fix_for_no_answer(error: Unanswered) -> str:
    if error.silent and error.operation_id:
        return "the request may have been applied: check with `remit get`, and repeat it if not"
    return "nothing was changed; try again later"


def print_problem_answer(about: str, problem: ProblemAnswer | None) -> None:
    """Print why one of several objects was refused."""
    from remit.client.api_caller import ApiError

    error = command_error(ApiError.of(problem), about) if problem is not None else CommandError(f"{about}: refused")
    click.echo(f"Error: {error.format_message()}", err=True)


def command_error(error: ApiError, about: str = "") -> CommandError:
    """Format an error response with all problems in it."""
    detail = error.detail or error.code or str(error)
    if error.field not in ("", "name") and not error.problems and not detail.startswith(f"{error.field}: "):
        detail = f"{error.field}: {detail}"
    message = f"{about}: {detail}" if about else detail
    if error.status == UNAUTHENTICATED:
        if error.reason in TOKEN_INVALID:
            return CommandError(
                escaped(message), "ask an admin for a new token (`remit token create`), and give its file with --token-file"
            )
        return CommandError(
            escaped(message),
            "this server does not know the token: check `remit context list`, or give another with --token-file",
        )
    lines = [escaped(message)]
    for problem in error.problems[:PROBLEMS_SHOWN]:
        place = f"{problem.field}: " if problem.field else ""
        fix = f"; {problem.cure}" if problem.cure else ""
        lines.append(f"  {escaped(place + problem.message + fix)}")
    if len(error.problems) > PROBLEMS_SHOWN:
        lines.append(f"  and {len(error.problems) - PROBLEMS_SHOWN} more")
    return CommandError("\n".join(lines), escaped(error.cure))
