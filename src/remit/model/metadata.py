"""Object metadata, labels, owner references, conditions, deadlines.

Names, labels, amounts and metadata, with the limits that stand on their types.

Two rules keep these pages short: a field that is absent means its default, so a stored row holds only what was said; and limits
stand on the type (`Meta`), so that the reader of manifests, the JSON Schema and the decoder all enforce the same ones; those of
limits.py are for what is declared anew, and the decoder does not ask them of what is stored. What needs more than one field to
judge is in rules.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from remit.model.constraints import Matching, Unreserved, limited
from remit.model.resources import Amount

API_VERSION = "remit/v1"

END = r"$(?!\n)"
"""The very end: to Python a bare `$` also stands before a last newline, and a name with a newline in it would pass."""

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?" + END
OPTIONAL_LABEL = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?" + END
DNS_NAME = r"^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?" + END
_PART = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LABEL_KEY = rf"^((?=[^/]{{1,253}}/){_PART}(\.{_PART})*/)?[A-Za-z0-9]([-_.A-Za-z0-9]{{0,61}}[A-Za-z0-9])?" + END
OPTIONAL_KEY = rf"^{END}|{LABEL_KEY}"
OWNED_NAME = rf"^{_PART}/{_PART}" + END
LABEL_VALUE = r"^([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?" + END
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*" + END
FILE_NAME = r"^(?!\.\.|\.$)[-_.A-Za-z0-9]+" + END
_VISIBLE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]*"
LINE = rf"^{_VISIBLE}" + END
"""One line: what ends up in a request, a path or a log, where a newline would begin something of its own."""
URL_PATH = rf"^/{_VISIBLE}" + END
KIND = r"^[A-Za-z][A-Za-z0-9]*" + END
UID = r"^[-_.:A-Za-z0-9]*" + END

Name = Annotated[str, Meta(pattern=DNS_LABEL, max_length=63, description="a DNS label: a-z, 0-9 and -")]
OwnedName = Annotated[str, Meta(pattern=OWNED_NAME, max_length=127, description="the name of a tenant, / and one of its own")]
LabelKey = Annotated[str, Meta(pattern=LABEL_KEY, max_length=317, description="a label key")]
LabelValue = Annotated[str, Meta(pattern=LABEL_VALUE, max_length=63, description="a label value")]
OwnKey = Annotated[str, limited(Unreserved(), pattern=LABEL_KEY, max_length=317, description="a label key of one's own")]
OwnLabels = Annotated[dict[OwnKey, LabelValue], Meta(max_length=64)]
"""What a writer sets; what a writer looks for are `Labels`, and those may be Remit's."""
Labels = Annotated[dict[LabelKey, LabelValue], Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Natural = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
Line = Annotated[str, Meta(pattern=LINE, max_length=4096)]
FileName = Annotated[str, Meta(pattern=FILE_NAME, max_length=253, description="a file name")]
Uid = Annotated[str, Meta(pattern=UID, max_length=253)]
ClassName = Annotated[
    str,
    limited(
        Matching(OPTIONAL_LABEL, 63, "a DNS label", "use a-z, 0-9 and -, as in the name of the PriorityClass"), max_length=63
    ),
]
EnvName = Annotated[str, Meta(pattern=ENV_NAME, max_length=256)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Resources = Annotated[Amount, Meta(extra={"devices": False}, description="resources by name, such as cpu and memory")]
Quota = Annotated[Amount, Meta(extra={"devices": True}, description="resources by name, and devices by kind")]


class Record(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Anything written inside an object."""


class Object(Record, tag_field="kind", frozen=True, kw_only=True):
    """Anything with a kind and a name of its own."""

    api_version: Literal["remit/v1"] = "remit/v1"


class Owner(Record, frozen=True):
    """What this object belongs to; when that goes, so does this."""

    kind: Annotated[str, Meta(pattern=KIND, max_length=253)]
    name: Name
    uid: Uid = ""


class Metadata(Record, frozen=True):
    name: Name
    tenant: Annotated[str, Meta(pattern=OPTIONAL_LABEL)] = ""
    labels: OwnLabels = field(default_factory=dict)
    annotations: Annotated[dict[OwnKey, Text], Meta(max_length=64)] = field(default_factory=dict)
    owners: Annotated[tuple[Owner, ...], Meta(max_length=16)] = ()
    finalizers: Annotated[tuple[OwnKey, ...], Meta(max_length=16)] = ()
    uid: Uid = ""
    generation: Natural = 0
    revision: Natural = 0
    created: Annotated[str, Meta(pattern=LINE, max_length=64, description="by the authority's wall clock, for people")] = ""
    deleting: bool = False


class Stamp(Record, frozen=True):
    """Metadata of the authority's own records: it names them itself, so nothing is checked again at each reading."""

    name: str
    tenant: str = ""
    uid: str = ""
    generation: int = 0
    revision: int = 0


class Condition(Record, frozen=True):
    """What an observer says of an object: `reason` is a stable word for programs, `message` is prose for people."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = ""
    message: str = ""
    observed_generation: Natural = 0
    last_transition: str = ""


# ------------------------------------------------------------------------------------------------------------- places


Priority = Annotated[int, Meta(ge=-1_000_000_000, le=2_000_000_000, description="higher is more urgent")]


class Deadline(Record, frozen=True):
    """An instant on one machine's boot clock; on any other boot it cannot be compared, and counts as passed."""

    boot: str
    at_ms: Natural
