"""Safety: processes run only as the committed rows order, and one copy at a time.

Based on the records of the simulated machines' process runners; reports of agents are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

from remit.simulate.checkers.rare_events import RareEvent, RareEvents
from remit.simulate.checkers.reference.history import AttemptKey, CommitStep, History
from remit.simulate.checkers.reference.lifecycle import ASSIGNED, CLOCK_RATIO_MAX, STOPPABLE
from remit.simulate.checkers.reference.rows import Json, ReferenceShape, attempt_of, phase_of
from remit.simulate.checkers.registry import UNDECIDED, Findings


class RunningProcess(NamedTuple):
    """One process: its attempt, its node, and when it started."""

    scope: str
    run: AttemptKey
    node: str
    pid: int
    began_ms: int


class StopRequest(NamedTuple):
    """A request to stop a process: the component that sent it, and when."""

    requester: str
    at_ms: int


class EndedProcess(NamedTuple):
    process: RunningProcess
    ended_ms: int


class ProcessRecords:
    """Running and ended processes of all nodes."""

    def __init__(
        self, histories: Mapping[str, History], now_ms: Callable[[], int], rare_events: RareEvents | None = None
    ) -> None:
        self.histories, self.now_ms, self.rare_events = histories, now_ms, rare_events or RareEvents()
        self.alive: dict[tuple[str, int], RunningProcess] = {}
        self.copies: dict[tuple[str, str, str], dict[tuple[str, int], RunningProcess]] = {}
        """Running processes, by scope, replica and uid."""
        self.ended: list[EndedProcess] = []
        self.waived: dict[str, int] = {}
        """How often a check did not apply, by reason: `eager` work may run twice, a scope that was `restored` may have lost an
        order to stop, a process that is `unhealthy` by its probe is stopped to be restarted, and one that was `unrecorded`
        because the disk failed when it was started is not found by a later keeper.
        """
        self.unrecorded: set[tuple[str, int]] = set()
        """Processes that were started while the machine's disk was failing."""
        self.stop_requests: dict[tuple[str, int], list[StopRequest]] = {}
        """Requests to stop, by process."""
        self.renewals: dict[tuple[str, str], int] = {}
        """When the latest successful renewal had been sent, by scope and lease."""

    def on_commit(self, step: CommitStep) -> None:
        """Record where each attempt was started and when it was released."""
        history = step.history
        for key, old, new in step.moves:
            if new is None:
                self._release(history, key, old)
                continue
            uid, phase = new["metadata"]["uid"], phase_of(new)
            run = key, uid, attempt_of(new)
            if old is None or (key, uid) not in history.shape_of:
                shape = history.shape(new)
                if shape is not None:
                    history.shape_of[key, uid] = shape
            if phase == "starting" and phase_of(old) == "bound":
                history.starts[run] = new["status"]["node"], history.serial
            elif (phase_of(old), phase) == ("unknown", "failed"):
                history.declared_lost.add(run)
            elif phase == "released":
                self._release(history, key, new)

    def _release(self, history: History, key: str, replica: Json) -> None:
        history.releases[key, replica["metadata"]["uid"], attempt_of(replica)] = history.serial

    def on_start(self, process: RunningProcess) -> None:
        self.rare_events.on_start(process.run)
        self.alive[process.node, process.pid] = process
        key, uid, _ = process.run
        self.copies.setdefault((process.scope, key, uid), {})[process.node, process.pid] = process

    def on_end(self, node: str, pid: int) -> None:
        process = self.alive.pop((node, pid), None)
        if process is None:
            return
        key, uid, _ = process.run
        running = self.copies[process.scope, key, uid]
        del running[node, pid]
        if not running:
            del self.copies[process.scope, key, uid]
        self.ended.append(EndedProcess(process, self.now_ms()))

    def on_stop_request(self, node: str, pid: int, by: str) -> RunningProcess | None:
        process = self.alive.get((node, pid))
        if process is not None:
            self.stop_requests.setdefault((node, pid), []).append(StopRequest(by, self.now_ms()))
        return process

    def on_renewal(self, scope: str, lease: str, sent_ms: int) -> None:
        self.renewals[scope, lease] = max(sent_ms, self.renewals.get((scope, lease), sent_ms))

    # -- starts -----------------------------------------------------------------------------------------------------

    def processes_have_committed_start(self, process: RunningProcess) -> Findings:
        """S14, and so S20: a start needs its own committed `starting` on this node that was not released since."""
        history, run = self.histories.get(process.scope), process.run
        ordered = None if history is None else history.starts.get(run)
        if history is None or ordered is None or ordered[0] != process.node:
            at = "nowhere" if ordered is None else f"on {ordered[0]}"
            yield run[0], f"attempt {run[2]} of {run[1]} runs on {process.node}, and was committed as starting {at}"
            return
        if history.releases.get(run, 0) <= ordered[1]:
            return
        if run in history.declared_lost and not self._fenced(process):
            self._waive("eager")
        else:
            yield run[0], f"attempt {run[2]} of {run[1]} was started on {process.node} after it was released"

    def fenced_replica_has_one_process(self, process: RunningProcess) -> Findings:
        """S8: the processes of a replica's attempts do not overlap, on any nodes."""
        key, uid, attempt = process.run
        others = [p for p in self.copies.get((process.scope, key, uid), {}).values() if p is not process]
        for other in others:
            if not self._fenced(process):
                self._waive("eager")
            else:
                note = " (the scope was restored)" if len(self.histories[process.scope].incarnations) > 1 else ""
                yield key, f"attempt {attempt} runs on {process.node} while attempt {other.run[2]} runs on {other.node}{note}"

    # -- stop requests ----------------------------------------------------------------------------------------------

    def assigned_processes_are_not_stopped(self, process: RunningProcess, requester: str) -> Findings:
        """S20: an attempt that its row still assigns to the node keeps running, even if other components are unreachable.

        It may be stopped only if the row is in a phase that ends the attempt or names another attempt or node, or if the fence
        has passed. Exempt are processes that fail a probe, that started while the disk failed, or that a restore has forgotten.
        """
        history, (key, uid, attempt) = self.histories.get(process.scope), process.run
        replica = None if history is None else history.row(key)
        if history is None or replica is None or _may_be_stopped(replica, uid, attempt, process.node):
            return
        if history.restored_ms is not None and history.restored_ms >= process.began_ms:
            self._waive("restored")
            return
        lease, shape = f"agent/{process.node}", self.shape(process)
        sent_ms = self.renewals.get((process.scope, lease))
        if shape is None:
            yield key, f"{UNDECIDED} its fence is in no row"
        elif self._fails_probe(process, shape, phase_of(replica)):
            self._waive("unhealthy")
        elif (process.node, process.pid) in self.unrecorded:
            self._waive("unrecorded")
        elif not shape.fenced:
            yield key, f"{requester} stops attempt {attempt} on {process.node}, which is {phase_of(replica)}, and has no fence"
        elif sent_ms is None:
            yield key, f"{UNDECIDED} no renewal of {lease} has succeeded yet, and its acquisition time is unknown"
        elif self.now_ms() - sent_ms < shape.fence_ms / CLOCK_RATIO_MAX:
            passed = f"{self.now_ms() - sent_ms} ms after {lease} was renewed, fence {shape.fence_ms}"
            yield key, f"{requester} stops attempt {attempt} on {process.node}, which is {phase_of(replica)}, {passed}"
        else:
            self.rare_events.count(RareEvent.FENCED)

    def _fails_probe(self, process: RunningProcess, shape: ReferenceShape, phase: str | None) -> bool:
        """Whether its program now fails a probe that may stop it. The start probe applies only until it has started."""
        is_probed = shape.has_liveness_probe or (shape.has_start_probe and phase == "starting")
        return (
            is_probed
            and shape.fails_probe_after_ms is not None
            and self.now_ms() - process.began_ms >= shape.fails_probe_after_ms
        )

    # -- committed ends -----------------------------------------------------------------------------------------------

    def ended_attempts_have_no_process(self, step: CommitStep) -> Findings:
        """S8: when an attempt's end is committed, or its fence has passed, no process of it is left. Eager work is exempt."""
        for key, old, new in step.moves:
            now = phase_of(new)
            if old is None or now not in ("finished", "failed", "released") or phase_of(old) not in ASSIGNED:
                continue
            for process in self.copies.get((step.history.scope, key, old["metadata"]["uid"]), {}).values():
                if process.run[2] != attempt_of(old) or process.node != old["status"].get("node"):
                    continue
                if (phase_of(old) == "unknown" or process.run in step.history.declared_lost) and not self._fenced(process):
                    self._waive("eager")
                else:
                    yield key, f"attempt {process.run[2]} is {now}, but process {process.pid} on {process.node} still runs"

    # -- at the end --------------------------------------------------------------------------------------------------

    def run_intervals_are_disjoint(self, scope: str) -> Findings:
        """S8 again, from the complete record instead of as it happened."""
        by_replica: dict[tuple[str, str], list[tuple[int, int, RunningProcess]]] = {}
        now = self.now_ms()
        lived = [*self.ended, *(EndedProcess(process, now + 1) for process in self.alive.values())]
        for process, ended_ms in lived:
            if process.scope == scope and self._fenced(process):
                by_replica.setdefault(process.run[:2], []).append((process.began_ms, ended_ms, process))
        for (key, _), intervals in by_replica.items():
            intervals.sort(key=lambda item: item[:2])
            for (_, ended_ms, first), (began_ms, _, second) in pairwise(intervals):
                if began_ms < ended_ms:
                    yield key, f"{first} ran until {ended_ms}, and {second} since {began_ms}"

    def shape(self, process: RunningProcess) -> ReferenceShape | None:
        history = self.histories.get(process.scope)
        return None if history is None else history.shape_of.get(process.run[:2])

    def _fenced(self, process: RunningProcess) -> bool:
        shape = self.shape(process)
        return shape is None or shape.fenced

    def _waive(self, reason: str) -> None:
        self.waived[reason] = self.waived.get(reason, 0) + 1

    def describe(self, scope: str, key: str) -> list[str]:
        lived = [(entry.process, f"until {entry.ended_ms} ms") for entry in self.ended]
        lived += [(process, "still runs") for process in self.alive.values()]
        return [
            f"  attempt {p.run[2]} of {p.run[1]} ran on {p.node} as process {p.pid} from {p.began_ms} ms, "
            f"{self._requested_by(p)}{until}"
            for p, until in sorted(lived, key=lambda item: item[0].began_ms)
            if (p.scope, p.run[0]) == (scope, key)
        ]

    def _requested_by(self, process: RunningProcess) -> str:
        requests = self.stop_requests.get((process.node, process.pid), ())
        return "".join(f"asked to end by {request.requester} at {request.at_ms} ms, " for request in requests)


def _may_be_stopped(replica: Json, uid: str, attempt: int, node: str) -> bool:
    """Whether this attempt is no longer ordered according to the rows. For unknown replicas the phase before counts."""
    status = replica.get("status", {})
    phase = phase_of(replica)
    if (replica["metadata"]["uid"], attempt_of(replica), status.get("node")) != (uid, attempt, node):
        return True
    return (status.get("before") if phase == "unknown" else phase) in STOPPABLE
