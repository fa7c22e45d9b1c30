"""Waits for conditions with live progress.

Asks again and again until it has, or time is up, and shows how far it is. Nothing is changed.

Each a goal that says how it stands; the waiting itself is in waiting.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import click

from remit.cli.output.console import BAD, GOOD, UNSURE, console
from remit.cli.session.kind_names import ObjectRef
from remit.cli.session.object_lookup import NOT_FOUND, class_of
from remit.cli.session.server_call import CommandError, UnplacedError
from remit.cli.session.workload_progress import ProgressSummary, format_funnel, funnel, is_rolled_out, summarize_progress
from remit.client.api_caller import ApiError
from remit.law.workload_rules import condition_of, pending_reasons
from remit.model.kinds import Node, Workload
from remit.model.metadata import Condition
from remit.model.problems import escaped
from remit.model.records import Decision, Phase, Replica
from remit.model.resources import format_duration, parse_duration
from remit.world.clock import BootClock

if TYPE_CHECKING:
    from rich.console import Console

    from remit.client.api import Api

PAUSE_MS: Final = 200
PAUSE_MS_MAX: Final = 2_000
LINES_MAX: Final = 20


class GoalStatus(NamedTuple):
    """How one goal stands: reached or not, in words for one line; `failed` says that it never will be, `cure` what to do then.

    `placed` is false while work of it has no place: who gives up then says so by another code than for anything else.
    `limit` is what keeps it from being reached.
    """

    reached: bool
    words: str
    placed: bool = True
    failed: str = ""
    limit: str = ""
    cure: str = ""

    @property
    def line(self) -> str:
        return f"{self.words}; limited by {self.limit}" if self.limit else self.words


DELETED: Final = GoalStatus(False, "is gone", failed="it was deleted meanwhile", cure="apply it again, and wait anew")


class Goal(Protocol):
    """Something to wait for."""

    name: str

    async def look(self, api: Api) -> GoalStatus: ...


async def wait_for_goals(api: Api, goals: Sequence[Goal], timeout_ms: int) -> None:
    """Returns once all are reached. Raises if one cannot be any more, or time is up, saying where each stands."""
    clock = BootClock()
    end_ms, pause_ms = clock.now_ms() + timeout_ms, PAUSE_MS
    with WaitDisplay(console(stderr=True)) as shown:
        while True:
            stands = {goal.name: await goal.look(api) for goal in goals}
            shown.update(stands)
            failed = {name: one for name, one in stands.items() if one.failed}
            if failed:
                raise _goal_failed_error(failed)
            if all(one.reached for one in stands.values()):
                return
            left_ms = end_ms - clock.now_ms()
            if left_ms <= 0:
                raise _timeout_error(stands, timeout_ms)
            await clock.sleep_ms(min(pause_ms, left_ms))
            pause_ms = min(PAUSE_MS_MAX, pause_ms * 5 // 4)


def _goal_failed_error(failed: dict[str, GoalStatus]) -> CommandError:
    name, first = next(iter(failed.items()))
    lines = [escaped(f"{name}: {one.failed}") for name, one in list(failed.items())[:LINES_MAX]]
    return CommandError("\n  ".join(lines), escaped(first.cure or f"look closer: remit describe {name}"))


def _timeout_error(stands: dict[str, GoalStatus], timeout_ms: int) -> CommandError:
    late = {name: one for name, one in stands.items() if not one.reached}
    unplaced = [name for name, one in late.items() if not one.placed]
    lines = [escaped(f"{name}: {one.line}") for name, one in list(late.items())[:LINES_MAX]]
    what = f"not reached within {format_duration(timeout_ms)}\n  " + "\n  ".join(lines)
    if unplaced:
        return UnplacedError(what, f"ask why: remit explain {unplaced[0]}")
    return CommandError(what, f"look closer: remit describe {next(iter(late))}")


class WaitDisplay:
    """Live lines on a terminal, which stay at the end; elsewhere a line whenever something has changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, str] = {}
        self._live: Any = None

    def __enter__(self) -> WaitDisplay:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.transient = error[0] is not None  # what went wrong says where each stands
            self._live.__exit__(None, None, None)

    def update(self, stands: dict[str, GoalStatus]) -> None:
        if self._live is not None:
            self._live.update(_render_lines(stands), refresh=True)
            return
        for name, one in stands.items():
            if self._said.get(name) != one.line and (name in self._said or not one.reached):
                self._said[name] = one.line
                click.echo(escaped(f"{name}: {one.line}"), err=True)


def _render_lines(stands: dict[str, GoalStatus]) -> Any:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    ordered = sorted(stands.items(), key=lambda pair: pair[1].reached)
    width = max(len(name) for name in stands)
    for number, (name, one) in enumerate(ordered[:LINES_MAX]):
        style = GOOD if one.reached else BAD if one.failed or not one.placed else UNSURE
        text.append("\n" if number else "")
        text.append("✓ " if one.reached else "· ", style=style)
        text.append(f"{escaped(name):<{width}}  ", style="bold")
        text.append(escaped(one.failed or one.words))
        if one.limit and not one.failed:
            text.append(f"\n  {'':<{width}}  limited by {escaped(one.limit)}", style=style)
    if len(ordered) > LINES_MAX:
        text.append(f"\n  and {len(ordered) - LINES_MAX} more")
    return text


def parse_timeout(text: str) -> int:
    """Milliseconds; for an option."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(f"{escaped(text)}: {error}", param_hint="--timeout") from error


# -- a workload ----------------------------------------------------------------------------------------------------------------


class WorkloadReady:
    """A workload is where it should be: a service is rolled out and ready, a job runs or is done."""

    def __init__(self, name: str, tenant: str, *, shown: str = "", done: bool = False) -> None:
        self._workload, self._tenant, self._done = name, tenant, done
        self.name = shown or f"workload/{name}"

    async def look(self, api: Api) -> GoalStatus:
        try:
            workload = await api.get(Workload, self._workload, tenant=self._tenant)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return DELETED
        fields = f"spec.workload={self._workload}"
        replicas = list((await api.list(Replica, tenant=self._tenant, fields=fields)).items)
        decisions: Sequence[Decision] = ()
        if any(one.status.phase is Phase.PENDING for one in replicas):
            decisions = (await api.list(Decision, tenant=self._tenant, fields="spec.verdict!=bound")).items
        found = summarize_progress(workload, replicas, pending_reasons(decisions))
        return workload_goal_status(workload, replicas, found, done=self._done)


def workload_goal_status(
    workload: Workload, replicas: Sequence[Replica], found: ProgressSummary, *, done: bool = False
) -> GoalStatus:
    """How it stands; `done`: only a job that has ended well counts as there."""
    spec = workload.spec
    words = f"{format_funnel(funnel(replicas, found.wanted, spec.type))} of {found.wanted:,}"
    if workload.metadata.deleting:  # of which nothing is wanted any more: that all of that stands says nothing
        return GoalStatus(False, words, failed="it is being deleted", cure=DELETED.cure)
    failed = condition_of(workload.status.conditions, "Failed")
    if failed is not None and failed.status == "True" and failed.observed_generation == workload.metadata.generation:
        return GoalStatus(False, words, failed=f"it failed: {failed.reason} {failed.message}".rstrip())
    if spec.type == "job":
        runs = sum(one.status.phase in (Phase.RUNNING, Phase.READY, Phase.SERVING, Phase.FINISHED) for one in replicas)
        complete = bool(found.wanted) and found.done >= found.wanted
        there = complete or (not done and runs + found.done >= min(spec.replicas, found.wanted))
    else:
        there = is_rolled_out(workload) and found.arrived >= found.wanted
    standing_now = sum(one.status.phase is not Phase.RELEASED for one in replicas) + (found.done if spec.type == "job" else 0)
    waits = any(one.status.phase in (Phase.PENDING, Phase.RESERVED) for one in replicas)
    short = standing_now < (min(spec.replicas, found.wanted) if spec.type == "job" else found.wanted)
    if there:
        return GoalStatus(True, words)
    limit = found.limit + (f": {found.detail}" if found.detail else "") if found.limit else ""
    if not limit and spec.type != "job" and not is_rolled_out(workload):
        limit = "controllers, which do not say yet that this generation is out"
    died = found.limit == "rollout"  # those that are short had a place, and have died there
    return GoalStatus(False, words, placed=not waits and (died or not short), limit=limit)


NAMED_MAX: Final = 3
_UNPLACED_PHASES: Final = (Phase.PENDING, Phase.RESERVED)
_TERMINAL_PHASES: Final = (Phase.FAILED, Phase.RELEASED, Phase.FINISHED)
_OFF_NODE_PHASES: Final = (Phase.PENDING, Phase.RELEASED)
_OPPOSITE_CONDITION: Final = {"Complete": "Failed", "Failed": "Complete"}
"""How a job ends, and how it does not end any more then."""


async def _get_or_none(api: Api, thing: ObjectRef, tenant: str) -> Any:
    try:
        return await api.get(class_of(thing.kind), thing.name, tenant=tenant)
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        return None


class ObjectDeleted:
    """It is not there any more. One of its name that was made later is another."""

    def __init__(self, thing: ObjectRef, tenant: str, shown: str) -> None:
        self.name, self._thing, self._tenant = shown, thing, tenant
        self._uid = ""

    async def look(self, api: Api) -> GoalStatus:
        found = await _get_or_none(api, self._thing, self._tenant)
        if found is None or (self._uid and found.metadata.uid != self._uid):
            return GoalStatus(True, "is gone")
        self._uid = found.metadata.uid
        if self._thing.kind != "Workload":
            held = ", ".join(getattr(found.metadata, "finalizers", ()))
            return GoalStatus(False, f"is still there{f', held by {held}' if held else ''}")
        left = (await api.list(Replica, tenant=self._tenant, fields=f"spec.workload={self._thing.name}")).items
        return GoalStatus(False, f"{len(left)} of its replicas are left" if left else "is still there")


class ConditionMet:
    """A condition says so."""

    def __init__(self, thing: ObjectRef, tenant: str, shown: str, type_: str, status: str) -> None:
        self.name, self._thing, self._tenant = shown, thing, tenant
        self._type, self._status = type_, status

    async def look(self, api: Api) -> GoalStatus:
        found = await _get_or_none(api, self._thing, self._tenant)
        if found is None:
            return DELETED
        conditions: Iterable[Condition] = getattr(getattr(found, "status", None), "conditions", ())
        if isinstance(found, Workload) and self._status.lower() == "true" and (never := self._never(found)) is not None:
            return never
        said = condition_of(conditions, self._type)
        if said is None:
            there = ", ".join(f"{one.type}={one.status}" for one in conditions)
            return GoalStatus(False, f"nothing is said of {self._type} yet" + (f"; said are {there}" if there else ""))
        current = said.observed_generation in (0, found.metadata.generation)
        words = " ".join(part for part in (f"{said.type}={said.status}", said.reason, said.message) if part)
        return GoalStatus(said.status.lower() == self._status.lower() and current, words)

    def _never(self, workload: Workload) -> GoalStatus | None:
        """An end that cannot come: only jobs end, and one that has ended does so no other way until it is changed."""
        other = _OPPOSITE_CONDITION.get(self._type)
        if other is None:
            return None
        kind = workload.spec.type
        if kind != "job":
            words = f"it is a {kind}: only jobs become {self._type}"
            return GoalStatus(
                False, f"is a {kind}", failed=words, cure=f"wait until it stands: remit wait {self.name} --for=ready"
            )
        said = condition_of(workload.status.conditions, other)
        if said is None or said.status != "True" or said.observed_generation != workload.metadata.generation:
            return None
        why = " ".join(part for part in (said.reason, said.message) if part)
        words = f"it is {said.type}{f' ({why})' if why else ''}, and does not become {self._type} any more"
        return GoalStatus(False, f"is {said.type}", failed=words, cure=f"see how it went: remit describe {self.name}")


class PhaseReached:
    """A replica is in a phase, or a node's health is so."""

    def __init__(self, thing: ObjectRef, tenant: str, shown: str, phase: str) -> None:
        self.name, self._thing, self._tenant, self._phase = shown, thing, tenant, phase

    async def look(self, api: Api) -> GoalStatus:
        found = await _get_or_none(api, self._thing, self._tenant)
        if found is None:
            return DELETED
        if isinstance(found, Node):
            return GoalStatus(found.status.health.value == self._phase, f"is {found.status.health.value}")
        status = found.status
        reason = f": {status.reason}" if getattr(status, "reason", "") else ""
        placed = status.phase not in _UNPLACED_PHASES
        return GoalStatus(status.phase.value == self._phase, f"is {status.phase.value}{reason}", placed=placed)


class ObjectReady:
    """A replica is ready or serves; a node takes work."""

    def __init__(self, thing: ObjectRef, tenant: str, shown: str) -> None:
        self.name, self._thing, self._tenant = shown, thing, tenant

    async def look(self, api: Api) -> GoalStatus:
        found = await _get_or_none(api, self._thing, self._tenant)
        if found is None:
            return DELETED
        if isinstance(found, Node):
            ready = found.status.health.value == "ready" and not found.spec.unschedulable
            words = "is cordoned" if found.spec.unschedulable else f"is {found.status.health.value}"
            return GoalStatus(ready, words)
        phase, reason = found.status.phase, found.status.reason
        words = f"is {phase.value}{f': {reason}' if reason else ''}"
        return GoalStatus(phase in (Phase.READY, Phase.SERVING), words, placed=phase not in _UNPLACED_PHASES)


class ReplicaSucceeded:
    """A replica has ended well."""

    def __init__(self, thing: ObjectRef, tenant: str, shown: str) -> None:
        self.name, self._thing, self._tenant = shown, thing, tenant

    async def look(self, api: Api) -> GoalStatus:
        found = await _get_or_none(api, self._thing, self._tenant)
        if found is None:
            return DELETED
        status = found.status
        words = " ".join(part for part in (f"is {status.phase.value}", status.result, status.reason) if part)
        return GoalStatus(
            status.result == "ok" and status.phase in _TERMINAL_PHASES, words, placed=status.phase not in _UNPLACED_PHASES
        )


class NodeDrained:
    """Nothing is left on a node. Says what is, and what holds it."""

    def __init__(self, node: str) -> None:
        self.name, self._node = f"node/{node}", node

    async def look(self, api: Api) -> GoalStatus:
        found = await _get_or_none(api, ObjectRef("Node", self._node), "")
        if found is None:
            return GoalStatus(True, "is gone")
        if not found.spec.draining:
            return GoalStatus(False, "", failed="it does not drain any more; somebody has taken that back")
        here = (await api.list(Replica, tenant="", fields=f"status.node={self._node}")).items
        left = [one for one in here if one.status.phase not in _OFF_NODE_PHASES]
        if not left:
            return GoalStatus(True, "is empty")
        named = [f"{one.metadata.tenant}/{one.metadata.name} {one.status.phase.value}" for one in left[:NAMED_MAX]]
        more = f" and {len(left) - NAMED_MAX} more" if len(left) > NAMED_MAX else ""
        said = condition_of(found.status.conditions, "Drained")
        held = f"; held: {said.message}" if said is not None and said.message else ""
        return GoalStatus(False, f"{len(left)} left: {', '.join(named)}{more}{held}")
