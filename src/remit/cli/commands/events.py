"""`events`, `audit`.

Prints the account of all, or of one object, and goes on with what happens next.

Prints what people did and what anybody was refused, as the server has written it down.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import Meant, is_owned, thing_meant
from remit.cli.session.server_call import Asked, ask, asks_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remit.cli.output.console import Cells, Column
    from remit.client.api import Api
    from remit.model.wire.api_types import AuditItem, HistoryEvent

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
    from remit.cli.output.console import until_nobody_reads

    regarding = account_path(asked, thing_meant(about)) if about else ""
    with until_nobody_reads():
        ask(asked, lambda api: _events(api, regarding, type_ or "", limit, watch, output))


def account_path(asked: Asked, thing: Meant) -> str:
    """As the account names it."""
    from remit.model.objects import key_of

    return key_of(thing.kind, thing.name, (thing.tenant or asked.reach.tenant) if is_owned(thing.kind) else "")


async def _events(api: Api, regarding: str, type_: str, limit: int, watch: bool, output: str) -> None:
    from remit.cli.output.console import Sheet, console
    from remit.cli.output.serialization import json_text, spelt
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


def chosen(items: Sequence[HistoryEvent], type_: str) -> list[HistoryEvent]:
    return [item for item in items if not type_ or item.type == type_.capitalize()]


def _key(item: HistoryEvent) -> tuple[str, str, str, str]:
    return item.regarding, item.reason, item.message, item.first or item.at


# -- what it looks like --------------------------------------------------------------------------------------------------------


def columns(*, about: bool) -> tuple[Column, ...]:
    from remit.cli.output.console import Column

    regarding = (Column("REGARDING"),) if about else ()
    more = Column("REVISION", wide=True, right=True), Column("AT", wide=True)
    return (Column("TYPE"), Column("REASON"), Column("AGE"), Column("FROM"), *regarding, *more, Column("MESSAGE", fluid=True))


def row(item: HistoryEvent, wall: str, *, about: bool) -> Cells:
    from remit.cli.output.console import BAD, Cell

    regarding = (item.regarding,) if about else ()
    type_ = Cell(item.type, BAD if item.type == "Warning" else "")
    return (type_, item.reason, when(item, wall), item.source, *regarding, str(item.revision), item.at, item.message or "-")


def when(item: HistoryEvent, wall: str) -> str:
    """`12s`, or `12s (x147 over 59m)` of what repeats."""
    from remit.cli.output.object_columns import age, span

    last = age(item.at, wall) or "?"
    if item.count < 2:
        return last
    try:
        over = int((datetime.fromisoformat(item.at) - datetime.fromisoformat(item.first)).total_seconds())
    except ValueError:
        return f"{last} (x{item.count})"
    return f"{last} (x{item.count} over {span(max(0, over))})"


AUDIT_LIMIT: Final = 100


@click.command(
    epilog=examples(
        "remit audit                                  the last hundred, the newest last",
        "remit audit --who ann --limit 1000           what she did",
        "remit audit --action createToken             who made tokens",
        "remit audit --since 2027-01-31T12:00:00Z -o json",
    )
)
@click.option("--who", default="", metavar="SUBJECT", help="Only this person or program.")
@click.option("--action", default="", help="Only this, such as createWorkload; /openapi.json of a server has them all.")
@click.option("--since", default="", metavar="INSTANT", help="Nothing before it, such as 2027-01-31T12:00:00Z.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=AUDIT_LIMIT, show_default=True, help="No more than the last so many."
)
@click.option("-o", "--output", type=click.Choice(["table", "wide", "json"]), default="table", show_default=True)
@asks_server()
def audit(asked: Asked, who: str, action: str, since: str, limit: int, output: str) -> None:
    """Print what people did and what anybody was refused, the newest last.

    Refusals of one sort that come soon after each other are one line with a count. With --tenant, only that tenant's people;
    somebody of a tenant is told of that one's alone.
    """
    from remit.cli.output.console import until_nobody_reads

    tenant = asked.reach.tenant if asked.tenant_said else ""
    with until_nobody_reads():
        ask(asked, lambda api: _show(api, tenant, who, action, since, limit, output))


async def _show(api: Api, tenant: str, who: str, action: str, since: str, limit: int, output: str) -> None:
    import msgspec

    from remit.cli.output.console import Column, Sheet, console

    items = list(reversed(await api.audit(tenant=tenant, subject=who, action=action, since=since, limit=limit)))
    if output == "json":
        for item in items:
            sys.stdout.write(msgspec.json.encode(item).decode() + "\n")
        return
    if not items:
        click.echo("nothing was written down that matches", err=True)
        return
    columns = (
        Column("TIME"), Column("WHO"), Column("ROLE"), Column("TENANT"), Column("ACTION"), Column("STATUS", right=True),
        Column("COUNT", right=True), Column("TARGET", fluid=True), Column("WHY", fluid=True), Column("FROM", wide=True),
        Column("TRACE", wide=True),
    )  # fmt: skip
    Sheet(console(), columns, wide=output == "wide").show(_rows(items))


def _rows(items: Sequence[AuditItem]) -> list[Cells]:
    from remit.cli.output.console import BAD, GOOD, UNSURE, Cell

    rows: list[Cells] = []
    for one in items:
        style = GOOD if one.status < 400 else BAD if one.status >= 500 or one.status in (401, 403) else UNSURE
        why = f"{one.code}: {one.detail}" if one.code else ""
        status, many = Cell(str(one.status), style), str(one.count)
        who = (one.subject or "-", one.role or "-", one.tenant or "-")
        rows.append(
            (one.time, *who, one.action or "-", status, many, one.target, why or "-", one.address or "-", one.trace or "-")
        )
    return rows
