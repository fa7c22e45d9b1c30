"""What can be waited for by name? Each a goal that says how it stands; the waiting itself is in waiting.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from remit.cli.finding import NOT_FOUND, class_of
from remit.cli.progress import condition_of
from remit.cli.spoken import Meant
from remit.cli.waiting import DELETED, Standing
from remit.client.calling import ApiError
from remit.model.fields import Condition
from remit.model.kinds import Node, Workload
from remit.model.records import Phase, Replica

if TYPE_CHECKING:
    from remit.client.api import Api

NAMED_MAX: Final = 3
_UNPLACED: Final = (Phase.PENDING, Phase.RESERVED)
_OVER: Final = (Phase.FAILED, Phase.RELEASED, Phase.FINISHED)
_OFF_NODE: Final = (Phase.PENDING, Phase.RELEASED)
_ENDS: Final = {"Complete": "Failed", "Failed": "Complete"}
"""How a job ends, and how it does not end any more then."""


async def _seen(api: Api, thing: Meant, tenant: str) -> Any:
    try:
        return await api.get(class_of(thing.kind), thing.name, tenant=tenant)
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        return None


class Gone:
    """It is not there any more. One of its name that was made later is another."""

    def __init__(self, thing: Meant, tenant: str, shown: str) -> None:
        self.name, self._thing, self._tenant = shown, thing, tenant
        self._uid = ""

    async def look(self, api: Api) -> Standing:
        found = await _seen(api, self._thing, self._tenant)
        if found is None or (self._uid and found.metadata.uid != self._uid):
            return Standing(True, "is gone")
        self._uid = found.metadata.uid
        if self._thing.kind != "Workload":
            held = ", ".join(getattr(found.metadata, "finalizers", ()))
            return Standing(False, f"is still there{f', held by {held}' if held else ''}")
        left = (await api.list(Replica, tenant=self._tenant, fields=f"spec.workload={self._thing.name}")).items
        return Standing(False, f"{len(left)} of its replicas are left" if left else "is still there")


class Conditioned:
    """A condition says so."""

    def __init__(self, thing: Meant, tenant: str, shown: str, type_: str, status: str) -> None:
        self.name, self._thing, self._tenant = shown, thing, tenant
        self._type, self._status = type_, status

    async def look(self, api: Api) -> Standing:
        found = await _seen(api, self._thing, self._tenant)
        if found is None:
            return DELETED
        conditions: Iterable[Condition] = getattr(getattr(found, "status", None), "conditions", ())
        if isinstance(found, Workload) and self._status.lower() == "true" and (never := self._never(found)) is not None:
            return never
        said = condition_of(conditions, self._type)
        if said is None:
            there = ", ".join(f"{one.type}={one.status}" for one in conditions)
            return Standing(False, f"nothing is said of {self._type} yet" + (f"; said are {there}" if there else ""))
        current = said.observed_generation in (0, found.metadata.generation)
        words = " ".join(part for part in (f"{said.type}={said.status}", said.reason, said.message) if part)
        return Standing(said.status.lower() == self._status.lower() and current, words)

    def _never(self, workload: Workload) -> Standing | None:
        """An end that cannot come: only jobs end, and one that has ended does so no other way until it is changed."""
        other = _ENDS.get(self._type)
        if other is None:
            return None
        kind = workload.spec.type
        if kind != "job":
            words = f"it is a {kind}: only jobs become {self._type}"
            return Standing(
                False, f"is a {kind}", failed=words, cure=f"wait until it stands: remit wait {self.name} --for=ready"
            )
        said = condition_of(workload.status.conditions, other)
        if said is None or said.status != "True" or said.observed_generation != workload.metadata.generation:
            return None
        why = " ".join(part for part in (said.reason, said.message) if part)
        words = f"it is {said.type}{f' ({why})' if why else ''}, and does not become {self._type} any more"
        return Standing(False, f"is {said.type}", failed=words, cure=f"see how it went: remit describe {self.name}")


class InPhase:
    """A replica is in a phase, or a node's health is so."""

    def __init__(self, thing: Meant, tenant: str, shown: str, phase: str) -> None:
        self.name, self._thing, self._tenant, self._phase = shown, thing, tenant, phase

    async def look(self, api: Api) -> Standing:
        found = await _seen(api, self._thing, self._tenant)
        if found is None:
            return DELETED
        if isinstance(found, Node):
            return Standing(found.status.health.value == self._phase, f"is {found.status.health.value}")
        status = found.status
        reason = f": {status.reason}" if getattr(status, "reason", "") else ""
        placed = status.phase not in _UNPLACED
        return Standing(status.phase.value == self._phase, f"is {status.phase.value}{reason}", placed=placed)


class Ready:
    """A replica is ready or serves; a node takes work."""

    def __init__(self, thing: Meant, tenant: str, shown: str) -> None:
        self.name, self._thing, self._tenant = shown, thing, tenant

    async def look(self, api: Api) -> Standing:
        found = await _seen(api, self._thing, self._tenant)
        if found is None:
            return DELETED
        if isinstance(found, Node):
            ready = found.status.health.value == "ready" and not found.spec.unschedulable
            words = "is cordoned" if found.spec.unschedulable else f"is {found.status.health.value}"
            return Standing(ready, words)
        phase, reason = found.status.phase, found.status.reason
        words = f"is {phase.value}{f': {reason}' if reason else ''}"
        return Standing(phase in (Phase.READY, Phase.SERVING), words, placed=phase not in _UNPLACED)


class Ended:
    """A replica has ended well."""

    def __init__(self, thing: Meant, tenant: str, shown: str) -> None:
        self.name, self._thing, self._tenant = shown, thing, tenant

    async def look(self, api: Api) -> Standing:
        found = await _seen(api, self._thing, self._tenant)
        if found is None:
            return DELETED
        status = found.status
        words = " ".join(part for part in (f"is {status.phase.value}", status.result, status.reason) if part)
        return Standing(status.result == "ok" and status.phase in _OVER, words, placed=status.phase not in _UNPLACED)


class Drained:
    """Nothing is left on a node. Says what is, and what holds it."""

    def __init__(self, node: str) -> None:
        self.name, self._node = f"node/{node}", node

    async def look(self, api: Api) -> Standing:
        found = await _seen(api, Meant("Node", self._node), "")
        if found is None:
            return Standing(True, "is gone")
        if not found.spec.draining:
            return Standing(False, "", failed="it does not drain any more; somebody has taken that back")
        here = (await api.list(Replica, tenant="", fields=f"status.node={self._node}")).items
        left = [one for one in here if one.status.phase not in _OFF_NODE]
        if not left:
            return Standing(True, "is empty")
        named = [f"{one.metadata.tenant}/{one.metadata.name} {one.status.phase.value}" for one in left[:NAMED_MAX]]
        more = f" and {len(left) - NAMED_MAX} more" if len(left) > NAMED_MAX else ""
        said = condition_of(found.status.conditions, "Drained")
        held = f"; held: {said.message}" if said is not None and said.message else ""
        return Standing(False, f"{len(left)} left: {', '.join(named)}{more}{held}")
