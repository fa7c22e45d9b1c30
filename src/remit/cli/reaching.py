"""How does a command reach its server, and how does it say what went wrong? One door for every command that asks one."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click

from remit.cli.contexts import Reach, resolve
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.client.calling import ApiError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

OK: Final = 0
FAILED: Final = 1
MISUSE: Final = 2
NOT_PLACED: Final = 3
PROBLEMS_SHOWN: Final = 20


class Failure(click.ClickException):
    """It was not done. The first line says what, the next what to do about it."""

    exit_code = FAILED

    def __init__(self, what: str, cure: str = "", *, code: int = FAILED) -> None:
        super().__init__(what + (f"\n  {cure}" if cure else ""))
        self.exit_code = code


class Asked(NamedTuple):
    """What every command knows: where to ask, and whether all tenants' things are meant."""

    reach: Reach
    everyone: bool = False
    tenant_said: bool = False

    @property
    def tenant(self) -> str:
        """Of which tenant things are listed; empty means all."""
        return "" if self.everyone else self.reach.tenant


def asks_server(command: F | None = None, *, everyone: bool = False) -> Any:
    """The flags of every command that asks a server; what they come to is the command's first argument."""

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def run(
            *words: Any, context: str, server: str, token_file: str, tenant: str, all_tenants: bool = False, **options: Any
        ) -> Any:
            if tenant and all_tenants:
                raise click.UsageError("--tenant names one, and --all-tenants means every one; write one of the two")
            reach = resolve(context=context, server=server, token_file=token_file, tenant=tenant)
            return command(Asked(reach, all_tenants, bool(tenant)), *words, **options)

        made: Any = run
        if everyone:
            made = click.option("-A", "--all-tenants", is_flag=True, help="Of every tenant.")(made)
        for option in reversed(_OPTIONS):
            made = option(made)
        return made  # type: ignore[no-any-return]

    return decorate(command) if command is not None else decorate


_OPTIONS: Final = (
    click.option("-t", "-n", "--tenant", default="", metavar="TENANT", help="Whose; else REMIT_TENANT, or the context's."),
    click.option("--context", default="", metavar="NAME", help="The server, by its name in `remit context list`."),
    click.option("--server", default="", metavar="URL", help="The server itself; else REMIT_SERVER, or the context's."),
    click.option("--token-file", default="", metavar="FILE", help="The file with the token for it."),
)


def ask(asked: Asked, deed: Callable[[Api], Coroutine[Any, Any, T]]) -> T:
    """What `deed` answers. What the server or the way there does to it is told in two lines."""
    from remit.client.api import Api
    from remit.client.calling import ApiError, Unanswered

    async def within() -> T:
        async with Api(asked.reach.server, asked.reach.token, tenant=asked.reach.tenant) as api:
            return await deed(api)

    try:
        return asyncio.run(within())
    except ApiError as error:
        raise refusal(error) from error
    except Unanswered as error:
        raise Failure(escaped(str(error))) from error


def refusal(error: ApiError, about: str = "") -> Failure:
    """The server's words, with every problem that it found."""
    what = f"{about}: {error.detail}" if about else error.detail
    lines = [escaped(what)]
    for problem in error.problems[:PROBLEMS_SHOWN]:
        place = f"{problem.field}: " if problem.field else ""
        cure = f"; {problem.cure}" if problem.cure else ""
        lines.append(f"  {escaped(place + problem.message + cure)}")
    if len(error.problems) > PROBLEMS_SHOWN:
        lines.append(f"  and {len(error.problems) - PROBLEMS_SHOWN} more")
    return Failure("\n".join(lines), escaped(error.cure))
