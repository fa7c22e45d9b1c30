"""Kind Override: an operator's temporary exception from the rules."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from remit.model.constraints import DistinctItems, MatchesPattern, MaxDuration, NonZeroDuration, constrained
from remit.model.kinds.definition import KindDefinition, ListColumn, sample
from remit.model.kinds.priority_class import USER_PRIORITY_MAX
from remit.model.metadata import LINE, OPTIONAL_LABEL, Condition, Deadline, Metadata, Name, Object, QualifiedName, Record, Text
from remit.model.resources import Duration
from remit.model.roles import OPERATORS

OverrideEffect = Literal["pause-expansion", "avoid", "pin", "boost", "hold-repair", "freeze-autoscaler", "lend-budget"]
"""In order: place nothing new of the workloads; place nothing new on the places; place the workloads only on the places; raise
the workloads' priority; do not repair; neither add nor remove nodes; let the workloads draw on an additional budget.
"""

NameList = Annotated[tuple[Name, ...], constrained(DistinctItems(), max_length=1024)]

OVERRIDE_TTL_MS_MAX = 7 * 86_400_000


class OverrideScope(Record, frozen=True):
    """The workloads (by tenant, or as `tenant/name`) and places that an override applies to. The lists add up."""

    tenants: NameList = ()
    workloads: Annotated[tuple[QualifiedName, ...], constrained(DistinctItems(), max_length=1024)] = ()
    regions: NameList = ()
    zones: NameList = ()
    pools: NameList = ()
    nodes: NameList = ()


class OverrideSpec(Record, frozen=True):
    """An operator's temporary exception from the rules. `postcondition` describes what must be true when it ends."""

    effect: OverrideEffect
    scope: OverrideScope
    ttl: Annotated[
        Duration,
        constrained(
            NonZeroDuration("an override with a ttl of 0 would have no effect", "write how long it is in force, such as 30m"),
            MaxDuration(OVERRIDE_TTL_MS_MAX, "use at most 7d; for longer, change the Policy or the object itself"),
        ),
    ]
    reason: Annotated[
        str,
        constrained(
            MatchesPattern(r"\S", 4096, "a reason", "write why it is needed, for operators who see it later"), max_length=4096
        ),
    ]
    author: Annotated[
        str,
        constrained(
            MatchesPattern(r"\S", 253, "an author", "write the name of the responsible person"), pattern=LINE, max_length=253
        ),
    ]
    by: Annotated[int, Meta(ge=0, le=USER_PRIORITY_MAX, description="how much a boost adds to the priority")] = 0
    budget: Annotated[
        str,
        constrained(
            MatchesPattern(OPTIONAL_LABEL, 63, "a DNS label", "use a-z, 0-9 and -, as in the budget's name"), max_length=63
        ),
    ] = ""
    postcondition: Text = ""


class OverrideStatus(Record, frozen=True):
    """`deadline` is set by the authority: the end of the term, on the authority's clock."""

    deadline: Deadline | None = None
    conditions: tuple[Condition, ...] = ()


class Override(Object, tag="Override", frozen=True, kw_only=True):
    metadata: Metadata
    spec: OverrideSpec
    status: OverrideStatus = OverrideStatus()


OVERRIDE: Final = KindDefinition(
    struct=Override,
    summary="a temporary exception by an operator: pause, avoid, pin, boost",
    plural="overrides",
    aliases=("ov",),
    declared_by=OPERATORS,
    scheduler_view=True,
    sample=sample(
        "avoid-zone-b",
        {
            "effect": "avoid",
            "scope": {"zones": ["eu-central-b"]},
            "ttl": "30m",
            "reason": "the switch of this zone is being replaced",
            "author": "ann",
        },
    ),
    columns=(
        ListColumn("EFFECT", "spec.effect"),
        ListColumn("SCOPE", fluid=True),
        ListColumn("TTL", "spec.ttl", right=True),
        ListColumn("AUTHOR", "spec.author"),
        ListColumn("REASON", "spec.reason", fluid=True),
    ),
)
