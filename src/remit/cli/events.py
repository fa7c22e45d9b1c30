"""What has happened? Prints the account of all, or of one object, and goes on with what happens next."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from remit.cli.main import examples
from remit.cli.reaching import Asked, ask, asks_server
from remit.cli.spoken import Meant, is_owned, thing_meant

if TYPE_CHECKING:
    from remit.cli.columns import Cells, Column
    from remit.client.api import Api
    from remit.model.answers import AccountItem

LIMIT: Final = 100
LOOK_MS: Final = 2_000


@click.command(
    epilog=examples(
        "remit events                               the last of all tenants' and nodes'",
        "remit events --for workload/web            of one object",
        "remit events --for node/n7 -w              and go on",
        "remit events --type Warning --limit 500    only what was wrong",
    )
)
@click.option("--for", "about", default="", metavar="KIND/NAME", help="Only what happened to this one.")
@click.option("--type", "type_", type=click.Choice(["Normal", "Warning"], case_sensitive=False), help="Only of this type.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=LIMIT, show_default=True, help="No more than the last so many."
)
@click.option("-w", "--watch", is_flag=True, help="Go on with what happens next.")
@click.option("-o", "--output", type=click.Choice(["table", "wide", "json"]), default="table", show_default=True)
@asks_server()
def events(asked: Asked, about: str, type_: str | None, limit: int, watch: bool, output: str) -> None:
    """Print what happened, the newest last: what components reported, and what the authority accepted or refused.

    What repeats is told once, with how often and over what time.
    """
    from remit.cli.told import until_nobody_reads

    regarding = account_path(asked, thing_meant(about)) if about else ""
    with until_nobody_reads():
        ask(asked, lambda api: _events(api, regarding, type_ or "", limit, watch, output))


def account_path(asked: Asked, thing: Meant) -> str:
    """As the account names it."""
    from remit.model.objects import key_of

    return key_of(thing.kind, thing.name, (thing.tenant or asked.reach.tenant) if is_owned(thing.kind) else "")


async def _events(api: Api, regarding: str, type_: str, limit: int, watch: bool, output: str) -> None:
    from remit.cli.columns import Sheet
    from remit.cli.told import console
    from remit.cli.written import json_text, spelt
    from remit.model.objects import encode
    from remit.world.clock import BootClock

    found = chosen(await api.account(regarding, limit=limit), type_)
    if output == "json" and not watch:
        sys.stdout.write(json_text({"kind": "AccountList", "items": found}))
        return
    clock = BootClock()
    about = not regarding or regarding.startswith("workload/")  # what happens to its replicas happens to it
    sheet = Sheet(console(), columns(about=about), wide=output == "wide")
    if not found and not watch:
        click.echo(f"nothing is recorded{f' of {regarding}' if regarding else ''}", err=True)
        return
    known: dict[tuple[str, str, str, str], int] = {}
    while True:
        fresh = [item for item in found if known.get(_key(item)) != item.count]
        known = {**known, **{_key(item): item.count for item in found}}
        if output == "json":
            sys.stdout.writelines(spelt(encode(item).decode()) + "\n" for item in fresh)
        elif fresh:
            sheet.show(row(item, clock.wall(), about=about) for item in fresh)
        sys.stdout.flush()
        if not watch:
            return
        await clock.sleep_ms(LOOK_MS)
        found = chosen(await api.account(regarding, limit=limit), type_)


def chosen(items: Sequence[AccountItem], type_: str) -> list[AccountItem]:
    return [item for item in items if not type_ or item.type == type_.capitalize()]


def _key(item: AccountItem) -> tuple[str, str, str, str]:
    return item.regarding, item.reason, item.message, item.first or item.at


# -- what it looks like --------------------------------------------------------------------------------------------------------


def columns(*, about: bool) -> tuple[Column, ...]:
    from remit.cli.columns import Column

    regarding = (Column("REGARDING"),) if about else ()
    more = Column("REVISION", wide=True, right=True), Column("AT", wide=True)
    return (Column("TYPE"), Column("REASON"), Column("AGE"), Column("FROM"), *regarding, *more, Column("MESSAGE", fluid=True))


def row(item: AccountItem, wall: str, *, about: bool) -> Cells:
    from remit.cli.columns import BAD, Cell

    regarding = (item.regarding,) if about else ()
    type_ = Cell(item.type, BAD if item.type == "Warning" else "")
    return (type_, item.reason, when(item, wall), item.source, *regarding, str(item.revision), item.at, item.message or "-")


def when(item: AccountItem, wall: str) -> str:
    """`12s`, or `12s (x147 over 59m)` of what repeats."""
    from remit.cli.listed import age, span

    last = age(item.at, wall) or "?"
    if item.count < 2:
        return last
    try:
        over = int((datetime.fromisoformat(item.at) - datetime.fromisoformat(item.first)).total_seconds())
    except ValueError:
        return f"{last} (x{item.count})"
    return f"{last} (x{item.count} over {span(max(0, over))})"
