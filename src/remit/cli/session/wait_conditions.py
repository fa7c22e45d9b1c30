"""Waits until objects reach goals, and shows live progress.

Goals are polled with growing pauses until all are reached, one has failed, or the timeout has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import click

from remit.cli.output.console import BAD, GOOD, UNSURE, console
from remit.cli.session.kind_names import ObjectRef
from remit.cli.session.object_lookup import NOT_FOUND, class_of
from remit.cli.session.server_call import CommandError, UnplacedError
from remit.cli.session.workload_progress import (
    RUNNING_PHASES,
    count_in,
    format_funnel,
    format_limit,
    funnel,
    is_rolled_out,
    load_progress,
)
from remit.client.api_caller import ApiError
from remit.law.workload_rules import condition_of
from remit.model.kinds import Node, Workload
from remit.model.metadata import Condition
from remit.model.problems import escaped
from remit.model.records import Phase, Replica, result_text
from remit.model.resources import format_duration, parse_duration
from remit.model.wire.api_types import WorkloadProgressItem
from remit.world.clock import BootClock

if TYPE_CHECKING:
    from rich.console import Console

    from remit.client.api import Api

PAUSE_MS: Final = 200
PAUSE_MS_MAX: Final = 2_000
LINES_MAX: Final = 20


class GoalStatus(NamedTuple):
    """Status of a goal, with a text of one line. `failed`: why it can no longer be reached, with `fix`.

    `placed` is false while a replica has no node; a timeout then has its own exit code. `limit` is what currently prevents the
    goal.
    """

    reached: bool
    text: str
    placed: bool = True
    failed: str = ""
    limit: str = ""
    fix: str = ""

    @property
    def line(self) -> str:
        return f"{self.text}; limited by {self.limit}" if self.limit else self.text


DELETED: Final = GoalStatus(False, "deleted", failed="it was deleted in the meantime", fix="apply it again, then wait again")


class Goal(Protocol):
    """A condition to wait for."""

    name: str

    async def check(self, api: Api) -> GoalStatus: ...


async def wait_for_goals(api: Api, goals: Sequence[Goal], timeout_ms: int) -> None:
    """Return once all goals are reached. Raises an error with their statuses if one has failed or the timeout has passed."""
    clock = BootClock()
    end_ms, pause_ms = clock.now_ms() + timeout_ms, PAUSE_MS
    with WaitDisplay(console(stderr=True)) as display:
        while True:
            statuses = {goal.name: await goal.check(api) for goal in goals}
            display.update(statuses)
            failed = {name: one for name, one in statuses.items() if one.failed}
            if failed:
                raise _goal_failed_error(failed)
            if all(status.reached for status in statuses.values()):
                return
            remaining_ms = end_ms - clock.now_ms()
            if remaining_ms <= 0:
                raise _timeout_error(statuses, timeout_ms)
            await clock.sleep_ms(min(pause_ms, remaining_ms))
            pause_ms = min(PAUSE_MS_MAX, pause_ms * 5 // 4)


def _goal_failed_error(failed: dict[str, GoalStatus]) -> CommandError:
    name, first_status = next(iter(failed.items()))
    lines = [escaped(f"{name}: {one.failed}") for name, one in list(failed.items())[:LINES_MAX]]
    return CommandError("\n  ".join(lines), escaped(first_status.fix or f"for details: remit describe {name}"))


def _timeout_error(statuses: dict[str, GoalStatus], timeout_ms: int) -> CommandError:
    unmet = {name: one for name, one in statuses.items() if not one.reached}
    unplaced = [name for name, one in unmet.items() if not one.placed]
    lines = [escaped(f"{name}: {one.line}") for name, one in list(unmet.items())[:LINES_MAX]]
    message = f"timed out after {format_duration(timeout_ms)}\n  " + "\n  ".join(lines)
    if unplaced:
        return UnplacedError(message, f"find out why: remit explain {unplaced[0]}")
    return CommandError(message, f"for details: remit describe {next(iter(unmet))}")


class WaitDisplay:
    """Shows statuses: live lines on a terminal, elsewhere a line for each change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: dict[str, str] = {}
        self._live: Any = None

    def __enter__(self) -> WaitDisplay:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.transient = error[0] is not None  # the error repeats the statuses
            self._live.__exit__(None, None, None)

    def update(self, statuses: dict[str, GoalStatus]) -> None:
        if self._live is not None:
            self._live.update(_render_lines(statuses), refresh=True)
            return
        for name, one in statuses.items():
            if self._printed.get(name) != one.line and (name in self._printed or not one.reached):
                self._printed[name] = one.line
                click.echo(escaped(f"{name}: {one.line}"), err=True)


def _render_lines(statuses: dict[str, GoalStatus]) -> Any:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    ordered = sorted(statuses.items(), key=lambda pair: pair[1].reached)
    width = max(len(name) for name in statuses)
    for number, (name, one) in enumerate(ordered[:LINES_MAX]):
        style = GOOD if one.reached else BAD if one.failed or not one.placed else UNSURE
        text.append("\n" if number else "")
        text.append("✓ " if one.reached else "· ", style=style)
        text.append(f"{escaped(name):<{width}}  ", style="bold")
        text.append(escaped(one.failed or one.text))
        if one.limit and not one.failed:
            text.append(f"\n  {'':<{width}}  limited by {escaped(one.limit)}", style=style)
    if len(ordered) > LINES_MAX:
        text.append(f"\n  and {len(ordered) - LINES_MAX} more")
    return text


def parse_timeout(text: str) -> int:
    """Parse the option --timeout into milliseconds."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(f"{escaped(text)}: {error}", param_hint="--timeout") from error


# -- goals ---------------------------------------------------------------------------------------------------------------- ----


class WorkloadReady:
    """A workload is ready: a service is rolled out and ready; a job has started all replicas that may run at once."""

    def __init__(self, name: str, tenant: str, *, display_name: str = "", must_complete: bool = False) -> None:
        self._workload, self._tenant, self._must_complete = name, tenant, must_complete
        self.name = display_name or f"workload/{name}"

    async def check(self, api: Api) -> GoalStatus:
        try:
            workload = await api.get(Workload, self._workload, tenant=self._tenant)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return DELETED
        if self._must_complete and workload.spec.type != "job":
            return _never_ends(workload.spec.type, "complete", self.name)
        progress = await load_progress(api, self._workload, self._tenant)
        return DELETED if progress is None else workload_goal_status(workload, progress, must_complete=self._must_complete)


def workload_goal_status(workload: Workload, progress: WorkloadProgressItem, *, must_complete: bool = False) -> GoalStatus:
    """Return whether the workload is ready. With `must_complete`, a job must have completed."""
    text = f"{format_funnel(funnel(progress, workload.spec.type))} of {progress.desired:,} desired"
    if workload.metadata.deleting:  # its desired number is 0, so the numbers alone would look like success
        return GoalStatus(False, text, failed="it is being deleted", fix=DELETED.fix)
    failed = condition_of(workload.status.conditions, "Failed")
    if failed is not None and failed.status == "True" and failed.observed_generation == workload.metadata.generation:
        return GoalStatus(False, text, failed=f"failed ({failed.reason})" + (f": {failed.message}" if failed.message else ""))
    if _is_ready(workload, progress, must_complete):
        return GoalStatus(True, text)
    limit = format_limit(progress)
    if not limit and workload.spec.type != "job" and not is_rolled_out(workload):
        limit = "controllers have not reported this generation as rolled out yet"
    return GoalStatus(False, text, placed=_is_placed(workload, progress), limit=limit)


def _is_ready(workload: Workload, progress: WorkloadProgressItem, must_complete: bool) -> bool:
    if workload.spec.type != "job":
        return is_rolled_out(workload) and progress.ready >= progress.desired
    if progress.desired and progress.done >= progress.desired:
        return True
    running = count_in(progress, *RUNNING_PHASES, Phase.FINISHED)
    return not must_complete and running >= min(workload.spec.replicas, progress.desired)


def _is_placed(workload: Workload, progress: WorkloadProgressItem) -> bool:
    if count_in(progress, *_UNPLACED_PHASES):
        return False
    if progress.limit.code == "rollout":  # missing replicas were placed and have failed
        return True
    wanted = min(workload.spec.replicas, progress.desired) if workload.spec.type == "job" else progress.desired
    return sum(progress.stages.values()) >= wanted


NAMED_MAX: Final = 3
_UNPLACED_PHASES: Final = (Phase.PENDING, Phase.RESERVED)
_TERMINAL_PHASES: Final = (Phase.FAILED, Phase.RELEASED, Phase.FINISHED)
_OFF_NODE_PHASES: Final = (Phase.PENDING, Phase.RELEASED)
_OPPOSITE_CONDITION: Final = {"Complete": "Failed", "Failed": "Complete"}
"""Outcomes of a job that exclude each other."""


async def _get_or_none(api: Api, ref: ObjectRef, tenant: str) -> Any:
    try:
        return await api.get(class_of(ref.kind), ref.name, tenant=tenant)
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        return None


class ObjectDeleted:
    """An object is deleted. A new object of the same name counts as deleted."""

    def __init__(self, ref: ObjectRef, tenant: str, display_name: str) -> None:
        self.name, self._ref, self._tenant = display_name, ref, tenant
        self._uid = ""

    async def check(self, api: Api) -> GoalStatus:
        obj = await _get_or_none(api, self._ref, self._tenant)
        if obj is None or (self._uid and obj.metadata.uid != self._uid):
            return GoalStatus(True, "deleted")
        self._uid = obj.metadata.uid
        if self._ref.kind != "Workload":
            finalizers = ", ".join(getattr(obj.metadata, "finalizers", ()))
            return GoalStatus(False, "not deleted yet" + (f", waiting for finalizers {finalizers}" if finalizers else ""))
        remaining = (await api.list(Replica, tenant=self._tenant, fields=f"spec.workload={self._ref.name}")).items
        return GoalStatus(False, f"{len(remaining)} of its replicas remain" if remaining else "not deleted yet")


def _never_ends(kind: str, outcome: str, display_name: str) -> GoalStatus:
    """Return the failed status of waiting for the end of a service or daemon."""
    fix = f"wait until it is ready: remit wait {display_name} --for=ready"
    return GoalStatus(False, f"a {kind}", failed=f"it is a {kind}; only jobs can become {outcome}", fix=fix)


class ConditionMet:
    """A condition has a given status."""

    def __init__(self, ref: ObjectRef, tenant: str, display_name: str, type_: str, status: str) -> None:
        self.name, self._ref, self._tenant = display_name, ref, tenant
        self._type, self._status = type_, status

    async def check(self, api: Api) -> GoalStatus:
        obj = await _get_or_none(api, self._ref, self._tenant)
        if obj is None:
            return DELETED
        conditions: Iterable[Condition] = getattr(getattr(obj, "status", None), "conditions", ())
        if isinstance(obj, Workload) and self._status.lower() == "true" and (impossible := self._impossible(obj)) is not None:
            return impossible
        condition = condition_of(conditions, self._type)
        if condition is None:
            present = ", ".join(f"{condition.type}={condition.status}" for condition in conditions)
            return GoalStatus(
                False, f"has no condition {self._type} yet" + (f"; its conditions are {present}" if present else "")
            )
        current = condition.observed_generation in (0, obj.metadata.generation)
        text = f"{condition.type}={condition.status}" + (f" ({_reason_text(condition)})" if _reason_text(condition) else "")
        return GoalStatus(condition.status.lower() == self._status.lower() and current, text)

    def _impossible(self, workload: Workload) -> GoalStatus | None:
        """Return a failed status for outcomes that are impossible: only jobs end, and a finished job keeps its outcome."""
        opposite = _OPPOSITE_CONDITION.get(self._type)
        if opposite is None:
            return None
        kind = workload.spec.type
        if kind != "job":
            return _never_ends(kind, self._type.lower(), self.name)
        condition = condition_of(workload.status.conditions, opposite)
        if condition is None or condition.status != "True" or condition.observed_generation != workload.metadata.generation:
            return None
        reason = _reason_text(condition)
        text = f"it is {condition.type}{f' ({reason})' if reason else ''} and can no longer become {self._type}"
        return GoalStatus(False, condition.type, failed=text, fix=f"for details: remit describe {self.name}")


class PhaseReached:
    """A replica or grant is in a phase, or a node has a health."""

    def __init__(self, ref: ObjectRef, tenant: str, display_name: str, phase: str) -> None:
        self.name, self._ref, self._tenant, self._phase = display_name, ref, tenant, phase

    async def check(self, api: Api) -> GoalStatus:
        obj = await _get_or_none(api, self._ref, self._tenant)
        if obj is None:
            return DELETED
        if isinstance(obj, Node):
            return GoalStatus(obj.status.health.value == self._phase, obj.status.health.value)
        status = obj.status
        reason = f": {status.reason}" if getattr(status, "reason", "") else ""
        placed = status.phase not in _UNPLACED_PHASES
        return GoalStatus(status.phase.value == self._phase, f"{status.phase.value}{reason}", placed=placed)


class ObjectReady:
    """A replica is ready or serving; a node is ready and schedulable."""

    def __init__(self, ref: ObjectRef, tenant: str, display_name: str) -> None:
        self.name, self._ref, self._tenant = display_name, ref, tenant

    async def check(self, api: Api) -> GoalStatus:
        obj = await _get_or_none(api, self._ref, self._tenant)
        if obj is None:
            return DELETED
        if isinstance(obj, Node):
            ready = obj.status.health.value == "ready" and not obj.spec.unschedulable
            text = "is cordoned" if obj.spec.unschedulable else obj.status.health.value
            return GoalStatus(ready, text)
        phase, reason = obj.status.phase, obj.status.reason
        text = f"is {phase.value}{f': {reason}' if reason else ''}"
        return GoalStatus(phase in (Phase.READY, Phase.SERVING), text, placed=phase not in _UNPLACED_PHASES)


class ReplicaSucceeded:
    """A replica has finished successfully."""

    def __init__(self, ref: ObjectRef, tenant: str, display_name: str) -> None:
        self.name, self._ref, self._tenant = display_name, ref, tenant

    async def check(self, api: Api) -> GoalStatus:
        obj = await _get_or_none(api, self._ref, self._tenant)
        if obj is None:
            return DELETED
        status = obj.status
        ending = result_text(status.result, status.reason)
        text = f"is {status.phase.value}" + (f", {ending}" if ending else "")
        return GoalStatus(
            status.result == "ok" and status.phase in _TERMINAL_PHASES, text, placed=status.phase not in _UNPLACED_PHASES
        )


class NodeDrained:
    """A draining node has no replicas left. The status lists the remaining replicas and what blocks them."""

    def __init__(self, node: str) -> None:
        self.name, self._node = f"node/{node}", node

    async def check(self, api: Api) -> GoalStatus:
        obj = await _get_or_none(api, ObjectRef("Node", self._node), "")
        if obj is None:
            return GoalStatus(True, "deleted")
        if not obj.spec.draining:
            return GoalStatus(False, "", failed="the drain was cancelled by `remit uncordon` or a manifest")
        replicas = (await api.list(Replica, tenant="", fields=f"status.node={self._node}")).items
        remaining = [one for one in replicas if one.status.phase not in _OFF_NODE_PHASES]
        if not remaining:
            return GoalStatus(True, "empty")
        named = [f"{one.metadata.tenant}/{one.metadata.name} {one.status.phase.value}" for one in remaining[:NAMED_MAX]]
        more_text = f" and {len(remaining) - NAMED_MAX} more" if len(remaining) > NAMED_MAX else ""
        condition = condition_of(obj.status.conditions, "Drained")
        finalizers = f"; blocked: {condition.message}" if condition is not None and condition.message else ""
        count_text = "1 replica" if len(remaining) == 1 else f"{len(remaining)} replicas"
        return GoalStatus(False, f"{count_text} left: {', '.join(named)}{more_text}{finalizers}")


def _reason_text(condition: Condition) -> str:
    return ": ".join(part for part in (condition.reason, condition.message) if part)
