"""What may be written in a manifest? Prints; the schema itself is made in model/schema.py."""

from __future__ import annotations

import json

import click
from click.shell_completion import CompletionItem

from remit.cli.main import examples
from remit.model.problems import did_you_mean, meant, shown


def _kinds(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For the shell: the kinds that begin like this, in whatever case."""
    from remit.model.schema import SUMMARIES

    begun = incomplete.lower()
    return [CompletionItem(kind, help=summary) for kind, summary in SUMMARIES.items() if kind.lower().startswith(begun)]


@click.command(
    epilog=examples(
        "remit schema                            the kinds, each in a line",
        "remit schema Workload                   the schema of one",
        "remit schema --all > .remit.json        one for all kinds, then, for editors with yaml-language-server:",
        "# yaml-language-server: $schema=.remit.json      as the first line of a manifest",
    )
)
@click.argument("kind", required=False, shell_complete=_kinds)
@click.option("--all", "all_kinds", is_flag=True, help="One schema for every kind, chosen by its `kind`.")
def schema(kind: str | None, all_kinds: bool) -> None:
    """Print the JSON Schema of a KIND, for editors; without one, list the kinds."""
    from remit.model import objects
    from remit.model.schema import SUMMARIES, schema, schema_of_all

    if kind and all_kinds:
        raise click.UsageError("name a KIND, or write --all, but not both")
    if all_kinds:
        click.echo(json.dumps(schema_of_all(), indent=2))
    elif kind:
        by_lower = {name.lower(): name for name in objects.KINDS}
        known = by_lower.get(kind.lower())
        if known is None:
            cure = did_you_mean(meant(kind, objects.KINDS)) or f"known are {', '.join(objects.DECLARED)}"
            raise click.UsageError(f"there is no kind {shown(kind)}; {cure}")
        click.echo(json.dumps(schema(known), indent=2))
    else:
        width = max(map(len, SUMMARIES))
        for name, summary in SUMMARIES.items():
            click.echo(f"{name:<{width}}  {summary}")
