"""Columnar table of replicas.

Stores replicas without one object each. It posts nothing to ledgers; holds.py does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remit.law.charges import NOT_WORKING_PHASES
from remit.law.lifecycle import HOLDING_PHASES
from remit.model.records import Phase
from remit.observation.column_table import NONE, Pool, Table

PHASES: Final = tuple(Phase)
PHASE_NUMBERS: Final = {phase: number for number, phase in enumerate(PHASES)}
PENDING: Final = PHASE_NUMBERS[Phase.PENDING]
RESERVED: Final = PHASE_NUMBERS[Phase.RESERVED]
HOLDS_CAPACITY: Final = tuple(phase in HOLDING_PHASES for phase in PHASES)
"""Whether a phase holds capacity, by its number."""

BOUND_PHASES: Final = tuple(PHASE_NUMBERS[phase] for phase in PHASES if phase in HOLDING_PHASES - NOT_WORKING_PHASES)
"""Phases in which a replica is bound."""

_NO_DEVICES: Final[Mapping[str, int]] = {}
_NO_VICTIMS: Final[Mapping[str, str]] = {}


class _MetadataFields(msgspec.Struct, frozen=True, gc=False):
    uid: str = ""


class _SpecFields(msgspec.Struct, frozen=True, gc=False):
    workload: str
    generation: int
    index: int = 0
    priority: int = 0


class _StatusFields(msgspec.Struct, frozen=True, gc=False):
    phase: Phase = Phase.PENDING
    attempt: int = 1
    node: str = ""
    devices: dict[str, int] | None = None
    grants: tuple[str, ...] = ()
    victims: dict[str, str] | None = None


_PENDING_STATUS: Final = _StatusFields()


class ReplicaFields(msgspec.Struct, frozen=True, gc=False):
    """The fields of a replica row that a scheduler needs; the decoder skips all others."""

    metadata: _MetadataFields
    spec: _SpecFields
    status: _StatusFields = _PENDING_STATUS


decode_replica_fields: Final = msgspec.json.Decoder(ReplicaFields).decode


class ReplicaHold(NamedTuple):
    """The capacity that a replica holds, in the form law/charges.py expects."""

    phase: Phase
    devices: Mapping[str, int]
    grants: tuple[str, ...]
    victims: Mapping[str, str]


class ReplicaTable(Table):
    """Replicas by slot: `phase` is an index into `PHASES`, `node` the node row on which it holds capacity (or `NONE`),
    `generation` an id of shapes.py, `grants` an id of `ledger_sets`. Fields that few replicas have are in dictionaries by slot.
    """

    columns: ClassVar[Mapping[str, Any]] = {
        "revision": np.int64, "uid": np.int64, "phase": np.int8, "node": np.int32, "generation": np.int32,
        "priority": np.int32, "attempt": np.int32, "grants": np.int32, "index": np.int32,
    }  # fmt: skip
    revision: npt.NDArray[np.int64]
    uid: npt.NDArray[np.int64]
    """Hash of the uid: it is only compared for equality."""
    phase: npt.NDArray[np.int8]
    node: npt.NDArray[np.int32]
    generation: npt.NDArray[np.int32]
    priority: npt.NDArray[np.int32]
    attempt: npt.NDArray[np.int32]
    grants: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[str, int] = {}
        self.keys: list[str] = []
        """Keys by slot; empty for unused slots."""
        self.ledger_sets: Pool[tuple[str, ...]] = Pool()
        self.devices: dict[int, dict[str, int]] = {}
        self.victims: dict[int, dict[str, str]] = {}

    def add(self, key: str) -> int:
        slot = self.slots[key] = self.allocate()
        if slot == len(self.keys):
            self.keys.append(key)
        else:
            self.keys[slot] = key
        return slot

    def remove(self, slot: int) -> None:
        del self.slots[self.keys[slot]]
        self.keys[slot] = ""
        self._forget(slot)
        self.release(slot)

    def set_status(self, slot: int, fields: ReplicaFields, revision: int, node: int) -> None:
        """Store the status; `node` is the row on which the replica holds capacity."""
        at, status = self.at, fields.status
        at.revision[slot] = revision
        at.phase[slot] = PHASE_NUMBERS[status.phase]
        at.node[slot] = node
        at.attempt[slot] = status.attempt
        old = at.grants[slot]
        at.grants[slot] = self.ledger_sets.acquire(status.grants) if status.grants else NONE
        if old != NONE:
            self.ledger_sets.release(old)
        if status.devices or slot in self.devices:
            self._set_sparse(self.devices, slot, status.devices)
        if status.victims or slot in self.victims:
            self._set_sparse(self.victims, slot, status.victims)

    def set_identity(self, slot: int, fields: ReplicaFields, generation: int) -> None:
        """Store the fields that stay the same for as long as the uid does."""
        at, spec = self.at, fields.spec
        at.uid[slot] = hash(fields.metadata.uid)
        at.generation[slot] = generation
        at.priority[slot] = spec.priority
        at.index[slot] = spec.index

    def hold_of(self, slot: int) -> ReplicaHold:
        """Return what the replica holds; valid until its row changes."""
        number = self.at.grants[slot]
        return ReplicaHold(
            PHASES[self.at.phase[slot]],
            self.devices.get(slot, _NO_DEVICES),
            self.ledger_sets[number] if number != NONE else (),
            self.victims.get(slot, _NO_VICTIMS),
        )

    def is_attempt(self, slot: int, attempt_id: str) -> bool:
        """Whether the slot holds this attempt of this replica."""
        uid, _, attempt = attempt_id.rpartition("/")
        return self.at.uid[slot] == hash(uid) and str(self.at.attempt[slot]) == attempt

    def pending(self) -> list[int]:
        """Return the slots of all pending replicas, in order."""
        slots: list[int] = np.flatnonzero(self.column("phase") == PENDING).tolist()
        return slots

    def _forget(self, slot: int) -> None:
        if (old := self.at.grants[slot]) != NONE:
            self.ledger_sets.release(old)
        self.devices.pop(slot, None)
        self.victims.pop(slot, None)

    @staticmethod
    def _set_sparse(values: dict[int, Any], slot: int, value: Any) -> None:
        if value:
            values[slot] = value
        else:
            values.pop(slot, None)
