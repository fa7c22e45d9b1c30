"""Who corrects what has drifted, when, and how far may it go? The page of the controllers, with what their code declares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from remit.cli.pages_words import code, codes, duration, page, table
from remit.commitment.declaring import FILL_MAX
from remit.correction import draining, nodes, repair
from remit.correction.crew import CONTROLLERS
from remit.correction.faring import patience_ms
from remit.correction.fights import UNDONE_MAX
from remit.correction.loop import FRESH_MS, Cadence, Controller
from remit.law.lifecycle import WAITS
from remit.law.progress import LIMITS
from remit.law.tempo import DRIFT_MAX_PERCENT, Tempo, lost_after_ms
from remit.model.claims import Note, Observe, Role
from remit.model.kinds import NodeHealth, NodeSpec, Template, WorkloadSpec
from remit.model.objects import DECLARED
from remit.model.resources import Amount
from remit.observation.health import MASS_MORE_THAN, MASS_PERCENT

SOURCE: Final = "src/remit/correction/"

_WORK: Final = WorkloadSpec(type="job", template=Template(command=("true",)))
_NODE: Final = NodeSpec(region="r", zone="z", capacity=Amount())
"""With every default."""

LOOP: Final = """\
A controller compares what stands with what should stand, and asks the authority for the difference. It writes nothing
itself: every deed is a claim, with the epoch of its lease, the revision on which it was decided, and how old that was. All
controllers of a scope run in one process, over one board: a copy of every row but batches, events and decisions. Several
such processes may run. Of the copies of one controller one holds the lease and acts; the others follow the board and wait.
Whoever waits asks for the status, which costs no commit, and for the lease only when it was not renewed for a term or was
given back.

A loop is keyed and level-triggered: `reconcile(key)` is told no event. It looks at the board and wishes for deeds until
nothing is left to wish for. So a change that was missed, seen twice or seen late makes no difference, and a copy that is
killed between any two claims is followed by one that ends where the first would have ended."""

RULES: Final = """\
- **Nothing outside its remit.** A deed that the controller has not declared is not asked for; an event `OutsideRemit` says
  so.
- **Nothing that stands already.** A condition that says nothing new is not said. A scope in which nothing changes is not
  written to, but for the authority's own beat.
- **Nothing on an old view.** Past the age above, and after a takeover until the board shows all that the former holder did,
  a loop waits.
- **Not the same again before the first is seen.** After an accepted deed its key rests until the board has reached its
  revision.
- **Not for ever.** What is refused or unanswered is tried after pauses that double, with full jitter, out of one budget of
  retries for all keys. After silence the same operations are asked under the same ids. A key that has got nowhere for long
  enough is told as `Stuck`, and goes on at the slowest rate.
- **No fights.** A deed that was done {undone} times and is wanted again has been undone as often. An event `Fought` says
  so, and it is not repeated until the object changes or a long pause has passed."""

WORKLOADS: Final = """\
Replicas are named after their workload and an index, and the lowest free indexes are taken first: a second creation finds
the first. What counts against the number that is wanted is every replica that is not released, whether it waits, runs,
leaves or is in doubt; so there are never more than are wanted, and `maxSurge` more while an older generation stands.

The first replicas of a workload that is new are made by the authority, in the commit that declares it, where the API is
asked and there are not more than {fill:,}: what this controller would ask for next. It finds nothing missing then. All others
it makes itself: those of daemons, of what is scaled or changed, and of whoever declares without that wish.

Scaling down ends first what stands on a node that is not well or is to be emptied, then what has come least far, then what
shares its node with others of the workload, then the highest index. What leaves anyway counts first, and so does what
nobody knows to run. Whoever only changes how many there are, or how they are treated, restarts nobody.

A job makes `completions` in all (or `replicas`, if there are none), at most `replicas` at a time. A replica that ended well
is kept with its result; one that did not is tried again after a pause that doubles, {base} to {most}, until one has failed
more often than `retries`, or the `deadline` has passed: then the job has failed, and what is left of it is ended. A job
that is over is kept for `keep` ({keep} if nothing is said), and deleted.

A job with a `schedule` is not run: nobody keeps schedules yet, and its condition `Admitted` says so.

A daemon has one replica on each node that is for it, by the scheduler's own rules.

A rollout retires old replicas that do nothing yet at once, and of those that are ready as many as can be spared: never
fewer are available than `minAvailable`, nor than are wanted less `maxUnavailable`. If the new generation never becomes
ready, the old one stays, and past `progressDeadline` the condition `Progressing` says so. What a drain has asked to leave
is not spared again."""

CONDITIONS: Final = """\
Each has a reason for programs, the generation that it speaks of, and when it last changed. Good news is told at once. Bad
news of the first three is told when it has lasted for {patience}: what comes and goes is not written down. Of a job neither
is, so one that is over sooner costs only its end. None holds a count: `remit get workload` counts the replicas by stage as
it is asked."""

DELETION: Final = """\
Deleting a workload marks it. From then on nothing of it is made or tried again: what waits is cancelled, what runs is
removed, what has finished is settled, what is released is forgotten. When nothing is left, and no finalizer, the workload
itself goes. Finalizers hold the object alone: its replicas end all the same.

What names owners goes when the last of them is gone: by uid, so one that was made anew under the same name saves nobody. It
is deleted at the revision at which it was seen, and the authority looks once more whether every owner is gone. What was
marked while something held it goes once nothing does. A sweep at the beginning of a term finds what was orphaned while
nobody looked."""

LADDER: Final = """\
The authority counts for how long it has heard nothing of each node, in its memory, from its takeover on; the controller
asks at every beat. Each silence decides only what its uncertainty allows, and the authority has the last word: what is
asked too early is refused."""

RETURN: Final = """\
A node that was unknown or lost joins like a new one. It takes work only when its beat says that it has come to terms with
this incarnation of the scope: nothing runs there any more that the authority knows nothing of.

Within a zone {burst} nodes may become unknown at once, and then {rate} a minute; {sick} in ten minutes if most of the
zone is silent. Endpoints on a suspect node are withdrawn, but never the last ones of a service: better one that may be dead
than none."""

MASS: Final = """\
When {percent} % of the nodes of a region, or more, are silent at once (and it has more than {more}), or all there are anywhere
(and there is more than one), the machines are not broken: the way to them is, or whoever listens. Then nothing there becomes
unknown, lost, evicted or drained. An event `MassSilence` says so; after {call} an event `CallOperator` asks for a person;
`MassSilenceOver` ends it. That a whole region is lost is not decided here."""

DRAIN: Final = """\
`draining` on a node takes it out of service, and asks what runs there to leave: up to {at_once} at a time, each only if its
workload can spare it. What is not ready is nothing to wait for; of what is, `minAvailable` must be left, and what any node
or rollout has asked to leave is counted as gone. The condition `Drained` of the node tells how it stands: `Draining`, then
`Empty`; past `drainDeadline` ({deadline} if nothing is said) `DeadlinePassed`, with who cannot be spared or has not ended.
With `drainForce` it goes on then in spite of the limits. `unschedulable` only keeps new work away. A `NoExecute` taint
pushes out what does not tolerate it at once, whatever that disrupts."""

REPAIR: Final = """\
What failed is released, what was released and is still wanted is queued again as a new attempt, and what has waited too
long is ended. A grant that has run out and is held in this scope is closed; what another scope holds is only its own to
give back. The override `hold-repair` keeps all of this from what it names. Repair never touches what runs, and nothing that
another role owns."""


def controllers() -> str:
    tempo, cadence = Tempo(), Cadence()
    return page(
        "Controllers",
        SOURCE,
        LOOP,
        table(("controller", "lease", "its question", "its moves", "also"), (_row(one) for one in CONTROLLERS)),
        "Everybody may record an event and observe a condition. A move that is not in a controller's row is not its to make; "
        "the [lifecycle](lifecycle.md) has the one role of each.",
        "## When it looks",
        f"At a beat of {duration(tempo.beat_ms)}; with another beat all but the age of the view change in proportion.",
        table(("what", "when"), _times(cadence)),
        "## What it never does",
        RULES.format(undone=UNDONE_MAX),
        "## Workloads and rollouts",
        WORKLOADS.format(
            fill=FILL_MAX,
            base=duration(repair.AGAIN_BASE_MS),
            most=duration(repair.AGAIN_MAX_MS),
            keep=duration(int(_WORK.keep)),
        ),
        "### Conditions",
        CONDITIONS.format(patience=duration(patience_ms(tempo))),
        table(("condition", "of", "true", "false"), _conditions()),
        "### Deletion, finalizers, owners",
        DELETION,
        "## Nodes: the evidence ladder",
        LADDER,
        table(("silent for more than", "at a beat of 2 s", "the node", "what follows"), _ladder(tempo)),
        RETURN.format(
            burst=nodes.GIVEN_UP_BURST,
            rate=nodes.GIVEN_UP_MILLI_PER_S * 60 // 1000,
            sick=nodes.GIVEN_UP_MILLI_PER_S_SICK * 600 // 1000,
        ),
        "### Mass silence",
        MASS.format(percent=MASS_PERCENT, more=MASS_MORE_THAN, call=duration(tempo.call_operator_ms)),
        "### Drain and disruption",
        DRAIN.format(at_once=draining.AT_ONCE, deadline=duration(int(_NODE.drain_deadline))),
        "## Repair",
        REPAIR,
        table(("a replica that is", "for longer than", "is moved on by"), _waits()),
    )


def _row(controller: type[Controller]) -> tuple[str, ...]:
    remit = controller.remit
    module = sys.modules[controller.__module__].__doc__ or ""
    claims = sorted(one.__name__.lower() for one in remit.claims - {Note, Observe})
    kinds = "every declared kind" if remit.declares == frozenset(DECLARED) else ", ".join(sorted(remit.declares))
    also = [
        f"{code(name)} of {kinds}" if name == "delete" else code(name) for name in claims if name not in ("spawn", "forget")
    ]
    lease = controller.lease or remit.role.value
    moves = codes(sorted(remit.transitions)) or "-"
    return controller.__name__.lower(), code(lease), module.partition("?")[0] + "?", moves, ", ".join(also) or "-"


def _times(cadence: Cadence) -> Iterator[tuple[str, str]]:
    pauses = cadence.pauses
    yield "a change on the board", f"at once; changes within {duration(cadence.gather_ms)} after a look are one look"
    patience = duration(patience_ms(cadence.tempo))
    yield (
        "a job whose replicas come nearer to their end",
        f"after {patience}: most are over by then, and what ends or fails is at once",
    )
    yield "a wait that begins", f"when it is over, and {duration(repair.LATE_MS)} later"
    yield "everything, whatever was heard", f"every {duration(cadence.sweep_ms)}, less up to a quarter"
    yield "what is not to be acted on", f"a board older than {duration(FRESH_MS)}"
    yield (
        "a key after a failure",
        f"after {duration(pauses.base_ms)}, doubling up to {duration(pauses.cap_ms)}, with full jitter",
    )
    yield "a key that is stuck", f"told after {duration(pauses.stuck_after_ms)}, then every {duration(pauses.slow_ms)} at most"
    yield "a deed that was undone again and again", f"not for {duration(cadence.truce_ms)}"
    yield "a lease", f"of {duration(cadence.tempo.lease_ms)}, renewed after a third of it"


def _conditions() -> Iterator[tuple[str, ...]]:
    placing = codes(list(LIMITS.values())[:3])
    yield code("Admitted"), "all", code("Accepted"), "why no replicas could be made: the refusal's code, such as `Limit`"
    yield code("Scheduled"), "all", f"{code('AllBound')}: every one that is wanted has a place", placing
    yield code("Ready"), "services, daemons", code("AllReady"), f"what limits it now: {codes(LIMITS.values())}"
    yield code("Available"), "services, daemons", f"{code('EnoughReady')}: as many as may not be missed", code("TooFewReady")
    yield code("Progressing"), "services, daemons", codes(("RollingOut", "RolledOut")), code("ProgressDeadlineExceeded")
    yield code("Complete"), "jobs", code("Done"), f"{code('Changed')}: it was, before it was changed"
    yield code("Failed"), "jobs", codes(("RetriesExhausted", "DeadlineExceeded")), f"{code('Changed')}: it had"


def _ladder(tempo: Tempo) -> Iterator[tuple[str, ...]]:
    fence_ms = int(_WORK.fence)
    fence = f"fence {duration(fence_ms)}: {lost_after_ms(fence_ms, tempo) // 1000} s"
    lost_ms = nodes.LOST_AFTER * tempo.unknown_ms
    yield "3 beats", duration(tempo.suspect_ms), code(NodeHealth.SUSPECT), "no new work there; endpoints are withdrawn"
    yield "7½ beats", duration(tempo.unknown_ms), code(NodeHealth.UNKNOWN), "what is there is in doubt, and holds its room"
    yield "15 beats", duration(tempo.eager_ms), "", "`replace: eager` work there is given up and replaced"
    yield f"{nodes.LOST_AFTER * 15 // 2} beats", duration(lost_ms), code(NodeHealth.LOST), "if nothing is there any more"
    yield (
        f"(`fence` + 2½ beats) and {DRIFT_MAX_PERCENT} %", fence, "",
        "`replace: fenced` work there is given up: its keeper has ended it by then",
    )  # fmt: skip


def _waits() -> Iterator[tuple[str, ...]]:
    for phase, wait in WAITS.items():
        if wait.role is Role.REPAIR:
            limit = "at once" if wait.transition == "release" else duration(wait.limit_ms)
            yield code(phase), limit, code(wait.transition)
