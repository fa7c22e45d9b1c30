"""Reads a scope's data directory without a server.

It is opened read-only, without taking the server's lock, so this also works while the server runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from remit.commitment.outcomes import BATCH_PREFIX
from remit.model.kinds import NodePool, Workload
from remit.model.objects import decode
from remit.model.problems import escaped
from remit.model.records import Replica
from remit.observation.frozen_view import frozen_view
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.explain.pending import PlacementInputs
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.plugins import installed_filters, installed_scores
from remit.serve.diagnostics.history import StoredHistory
from remit.store.protocol import Corrupt, StoreError
from remit.store.sqlite.offline_reader import OfflineReader
from remit.world.clock import BootClock
from remit.world.interfaces import Clock

MISUSE = 2


class OfflineStoreError(click.ClickException):
    """The directory cannot be read. The message contains reason and fix."""

    exit_code = MISUSE


class OfflineScope(NamedTuple):
    """The state of a scope at one revision, and the clock for its timestamps."""

    view: SchedulerView
    reader: OfflineReader
    clock: Clock

    def workload(self, tenant: str, name: str) -> Workload | None:
        row = self.reader.get(f"workload/{tenant}/{name}")
        obj = None if row is None else decode(row.value)
        return obj if isinstance(obj, Workload) else None

    def replica(self, tenant: str, name: str) -> tuple[Replica, int] | None:
        row = self.reader.get(f"replica/{tenant}/{name}")
        obj = None if row is None else decode(row.value)
        return (obj, row.revision) if row is not None and isinstance(obj, Replica) else None

    def pools(self) -> list[NodePool]:
        return [obj for row in self.reader.rows("nodepool/") if isinstance(obj := decode(row.value), NodePool)]

    def history(self, tenant: str) -> StoredHistory:
        """Return the stored decisions and verdicts about a tenant's replicas."""
        return StoredHistory(self.reader.rows(f"decision/{tenant}/"), self.reader.rows(BATCH_PREFIX))


@contextmanager
def open_offline_scope(directory: Path) -> Iterator[OfflineScope]:
    clock, scratch = BootClock(), ""
    try:
        with tempfile.TemporaryDirectory(prefix="remit-look-") as scratch, OfflineReader(directory, Path(scratch)) as reader:
            head = reader.head()
            if head is None:
                raise OfflineStoreError(f"{escaped(str(directory))} contains an empty store: no server has written to it yet")
            yield OfflineScope(frozen_view(clock, head, reader.revision, reader.pages), reader, clock)
    except Corrupt as error:
        # The error names the temporary copy, which is deleted; report the original directory instead.
        raise OfflineStoreError(escaped(str(error).replace(scratch or str(directory), str(directory)))) from error
    except StoreError as error:
        raise OfflineStoreError(escaped(str(error))) from error
    except msgspec.MsgspecError as error:
        raise OfflineStoreError(
            f"{escaped(str(directory))}: a row cannot be decoded ({escaped(str(error))}); restore a backup"
        ) from error
    except OSError as error:
        raise OfflineStoreError(f"{escaped(str(directory))} cannot be read: {escaped(error.strerror or str(error))}") from error


def placement_inputs(clock: Clock) -> PlacementInputs:
    """Return the inputs of a scheduler on this machine, with the plug-ins installed here."""
    return PlacementInputs((clock.boot(), clock.now_ms()), installed_filters(), (*DEFAULT_SCORES, *installed_scores()))
