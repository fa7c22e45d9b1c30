"""Generated reference pages: lifecycle, refusals, filters, invariants, operations, scenarios.

Returns texts only. generate.py writes and compares the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
from msgspec import inspect

from remit.commitment import ledger_check
from remit.commitment.decide import rulings, tag
from remit.commitment.rulings.registry import ALL_ROLES, UNLEASED_ROLES, Coordination, Ruling
from remit.docgen.component_pages import (
    COMMANDS_SOURCE,
    code,
    codes,
    commands_page,
    controllers,
    duration,
    metrics,
    page,
    table,
)
from remit.law.invariants import INVARIANTS
from remit.law.lifecycle import (
    GUARDS,
    HOLDING_PHASES,
    NODE_HEALTH_TRANSITIONS,
    ON_NODE_PHASES,
    PHASE_MEANINGS,
    PHASE_TIMEOUTS,
    TRANSITIONS,
    PhaseTimeout,
    Transition,
)
from remit.law.refusals import REFUSALS
from remit.model.claims import CLAIMS, Abandon, Claim
from remit.model.kinds import NodeHealth
from remit.model.objects import DECLARED, KINDS
from remit.model.records import Phase
from remit.model.roles import Role
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES, STATELESS_SCORES, OverrideFilter
from remit.proposal.placement.plugins import BUILTIN_FILTERS
from remit.simulate import scenarios as scenario
from remit.simulate.actors.users import WORKLOAD_KINDS
from remit.simulate.faults.kinds import KINDS as FAULTS

P = Phase

DIAGRAM_TRANSITIONS: Final = (
    (P.PENDING, P.RESERVED), (P.RESERVED, P.BOUND), (P.PENDING, P.BOUND), (P.BOUND, P.STARTING), (P.STARTING, P.RUNNING),
    (P.RUNNING, P.READY), (P.READY, P.SERVING), (P.SERVING, P.DRAINING), (P.DRAINING, P.STOPPING), (P.STOPPING, P.RELEASED),
    (P.RUNNING, P.FINISHED), (P.FINISHED, P.RELEASED), (P.RUNNING, P.FAILED), (P.RUNNING, P.UNKNOWN), (P.UNKNOWN, P.RUNNING),
    (P.UNKNOWN, P.FAILED), (P.FAILED, P.RELEASED), (P.RELEASED, P.PENDING),
)  # fmt: skip
"""The transitions drawn in the diagram. All of them would be unreadable; the table below the diagram lists every one."""


# ------------------------------------------------------------------------------------------------------------- the lifecycle


def lifecycle() -> str:
    return page(
        "The lifecycle of a replica",
        "src/remit/law/lifecycle.py",
        "A replica changes its phase only by these transitions. Each has a name and one owning role. The authority refuses "
        "every other combination of transition and phase. The diagram shows the main transitions, the table all of them.",
        _diagram(),
        "## Phases",
        _phases(),
        "## Transitions",
        "`-` means no replica: before it is created, or after it is forgotten. *Evidence age* is the maximum age of the "
        "claim's evidence. The last column names the role and transition that end a phase which lasts too long.",
        _transitions(),
        "## Guards",
        "The authority checks the guards in the transaction that makes the transition.",
        table(("guard", "condition"), ((code(name), meaning) for name, meaning in GUARDS.items())),
        "## Node health",
        f"Only {code(Role.NODES)} changes it. Only a ready node receives new work. A node that was unknown or lost joins again "
        "first.",
        _health(),
    )


def _diagram() -> str:
    names: dict[tuple[Phase, Phase], list[str]] = {}
    for row in TRANSITIONS:
        if row.source is not None and row.target is not None:
            names.setdefault((row.source, row.target), []).append(row.name)
    edges = [f"    {source} --> {target}: {', '.join(names[source, target])}" for source, target in DIAGRAM_TRANSITIONS]
    ends = [f"    [*] --> {Phase.PENDING}: create", f"    {Phase.RELEASED} --> [*]: forget"]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    direction LR", ends[0], *edges, ends[1], "```"])


def _phases() -> str:
    return table(
        ("phase", "meaning", "holds capacity", "may run on a node", "time limit", "then"),
        (
            (
                code(phase),
                PHASE_MEANINGS[phase],
                _yes_or_no(phase in HOLDING_PHASES),
                _yes_or_no(phase in ON_NODE_PHASES),
                *_timeout_cells(PHASE_TIMEOUTS.get(phase)),
            )
            for phase in Phase
        ),
    )


def _yes_or_no(holds: bool) -> str:
    return "yes" if holds else "no"


def _timeout_cells(timeout: PhaseTimeout | None) -> tuple[str, str]:
    if timeout is None:
        return "none", "-"
    return duration(
        timeout.limit_ms
    ) if timeout.limit_ms else "the workload's fence", f"{code(timeout.role)} makes {code(timeout.transition)}"


def _transitions() -> str:
    groups: dict[tuple[object, ...], list[Transition]] = {}
    for row in TRANSITIONS:
        same = (row.name, row.target if row.name != "resume" else "", row.role, row.guards, row.evidence_age_ms_max)
        groups.setdefault(same, []).append(row)
    return table(
        ("transition", "from", "to", "owner", "guards", "evidence age", "if it stays there"), map(_transition, groups.values())
    )


def _transition(rows: Sequence[Transition]) -> tuple[str, ...]:
    first = rows[0]
    sources = dict.fromkeys(_phase_cell(row.source) for row in rows)
    targets = dict.fromkeys(_phase_cell(row.target) for row in rows)
    waits = [first.timeout] if len(targets) == 1 else []
    after = "; ".join(f"after {_timeout_cells(wait)[0]} {_timeout_cells(wait)[1]}" for wait in waits if wait is not None)
    return (
        code(first.name), ", ".join(sources), ", ".join(targets), code(first.role), codes(first.guards),
        duration(first.evidence_age_ms_max), after or ("see the phase" if len(targets) > 1 else "-"),
    )  # fmt: skip


def _phase_cell(phase: Phase | None) -> str:
    return code(phase) if phase is not None else "-"


def _health() -> str:
    order = list(NodeHealth)
    edges = sorted(NODE_HEALTH_TRANSITIONS, key=lambda edge: (order.index(edge[0]), order.index(edge[1])))
    drawn = "\n".join(
        ["```mermaid", "stateDiagram-v2", "    direction LR", *(f"    {old} --> {new}" for old, new in edges), "```"]
    )
    return drawn + "\n\n" + table(("from", "to"), ((code(old), code(new)) for old, new in edges))


# ------------------------------------------------------------------------------------------------------------------ refusals


def refusals() -> str:
    rows = (
        (code(name), refusal.meaning, refusal.cure, "never" if refusal.never else "later") for name, refusal in REFUSALS.items()
    )
    return page(
        "Refusals",
        "src/remit/law/refusals.py",
        "A refused claim changes nothing. Programs read the code, people the detail that comes with it. *Later* means that "
        "the same claim can be accepted after the event or action in the fix column. *Never* means that the same claim is "
        "refused every time; change it first.",
        table(("code", "meaning", "fix", "retry"), rows),
    )


# ------------------------------------------------------------------------------------------------------------ filters, scores


def filters() -> str:
    override_filter = OverrideFilter().filter
    all_filters = [*BUILTIN_FILTERS, override_filter]
    rows = (
        (code(plugin.name), code(plugin.code), codes(plugin.unblock_events), REFUSALS[plugin.code].meaning)
        for plugin in all_filters
    )
    ranking = (
        (
            code(plugin.name),
            "yes" if plugin in DEFAULT_SCORES else "",
            "yes" if plugin.static else "",
            str(plugin.weight),
            _first_line(plugin.score),
        )
        for plugin in STATELESS_SCORES
    )
    return page(
        "Filters and scores",
        "src/remit/proposal/placement/plugins.py",
        "A filter excludes nodes on which a replica may not run. In the funnel of a decision each node is counted once, at "
        "the first filter that excludes it. The unblock events are the kinds of events after which a waiting replica is tried "
        "again. All filters but the last are rules of `src/remit/law/fit.py`, which the authority evaluates again at the "
        "commit.",
        table(("filter", "reason", "unblock events", "excludes nodes where"), rows),
        "A score ranks the remaining nodes with a value from 0 to 1 times its weight.",
        table(("score", "default", "static", "weight", "preference"), ranking),
        "The scheduler uses the *default* scores; no setting selects others. A program that creates a `Kernel` may pass any of "
        "them. A *static* score depends only on the node's attributes, not on its load.",
        "The scheduler also uses two scores with state. `locality` prefers nodes that "
        "[hints](scheduling.md#overrides-and-hints) report as warm for the workload. `fragmentation` "
        "[keeps devices usable](packing.md); in a cluster with devices it replaces `least-allocated`.",
        "Packages add filters and scores by entry points; see `examples/plugins`.",
    )


def _first_line(function: Callable[..., object]) -> str:
    """Return the first line of a function's docstring."""
    return (function.__doc__ or "").strip().split("\n")[0]


# ---------------------------------------------------------------------------------------------------------------- invariants


def invariants() -> str:
    rows = (
        (str(invariant.number), code(invariant.name), invariant.statement, invariant.enforced_by, _check_cell(invariant.name))
        for invariant in INVARIANTS
    )
    return page(
        "Invariants",
        "src/remit/law/invariants.py",
        "Statements that hold under every failure. The last column names the check of `src/remit/commitment/ledger_check.py` "
        "that recomputes part of the invariant from the rows alone; `remit demo` prints the results. An invariant without a "
        "check is about sequences of events and cannot be read off one state; the tests and the simulator look for violations.",
        table(("no.", "name", "statement", "enforced by", "checked by"), rows),
    )


def _check_cell(name: str) -> str:
    check = ledger_check.CHECKS.get(name)
    return f"{code(check.__name__ + '()')}: {ledger_check.statement(name)}" if check is not None else "-"


# ---------------------------------------------------------------------------------------------------------------- operations


def operations() -> str:
    known = rulings()
    return page(
        "Operations",
        "src/remit/model/claims.py` and `src/remit/commitment/rulings/registry.py",
        "All claims that an authority accepts. An operation has an id that stays the same over every retry, an actor with its "
        "role, lease and epoch, the evidence that it acted on, and one of these claims. The answer is `accepted` or "
        "[`refused`](refusals.md). Names and other short texts have at most 512 characters.",
        "The class states where agreement on a claim is needed. *Hard* claims need it before the commit: two branches could "
        "each be valid and together break an invariant. *Bounded* and *soft* claims merge in any order.",
        table(
            ("claim", "class", "allowed roles", "protects, or why it merges"),
            ((f"[{code(tag(claim))}](#{tag(claim)})", *_ruling_cells(claim, known.get(claim))) for claim in CLAIMS),
        ),
        f"{codes(sorted(UNLEASED_ROLES))} act without a lease. Every other role must hold its lease at the current epoch.",
        *(_claim_section(claim) for claim in CLAIMS),
    )


def _ruling_cells(claim: type[Claim], ruling: Ruling | None) -> tuple[str, str, str]:
    if claim is Abandon or ruling is None:
        return Coordination.HARD.value, "all", "an operation id has one outcome"
    return ruling.coordination.value, _roles_cell(ruling.roles), ruling.protects


def _roles_cell(roles: frozenset[Role]) -> str:
    named = [role for role in Role if role in roles]
    if roles == ALL_ROLES:
        return "all"
    if roles == ALL_ROLES - UNLEASED_ROLES:
        return "all roles with a lease"
    return codes(named)


def _claim_section(claim: type[Claim]) -> str:
    own = claim.__doc__ if claim.__doc__ and not claim.__doc__.startswith(f"{claim.__name__}(") else ""
    rows = [(code(field.encode_name), kind(field.type), _default(field)) for field in inspect.type_info(claim).fields]  # type: ignore[attr-defined]
    parts = [f"## {tag(claim)}", " ".join(own.split()), table(("field", "type", "default"), rows)]
    return "\n\n".join(part for part in parts if part)


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return "empty"
    return {"": "empty", "None": "not checked"}.get(str(field.default), code(str(field.default).lower()))


def kind(type_: inspect.Type) -> str:
    """Return a field's type in words."""
    match type_:
        case inspect.StrType():
            return "text"
        case inspect.IntType():
            return f"number{_bounds(type_)}"
        case inspect.BoolType():
            return "true or false"
        case inspect.EnumType():
            return f"one of {codes(str(member.value) for member in type_.cls)}"
        case inspect.StructType():
            return code(type_.cls.__name__)
        case inspect.CustomType():
            return type_.cls.__name__.lower()
        case inspect.DictType():
            return f"map: {kind(type_.key_type)} -> {kind(type_.value_type)}"
        case inspect.VarTupleType():
            return f"list of {kind(type_.item_type)}{_length(type_)}"
        case inspect.UnionType():
            return _union(type_)
        case _:
            return type(type_).__name__.removesuffix("Type").lower()


def _union(type_: inspect.UnionType) -> str:
    types = [member for member in type_.types if not isinstance(member, inspect.NoneType)]
    if {getattr(member, "cls", None) for member in types} == set(KINDS.values()):
        return f"an object of a declared kind: {codes(DECLARED)}"
    return " or ".join(kind(member) for member in types)


def _bounds(type_: inspect.IntType) -> str:
    low = f" from {type_.ge}" if type_.ge is not None else ""
    return low + (f" to {type_.le:,}" if type_.le is not None else "")


def _length(type_: inspect.VarTupleType) -> str:
    return f", {type_.min_length or 0} to {type_.max_length:,}" if type_.max_length else ""


# ---------------------------------------------------------------------------------------------------------------- scenarios


def scenarios() -> str:
    known = [scenario.load(name) for name in scenario.names()]
    covered: dict[int, list[str]] = {}
    answers: dict[str, list[str]] = {}
    for item in known:
        answers.setdefault(item.matrix, []).append(item.name)
        for row in item.covers:
            covered.setdefault(row, []).append(item.name)
    return page(
        "Scenarios",
        "src/remit/simulate/files/` and `src/remit/simulate/faults/kinds.py",
        "The scenarios of `remit simulate NAME`. [simulation.md](simulation.md) explains how to run, read and write them. The "
        "rows are those of [faults.md](faults.md).",
        table(
            ("scenario", "purpose", "rows", "faults for", "then healed for"),
            ((code(item.name), item.summary, _rows_cell(item.covers), item.duration, item.heal) for item in known),
        ),
        "## By row",
        table(("row", "scenarios"), ((f"F{row:02}", codes(names)) for row, names in sorted(covered.items()))),
        "## The failure matrix",
        "Failures that a design review of a control plane asks about, and the scenarios that cover them.",
        table(("failure", "scenarios"), ((row, codes(answers.get(row, ())) or "-") for row in scenario.MATRIX)),
        "## Fault kinds",
        "A scenario with `swarm` draws its faults at random from those marked *drawn*.",
        table(
            ("kind", "effect", "rows", "size", "drawn"),
            (
                (code(kind.name), kind.summary, _rows_cell(kind.rows), kind.size or "-", _yes_or_no(kind.swarms))
                for _, kind in sorted(FAULTS.items())
            ),
        ),
        "## Workload kinds",
        table(("kind", "description"), ((code(name), description) for name, description in WORKLOAD_KINDS.items())),
    )


def _rows_cell(rows: Iterable[int]) -> str:
    return " ".join(f"F{row:02}" for row in rows) or "-"


def command_line() -> str:
    return page("The command line", COMMANDS_SOURCE, commands_page())


PAGES: Final[dict[str, Callable[[], str]]] = {
    "cli.md": command_line,
    "controllers.md": controllers,
    "lifecycle.md": lifecycle,
    "metrics.md": metrics,
    "refusals.md": refusals,
    "filters.md": filters,
    "invariants.md": invariants,
    "operations.md": operations,
    "scenarios.md": scenarios,
}
"""All generated pages, by file name under docs/."""
