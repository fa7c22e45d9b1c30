"""`remit demo race` shows what it claims and notices violations, which are planted in its store."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from remit.client.endpoint import AuthorityStatus, EndpointError, NotLeader, OutcomeUnknown, Overloaded
from remit.commitment.authority import Authority
from remit.commitment.outcomes import batch_key
from remit.demo.authority_process import AUTHORITY, DemoFailed, EpochStampingService, RecordingEndpoint, address_of
from remit.demo.demo_command import ROUNDS, demo
from remit.demo.demo_processes import AuthorityProcess
from remit.demo.race import Race
from remit.demo.verify import _one_outcome
from remit.model.objects import decode, encode
from remit.model.records import Phase, Replica
from remit.store import chain
from remit.store.protocol import Committed, Head
from remit.store.sqlite.database_file import FILE_NAME
from remit.store.sqlite.store import SqliteStore
from remit.world.interfaces import Clock
from remit.world.production import production
from tests.contracts.stores import OneThread
from tests.integration.store.failing_disks import small_disk

REMIT = Path(sys.executable).parent / "remit"
GPU = ("node-gpu-4", "gpu-0")


def run_demo(*arguments: str, **env: str) -> tuple[int, str]:
    """Run the demo as a user would: in its own process, with its output piped."""
    command = [str(REMIT), "demo", "race", "--rounds", "10", *arguments]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_demo_kills_restarts_and_reports(tmp_path: Path) -> None:
    """F01, F02: two schedulers race for one GPU, and answers lost by the kill are found again."""
    data = tmp_path / "data"
    code, output = run_demo("--data", str(data), COLUMNS="80")
    assert code == 0, output
    flat = " ".join(output.split())
    killed = re.search(r"SIGKILL to process (\d+) in round 6", flat)
    after = re.search(r"Restarted: process (\d+) took over .* \(epoch 2\)", flat)
    assert killed and after and killed[1] != after[1]
    assert re.search(r"✓ one owner gpu-0 of node-gpu-4 belongs to fraud/fraud-batch-\d+ \(running\)", flat)
    assert "✓ never two owners 10 successive owners" in flat
    assert re.search(r"✓ nothing lost (\d+) operations acknowledged: \1 have the same verdict in the store, 0 lost", flat)
    assert re.search(r"✓ in flight settled [1-9]", flat)
    assert "✓ epoch raised 1 before the kill, 2 after" in flat
    assert re.search(r"✓ chain unbroken sequence 1 to \d+", flat)
    for name in ("one-owner-per-device", "node-ledgers-balance", "one-binding", "grants-cover", "quota-covers", "no-excess"):
        assert f"✓ {name} " in flat
    assert "device_taken" in flat and "fix device freed" in flat
    assert "One owner, balanced books, nothing lost." in flat
    assert "✗" not in output
    assert (data / FILE_NAME).is_file()
    lines = [line.replace(str(data), "DATA") for line in output.splitlines()]
    assert not [line for line in lines if len(line) > 80 or line != line.rstrip()]


@pytest.mark.smoke
def test_output_without_terminal_has_no_colour_or_progress_bar() -> None:
    code, output = run_demo()
    assert code == 0, output
    assert "\x1b" not in output and "\r" not in output and "━" not in output


def test_nonempty_directory_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    code, output = run_demo("--data", str(tmp_path))
    assert code == 2
    assert "name another directory" in output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("part", ["place", "race"])
def test_unusable_directory_is_reported_in_one_line(part: str) -> None:
    result = CliRunner().invoke(demo, [part, "--data", "/dev/null/here"])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "The demo failed: " in result.output and "/dev/null/here cannot be used" in result.output


def test_missing_manifests_are_reported_with_fix(tmp_path: Path) -> None:
    code, output = run_demo("--examples", str(tmp_path))
    assert code == 2
    assert "--examples" in output


def test_error_outside_checkout_names_no_installation_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = tmp_path / "lib" / "python3.11" / "site-packages" / "remit" / "cli" / "demo.py"
    monkeypatch.setattr(sys.modules["remit.demo.demo_command"], "__file__", str(installed))
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    result = CliRunner().invoke(demo, ["race"])
    assert result.exit_code == 2
    output = " ".join(result.output.split())
    assert f"are not in {tmp_path}/mine/examples; they come with the repository" in output
    assert f"{tmp_path}/lib" not in output


def test_help_example_is_longer_than_default() -> None:
    output = CliRunner().invoke(demo, ["race", "--help"]).output
    longer = re.search(r"--rounds (\d+) --seed 7 +a longer race", output)
    assert longer and int(longer[1]) > ROUNDS


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 had no answer and were"), (1, "1 had no answer and was"), (2, "2 had no answer and were")]
)
def test_retried_operations_are_worded_by_count(tmp_path: Path, count: int, expected: str) -> None:
    world = production()
    race = Race(tmp_path, tmp_path / "s", world, world.randomness, 2)
    race.retried = count
    assert _one_outcome(race).result.startswith(f"{expected} retried with the same id")


@pytest.mark.mounts
@pytest.mark.parametrize("size", ["16k", "200k", "1m"])
def test_full_disk_ends_demo_soon_with_reason_and_fix(tmp_path: Path, size: str) -> None:
    """F11: before the store exists, while objects are created, and during the race. Not merely an expired deadline."""
    with small_disk(tmp_path / "disk", size) as disk:
        began = time.monotonic()
        code, output = run_demo("--rounds", "500", "--data", str(disk / "data"))
        took_s = time.monotonic() - began
    assert code == 1, output
    assert "The demo failed: the authority c" in output
    assert str(disk / "data") in output.split("The demo failed:")[1]
    assert "disk is full" in output and "free space there" in output
    assert "Traceback" not in output
    assert took_s < 60, f"took {took_s:.1f} s"  # three without load; a busy machine takes longer


class NoRecorder:
    def sent(self, operations: object) -> None: ...

    def answered(self, ids: object, verdicts: object, epoch: int) -> None: ...


def test_endpoint_errors_are_preserved_over_socket(tmp_path: Path) -> None:
    """The demo waits briefly for a store that cannot write, and then ends; it waits longer for a silent restart."""
    failures: list[EndpointError] = [OutcomeUnknown("torn"), NotLeader("b", "deposed"), Overloaded(7, "full"), Overloaded(8)]

    class Failing:
        head = Head("i", 1, 1, "", 0, "")

        async def status(self) -> AuthorityStatus:
            raise failures[0]

    async def scenario() -> None:
        world, authority = production(address_of(tmp_path / "s")), cast(Authority, Failing())
        watched = RecordingEndpoint(tmp_path / "s", NoRecorder(), world.clock)
        async with world.link.serve(AUTHORITY, EpochStampingService(authority)):
            while failures:
                expected = failures[0]
                with pytest.raises(type(expected)) as caught:
                    await watched.status()
                assert (str(caught.value), vars(caught.value)) == (str(expected), vars(expected))
                failures.pop(0)
            failures.append(Overloaded(0, "full: make room"))
            with pytest.raises(DemoFailed, match=r"cannot write: full: make room; or choose another directory with --data"):
                async with asyncio.timeout(20):
                    while True:
                        with suppress(Overloaded):
                            await watched.status()
                        await asyncio.sleep(0.05)
        await world.offload.close()

    asyncio.run(scenario())


# -- planted violations --------------------------------------------------------------------------------------------------

Plant = Callable[[Path], Awaitable[None]]


async def overwrite_with_garbage(data: Path) -> None:
    with (data / FILE_NAME).open("r+b") as file:
        file.write(os.urandom(8192))


async def delete_files(data: Path) -> None:
    for path in sorted(data.glob("*")):  # noqa: ASYNC240 - nothing else runs
        path.unlink()


async def truncate_log(data: Path) -> None:
    log = data / f"{FILE_NAME}-wal"
    os.truncate(log, log.stat().st_size // 2)


async def commit_directly(
    data: Path, change: Callable[[SqliteStore], Awaitable[tuple[list[tuple[str, bytes]], list[str]]]]
) -> None:
    """Commit a batch that breaks the rules but not the chain."""
    store = await SqliteStore.open(data, offload=OneThread(), holder="planted", incarnation="planted")
    try:
        puts, deletes = await change(store)
        head = chain.advance(store.position.head, puts, deletes)
        assert isinstance(await store.commit(chain.batch(store.position, head, puts, deletes)), Committed)
    finally:
        await store.close()


async def forget_outcome(data: Path) -> None:
    async def change(store: SqliteStore) -> tuple[list[tuple[str, bytes]], list[str]]:
        return [], [row.key for row in (await store.range(batch_key(1)[:-4])).rows[5:7]]

    await commit_directly(data, change)


async def add_second_owner(data: Path) -> None:
    async def change(store: SqliteStore) -> tuple[list[tuple[str, bytes]], list[str]]:
        rows = (await store.range("replica/")).rows
        replicas = {row.key: replica for row in rows if isinstance(replica := decode(row.value), Replica)}
        owner = next(one for one in replicas.values() if (one.status.node, *one.status.devices) == GPU)
        name, other = next((key, one) for key, one in replicas.items() if one.status.phase is Phase.PENDING)
        return [(name, encode(replace(other, status=owner.status)))], []

    await commit_directly(data, change)


def between_kill_and_restart(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    start, starts = AuthorityProcess.start, []

    async def planted(data: Path, socket: Path, clock: Clock) -> AuthorityProcess:
        starts.append(socket)
        if len(starts) == 2:
            await plant(data)
        return await start(data, socket, clock)

    monkeypatch.setattr(AuthorityProcess, "start", planted)


def after_the_race(monkeypatch: pytest.MonkeyPatch, plant: Plant, data: Path) -> None:
    stop = Race.stop

    async def planted(race: Race) -> None:
        await stop(race)
        await plant(data)

    monkeypatch.setattr(Race, "stop", planted)


def failing_output(data: Path) -> str:
    result = CliRunner().invoke(demo, ["race", "--rounds", "4", "--data", str(data)])
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert "nothing lost." not in result.output
    return " ".join(result.output.split())


def test_garbage_in_store_is_reported_with_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """F13: the restarted process refuses to serve a damaged store."""
    between_kill_and_restart(monkeypatch, overwrite_with_garbage)
    output = failing_output(tmp_path / "data")
    assert "The demo failed: the authority could not take over" in output
    assert "restore a backup" in output


def test_emptied_store_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    between_kill_and_restart(monkeypatch, delete_files)
    assert "acknowledged operations are lost" in failing_output(tmp_path / "data")


def test_store_that_lost_its_log_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    between_kill_and_restart(monkeypatch, truncate_log)
    assert "acknowledged operations are lost" in failing_output(tmp_path / "data")


def test_missing_acknowledged_operation_is_counted_as_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    between_kill_and_restart(monkeypatch, forget_outcome)
    output = failing_output(tmp_path / "data")
    assert re.search(
        r"✗ nothing lost \d+ operations acknowledged: \d+ have the same verdict in the store, [1-9]\d* lost", output
    )
    assert "✗ one outcome each" in output
    assert "checks failed" in output


@pytest.mark.smoke
def test_second_owner_is_noticed_by_history_and_ledgers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = tmp_path / "data"
    after_the_race(monkeypatch, add_second_owner, data)
    output = failing_output(data)
    for name in ("one owner", "never two owners", "one-owner-per-device", "no-excess"):
        assert f"✗ {name} " in output
    assert "✓ chain unbroken" in output


def test_row_written_outside_chain_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = tmp_path / "data"

    async def write_outside_chain(data: Path) -> None:
        from remit.store.protocol import Commit

        store = await SqliteStore.open(data, offload=OneThread(), holder="planted", incarnation="planted")
        assert isinstance(await store.commit(Commit(puts=(("note/planted", b"{}"),))), Committed)
        await store.close()

    after_the_race(monkeypatch, write_outside_chain, data)
    assert "✗ chain unbroken" in failing_output(data)


def running_processes(place: bytes) -> list[Path]:
    """Processes whose command line contains this path."""
    found = []
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it may have ended
            if place in command_line.read_bytes():
                found.append(command_line)
    return found


@pytest.mark.parametrize("line", [b"Remit demo", b"Setup", b"objects from", b"The race"])
def test_sigterm_leaves_no_process_and_no_temporary_directory(tmp_path: Path, line: bytes) -> None:
    command = [str(REMIT), "demo", "race", "--rounds", "500"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        while line not in process.stdout.readline():
            pass
        assert list(tmp_path.iterdir())
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (128 + signal.SIGTERM, b"")
    assert list(tmp_path.iterdir()) == []
    assert not running_processes(str(tmp_path).encode())


def test_killed_demo_leaves_no_process(tmp_path: Path) -> None:
    async def interrupted() -> int:
        process = await asyncio.create_subprocess_exec(
            *(str(REMIT), "demo", "race", "--rounds", "500", "--data", str(tmp_path / "data")),
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        while b"The race" not in await process.stdout.readline():
            pass
        process.kill()  # SIGKILL: the child must notice by itself
        await process.wait()
        return int((tmp_path / "data" / "owner").read_text())

    server = asyncio.run(interrupted())
    for _ in range(100):
        if not Path(f"/proc/{server}").exists():
            return
        asyncio.run(asyncio.sleep(0.1))
    pytest.fail(f"process {server} still runs")
