"""Names of all random streams of a simulated run.

Every random decision of a run is drawn from a stream that is seeded by its name. A separate stream for each purpose keeps the
purposes independent: one more draw in the network does not change the fault schedule. The names are part of the seed, so a
changed name changes every run that uses it, and saved replays no longer reproduce their violation.

`run` is the name of a run, `<scenario>/<seed>`. The streams of a process are derived from the name of its start, so that a
restarted process does not repeat the decisions of its previous start. Components of the product derive their own streams from
it where they are built: `agent NAME`, `standing NAME` (heartbeats), `scheduler NAME` and `ROLE LEASE NAME` (controllers).
"""

from __future__ import annotations

from random import Random  # noqa: TID251 - the simulator is the place where randomness is seeded
from typing import Final

__all__ = ["Random", "stream"]


def stream(name: str) -> Random:
    """The generator of this name. A text seed goes through SHA-512, so similar names give unrelated streams."""
    return Random(name)  # noqa: S311 - no secret is drawn from it


# -- streams of a run ----------------------------------------------------------------------------------------------------------


def run_name(scenario: str, seed: int) -> str:
    return f"{scenario}/{seed}"


def cluster_shape(run: str) -> str:
    """Size of cluster and load in a swarm scenario."""
    return f"{run}/shape"


def fault_schedule(run: str) -> str:
    """Kinds, times and durations of all faults."""
    return f"{run}/plan"


def fault(run: str, number: int) -> str:
    """Victim and strength of one fault. Removing another fault from the schedule does not change it."""
    return f"{run}/fault-{number}"


def event_order(run: str) -> str:
    """Which process runs next among those with a ready callback."""
    return f"{run}/order"


def network(run: str) -> str:
    """Delay, loss and repetition of messages."""
    return f"{run}/network"


def store(run: str, service: str) -> str:
    """Faults of one store service."""
    return f"{run}/{service}"


def torn_disk(run: str, service: str) -> str:
    """Surviving sectors of a SQLite store; each power cut has a stream of its own below it."""
    return f"{run}/{service}/torn"


def torn_disk_crash(number: int) -> str:
    """One power cut of a SQLite store. The stream is derived from that of `torn_disk`."""
    return f"crash {number}"


def machine_clocks(run: str) -> str:
    """Start value and rate of the clock of each machine."""
    return f"{run}/cluster"


def machine_crash(run: str, machine: str, at_s: float) -> str:
    """Unsynced files that survive a power cut of one machine."""
    return f"{run}/{machine}/{at_s}"


def restore(run: str, at_s: float) -> str:
    """Which backup is restored, and when the servers start again."""
    return f"{run}/restore-{at_s}"


def permanent_faults(run: str) -> str:
    """Processes that stay down for good after the faults have ended."""
    return f"{run}/core"


# -- streams of a process ------------------------------------------------------------------------------------------------------


def process_start(run: str, process: str, starts: int) -> str:
    """The stream of one start of a process; all streams below are derived from it."""
    return f"{run}/{process}#{starts}"


def process_ids(process: str) -> str:
    """Nonces and incarnation ids that the process creates."""
    return f"{process}/ids"


def role(role: str, lease: str) -> str:
    """Timing and choices of a simulated role."""
    return f"{role}-{lease}"


USERS: Final = "people"
"""Actions of users and operators, and their times."""

INITIAL_REPLICAS: Final = "filling"
"""Whether a workload is created together with its first replicas."""

ADVERSARY: Final = "meddler"
"""Choice and timing of invalid operations."""

NODE_HINTS: Final = "warmth"
"""When agents report warm-start hints."""

FALSE_HINTS: Final = "gossip"
"""Content and timing of misleading hints."""
