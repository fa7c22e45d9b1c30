"""Identity of one attempt of a replica: key, uid, attempt number, fencing token, file names.

Names only; nothing runs here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from remit.world.interfaces import Ended

if TYPE_CHECKING:  # a keeper is small: it knows copies, and loads no kinds
    from remit.model.records import Replica

OK: Final = "ok"
OOM: Final = "oom"
TIMEOUT: Final = "timeout"
GONE: Final = "gone"
"""It ended, and nobody saw how: whoever started it was gone too."""
NOT_STARTED: Final = "not started"
UNWELL: Final = "unwell"
"""A probe failed too often, so it was ended."""

SCRATCH_FULL: Final = "scratch full"
"""It kept more in a scratch volume than its size allows, so it was ended."""

STREAMS: Final = ("out", "err")

_COPY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,180}\.[0-9]{1,10}")
_UNSAFE: Final = re.compile(r"[^a-zA-Z0-9.-]")


class Copy(NamedTuple):
    """One attempt of one replica: `key` is its row's, and a name may come again with another uid."""

    key: str
    uid: str
    attempt: int

    @property
    def token(self) -> str:
        """What fences it: the work may show it to whatever it writes to."""
        return f"{self.uid}.{self.attempt}"

    @property
    def file_name(self) -> str:
        """Safe as the name of a file or a cgroup, and no other copy's."""
        return f"{_UNSAFE.sub('_', self.uid)}.{self.attempt}"

    @property
    def log_names(self) -> tuple[str, ...]:
        """The files of what it says, in the directory of its node's logs."""
        return tuple(f"{self.file_name}.{stream}" for stream in STREAMS)


def is_copy_name(name: str) -> bool:
    """May this be a copy's `file_name`?"""
    return _COPY_NAME.fullmatch(name) is not None


def copy_of(key: str, replica: Replica) -> Copy:
    return Copy(key, replica.metadata.uid, replica.status.attempt)


def known_by(env: Mapping[str, str]) -> Copy:
    """Whose process it is, by its environment."""
    return Copy(env["REMIT_REPLICA"], env["REMIT_UID"], int(env["REMIT_ATTEMPT"]))


def named(node: str, copy: Copy) -> dict[str, object]:
    """What a line of the log is found by."""
    return {"node": node, "replica": copy.key, "attempt": copy.attempt, "uid": copy.uid}


def result_of(ended: Ended) -> str:
    """How an attempt ended, in one word for programs."""
    if ended.oom:
        return OOM
    if ended.code is not None:
        return OK if ended.code == 0 else f"exit {ended.code}"
    return f"signal {ended.signal}" if ended.signal is not None else GONE
