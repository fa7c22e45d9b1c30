"""Tests of table columns, widths, quantities and terminal escaping."""

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
    RowContext,
    age,
    columns_of,
    endpoint_columns,
    endpoint_row,
    format_bytes,
    format_cpu,
    format_span,
    row_of,
)
from remit.cli.output.object_list import natural_key, sort_objects
from remit.cli.output.terminal import LINE_CHARS_MAX, LineDecoder, escape_terminal
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
from remit.model.wire.api_types import (
    EndpointItem,
    HistoryEvent,
    NodeTop,
    ReplicaTop,
    ResourceUsage,
    WorkloadLimit,
    WorkloadProgressItem,
)
from tests.tidy.source_tree import ROOT

WALL = "2026-01-01T00:10:00.000Z"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def render_table(columns: Any, rows: Any, *, width: int = 0, wide: bool = False) -> str:
    """Render a table for a file, or for a terminal of `width` columns."""
    out = Terminal() if width else io.StringIO()
    console = Console(file=out, width=width or 1_000_000, color_system=None)
    Sheet(console, columns, wide=wide).show(rows)
    return out.getvalue()


def spec_of_work() -> WorkloadSpec:
    return WorkloadSpec(type="service", template=Template(command=("true",)), replicas=6)


def metadata(name: str) -> RecordMetadata:
    return RecordMetadata(name=name, tenant="risk", revision=12)


RECORDS = [
    Replica(
        metadata=metadata("web-0"), spec=ReplicaSpec(workload="web", generation=1), status=ReplicaStatus(phase=Phase.READY)
    ),
    Generation(metadata=metadata("web/1"), spec=GenerationSpec(workload="web", generation=1, labels={}, spec=spec_of_work())),
    PolicyRevision(metadata=metadata("1"), spec=PolicyRevisionSpec(number=1, policies={})),
    Grant(metadata=metadata("g"), spec=GrantSpec(holder="scheduler", amount=Amount({"cpu": 1000}))),
    Peer(metadata=metadata("eu"), spec=PeerSpec()),
    Lease(metadata=metadata("scheduler"), spec=LeaseSpec(holder="s1", epoch=3)),
    Decision(
        metadata=metadata("d"), spec=DecisionSpec(verdict="waiting", reason="no_room", replicas={"risk/web-0": ""}, nodes=3)
    ),
    Event(metadata=metadata("e"), spec=EventSpec(regarding="node/n1", type="Warning", reason="Lost", message="gone")),
    Summary(metadata=metadata("s"), spec=SummarySpec(holder="eu", epoch=1, sequence=2)),
]


def declared() -> list[Any]:
    objects = [obj for file in sorted((ROOT / "examples").glob("*.yaml")) for obj in read(file.read_bytes(), file.name).objects]
    options = b"""
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
    return [*objects, *read(options, "more.yaml").objects]


def test_every_kind_has_as_many_cells_as_columns() -> None:
    seen = set()
    for obj in [*declared(), *RECORDS]:
        kind = type(obj).__name__
        seen.add(kind)
        for all_tenants in (False, True):
            row = row_of(obj, RowContext(wall=WALL), all_tenants=all_tenants)
            assert len(row) == len(columns_of(kind, all_tenants=all_tenants))
            assert obj.metadata.name in render_table(columns_of(kind, all_tenants=all_tenants), [row], wide=True)
    assert seen >= set(KINDS) - {"Policy", "PriorityClass", "NodePool", "Region", "Override"}


def workload_table(stages: dict[str, int], **options: Any) -> str:
    obj = Workload(metadata=Metadata(name="web", tenant="risk"), spec=spec_of_work())
    progress = WorkloadProgressItem(
        tenant="risk", name="web", revision=1, desired=6, ready=4, placed=4, stages=stages, limit=WorkloadLimit(**options)
    )
    row_context = RowContext(progress={("risk", "web"): progress}, wall=WALL)
    return render_table(columns_of("Workload", all_tenants=False), [row_of(obj, row_context, all_tenants=False)])


def test_workload_row_shows_stages_and_limit() -> None:
    text = workload_table({"queued": 2, "serving": 4}, code="no_room", detail="cpu 200m short on n1")
    assert text.splitlines() == [
        "NAME   TYPE      READY/DONE   STAGES                LIMITED BY                      AGE",
        "web    service          4/6   serving 4, queued 2   no_room: cpu 200m short on n1     -",
    ]


def test_pending_replica_row_shows_the_decision_reason() -> None:
    replica = Replica(metadata=metadata("web-4"), spec=ReplicaSpec(workload="web", generation=1))
    row_context = RowContext(reasons={("risk", "web-4"): PendingReason("over_quota", "cpu is used up", revision=13)})
    text = render_table(columns_of("Replica", all_tenants=True), [row_of(replica, row_context, all_tenants=True)])
    assert "risk     web-4   pending   -            1          -   over_quota: cpu is used up" in text


def test_running_replica_row_shows_the_failed_probe_and_a_serving_one_does_not() -> None:
    spec = ReplicaSpec(workload="web", generation=1)
    top = ReplicaTop(tenant="risk", replica="web-4", said="its ready probe failed: connection refused")
    for phase, shown in ((Phase.RUNNING, True), (Phase.SERVING, False)):
        replica = Replica(metadata=metadata("web-4"), spec=spec, status=ReplicaStatus(phase))
        row = row_of(replica, RowContext(replicas={("risk", "web-4"): top}), all_tenants=True)
        assert ("connection refused" in render_table(columns_of("Replica", all_tenants=True), [row])) is shown


def test_node_row_shows_requests_of_capacity_or_a_dash() -> None:
    spec = NodeSpec(region="eu", zone="a", capacity=Amount({"cpu": 32_000, "memory": 128 << 30}), unschedulable=True)
    node = Node(metadata=Metadata(name="n1"), spec=spec)
    top = NodeTop(node="n1", requests=ResourceUsage(cpu_milli=1_500, memory_bytes=3 << 29), replicas=3)
    text = render_table(columns_of("Node", all_tenants=False), [row_of(node, RowContext(nodes={"n1": top}), all_tenants=False)])
    assert "joining,cordoned   eu       a      default         1.5/32       1.5Gi/128Gi          3" in text
    assert "CPU REQUESTS   MEMORY REQUESTS" in text
    assert "-/32" in render_table(columns_of("Node", all_tenants=False), [row_of(node, RowContext(), all_tenants=False)])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_long_columns_are_cut_on_a_terminal_but_not_with_wide_or_in_a_file(width: int) -> None:
    columns = (Column("NAME"), Column("TYPE"), Column("REASON", fluid=True))
    text = render_table(columns, [["web-0", "service", "x" * 200], ["b", "job", "short"]], width=width)
    assert max(map(len, text.splitlines())) == width
    assert "…" in text
    assert "x" * 200 in render_table(columns, [["web-0", "service", "x" * 200]])
    assert "x" * 200 in render_table(columns, [["web-0", "service", "x" * 200]], width=width, wide=True)


def test_control_characters_in_cells_are_escaped() -> None:
    text = render_table((Column("NAME"), Column("R", right=True)), [["a\x1b[2J\n", Cell("1", "red")]], width=80)
    assert "\x1b" not in text and "a\\x1b[2J\\n" in text


def test_later_rows_keep_the_column_widths() -> None:
    out = io.StringIO()
    replica = Sheet(Console(file=out, color_system=None), (Column("NAME"), Column("B")))
    replica.show([["longer", "x"]])
    replica.show([["s", "y"]])
    assert out.getvalue() == "NAME     B\nlonger   x\ns        y\n"


def test_endpoint_row_shows_name_host_and_port() -> None:
    item = EndpointItem(tenant="t", service="web", replica="web-0", node="n1", host="10.0.0.7", ports={"http": 31_000})
    assert "http=10.0.0.7:31000" in render_table(endpoint_columns(all_tenants=True), [endpoint_row(item, all_tenants=True)])


def test_repeated_event_is_one_row_with_its_count() -> None:
    item = HistoryEvent(
        at="2026-01-01T00:09:48.000Z", first="2025-12-31T23:10:48.000Z", type="Warning", reason="no_room", count=147,
        source="scheduler", regarding="replica/t/web-0", message="no node has room",
    )  # fmt: skip
    text = render_table(event_columns(about=True), [event_row(item, WALL, about=True)])
    assert text.splitlines()[1].startswith("Warning   no_room   12s (x147 over 59m)   scheduler   replica/t/web-0")
    assert text.splitlines()[0].split() == ["TYPE", "REASON", "AGE", "FROM", "REGARDING", "MESSAGE"]


def test_top_shows_usage_in_percent_and_never_for_missing_reports() -> None:
    has, requests = ResourceUsage(cpu_milli=4_000, memory_bytes=8 << 30), ResourceUsage(cpu_milli=1_000, memory_bytes=1 << 30)
    row = node_row(
        NodeTop(node="n1", cpu_milli=2_000, memory_bytes=2 << 30, capacity=has, requests=requests, age_ms=1_500, health="ready")
    )
    assert [cell.text if isinstance(cell, Cell) else cell for cell in row] == [
        "n1", "2", "50%", "1/4", "2Gi", "25%", "1Gi/8Gi", "0", "ready", "1s ago",
    ]  # fmt: skip
    silent = replica_row(ReplicaTop(tenant="t", replica="web-0"), all_tenants=False)
    assert "never" in silent and "-" in silent


def test_quantities_and_ages_are_formatted_short() -> None:
    assert [format_cpu(n) for n in (0, 250, 1_000, 1_500, 32_000)] == ["0", "250m", "1", "1.5", "32"]
    assert [format_bytes(n) for n in (0, 1_023, 1 << 20, 3 << 29, 300 << 20)] == ["0", "1023", "1Mi", "1.5Gi", "300Mi"]
    assert [format_span(n) for n in (0, 119, 125, 600, 7_200, 90_000, 259_200)] == [
        "0s",
        "119s",
        "2m5s",
        "10m",
        "120m",
        "25h",
        "3d",
    ]
    assert age("2026-01-01T00:09:00.000Z", WALL) == "60s"
    assert age("", WALL) == age("yesterday", WALL) == ""


def test_names_sort_in_natural_order() -> None:
    assert sorted(["web-10", "web-2", "web", "a-1"], key=natural_key) == ["a-1", "web", "web-2", "web-10"]
    replica = [Replica(metadata=metadata(f"web-{n}"), spec=ReplicaSpec(workload="web", generation=n)) for n in (10, 9, 2)]
    assert [item.metadata.name for item in sort_objects(replica, "")] == ["web-2", "web-9", "web-10"]
    assert [item.spec.generation for item in sort_objects(replica, ".spec.generation")] == [2, 9, 10]
    assert len(sort_objects(replica, "no.such.path")) == 3


# -- program output ------------------------------------------------------------------------------------------------------------


def test_split_characters_and_lines_are_joined() -> None:
    lines, data = LineDecoder(), "grüß dich\nzwei\nrest".encode()
    lines_so_far = [line for at in range(len(data)) for line in lines.feed(data[at : at + 1])]
    assert [*lines_so_far, *lines.rest()] == ["grüß dich", "zwei", "rest"]
    assert LineDecoder().feed(b"\xff\n") == ["\\xff"]


def test_overlong_line_is_flushed_at_the_limit() -> None:
    lines = LineDecoder()
    lines_so_far = lines.feed(b"x" * (LINE_CHARS_MAX + 5))
    assert [len(item) for item in lines_so_far] == [LINE_CHARS_MAX]
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
def test_escape_sequences_are_dropped_or_escaped(line: str, shown: str) -> None:
    assert escape_terminal(line) == shown


@pytest.mark.parametrize(
    ("result", "reason", "cell"),
    [
        ("lost", "node n7 sent no heartbeats", "lost: node n7 sent no heartbeats"),
        ("exit 3", "", "exit 3"),
        ("", "the node is draining", "the node is draining"),
    ],
)
def test_reason_of_a_replica_separates_result_and_reason(result: str, reason: str, cell: str) -> None:
    failed = Replica(
        metadata=RecordMetadata(name="web-0", tenant="risk"),
        spec=ReplicaSpec(workload="web", generation=1),
        status=ReplicaStatus(phase=Phase.FAILED, result=result, reason=reason),
    )
    row = row_of(failed, RowContext(), all_tenants=False)
    assert cell in [one.text if isinstance(one, Cell) else one for one in row]
