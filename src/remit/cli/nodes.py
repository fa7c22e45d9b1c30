"""May a node take work, and should it be emptied? Changes what is declared of it; controllers do the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from remit.cli.main import examples
from remit.cli.reaching import Asked, ask, asks_server
from remit.cli.spoken import Meant, thing_meant
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.model.kinds import Node

NODES = click.argument("nodes", nargs=-1, required=True, metavar="NODE...")


@click.command(epilog=examples("remit cordon n7 n8      nothing new is placed there; what runs stays"))
@NODES
@asks_server()
def cordon(asked: Asked, nodes: tuple[str, ...]) -> None:
    """Place nothing new on NODEs. What runs there stays; `remit drain` empties one."""
    ask(asked, lambda api: _change(api, asked, nodes, {"unschedulable": True}, "cordoned"))


@click.command(epilog=examples("remit uncordon n7       it takes work again; a drain of it ends"))
@NODES
@asks_server()
def uncordon(asked: Asked, nodes: tuple[str, ...]) -> None:
    """Let NODEs take work again. A drain of one ends."""
    undone = {"unschedulable": None, "draining": None, "drainForce": None, "drainDeadline": None}
    ask(asked, lambda api: _change(api, asked, nodes, undone, "takes work again"))


@click.command(
    epilog=examples(
        "remit drain n7 --wait                   until it is empty, showing what is left and what holds it",
        "remit drain n7 --deadline 30m --force   past the deadline go on in spite of disruption limits",
        "remit uncordon n7                       take it back",
    )
)
@NODES
@click.option(
    "--deadline",
    default="10m",
    show_default=True,
    metavar="DURATION",
    help="How long it may take before it is said to be overdue.",
)
@click.option("--force", is_flag=True, help="Past the deadline, go on in spite of disruption limits.")
@click.option("--wait", is_flag=True, help="Wait until they are empty, and show what is left.")
@click.option("--timeout", default="", metavar="DURATION", help="How long to wait; else the deadline and a minute.")
@asks_server()
def drain(asked: Asked, nodes: tuple[str, ...], deadline: str, force: bool, wait: bool, timeout: str) -> None:
    """Empty NODEs: nothing new is placed there, and what runs is moved within what each workload can spare.

    Exits with 1 if --wait ended before they were empty, and says what held them.
    """
    from remit.cli.waiting import timeout_of
    from remit.model.quantity import format_duration, parse_duration

    try:
        deadline_ms = parse_duration(deadline)
    except ValueError as error:
        raise click.BadParameter(f"{escaped(deadline)}: {error}", param_hint="--deadline") from error
    timeout_ms = timeout_of(timeout) if timeout else deadline_ms + 60_000
    wanted = {
        "unschedulable": True,
        "draining": True,
        "drainDeadline": format_duration(deadline_ms),
        "drainForce": True if force else None,
    }
    ask(asked, lambda api: _drain(api, asked, nodes, wanted, timeout_ms if wait else 0))


async def _drain(api: Api, asked: Asked, nodes: Sequence[str], wanted: dict[str, Any], wait_ms: int) -> None:
    from remit.cli.waiting import until
    from remit.cli.waits import Drained

    await _change(api, asked, nodes, wanted, "drains")
    if wait_ms:
        await until(api, [Drained(thing.name) for thing in _meant(nodes)], wait_ms)
        for thing in _meant(nodes):
            click.echo(f"{escaped(str(thing))} is empty")


def _meant(nodes: Sequence[str]) -> list[Meant]:
    things = [thing_meant(node, "Node") for node in nodes]
    other = next((thing for thing in things if thing.kind != "Node"), None)
    if other is not None:
        raise click.UsageError(f"{escaped(str(other))} is no node")
    return things


async def _change(api: Api, asked: Asked, nodes: Sequence[str], wanted: dict[str, Any], said: str) -> None:
    """Those that are not there are told before anything is changed."""
    from remit.cli.finding import find
    from remit.cli.written import plain
    from remit.model.kinds import Node

    things = _meant(nodes)
    found: list[Node] = [await find(api, asked, thing) for thing in things]
    for thing, node in zip(things, found, strict=True):
        spec = plain(node)["spec"]
        if all(spec.get(name) == value for name, value in wanted.items()):
            click.echo(f"{escaped(str(thing))} {said} already")
            continue
        await api.patch(Node, thing.name, {"spec": wanted})
        click.echo(f"{escaped(str(thing))} {said}")
