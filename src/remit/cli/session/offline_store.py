"""Reads a scope's data directory without a server.

Opened to be looked at, also while its owner runs; nothing is taken over or written.
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
    """What was named cannot be looked at; the message says why and what to do."""

    exit_code = MISUSE


class OfflineScope(NamedTuple):
    """One state of a scope, and the clock that its instants are compared with."""

    view: SchedulerView
    glimpse: OfflineReader
    clock: Clock

    def workload(self, tenant: str, name: str) -> Workload | None:
        row = self.glimpse.get(f"workload/{tenant}/{name}")
        obj = None if row is None else decode(row.value)
        return obj if isinstance(obj, Workload) else None

    def replica(self, tenant: str, name: str) -> tuple[Replica, int] | None:
        row = self.glimpse.get(f"replica/{tenant}/{name}")
        obj = None if row is None else decode(row.value)
        return (obj, row.revision) if row is not None and isinstance(obj, Replica) else None

    def pools(self) -> list[NodePool]:
        return [obj for row in self.glimpse.rows("nodepool/") if isinstance(obj := decode(row.value), NodePool)]

    def written(self, tenant: str) -> StoredHistory:
        """What was written down about a tenant's replicas."""
        return StoredHistory(self.glimpse.rows(f"decision/{tenant}/"), self.glimpse.rows(BATCH_PREFIX))


@contextmanager
def open_offline_scope(directory: Path) -> Iterator[OfflineScope]:
    clock, scratch = BootClock(), ""
    try:
        with tempfile.TemporaryDirectory(prefix="remit-look-") as scratch, OfflineReader(directory, Path(scratch)) as glimpse:
            head = glimpse.head()
            if head is None:
                raise OfflineStoreError(
                    f"{escaped(str(directory))} is the directory of a scope in which nothing was ever written"
                )
            yield OfflineScope(frozen_view(clock, head, glimpse.revision, glimpse.pages), glimpse, clock)
    except Corrupt as error:
        # Damage that is found in the copy is in what was copied, and the copy is gone.
        raise OfflineStoreError(escaped(str(error).replace(scratch or str(directory), str(directory)))) from error
    except StoreError as error:
        raise OfflineStoreError(escaped(str(error))) from error
    except msgspec.MsgspecError as error:
        raise OfflineStoreError(
            f"{escaped(str(directory))}: a row does not decode ({escaped(str(error))}); restore a backup"
        ) from error
    except OSError as error:
        raise OfflineStoreError(f"{escaped(str(directory))} cannot be read: {escaped(error.strerror or str(error))}") from error


def placement_inputs(clock: Clock) -> PlacementInputs:
    """As a scheduler on this machine would have them, with the plug-ins that are installed here."""
    return PlacementInputs((clock.boot(), clock.now_ms()), installed_filters(), (*DEFAULT_SCORES, *installed_scores()))
