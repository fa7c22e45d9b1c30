"""How do manifests become true? Sends them all at once, says what became of each, and can wait until it is so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from remit.cli.main import examples
from remit.cli.reaching import FAILED, OK, Asked, ask, asks_server, tell_problem
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.model.answers import ApplyAnswer
    from remit.model.objects import AnyObject

STYLES = {"created": "green", "replaced": "yellow", "refused": "red"}


@click.command(
    epilog=examples(
        "remit apply -f risk-api.yaml                        create it, or replace what is there",
        "remit apply -f cluster/ -f risk-api.yaml --wait     a directory and a file; until all of it stands",
        "helm template chart | remit apply -f -              what comes through a pipe",
        "remit apply -f web.yaml --if-unchanged 812          only if all is as `remit plan` has seen it",
    )
)
@click.option(
    "-f", "--file", "files", multiple=True, required=True, metavar="FILE", type=click.Path(allow_dash=True),
    help="A manifest, a directory of them, or - for a pipe; may be given again.",
)  # fmt: skip
@click.option(
    "--if-unchanged", type=click.IntRange(min=1), metavar="REVISION", help="Apply nothing if any of it changed since."
)
@click.option("--wait", is_flag=True, help="Wait until services are ready and jobs run, and show how far each is.")
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="How long to wait.")
@click.option("-o", "--output", type=click.Choice(["text", "json", "name"]), default="text", show_default=True)
@asks_server()
def apply(asked: Asked, files: tuple[str, ...], if_unchanged: int | None, wait: bool, timeout: str, output: str) -> None:
    """Create or replace what manifests declare.

    Everything is judged first: if anything is wrong with any of them, nothing is sent. What others depend on comes first.
    Exits with 0 if all of it was done, 1 if not, 2 if a file cannot be read, and 3 if --wait ended with work that has no place.
    """
    from remit.cli.reading import declared
    from remit.cli.waiting import timeout_of

    timeout_ms = timeout_of(timeout)
    things = declared(files, asked.reach.tenant if asked.tenant_said else "")
    sys.exit(ask(asked, lambda api: _apply(api, asked, things, if_unchanged, timeout_ms if wait else 0, output)))


async def _apply(
    api: Api, asked: Asked, things: Sequence[AnyObject], if_unchanged: int | None, wait_ms: int, output: str
) -> int:
    answer = await api.apply(things, if_unchanged=if_unchanged)
    show(answer, asked, output)
    refused = any(one.action == "refused" for one in answer.results)
    workloads = [one for one in answer.results if one.kind == "Workload" and one.action != "refused"]
    if wait_ms and workloads:
        from remit.cli.finding import said_path
        from remit.cli.waiting import Arrived, until

        sys.stdout.flush()
        await until(
            api,
            [Arrived(one.name, one.tenant, shown=said_path(asked, one.kind, one.name, one.tenant)) for one in workloads],
            wait_ms,
        )
    return FAILED if refused else OK


def show(answer: ApplyAnswer, asked: Asked, output: str) -> None:
    from remit.cli.finding import said_path
    from remit.cli.written import json_text

    if output == "json":
        sys.stdout.write(json_text(answer))
        return
    for one in answer.results:
        path = escaped(said_path(asked, one.kind, one.name, one.tenant))
        if one.action == "refused":
            tell_problem(path, one.problem)
        elif output == "name":
            click.echo(path)
        else:
            click.echo(f"{path} {click.style(one.action, fg=STYLES.get(one.action))}")
