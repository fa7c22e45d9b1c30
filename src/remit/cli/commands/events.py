"""Commands `events` and `audit`: print recorded events of objects, and the audit log of API requests.

Both print the newest entry last. The server records events and audit entries; this module filters and formats them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import ObjectRef, is_tenant_scoped, parse_object_ref
from remit.cli.session.server_call import CommandContext, call_server, server_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remit.cli.output.console import Cells, Column
    from remit.client.api import Api
    from remit.model.wire.api_types import AuditItem, HistoryEvent

LIMIT: Final = 100
LIMIT_MAX: Final = 1_000
"""Maximum number of events that the server returns for one request."""

POLL_MS: Final = 2_000


@click.command(
    epilog=examples(
        "remit events                               latest events of all tenants and nodes",
        "remit events --for workload/web            events of one object",
        "remit events --for node/n7 -w              also print new events as they occur",
        "remit events --type Warning --limit 500    only warnings",
    )
)
@click.option("--for", "about", default="", metavar="KIND/NAME", help="Only events of this object.")
@click.option(
    "--type", "type_", type=click.Choice(["Normal", "Warning"], case_sensitive=False), help="Only events of this type."
)
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=LIMIT,
    show_default=True,
    help="Maximum number of events; the latest are kept. With --type it counts events of that type only.",
)
@click.option("-w", "--watch", is_flag=True, help="Keep printing new events.")
@click.option(
    "-o", "--output", type=click.Choice(["table", "wide", "json"]), default="table", show_default=True, help="Output format."
)
@server_options()
def events(context: CommandContext, about: str, type_: str | None, limit: int, watch: bool, output: str) -> None:
    """Print events, newest last: reports of components, and operations that the leader (authority) accepted or refused.

    Repeated events are one line with a count and the time span.
    """
    from remit.cli.output.console import until_broken_pipe

    regarding = account_path(context, parse_object_ref(about)) if about else ""
    with until_broken_pipe():
        call_server(context, lambda api: _events(api, regarding, type_ or "", limit, watch, output))


def account_path(context: CommandContext, ref: ObjectRef) -> str:
    """Return the object's key in the event history, such as `workload/default/web`."""
    from remit.model.objects import key_of

    return key_of(ref.kind, ref.name, (ref.tenant or context.address.tenant) if is_tenant_scoped(ref.kind) else "")


async def _events(api: Api, regarding: str, type_: str, limit: int, watch: bool, output: str) -> None:
    from remit.cli.output.console import Sheet, console
    from remit.cli.output.serialization import escape_json, json_text
    from remit.model.objects import encode
    from remit.world.clock import BootClock

    # The server cannot filter by type: a request for only `limit` events could return none of this type.
    page = LIMIT_MAX if type_ else limit
    latest = await api.account(regarding, limit=page)
    events = filter_type(latest, type_)[-limit:]
    if output == "json" and not watch:
        sys.stdout.write(json_text({"kind": "AccountList", "items": events}))
        return
    clock = BootClock()
    about = not regarding or regarding.startswith("workload/")  # its events include those of its replicas
    sheet = Sheet(console(), columns(about=about), wide=output == "wide")
    if not events and not watch:
        click.echo(_empty_text(regarding, type_, len(latest)), err=True)
        return
    printed: dict[tuple[str, str, str, str], int] = {}
    while True:
        fresh = [item for item in events if printed.get(_key(item)) != item.count]
        printed = {**printed, **{_key(item): item.count for item in events}}
        if output == "json":
            sys.stdout.writelines(escape_json(encode(item).decode()) + "\n" for item in fresh)
        elif fresh:
            sheet.show(row(item, clock.wall(), about=about) for item in fresh)
        sys.stdout.flush()
        if not watch:
            return
        await clock.sleep_ms(POLL_MS)
        events = filter_type(await api.account(regarding, limit=page), type_)[-limit:]


def _empty_text(regarding: str, type_: str, searched: int) -> str:
    about = f" for {regarding}" if regarding else ""
    if not searched:
        return f"no events recorded{about}"
    return f"no {type_.capitalize()} event among the latest {searched:,}{about}"


def filter_type(items: Sequence[HistoryEvent], type_: str) -> list[HistoryEvent]:
    return [item for item in items if not type_ or item.type == type_.capitalize()]


def _key(item: HistoryEvent) -> tuple[str, str, str, str]:
    return item.regarding, item.reason, item.message, item.first or item.at


# -- text output ---------------------------------------------------------------------------------------------------------------


def columns(*, about: bool) -> tuple[Column, ...]:
    from remit.cli.output.console import Column

    regarding = (Column("REGARDING"),) if about else ()
    details = Column("REVISION", wide=True, right=True), Column("AT", wide=True)
    return (
        Column("TYPE"),
        Column("REASON"),
        Column("AGE"),
        Column("FROM"),
        *regarding,
        *details,
        Column("MESSAGE", fluid=True),
    )


def row(item: HistoryEvent, wall: str, *, about: bool) -> Cells:
    from remit.cli.output.console import BAD, Cell

    regarding = (item.regarding or "-",) if about else ()
    type_ = Cell(item.type, BAD if item.type == "Warning" else "")
    return (type_, item.reason, when(item, wall), item.source, *regarding, str(item.revision), item.at, item.message or "-")


def when(item: HistoryEvent, wall: str) -> str:
    """Return the age of an event: `12s`, or `12s (x147 over 59m)` if it was repeated."""
    from remit.cli.output.object_columns import age, format_span

    last = age(item.at, wall) or "?"
    if item.count < 2:
        return last
    try:
        seconds = int((datetime.fromisoformat(item.at) - datetime.fromisoformat(item.first)).total_seconds())
    except ValueError:
        return f"{last} (x{item.count})"
    return f"{last} (x{item.count} over {format_span(max(0, seconds))})"


AUDIT_LIMIT: Final = 100


@click.command(
    epilog=examples(
        "remit audit                                  the latest 100 entries, newest last",
        "remit audit --who ann --limit 1000           requests of one user",
        "remit audit --action createToken             who created tokens",
        "remit audit --since 2027-01-31T12:00:00Z -o json",
    )
)
@click.option("--who", default="", metavar="SUBJECT", help="Only requests of this user or program.")
@click.option(
    "--action",
    default="",
    help="Only this operation, such as createWorkload; the server's /openapi.json lists all operation ids.",
)
@click.option("--since", default="", metavar="INSTANT", help="Only entries from this time on, such as 2027-01-31T12:00:00Z.")
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=AUDIT_LIMIT,
    show_default=True,
    help="Maximum number of entries; the latest are kept.",
)
@click.option(
    "-o", "--output", type=click.Choice(["table", "wide", "json"]), default="table", show_default=True, help="Output format."
)
@server_options()
def audit(context: CommandContext, who: str, action: str, since: str, limit: int, output: str) -> None:
    """Print the audit log, newest last: requests of users that change something, read logs or a backup, or run commands,
    and refused requests.

    TENANT is the tenant of the caller. Similar refusals in a short time are one line with a count. --tenant limits the output
    to users of that tenant. A token of a tenant sees only entries of that tenant.
    """
    from remit.cli.output.console import until_broken_pipe

    tenant = context.address.tenant if context.tenant_given else ""
    with until_broken_pipe():
        call_server(context, lambda api: _show(api, tenant, who, action, since, limit, output))


async def _show(api: Api, tenant: str, who: str, action: str, since: str, limit: int, output: str) -> None:
    import msgspec

    from remit.cli.output.console import Column, Sheet, console

    items = list(reversed(await api.audit(tenant=tenant, subject=who, action=action, since=since, limit=limit)))
    if output == "json":
        for item in items:
            sys.stdout.write(msgspec.json.encode(item).decode() + "\n")
        return
    if not items:
        click.echo("no audit entries match", err=True)
        return
    columns = (
        Column("TIME"), Column("WHO"), Column("ROLE"), Column("TENANT"), Column("ACTION"), Column("STATUS", right=True),
        Column("COUNT", right=True), Column("TARGET", fluid=True), Column("REASON", fluid=True), Column("ADDRESS", wide=True),
        Column("TRACE", wide=True),
    )  # fmt: skip
    Sheet(console(), columns, wide=output == "wide").show(_rows(items))


def _rows(items: Sequence[AuditItem]) -> list[Cells]:
    from remit.cli.output.console import BAD, GOOD, UNSURE, Cell

    rows: list[Cells] = []
    for item in items:
        style = GOOD if item.status < 400 else BAD if item.status >= 500 or item.status in (401, 403) else UNSURE
        why = f"{item.code}: {item.detail}" if item.code else ""
        status, many = Cell(str(item.status), style), str(item.count)
        who = (item.subject or "-", item.role or "-", item.tenant or "-")
        rows.append(
            (item.time, *who, item.action or "-", status, many, item.target, why or "-", item.address or "-", item.trace or "-")
        )
    return rows
