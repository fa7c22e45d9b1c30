"""How does something go? Asks the server to delete it, and can wait until it is gone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from remit.cli.main import examples
from remit.cli.reaching import FAILED, OK, Asked, ask, asks_server, refusal
from remit.cli.spoken import ENDPOINTS, Meant, complete_kind, is_owned, things_meant
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api


@click.command(
    epilog=examples(
        "remit delete workload web                   its replicas drain and stop first",
        "remit delete workload web --wait            until it is gone",
        "remit delete -f web.yaml                    everything that the file declares",
        "remit delete workloads -l app=web           all with this label",
    )
)
@click.argument("what", nargs=-1, metavar="[KIND NAME...]", shell_complete=complete_kind)
@click.option(
    "-f", "--file", "files", multiple=True, metavar="FILE", type=click.Path(allow_dash=True), help="What these declare."
)
@click.option("-l", "--selector", default="", metavar="LABELS", help="All of the KIND with these labels.")
@click.option("--wait", is_flag=True, help="Wait until it is gone.")
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="How long to wait.")
@click.option("--ignore-not-found", is_flag=True, help="What is not there counts as deleted.")
@asks_server()
def delete(
    asked: Asked,
    what: tuple[str, ...],
    files: tuple[str, ...],
    selector: str,
    wait: bool,
    timeout: str,
    ignore_not_found: bool,
) -> None:
    """Delete objects by KIND and NAME, as files declare them, or by labels.

    A workload goes once its replicas have drained and stopped. Exits with 1 if anything could not be deleted.
    """
    from remit.cli.waiting import timeout_of

    if bool(what) == bool(files):
        raise click.UsageError("name KIND and NAME, or files with -f, and not both")
    timeout_ms = timeout_of(timeout) if wait else 0
    kinds, things = ([], _of_files(files, asked)) if files else things_meant(what)
    if kinds and not selector:
        raise click.UsageError(f"say which {what[0]}: write their NAMEs, or select them with -l")
    if things and selector:
        raise click.UsageError("name objects, or select them with -l, and not both")
    sys.exit(ask(asked, lambda api: _delete(api, asked, kinds, things, selector, timeout_ms, ignore_not_found)))


def _of_files(files: tuple[str, ...], asked: Asked) -> list[Meant]:
    """The last declared goes first: what others depend on comes last."""
    from remit.cli.reading import declared

    things = declared(files, asked.reach.tenant if asked.tenant_said else "")
    return [Meant(type(thing).__name__, thing.metadata.name, thing.metadata.tenant) for thing in reversed(things)]


async def _delete(
    api: Api,
    asked: Asked,
    kinds: Sequence[str],
    things: Sequence[Meant],
    selector: str,
    timeout_ms: int,
    lenient: bool,
) -> int:
    from remit.cli.finding import NOT_FOUND, class_of, missing, path_of, tenant_of
    from remit.cli.waits import Gone
    from remit.client.calling import ApiError

    for kind in kinds:
        listed = await api.list(class_of(kind), tenant=asked.tenant if is_owned(kind) else "", labels=selector)
        things = [*things, *(Meant(kind, one.metadata.name, one.metadata.tenant) for one in listed.items)]
    if not things:
        click.echo("nothing matches", err=True)
    failed, going = 0, []
    for thing in things:
        if thing.kind == ENDPOINTS:
            raise click.UsageError("endpoints come and go with what serves; delete or scale the workload")
        tenant = tenant_of(asked, thing)
        try:
            done = await api.delete(class_of(thing.kind), thing.name, tenant=tenant)
        except ApiError as error:
            if error.status == NOT_FOUND and lenient:
                continue
            told = await missing(api, asked, thing) if error.status == NOT_FOUND else refusal(error, path_of(asked, thing))
            click.echo(f"Error: {told.format_message()}", err=True)
            failed += 1
            continue
        going.append(Gone(thing, tenant, path_of(asked, thing)))
        said = "deleted" if done.action == "deleted" else "is going: deleted once what is left of it has ended"
        click.echo(f"{escaped(path_of(asked, thing))} {said}")
    if timeout_ms and going:
        from remit.cli.waiting import until

        sys.stdout.flush()
        await until(api, going, timeout_ms)
        for one in going:
            click.echo(f"{escaped(one.name)} is gone")
    return FAILED if failed else OK
