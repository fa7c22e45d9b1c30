"""Who did what? Prints what people did and what anybody was refused, as the server has written it down."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click

from remit.cli.main import examples
from remit.cli.reaching import Asked, ask, asks_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remit.cli.columns import Cells
    from remit.client.api import Api
    from remit.model.answers import AuditItem

LIMIT: Final = 100


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
    "--limit", type=click.IntRange(1, 10_000), default=LIMIT, show_default=True, help="No more than the last so many."
)
@click.option("-o", "--output", type=click.Choice(["table", "wide", "json"]), default="table", show_default=True)
@asks_server()
def audit(asked: Asked, who: str, action: str, since: str, limit: int, output: str) -> None:
    """Print what people did and what anybody was refused, the newest last.

    Refusals of one sort that come soon after each other are one line with a count. With --tenant, only that tenant's people;
    somebody of a tenant is told of that one's alone.
    """
    from remit.cli.told import until_nobody_reads

    tenant = asked.reach.tenant if asked.tenant_said else ""
    with until_nobody_reads():
        ask(asked, lambda api: _show(api, tenant, who, action, since, limit, output))


async def _show(api: Api, tenant: str, who: str, action: str, since: str, limit: int, output: str) -> None:
    import msgspec

    from remit.cli.columns import Column, Sheet
    from remit.cli.told import console

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
    from remit.cli.columns import BAD, GOOD, UNSURE, Cell

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
