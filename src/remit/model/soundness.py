"""Is it plain to see that a workload breaks no rule? If it is not, judging.py looks, and says what it breaks. No I/O here.

Work comes in floods of one shape: each time another name, and the same spec. No rule of a workload looks at metadata and
spec together (rules.py), so a spec that was once judged sound is sound again, byte for byte the same, under any name. What
is told by this is only `yes`: whatever is unusual is left to the judge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar

from remit.model.fields import API_VERSION, DNS_LABEL, END, LABEL_VALUE, Metadata
from remit.model.kinds import Workload, WorkloadSpec
from remit.model.objects import encoded_spec

V = TypeVar("V")

KNOWN_MAX: Final = 4_096
SPEC_BYTES_MAX: Final = 8 << 10
"""Of a spec that is remembered: far below what a manifest may have."""
LABELS_MAX: Final = 16

_label: Final = re.compile(DNS_LABEL).search
_key: Final = re.compile(r"^[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?" + END).search
"""A key without a prefix: whose prefix is reserved is the judge's to say."""
_value: Final = re.compile(LABEL_VALUE).search


class Remembered(Generic[V]):
    """Values by the bytes that they stand for; all are forgotten when there are too many."""

    def __init__(self) -> None:
        self._values: dict[bytes, V] = {}
        self.get = self._values.get

    def put(self, spec: bytes, value: V) -> None:
        if len(spec) <= SPEC_BYTES_MAX:
            if len(self._values) >= KNOWN_MAX:
                self._values.clear()
            self._values[spec] = value


_sound: Final[Remembered[bool]] = Remembered()


def plainly_named(name: str, tenant: str, labels: Mapping[str, str]) -> bool:
    """Would the judge find nothing wrong with metadata that say only this?"""
    if _label(name) is None or _label(tenant) is None or len(labels) > LABELS_MAX:
        return False
    for key, value in labels.items():  # noqa: SIM110  (a generator would cost more than what it goes through)
        if _key(key) is None or _value(value) is None:
            return False
    return True


def is_sound(thing: Any) -> bool:
    """Is it known already that the judge finds nothing wrong?"""
    if type(thing) is not Workload or thing.api_version != API_VERSION:
        return False
    meta = thing.metadata
    if type(meta) is not Metadata or meta.annotations or meta.owners or meta.finalizers:
        return False
    return is_sound_spec(thing.spec) and plainly_named(meta.name, meta.tenant, meta.labels)


def is_sound_spec(spec: WorkloadSpec) -> bool:
    """Was it judged before?"""
    return _sound.get(encoded_spec(spec)) is not None


def found_sound(thing: Any) -> None:
    """The judge found nothing wrong."""
    if type(thing) is Workload:
        _sound.put(encoded_spec(thing.spec), True)
