"""Which world do real processes get? Put together here; what each part does is beside it."""

from __future__ import annotations

from remit.world.chance import seeded_by_the_system
from remit.world.clock import BootClock
from remit.world.disk import FileDisk
from remit.world.ids import RandomIds
from remit.world.offload import ThreadOffload
from remit.world.promises import World


def production() -> World:
    """Whoever calls this closes `offload` at the end."""
    return World(BootClock(), seeded_by_the_system(), RandomIds(), FileDisk(), ThreadOffload())
