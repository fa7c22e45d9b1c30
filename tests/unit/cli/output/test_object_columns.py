"""Has every kind columns that fit its rows, whole where nobody looks and within a terminal where somebody does?"""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from remit.cli.commands.events import columns as event_columns
from remit.cli.commands.events import row as event_row
from remit.cli.commands.nodes import node_row, replica_row
from remit.cli.output.console import Cell, Column, Sheet
from remit.cli.output.object_columns import (
    LAYOUTS,
    Around,
    age,
    bytes_words,
    columns_of,
    cpu_words,
    endpoint_columns,
    endpoint_row,
    row_of,
    span,
)
from remit.cli.output.object_list import in_order, natural
from remit.cli.output.terminal import LINE_LETTERS_MAX, Lines, harmless
from remit.cli.session.workload_progress import ProgressSummary
from remit.law.workload_rules import PendingReason
from remit.model.kinds import Node, NodeSpec, Template, Workload, WorkloadSpec
from remit.model.manifests.reader import read
from remit.model.metadata import Metadata, RecordMetadata
from remit.model.objects import KINDS
from remit.model.records import (
    Decision,
    DecisionSpec,
    Event,
    EventSpec,
    Generation,
    GenerationSpec,
    Grant,
    GrantSpec,
    Lease,
    LeaseSpec,
    Peer,
    PeerSpec,
    Phase,
    PolicyRevision,
    PolicyRevisionSpec,
    Replica,
    ReplicaSpec,
    ReplicaStatus,
    Summary,
    SummarySpec,
)
from remit.model.resources import Amount
from remit.model.wire.api_types import EndpointItem, HistoryEvent, NodeTop, ReplicaTop, ResourceUsage
from tests.tidy.source_tree import ROOT

WALL = "2026-01-01T00:10:00.000Z"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def sheet(columns: Any, rows: Any, *, width: int = 0, wide: bool = False) -> str:
    """As into a file, or on a terminal of some width."""
    out = Terminal() if width else io.StringIO()
    console = Console(file=out, width=width or 1_000_000, color_system=None)
    Sheet(console, columns, wide=wide).show(rows)
    return out.getvalue()


def spec_of_work() -> WorkloadSpec:
    return WorkloadSpec(type="service", template=Template(command=("true",)), replicas=6)


def stamp(name: str) -> RecordMetadata:
    return RecordMetadata(name=name, tenant="risk", revision=12)


RECORDS = [
    Replica(metadata=stamp("web-0"), spec=ReplicaSpec(workload="web", generation=1), status=ReplicaStatus(phase=Phase.READY)),
    Generation(metadata=stamp("web/1"), spec=GenerationSpec(workload="web", generation=1, labels={}, spec=spec_of_work())),
    PolicyRevision(metadata=stamp("1"), spec=PolicyRevisionSpec(number=1, policies={})),
    Grant(metadata=stamp("g"), spec=GrantSpec(holder="scheduler", amount=Amount({"cpu": 1000}))),
    Peer(metadata=stamp("eu"), spec=PeerSpec()),
    Lease(metadata=stamp("scheduler"), spec=LeaseSpec(holder="s1", epoch=3)),
    Decision(metadata=stamp("d"), spec=DecisionSpec(verdict="waiting", reason="no_room", replicas={"risk/web-0": ""}, nodes=3)),
    Event(metadata=stamp("e"), spec=EventSpec(regarding="node/n1", type="Warning", reason="Lost", message="gone")),
    Summary(metadata=stamp("s"), spec=SummarySpec(holder="eu", epoch=1, sequence=2)),
]


def declared() -> list[Any]:
    things = [
        thing for file in sorted((ROOT / "examples").glob("*.yaml")) for thing in read(file.read_bytes(), file.name).objects
    ]
    more = b"""
apiVersion: remit/v1
kind: Secret
metadata: {name: key, tenant: risk}
spec: {data: {a: b}}
---
apiVersion: remit/v1
kind: Config
metadata: {name: conf, tenant: risk}
spec: {data: {a: b}}
---
apiVersion: remit/v1
kind: Allotment
metadata: {name: al, tenant: risk}
spec: {workload: web, region: eu, replicas: 1}
---
apiVersion: remit/v1
kind: Token
metadata: {name: ann}
spec:
  role: member
  tenant: risk
  digest: "0000000000000000000000000000000000000000000000000000000000000000"
  expires: "2027-01-31T12:00:00Z"
"""
    return [*things, *read(more, "more.yaml").objects]


def test_every_kind_has_a_row_as_long_as_its_columns() -> None:
    seen = set()
    for thing in [*declared(), *RECORDS]:
        kind = type(thing).__name__
        seen.add(kind)
        for everyone in (False, True):
            row = row_of(thing, Around(wall=WALL), everyone=everyone)
            assert len(row) == len(columns_of(kind, everyone=everyone))
            assert thing.metadata.name in sheet(columns_of(kind, everyone=everyone), [row], wide=True)
    assert seen >= set(LAYOUTS) - {"Policy", "PriorityClass", "NodePool", "Region", "Override"}
    assert set(LAYOUTS) == set(KINDS)


def web(stages: dict[str, int], **more: Any) -> str:
    thing = Workload(metadata=Metadata(name="web", tenant="risk"), spec=spec_of_work())
    around = Around(progress={("risk", "web"): ProgressSummary(6, 4, 4, 0, stages, **more)}, wall=WALL)
    return sheet(columns_of("Workload", everyone=False), [row_of(thing, around, everyone=False)])


def test_a_workload_shows_how_far_it_is_and_what_limits_it() -> None:
    text = web({"queued": 2, "serving": 4}, limit="no_room", detail="cpu 200m short on n1")
    assert text.splitlines() == [
        "NAME   TYPE      READY   STAGES                LIMITED BY                      AGE",
        "web    service     4/6   serving 4, queued 2   no_room: cpu 200m short on n1     -",
    ]


def test_a_replica_shows_why_it_waits() -> None:
    made = Replica(metadata=stamp("web-4"), spec=ReplicaSpec(workload="web", generation=1))
    around = Around(reasons={("risk", "web-4"): PendingReason("over_quota", "cpu is used up", revision=13)})
    text = sheet(columns_of("Replica", everyone=True), [row_of(made, around, everyone=True)])
    assert "risk     web-4   pending   -            1          -   over_quota: cpu is used up" in text


def test_a_replica_that_is_not_ready_shows_what_its_probe_was_answered() -> None:
    spec = ReplicaSpec(workload="web", generation=1)
    top = ReplicaTop(tenant="risk", replica="web-4", said="its ready probe failed: connection refused")
    for phase, shown in ((Phase.RUNNING, True), (Phase.SERVING, False)):
        made = Replica(metadata=stamp("web-4"), spec=spec, status=ReplicaStatus(phase))
        row = row_of(made, Around(replicas={("risk", "web-4"): top}), everyone=True)
        assert ("connection refused" in sheet(columns_of("Replica", everyone=True), [row])) is shown


def test_a_node_shows_what_is_asked_of_it() -> None:
    spec = NodeSpec(region="eu", zone="a", capacity=Amount({"cpu": 32_000, "memory": 128 << 30}), unschedulable=True)
    node = Node(metadata=Metadata(name="n1"), spec=spec)
    top = NodeTop(node="n1", requests=ResourceUsage(cpu_milli=1_500, memory_bytes=3 << 29), replicas=3)
    text = sheet(columns_of("Node", everyone=False), [row_of(node, Around(nodes={"n1": top}), everyone=False)])
    assert "joining,cordoned   eu       a      default   1.5/32   1.5Gi/128Gi          3" in text
    assert "-/32" in sheet(columns_of("Node", everyone=False), [row_of(node, Around(), everyone=False)])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_on_a_terminal_the_longest_columns_give_way(width: int) -> None:
    columns = (Column("NAME"), Column("TYPE"), Column("REASON", fluid=True))
    text = sheet(columns, [["web-0", "service", "x" * 200], ["b", "job", "short"]], width=width)
    assert max(map(len, text.splitlines())) == width
    assert "…" in text
    assert "x" * 200 in sheet(columns, [["web-0", "service", "x" * 200]])
    assert "x" * 200 in sheet(columns, [["web-0", "service", "x" * 200]], width=width, wide=True)


def test_a_name_with_letters_that_a_terminal_obeys_is_spelt() -> None:
    text = sheet((Column("NAME"), Column("R", right=True)), [["a\x1b[2J\n", Cell("1", "red")]], width=80)
    assert "\x1b" not in text and "a\\x1b[2J\\n" in text


def test_rows_that_come_later_keep_the_widths() -> None:
    out = io.StringIO()
    made = Sheet(Console(file=out, color_system=None), (Column("NAME"), Column("B")))
    made.show([["longer", "x"]])
    made.show([["s", "y"]])
    assert out.getvalue() == "NAME     B\nlonger   x\ns        y\n"


def test_an_endpoint_says_where_to_go() -> None:
    item = EndpointItem(tenant="t", service="web", replica="web-0", node="n1", host="10.0.0.7", ports={"http": 31_000})
    assert "http=10.0.0.7:31000" in sheet(endpoint_columns(everyone=True), [endpoint_row(item, everyone=True)])


def test_what_repeats_is_told_once() -> None:
    item = HistoryEvent(
        at="2026-01-01T00:09:48.000Z", first="2025-12-31T23:10:48.000Z", type="Warning", reason="no_room", count=147,
        source="scheduler", regarding="replica/t/web-0", message="no node has room",
    )  # fmt: skip
    text = sheet(event_columns(about=True), [event_row(item, WALL, about=True)])
    assert text.splitlines()[1].startswith("Warning   no_room   12s (x147 over 59m)   scheduler   replica/t/web-0")
    assert text.splitlines()[0].split() == ["TYPE", "REASON", "AGE", "FROM", "REGARDING", "MESSAGE"]


def test_what_is_used_is_told_in_percent_and_what_was_never_said_is_not() -> None:
    has, asked = ResourceUsage(cpu_milli=4_000, memory_bytes=8 << 30), ResourceUsage(cpu_milli=1_000, memory_bytes=1 << 30)
    row = node_row(
        NodeTop(node="n1", cpu_milli=2_000, memory_bytes=2 << 30, capacity=has, requests=asked, age_ms=1_500, health="ready")
    )
    assert [cell.text if isinstance(cell, Cell) else cell for cell in row] == [
        "n1", "2", "50%", "1/4", "2Gi", "25%", "1Gi/8Gi", "0", "ready", "1s ago",
    ]  # fmt: skip
    silent = replica_row(ReplicaTop(tenant="t", replica="web-0"), everyone=False)
    assert "never" in silent and "-" in silent


def test_figures_are_short() -> None:
    assert [cpu_words(n) for n in (0, 250, 1_000, 1_500, 32_000)] == ["0", "250m", "1", "1.5", "32"]
    assert [bytes_words(n) for n in (0, 1_023, 1 << 20, 3 << 29, 300 << 20)] == ["0", "1023", "1Mi", "1.5Gi", "300Mi"]
    assert [span(n) for n in (0, 119, 125, 600, 7_200, 90_000, 259_200)] == ["0s", "119s", "2m5s", "10m", "120m", "25h", "3d"]
    assert age("2026-01-01T00:09:00.000Z", WALL) == "60s"
    assert age("", WALL) == age("yesterday", WALL) == ""


def test_names_are_in_the_order_that_people_count_in() -> None:
    assert sorted(["web-10", "web-2", "web", "a-1"], key=natural) == ["a-1", "web", "web-2", "web-10"]
    made = [Replica(metadata=stamp(f"web-{n}"), spec=ReplicaSpec(workload="web", generation=n)) for n in (10, 9, 2)]
    assert [one.metadata.name for one in in_order(made, "")] == ["web-2", "web-9", "web-10"]
    assert [one.spec.generation for one in in_order(made, ".spec.generation")] == [2, 9, 10]
    assert len(in_order(made, "no.such.path")) == 3


# -- what programs write -------------------------------------------------------------------------------------------------------


def test_letters_and_lines_cut_in_pieces_are_put_together() -> None:
    lines, data = Lines(), "grüß dich\nzwei\nrest".encode()
    told = [line for at in range(len(data)) for line in lines.feed(data[at : at + 1])]
    assert [*told, *lines.rest()] == ["grüß dich", "zwei", "rest"]
    assert Lines().feed(b"\xff\n") == ["\\xff"]


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    lines = Lines()
    told = lines.feed(b"x" * (LINE_LETTERS_MAX + 5))
    assert [len(one) for one in told] == [LINE_LETTERS_MAX]
    assert lines.rest() == ["xxxxx"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m\tplain\r", "red\tplain"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("a\u202eb\x9bc", "a\\u202eb\\x9bc"),
        ("10%\r20%", "10%\\r20%"),
    ],
)
def test_a_terminal_is_not_steered(line: str, shown: str) -> None:
    assert harmless(line) == shown
