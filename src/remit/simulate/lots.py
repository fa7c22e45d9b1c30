"""Which lots decide in a simulated world? Streams by name, each from the run's seed. The only randomness in this room."""

from __future__ import annotations

from random import Random as Lots  # noqa: TID251 - the simulator is where chance is made

__all__ = ["Lots", "stream"]


def stream(*names: object) -> Lots:
    """A stream of its own for these names: a text seed goes through SHA-512, so near names are far apart."""
    return Lots("/".join(map(str, names)))  # noqa: S311 - no secret is drawn from it
