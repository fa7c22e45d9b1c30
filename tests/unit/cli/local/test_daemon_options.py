"""cli/local/daemon_options.py: options that a command receives in groups, and former names of options."""

from __future__ import annotations

from typing import NamedTuple

import click
import pytest
from click.testing import CliRunner

from remit.cli.local.daemon_options import heartbeat_interval_option, option_group


class Size(NamedTuple):
    width: int
    height: int


size_options = option_group(
    "size", Size, click.option("--width", type=int, default=1), click.option("--height", type=int, default=2)
)


@click.command()
@size_options
@heartbeat_interval_option
@click.pass_context
def command(ctx: click.Context, size: Size, heartbeat_ms: int) -> None:
    given = ctx.get_parameter_source("width") is click.core.ParameterSource.COMMANDLINE
    click.echo(f"{size} {heartbeat_ms} {given}")


def run(*args: str) -> str:
    result = CliRunner().invoke(command, args)
    assert result.exit_code == 0, result.output
    return result.output


def test_grouped_options__received_together() -> None:
    assert run() == "Size(width=1, height=2) 2000 False\n"
    assert run("--height", "5", "--width", "3") == "Size(width=3, height=5) 2000 True\n"


@pytest.mark.parametrize("name", ["--heartbeat-interval", "--beat"])
def test_former_name_of_an_option__accepted(name: str) -> None:
    assert run(name, "500ms") == "Size(width=1, height=2) 500 False\n"


def test_help__lists_options_in_order_without_former_names() -> None:
    text = run("--help")
    assert text.index("--width") < text.index("--height") < text.index("--heartbeat-interval DURATION")
    assert "--beat" not in text
