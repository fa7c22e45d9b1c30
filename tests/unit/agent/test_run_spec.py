"""Small parts of an agent: journal, probes, restarts, process specs, log bounds, lease continuity."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from remit.agent.attempts import AttemptId, result_of
from remit.agent.hosted_node import LeaseContinuity
from remit.agent.keeper.journal import COMPACT_LINES, Journal, tombstone
from remit.agent.keeper.log_retention import LogBounds, LogRetention, parse_log_bounds
from remit.agent.keeper.protocol import BACKOFF_MS, KeeperLauncher, ProcessRecord
from remit.agent.probes import STABLE_RUN_MS, ProcessHealth, restart_after_ms
from remit.agent.run_spec import NodeSettings, build_process_spec, expand_variables, fence_ms
from remit.model.kinds import Probe, Probes, TcpProbe, Template, WorkloadSpec
from remit.model.metadata import RecordMetadata
from remit.model.records import GenerationSpec, Replica, ReplicaSpec, ReplicaStatus
from remit.model.resources import Amount, Duration
from remit.world.files.disk import FileDisk
from remit.world.files.log_files import FileLogFiles
from remit.world.interfaces import ExitStatus, Limits, ProcessSpec
from remit.world.process.isolation import USER_PER_TENANT, tenant_user
from tests.unit.agent.virtual_machines import Machine, world_on
from tests.unit.world.virtual_world import run_virtually, virtual_world

ONE, TWO = AttemptId("replica/t/a-0", "u1", 1), AttemptId("replica/t/b-0", "u2", 1)


def begun(uid: str = "u1", **more: object) -> ProcessRecord:
    return replace(ProcessRecord("n1", "local", "replica/t/a-0", uid, 1, pid=5), **more)


# -- the journal ---------------------------------------------------------------------------------------------------------------


def test_journal_read_returns_latest_record_and_skips_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal"
    journal = Journal(FileDisk(), path)
    assert journal.read() == {}
    journal.write([begun(), begun("u2")], durably=True)
    journal.write([begun(ended=ExitStatus(code=1)), tombstone(begun("u2"))], durably=False)
    assert Journal(FileDisk(), path).read() == {ONE: begun(ended=ExitStatus(code=1))}


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_journal_line_cut_by_crash_hides_no_later_record(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    journal = Journal(FileDisk(), path)
    journal.write([begun(), begun("u2")], durably=True)
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(FileDisk(), path)
    assert ONE in again.read()
    again.write([begun("u3")], durably=True)
    records = Journal(FileDisk(), path).read()
    assert {copy.uid for copy in records} >= {"u1", "u3"}


def test_journal_with_many_obsolete_records_is_compacted(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(FileDisk(), path)
    journal.write([begun()] * (COMPACT_LINES + 5), durably=False)
    assert journal.needs_compaction(1)
    journal.compact([begun()])
    assert not journal.needs_compaction(1)
    assert Journal(FileDisk(), path).read() == {ONE: begun()}
    assert len(path.read_text().splitlines()) == 1


# -- probes and restarts -------------------------------------------------------------------------------------------------------


def test_start_probe_runs_first_and_probes_keep_their_period() -> None:
    probe = Probe(tcp=TcpProbe(port=1), period=Duration(100), timeout=Duration(50), failures=2)
    health = ProcessHealth(Probes(start=probe, ready=probe), 1_000)
    assert list(health.due_probes(1_000)) == ["start"]
    health.mark_running("start", 1_000)
    assert list(health.due_probes(1_100)) == []
    health.record("start", False, "refused", 1_020)
    assert health.next_run_ms() == 1_120
    health.record("start", True, "", 1_120)
    assert list(health.due_probes(1_120)) == ["ready"], "a passed start probe does not run again"
    assert (health.is_ready, health.is_unready) == (False, False), "no result yet"
    health.record("ready", False, "status 500", 1_130)
    assert health.failure_message == "ready probe failed: status 500"
    ready = []
    for ok in (True, False, False):
        health.record("ready", ok, "status 500", 1_330)
        ready.append(health.is_ready)
    assert ready == [True, True, False], "ready until the failure threshold"
    assert not health.is_dead, "not ready is not dead"


def test_failing_start_probe_marks_process_dead() -> None:
    health = ProcessHealth(Probes(start=Probe(tcp=TcpProbe(port=1), failures=2)), 0)
    health.record("start", False, "", 1)
    health.record("start", False, "", 2)
    assert health.is_dead


@pytest.mark.parametrize(
    ("when", "failed", "restarts", "ran_ms", "limit", "pause_ms"),
    [
        ("always", False, 0, 0, 0, 1_000),
        ("always", True, 3, 0, 0, 8_000),
        ("always", True, 1_000, 0, 0, 60_000),
        ("always", True, 9, STABLE_RUN_MS, 0, 1_000),
        ("failure", False, 0, 0, 0, None),
        ("failure", True, 0, 0, 0, 1_000),
        ("never", True, 0, 0, 0, None),
        ("always", True, 2, 0, 2, None),
        ("always", True, 1, 0, 2, 2_000),
    ],
)
def test_restart_backoff_follows_policy_and_limit(
    when: Any, failed: bool, restarts: int, ran_ms: int, limit: int, pause_ms: int | None
) -> None:
    records = restart_after_ms(
        when,
        failed=failed,
        restarts=restarts,
        ran_ms=ran_ms,
        backoff_ms=1_000,
        backoff_max_ms=60_000,
        limit=limit,
    )
    assert records == pause_ms


# -- what is started -----------------------------------------------------------------------------------------------------------


def test_process_spec_follows_template_and_agent_variables_win() -> None:
    spec = WorkloadSpec(
        type="job",
        fence=Duration(7_000),
        template=Template(
            command=("serve", "--port=$(PORT_http)", "$$(HOME)", "$(NOBODY)"),
            env={"PATH": "/opt", "REMIT_NODE": "forged", "A": "b"},
            resources=Amount.parse({"cpu": "250m", "memory": "64Mi"}),
            user="web",
            working_directory="/srv",
        ),
    )
    generation = GenerationSpec(workload="a", generation=1, labels={}, spec=spec)
    replica = Replica(
        metadata=RecordMetadata(name="a-0", tenant="t", uid="u1"),
        spec=ReplicaSpec(workload="a", generation=1, index=4),
        status=ReplicaStatus(devices={"gpu-1": 1000, "gpu-0": 500}),
    )
    place = NodeSettings("n1", "local", Path("/d/logs/n1"), Path("/d/work"), sandbox=True)
    order = build_process_spec(place, ONE, replica, generation, {"http": 31000})
    assert order.argv == ("serve", "--port=31000", "$(HOME)", "$(NOBODY)")
    assert order.env["PATH"] == "/opt"
    assert order.env["REMIT_NODE"] == "n1", "the template cannot override agent variables"
    assert (order.env["REMIT_TOKEN"], order.env["REMIT_INDEX"], order.env["REMIT_FENCE_MS"]) == ("u1.1", "4", "7000")
    assert (order.env["REMIT_DEVICES"], order.env["CUDA_VISIBLE_DEVICES"]) == ("gpu-0,gpu-1", "0,1")
    assert (order.directory, order.user) == (Path("/srv"), "web")
    assert order.writable == (Path("/d/work/u1.1"),)
    assert (order.stdout, order.stderr) == (Path("/d/logs/n1/u1.1.out"), Path("/d/logs/n1/u1.1.err"))
    assert order.limits == Limits(memory_bytes=64 << 20, cpu_milli=250, pids=4_096)
    assert (order.sandbox, order.with_parent, order.group) == ("bwrap", True, "u1.1")
    assert fence_ms(generation) == 7_000
    eager = replace(generation, spec=replace(spec, replace="eager", template=replace(spec.template, sandbox="none")))
    assert fence_ms(eager) == 0
    plain = build_process_spec(place, ONE, replica, eager, {})
    assert (plain.sandbox, plain.with_parent) == ("none", False)
    unnamed = replace(generation, spec=replace(spec, template=replace(spec.template, user="")))
    assert build_process_spec(place, ONE, replica, unnamed, {}).user == "", "the user of the agent"
    held = place._replace(user="nobody")
    assert [build_process_spec(held, ONE, replica, one, {}).user for one in (unnamed, generation)] == ["nobody", "web"]
    held = place._replace(user=USER_PER_TENANT)
    assert [build_process_spec(held, ONE, replica, one, {}).user for one in (unnamed, generation)] == [tenant_user("t"), "web"]


def test_attempt_file_names_cannot_escape_directory() -> None:
    assert AttemptId("k", "../../etc/passwd", 2).file_name == ".._.._etc_passwd.2"
    assert "/" not in "".join(AttemptId("k", "a/b", 1).log_names)
    assert expand_variables("$(A)$(A)", {"A": "$(A)"}) == "$(A)$(A)", "expansion is not recursive"
    assert result_of(ExitStatus(code=0, oom=True)) == "oom"


# -- lease continuity ----------------------------------------------------------------------------------------------------------


def test_lease_is_continuous_when_previous_epoch_was_recorded(tmp_path: Path) -> None:
    async def scene() -> None:
        world, path = virtual_world(), tmp_path / "run" / "epochs"
        first = LeaseContinuity(world, path)
        assert await first.record_acquired({"n1": 1, "n2": 4}) == {"n1"}, "n2 had unknown holders before"
        assert await first.record_acquired({"n1": 2}) == {"n1"}
        assert await LeaseContinuity(world, path).record_acquired({"n1": 3, "n2": 5}) == {"n1", "n2"}
        assert await LeaseContinuity(world, path).record_acquired({"n1": 5}) == frozenset(), "epoch 4 had another holder"
        assert await LeaseContinuity(world, None).record_acquired({"n1": 5}) == {"n1"}
        path.write_text("not json")
        assert await LeaseContinuity(world, path).record_acquired({"n1": 6}) == frozenset()

    run_virtually(scene())


# -- logs and keeper launch ----------------------------------------------------------------------------------------------------


def test_log_bounds_round_trip_and_malformed_ones_are_refused() -> None:
    assert parse_log_bounds("") == LogBounds()
    assert parse_log_bounds(LogBounds(older=7).to_text()) == LogBounds(older=7)
    assert parse_log_bounds("older=1,file_bytes=5") == LogBounds(older=1, file_bytes=5)
    for wrong in ("older", "older=-1", "colour=1", "older=1,"):
        with pytest.raises(ValueError, match="is not a log bound"):
            parse_log_bounds(wrong)


def test_logs_of_running_attempts_rotate_and_old_logs_are_removed(tmp_path: Path) -> None:
    place = tmp_path / "n1"
    place.mkdir()
    (place / "u1.1.out").write_text("x" * 100)
    for n in range(5):
        (place / f"old-{n}.1.err").write_text("x")

    async def scene() -> None:
        world = virtual_world()
        bounds = LogBounds(file_bytes=50, older=1, copies=2)
        retention = LogRetention(world, FileLogFiles(), tmp_path, bounds)
        async with world.clock.timeout_ms(3_000):
            await retention.run({ONE: begun()})

    with pytest.raises(TimeoutError):
        run_virtually(scene())
    assert (place / "u1.1.out").read_text() == ""
    assert (place / "u1.1.out@0000000000000000").read_text() == "x" * 100
    assert len(list(place.glob("old-*"))) == 2


def test_fast_growing_log_is_checked_more_often(tmp_path: Path) -> None:
    world, bounds = world_on(Machine()), LogBounds(file_bytes=100, older=1)
    checks: list[tuple[int, str]] = []

    class CountingLogFiles(FileLogFiles):
        def rotate(self, directory: Path, name: str, *, bytes_max: int, rotated_max: int) -> bool:
            checks.append((world.clock.now_ms(), name))
            if name == TWO.log_names[0]:
                with (directory / name).open("ab") as file:
                    file.write(b"x" * 101)
            return super().rotate(directory, name, bytes_max=bytes_max, rotated_max=rotated_max)

    async def scene() -> None:
        (tmp_path / "n1").mkdir()
        retention = LogRetention(world, CountingLogFiles(), tmp_path, bounds)
        with suppress(TimeoutError):
            async with world.clock.timeout_ms(2_950):
                await retention.run({ONE: begun(), TWO: begun(TWO.uid, key=TWO.key)})

    run_virtually(scene())
    times = {name: [at_ms for at_ms, seen in checks if seen == name] for name in (ONE.log_names[0], TWO.log_names[0])}
    assert len(times[ONE.log_names[0]]) == 3
    assert len(times[TWO.log_names[0]]) == 30


def test_missing_keeper_is_launched_with_backoff_and_only_once(tmp_path: Path) -> None:
    machine, lock, logged = Machine(), tmp_path / "lock", list[str]()

    async def scene() -> None:
        world = world_on(machine)
        launch = KeeperLauncher(world, ProcessSpec(("keeper",)), lock, logged.append)
        with world.disk.lock(lock):
            await launch()
        assert not machine.runs, "a suspended keeper still holds the lock"
        await launch()
        assert len(machine.runs) == 1
        await launch()
        assert len(machine.runs) == 1
        starts = 1
        for _ in range(4):
            machine.end(machine.pids, ExitStatus(code=1))
            await launch()
            await world.clock.sleep_ms(BACKOFF_MS << starts)
            await launch()
            starts += 1
            assert machine.pids == 100 + starts
        assert "has ended: 1" in logged[0]

    run_virtually(scene())
