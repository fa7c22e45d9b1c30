"""Identity of one attempt of a replica: key, uid, attempt number, fencing token, file names.

Holds names and result words only; it starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from remit.world.interfaces import ExitStatus

if TYPE_CHECKING:  # the keeper process loads this module and must stay small, so no kinds are imported
    from remit.model.records import Replica

OK: Final = "ok"
OOM: Final = "oom"
TIMEOUT: Final = "timeout"
GONE: Final = "gone"
"""The process ended while no keeper was watching it, so its exit status is unknown."""
NOT_STARTED: Final = "not started"
START_ABANDONED: Final = "start abandoned"
"""The agent did not start the attempt, because the scope may have declared it lost in the meantime."""

START_TOO_LATE: Final = "start too late"
"""The keeper or the machine refused the start, because its deadline had passed."""

UNHEALTHY: Final = "unhealthy"
"""A startup or liveness probe failed too often, so the process was stopped."""

FORMER_RESULTS: Final = {"unwell": UNHEALTHY}
"""By former name: results that a keeper's records may still contain."""

SCRATCH_FULL: Final = "scratch full"
"""The process wrote more to a scratch volume than its size, so it was stopped."""

STREAMS: Final = ("out", "err")

_ATTEMPT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,180}\.[0-9]{1,10}")
_UNSAFE: Final = re.compile(r"[^a-zA-Z0-9.-]")


class AttemptId(NamedTuple):
    """One attempt of one replica. `key` is the key of its row. A deleted replica may be created again under the same name; the
    uid tells the two apart.
    """

    key: str
    uid: str
    number: int

    @property
    def token(self) -> str:
        """The fencing token of this attempt. The process may present it to storage it writes to."""
        return f"{self.uid}.{self.number}"

    @property
    def file_name(self) -> str:
        """A name for files and cgroups of this attempt: safe in a path, and unique."""
        return f"{_UNSAFE.sub('_', self.uid)}.{self.number}"

    @property
    def log_names(self) -> tuple[str, ...]:
        """Names of the log files of this attempt, in the log directory of its node."""
        return tuple(f"{self.file_name}.{stream}" for stream in STREAMS)


def is_attempt_name(name: str) -> bool:
    """Return whether `name` has the form of an attempt's `file_name`."""
    return _ATTEMPT_NAME.fullmatch(name) is not None


def attempt_of(key: str, replica: Replica) -> AttemptId:
    return AttemptId(key, replica.metadata.uid, replica.status.attempt)


def attempt_from_env(env: Mapping[str, str]) -> AttemptId:
    """Return the attempt a process belongs to, from its environment."""
    return AttemptId(env["REMIT_REPLICA"], env["REMIT_UID"], int(env["REMIT_ATTEMPT"]))


def log_fields(node: str, attempt: AttemptId) -> dict[str, object]:
    """Return the fields that identify an attempt in a structured log line."""
    return {"node": node, "replica": attempt.key, "attempt": attempt.number, "uid": attempt.uid}


def result_of(status: ExitStatus) -> str:
    """Return how an attempt ended, as one word for programs."""
    if status.oom:
        return OOM
    if status.code is not None:
        return OK if status.code == 0 else f"exit {status.code}"
    return f"signal {status.signal}" if status.signal is not None else GONE
