"""Object metadata, labels, owner references, conditions, deadlines.

Two conventions hold for all types. An absent field has its default, so that a stored row contains only what was set. Bounds
are part of the type (`Meta`), so that the manifest reader, the JSON Schema and the decoder enforce the same ones; the
constraints of constraints.py are checked when an object is declared, but not when it is decoded. Rules between fields are in
manifests/field_rules.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

from remit.model.constraints import MatchesPattern, UnreservedName, constrained
from remit.model.resources import Amount

API_VERSION = "remit/v1"

END = r"$(?!\n)"
"""Matches only at the very end. In Python a bare `$` also matches before a trailing newline and would accept a name that ends
with one.
"""

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?" + END
OPTIONAL_LABEL = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?" + END
DNS_NAME = r"^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?" + END
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LABEL_KEY = rf"^((?=[^/]{{1,253}}/){_LABEL}(\.{_LABEL})*/)?[A-Za-z0-9]([-_.A-Za-z0-9]{{0,61}}[A-Za-z0-9])?" + END
OPTIONAL_KEY = rf"^{END}|{LABEL_KEY}"
QUALIFIED_NAME = rf"^{_LABEL}/{_LABEL}" + END
LABEL_VALUE = r"^([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?" + END
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*" + END
FILE_NAME = r"^(?!\.\.|\.$)[-_.A-Za-z0-9]+" + END
_VISIBLE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]*"
LINE = rf"^{_VISIBLE}" + END
"""One line without control characters. The text is used in requests, paths and logs, where a newline would start a new line or
header.
"""
URL_PATH = rf"^/{_VISIBLE}" + END
KIND = r"^[A-Za-z][A-Za-z0-9]*" + END
UID = r"^[-_.:A-Za-z0-9]*" + END

Name = Annotated[str, Meta(pattern=DNS_LABEL, max_length=63, description="a DNS label: a-z, 0-9 and -")]
QualifiedName = Annotated[
    str, Meta(pattern=QUALIFIED_NAME, max_length=127, description="a tenant's name, / and the name of its object")
]
LabelKey = Annotated[str, Meta(pattern=LABEL_KEY, max_length=317, description="a label key")]
LabelValue = Annotated[str, Meta(pattern=LABEL_VALUE, max_length=63, description="a label value")]
UserKey = Annotated[
    str, constrained(UnreservedName(), pattern=LABEL_KEY, max_length=317, description="a label key without Remit's own prefix")
]
UserLabels = Annotated[dict[UserKey, LabelValue], Meta(max_length=64)]
"""Labels that a user sets. `Labels` is for selectors, which may also use Remit's own labels."""
Labels = Annotated[dict[LabelKey, LabelValue], Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Natural = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
Line = Annotated[str, Meta(pattern=LINE, max_length=4096)]
FileName = Annotated[str, Meta(pattern=FILE_NAME, max_length=253, description="a file name")]
Uid = Annotated[str, Meta(pattern=UID, max_length=253)]
ClassName = Annotated[
    str,
    constrained(
        MatchesPattern(OPTIONAL_LABEL, 63, "a DNS label", "use a-z, 0-9 and -, as in the name of the PriorityClass"),
        max_length=63,
    ),
]
EnvName = Annotated[str, Meta(pattern=ENV_NAME, max_length=256)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Resources = Annotated[Amount, Meta(extra={"devices": False}, description="resources by name, such as cpu and memory")]
Quota = Annotated[Amount, Meta(extra={"devices": True}, description="resources by name, and devices by kind")]


class Record(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Base of every struct inside an object."""


def share_default(record: Record, name: str, default: str) -> None:
    """Makes a field that equals its default refer to the default object, for `__post_init__` of a struct.

    The encoder leaves out a field only if it holds the default object itself. CPython shares strings of one character, except
    those that msgspec decodes, so without this equal structs could be encoded differently and a retry would get another digest.
    """
    if getattr(record, name) == default:
        force_setattr(record, name, default)


class Object(Record, tag_field="kind", frozen=True, kw_only=True):
    """Base of every kind: an object with a kind and a name."""

    api_version: Literal["remit/v1"] = "remit/v1"


class Owner(Record, frozen=True):
    """Owner of this object. When the owner is deleted, the object is deleted too."""

    kind: Annotated[str, Meta(pattern=KIND, max_length=253)]
    name: Name
    uid: Uid = ""


class Metadata(Record, frozen=True):
    name: Name
    tenant: Annotated[str, Meta(pattern=OPTIONAL_LABEL)] = ""
    labels: UserLabels = field(default_factory=dict)
    annotations: Annotated[dict[UserKey, Text], Meta(max_length=64)] = field(default_factory=dict)
    owners: Annotated[tuple[Owner, ...], Meta(max_length=16)] = ()
    finalizers: Annotated[tuple[UserKey, ...], Meta(max_length=16)] = ()
    uid: Uid = ""
    generation: Natural = 0
    revision: Natural = 0
    created: Annotated[str, Meta(pattern=LINE, max_length=64, description="wall-clock time of the authority, for people")] = ""
    deleting: bool = False


class RecordMetadata(Record, frozen=True):
    """Metadata of records that the authority itself writes. The authority chooses their names, so the decoder does not validate
    them again.
    """

    name: str
    tenant: str = ""
    uid: str = ""
    generation: int = 0
    revision: int = 0


class Condition(Record, frozen=True):
    """An observed condition of an object. `reason` is a stable identifier for programs, `message` is text for people."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = ""
    message: str = ""
    observed_generation: Natural = 0
    last_transition: str = ""


class ObjectStatus(Record, frozen=True):
    """Status of kinds of which nothing but conditions is observed."""

    conditions: tuple[Condition, ...] = ()


# ------------------------------------------------------------------------------------------------- priorities and deadlines


Priority = Annotated[int, Meta(ge=-1_000_000_000, le=2_000_000_000, description="higher is more urgent")]


class Deadline(Record, frozen=True):
    """An instant on the boot clock of one machine. It cannot be compared with the clock of another boot and then counts as
    passed.
    """

    boot: str
    at_ms: Natural
