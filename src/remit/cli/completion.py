"""How does a shell complete `remit`? Prints click's own script, with a line on where to put it."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from remit.cli.main import examples, remit

INSTALL = {
    "bash": "remit completion bash > ~/.local/share/bash-completion/completions/remit",
    "zsh": "remit completion zsh > ~/.zfunc/_remit     (with ~/.zfunc in fpath, before compinit)",
    "fish": "remit completion fish > ~/.config/fish/completions/remit.fish",
}


@click.command(
    epilog=examples(
        'eval "$(remit completion bash)"      try it in this shell',
        *INSTALL.values(),
    )
)
@click.argument("shell", type=click.Choice(list(INSTALL)))
def completion(shell: str) -> None:
    """Print the script that completes commands in your SHELL."""
    maker = get_completion_class(shell)
    if maker is None:
        raise click.ClickException(f"click has no completion for {shell}")
    head = "#compdef remit\n" if shell == "zsh" else ""  # zsh reads it only from the first line
    script = maker(remit, {}, "remit", "_REMIT_COMPLETE").source().strip().removeprefix("#compdef remit").strip()
    click.echo(f"{head}# Install with: {INSTALL[shell]}\n{script}")
