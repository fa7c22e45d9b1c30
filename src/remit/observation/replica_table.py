"""Columnar table of replicas.

A table without an object for each. It posts nothing: view.py does.
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
NUMBER: Final = {phase: number for number, phase in enumerate(PHASES)}
PENDING: Final = NUMBER[Phase.PENDING]
RESERVED: Final = NUMBER[Phase.RESERVED]
HOLDING: Final = tuple(phase in HOLDING_PHASES for phase in PHASES)
"""By the number of a phase: does it hold room?"""

BOUND: Final = tuple(NUMBER[phase] for phase in PHASES if phase in HOLDING_PHASES - NOT_WORKING_PHASES)
"""Those in which a replica is one that works."""

_NO_DEVICES: Final[Mapping[str, int]] = {}
_NO_VICTIMS: Final[Mapping[str, str]] = {}


class _Stamp(msgspec.Struct, frozen=True, gc=False):
    uid: str = ""


class _Spec(msgspec.Struct, frozen=True, gc=False):
    workload: str
    generation: int
    index: int = 0
    priority: int = 0


class _Status(msgspec.Struct, frozen=True, gc=False):
    phase: Phase = Phase.PENDING
    attempt: int = 1
    node: str = ""
    devices: dict[str, int] | None = None
    grants: tuple[str, ...] = ()
    victims: dict[str, str] | None = None


_UNTOUCHED: Final = _Status()


class Lean(msgspec.Struct, frozen=True, gc=False):
    """As much of a replica as a scheduler needs; what else the row says is skipped unread."""

    metadata: _Stamp
    spec: _Spec
    status: _Status = _UNTOUCHED


decode_lean: Final = msgspec.json.Decoder(Lean).decode


class Held(NamedTuple):
    """What a replica holds, as law/charges.py asks for it."""

    phase: Phase
    devices: Mapping[str, int]
    grants: tuple[str, ...]
    victims: Mapping[str, str]


class Replicas(Table):
    """By slot: `phase` is an index into `PHASES`, `node` the row in the columns of nodes on which it holds room (or `NONE`),
    `generation` an id of shapes.py, `grants` an id of `charged`. What few have is in dictionaries by slot.
    """

    columns: ClassVar[Mapping[str, Any]] = {
        "revision": np.int64, "uid": np.int64, "phase": np.int8, "node": np.int32, "generation": np.int32,
        "priority": np.int32, "attempt": np.int32, "grants": np.int32, "index": np.int32,
    }  # fmt: skip
    revision: npt.NDArray[np.int64]
    uid: npt.NDArray[np.int64]
    """Its hash: it is only ever asked whether it is a certain one."""
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
        """By slot; empty where nobody is."""
        self.charged: Pool[tuple[str, ...]] = Pool()
        self.devices: dict[int, dict[str, int]] = {}
        self.victims: dict[int, dict[str, str]] = {}

    def add(self, key: str) -> int:
        slot = self.slots[key] = self.slot()
        if slot == len(self.keys):
            self.keys.append(key)
        else:
            self.keys[slot] = key
        return slot

    def remove(self, slot: int) -> None:
        del self.slots[self.keys[slot]]
        self.keys[slot] = ""
        self._forget(slot)
        self.give_up(slot)

    def write(self, slot: int, lean: Lean, revision: int, node: int) -> None:
        """How it stands; `node` is where it holds room."""
        at, status = self.at, lean.status
        at.revision[slot] = revision
        at.phase[slot] = NUMBER[status.phase]
        at.node[slot] = node
        at.attempt[slot] = status.attempt
        old = at.grants[slot]
        at.grants[slot] = self.charged.take(status.grants) if status.grants else NONE
        if old != NONE:
            self.charged.drop(old)
        if status.devices or slot in self.devices:
            self._sparse(self.devices, slot, status.devices)
        if status.victims or slot in self.victims:
            self._sparse(self.victims, slot, status.victims)

    def name(self, slot: int, lean: Lean, generation: int) -> None:
        """Who it is: as long as its uid is the same, this is too."""
        at, spec = self.at, lean.spec
        at.uid[slot] = hash(lean.metadata.uid)
        at.generation[slot] = generation
        at.priority[slot] = spec.priority
        at.index[slot] = spec.index

    def held(self, slot: int) -> Held:
        """What it holds; good until its row changes."""
        number = self.at.grants[slot]
        return Held(
            PHASES[self.at.phase[slot]],
            self.devices.get(slot, _NO_DEVICES),
            self.charged[number] if number != NONE else (),
            self.victims.get(slot, _NO_VICTIMS),
        )

    def is_copy(self, slot: int, copy: str) -> bool:
        """Is it this very attempt of this very replica? See `law.holding.copy_of`."""
        uid, _, attempt = copy.rpartition("/")
        return self.at.uid[slot] == hash(uid) and str(self.at.attempt[slot]) == attempt

    def pending(self) -> list[int]:
        """The slots of all that wait for a node, in order."""
        found: list[int] = np.flatnonzero(self.column("phase") == PENDING).tolist()
        return found

    def _forget(self, slot: int) -> None:
        if (old := self.at.grants[slot]) != NONE:
            self.charged.drop(old)
        self.devices.pop(slot, None)
        self.victims.pop(slot, None)

    @staticmethod
    def _sparse(kept: dict[int, Any], slot: int, value: Any) -> None:
        if value:
            kept[slot] = value
        else:
            kept.pop(slot, None)
