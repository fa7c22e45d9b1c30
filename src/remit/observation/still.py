"""What does a scope look like at one revision? A view of rows that stand still: it follows nothing, and nobody is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from remit.model.fields import Stamp
from remit.model.kinds import Node, NodeHealth, NodeStatus, Policy
from remit.model.objects import AnyObject, encode, key
from remit.model.records import PolicyRevision, PolicyRevisionSpec
from remit.observation.view import PARTS, View
from remit.store.protocol import Head, Page, Row
from remit.world.promises import Clock

Pages = Callable[[str, str], Iterable[Page]]
"""All rows that begin with a prefix, past a key."""

_DECLARED: Final = Head("declared", 1, 1, "", 0, "")


def still(clock: Clock, head: Head, revision: int, pages: Pages) -> View:
    """As `Follower` lists it."""
    view = View(clock)
    view.begin(head, revision)
    for prefix, after in PARTS:
        for page in pages(prefix, after):
            view.page(page.rows)
    view.end()
    return view


def declared(clock: Clock, things: Sequence[AnyObject]) -> View:
    """Of what manifests declare, as if it were all there is: its nodes are ready, its policies in force."""
    policies = {thing.metadata.name: thing.spec for thing in things if isinstance(thing, Policy)}
    spec = PolicyRevisionSpec(number=1, policies=policies)
    published = (PolicyRevision(metadata=Stamp(name="1"), spec=spec),) if policies else ()
    rows = {key(thing): Row(key(thing), encode(_there(thing)), 1) for thing in (*things, *published)}

    def pages(prefix: str, after: str) -> Iterable[Page]:
        found = sorted(row for name, row in rows.items() if name.startswith(prefix) and name > after)
        return (Page(tuple(found), 1, more=False),)

    return still(clock, _DECLARED, 1, pages)


def _there(thing: AnyObject) -> AnyObject:
    return replace(thing, status=NodeStatus(health=NodeHealth.READY)) if isinstance(thing, Node) else thing
