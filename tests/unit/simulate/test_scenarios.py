"""Scenario files: invalid ones are refused with field and fix, includes are merged, and a seed determines its plan."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from remit.simulate import scenarios
from remit.simulate.faults.fault_schedule import draw_faults, draw_shape
from remit.simulate.faults.kinds import KINDS
from remit.simulate.scenarios import BadScenario, load, names, parse, problems
from remit.simulate.simulation import Simulation

GOOD = 'summary = "s"\n'

BAD = {
    "empty": ("", ["summary"]),
    "not-toml": ("summary = x", ["not TOML", "line 1"]),
    "unknown-field": (GOOD + "nodes = 3", ["nodes"]),
    "unknown-cluster-field": (GOOD + "[cluster]\nnodez = 3", ["nodez", "cluster"]),
    "unknown-fault-field": (GOOD + '[[faults]]\nkind = "loss"\nat = "1s"\nlast = "2s"', ["last", "faults"]),
    "wrong-type": (GOOD + '[cluster]\nnodes = "many"', ["cluster.nodes", "int"]),
    "table-for-list": (GOOD + '[faults]\nkind = "loss"\nat = "1s"', ["faults", "[[faults]]"]),
    "number-for-list": (GOOD + "faults = 3", ["faults", "[[faults]]"]),
    "number-in-list": (GOOD + "faults = [3]", ["faults"]),
    "table-for-text": (GOOD + "[duration]\ns = 1", ["duration"]),
    "text-for-table": (GOOD + 'cluster = "big"', ["cluster"]),
    "unknown-fault": (GOOD + '[[faults]]\nkind = "meteor"\nat = "1s"', ["faults[0].kind", "'meteor'", "kill-leader"]),
    "fault-without-time": (GOOD + '[[faults]]\nkind = "loss"', ["faults[0]", "at or every"]),
    "fault-with-two-times": (GOOD + '[[faults]]\nkind = "loss"\nat = "1s"\nevery = "1s"', ["faults[0]", "at or every"]),
    "bad-at": (GOOD + '[[faults]]\nkind = "loss"\nat = "soon"', ["faults[0].at", "30s"]),
    "bad-every": (GOOD + '[[faults]]\nkind = "loss"\nevery = "5"', ["faults[0].every", "30s"]),
    "bad-lasts": (GOOD + '[[faults]]\nkind = "loss"\nat = "1s"\nlasts = "-1s"', ["faults[0].lasts", "30s"]),
    "empty-lasts": (GOOD + '[[faults]]\nkind = "loss"\nat = "1s"\nlasts = ""', ["faults[0].lasts", "30s"]),
    "bad-size": (GOOD + '[[faults]]\nkind = "loss"\nat = "1s"\nsize = -1', ["faults[0].size"]),
    "size-not-a-number": (GOOD + '[[faults]]\nkind = "loss"\nat = "1s"\nsize = nan', ["faults[0].size"]),
    "share-above-one": (GOOD + '[[faults]]\nkind = "loss"\nat = "1s"\nsize = 1.5', ["faults[0].size", "from 0 to 1"]),
    "size-of-fault-without-size": (
        GOOD + '[[faults]]\nkind = "drift"\nat = "1s"\nsize = 0.5',
        ["faults[0].size", "remove it"],
    ),
    "where-of-fault-in-all-scopes": (
        GOOD + '[[faults]]\nkind = "loss"\nat = "1s"\nwhere = "local"',
        ["faults[0].where", "remove it"],
    ),
    "unknown-store": (GOOD + '[cluster]\nstore = "tape"', ["cluster.store", "'tape'", "memory or sqlite"]),
    "unknown-matrix-row": (GOOD + 'matrix = "it rains"', ["matrix", "Scheduler cache is stale"]),
    "where-scope-without-nodes": (
        GOOD + '[[faults]]\nkind = "region-lost"\nat = "1s"\nwhere = "top"\n[cluster]\nscopes = ["top", "left"]',
        ["faults[0].where", "has nodes", "available are left"],
    ),
    "unknown-scope": (GOOD + '[[faults]]\nkind = "loss"\nat = "1s"\nwhere = "mars"', ["faults[0].where", "'mars'", "local"]),
    "too-few-scopes": (GOOD + '[[faults]]\nkind = "cut-scopes"\nat = "1s"', ["faults[0].kind", "cut-scopes", "cluster.scopes"]),
    "wrong-store": (
        GOOD + '[cluster]\nstore = "sqlite"\n[[faults]]\nkind = "compaction"\nat = "1s"',
        ["faults[0].kind", "compaction", "cluster.store"],
    ),
    "bad-duration": (GOOD + 'duration = "5 minutes"', ["duration", "30s"]),
    "duration-too-long": (GOOD + 'duration = "99999d"', ["duration", "at most"]),
    "bad-heal": (GOOD + 'heal = "x"', ["heal", "30s"]),
    "bad-beat": (GOOD + '[cluster]\nbeat = "x"', ["cluster.beat", "30s"]),
    "beat-zero": (GOOD + '[cluster]\nbeat = "0s"', ["cluster.beat", "at least"]),
    "bad-fence": (GOOD + '[load]\nfence = "x"', ["load.fence", "30s"]),
    "no-nodes": (GOOD + "[cluster]\nnodes = 0", ["cluster.nodes", "from 1 to 10000"]),
    "negative-agents": (GOOD + "[cluster]\nagents = -1", ["cluster.agents", "from 1 to 10000"]),
    "too-many-nodes": (GOOD + "[cluster]\nnodes = 10001", ["cluster.nodes", "to 10000"]),
    "no-scopes": (GOOD + "[cluster]\nscopes = []", ["cluster.scopes", "at least one"]),
    "repeated-scope": (GOOD + '[cluster]\nscopes = ["a", "a"]', ["cluster.scopes", "each only once"]),
    "scope-without-name": (GOOD + '[cluster]\nscopes = [""]', ["cluster.scopes", "letters and digits"]),
    "scope-with-hyphen": (GOOD + '[cluster]\nscopes = ["eu-west"]', ["cluster.scopes", "letters and digits"]),
    "unknown-work": (GOOD + '[load]\nkinds = ["nap"]', ["load.kinds", "'nap'", "service"]),
    "no-work-kinds": (GOOD + "[load]\nkinds = []", ["load.kinds", "at least one"]),
    "size-zero": (GOOD + "[load]\nsize = 0", ["load.size", "from 1 to 10000"]),
    "load-not-a-number": (GOOD + "[load]\nper_minute = nan", ["load.per_minute"]),
    "negative-load": (GOOD + "[load]\nper_minute = -1.0", ["load.per_minute"]),
    "bad-quota": (GOOD + "[load]\nquota = -5", ["load.quota"]),
    "negative-swarm": (GOOD + "swarm = -1", ["swarm"]),
    "include-missing-file": (GOOD + 'include = ["_nothing"]', ["include", "_nothing", "_busy"]),
    "include-text": (GOOD + 'include = "_busy"', ["include", "list"]),
    "include-number": (GOOD + "include = 3", ["include", "list"]),
    "include-list-of-numbers": (GOOD + "include = [3]", ["include", "list"]),
    "include-outside-folder": (GOOD + 'include = ["../../../../../pyproject"]', ["include", "pyproject"]),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_invalid_scenario_is_refused_with_field_and_fix(name: str) -> None:
    text, needles = BAD[name]
    with pytest.raises(BadScenario) as caught:
        parse(name, text)
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    for needle in needles:
        assert needle in message
    assert "\n" not in message


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "garbage.toml"
    path.write_bytes(b"\xff\xfe\x00\x80summary")
    with pytest.raises(BadScenario, match=r"^garbage: .*UTF-8"):
        load(str(path))


@pytest.mark.parametrize("name", ["no-such-scenario", "{place}", "{place}/missing.toml", "{place}/folder.toml", "_busy", ""])
def test_unknown_scenario_is_refused_with_hint(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(BadScenario, match=r"there is no scenario .*--list.*\.toml"):
        load(name.format(place=tmp_path))


def test_scenario_file_is_loaded_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD + 'include = ["_busy"]\n[cluster]\nnodes = 2')
    found = load(str(path))
    assert (found.name, found.cluster.nodes) == ("mine", 2)


def test_bundled_scenarios_load_and_round_trip() -> None:
    assert len(names()) > 10
    for name in names():
        found = load(name)
        assert found.name == name
        assert msgspec.convert(msgspec.to_builtins(found), scenarios.Scenario) == found


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Texts of files that may be included, by name."""
    texts: dict[str, str] = {}

    def text(name: str) -> str:
        if name not in texts:
            raise FileNotFoundError(name)
        return texts[name]

    monkeypatch.setattr(scenarios, "_text", text)
    return texts


def test_including_file_overrides_and_faults_are_joined(folder: dict[str, str]) -> None:
    folder["_one"] = """
        summary = "one"
        duration = "1m"
        [cluster]
        nodes = 4
        agents = 2
        [load]
        kinds = ["job", "gang"]
        [[faults]]
        kind = "loss"
        at = "1s"
    """
    folder["_two"] = 'include = ["_one"]\nduration = "2m"\n[cluster]\nnodes = 5\n[[faults]]\nkind = "repeats"\nat = "2s"'
    folder["_three"] = "[cluster]\nservers = 3"
    found = parse(
        "top",
        """
        include = ["_two", "_three"]
        summary = "top"
        [cluster]
        agents = 1
        [load]
        kinds = ["service"]
        [[faults]]
        kind = "delays"
        at = "3s"
        """,
    )
    assert (found.name, found.summary, found.duration) == ("top", "top", "2m")
    assert (found.cluster.nodes, found.cluster.agents, found.cluster.servers) == (5, 1, 3)
    assert found.load.kinds == ("service",), "lists other than faults are replaced"
    assert [line.kind for line in found.faults] == ["loss", "repeats", "delays"]


def test_later_include_overrides_earlier_one(folder: dict[str, str]) -> None:
    folder["_one"], folder["_two"] = "[cluster]\nnodes = 1", "[cluster]\nnodes = 2"
    assert parse("top", GOOD + 'include = ["_one", "_two"]').cluster.nodes == 2


def test_circular_include_is_refused(folder: dict[str, str]) -> None:
    folder["_one"], folder["_two"] = 'include = ["_two"]', 'include = ["_one"]'
    with pytest.raises(BadScenario, match="include: _one includes itself"):
        parse("top", GOOD + 'include = ["_one"]')
    folder["_self"] = 'include = ["_self"]'
    with pytest.raises(BadScenario, match="include: _self includes itself"):
        parse("_self", folder["_self"])


def test_including_one_file_twice_is_allowed(folder: dict[str, str]) -> None:
    folder["_base"], folder["_one"], folder["_two"] = "[cluster]\nnodes = 4", 'include = ["_base"]', 'include = ["_base"]'
    assert parse("top", GOOD + 'include = ["_one", "_two"]').cluster.nodes == 4


# Plans


def many() -> scenarios.Scenario:
    lines = "".join(f'[[faults]]\nkind = "{kind}"\nevery = "30s"\nlasts = "10s"\n' for kind in ("loss", "kill-agent", "delays"))
    return parse("many", GOOD + f'duration = "10m"\nswarm = 5\n{lines}')


def test_plan_is_determined_by_seed() -> None:
    assert draw_faults(many(), 1) == draw_faults(many(), 1)
    assert draw_faults(many(), 1) != draw_faults(many(), 2)


def test_plan_is_ordered_numbered_and_within_run() -> None:
    for seed in range(30):
        plan = draw_faults(many(), seed)
        assert [one.at_s for one in plan] == sorted(one.at_s for one in plan)
        assert sorted(one.number for one in plan) == list(range(len(plan)))
        assert all(one.at_s >= 0 and one.at_s + one.lasts_s <= 600.0 for one in plan)
        assert {"loss", "kill-agent", "delays"} <= {one.kind for one in plan}


def test_fault_at_fixed_time_is_planned_unless_after_end() -> None:
    lines = '[[faults]]\nkind = "loss"\nat = "90s"\nsize = 0.5\n[[faults]]\nkind = "loss"\nat = "10m"'
    plan = draw_faults(replace(parse("at", GOOD + f'duration = "20m"\n{lines}'), duration="5m"), 1)
    assert [(one.at_s, one.kind, one.size, one.lasts_s) for one in plan] == [(90.0, "loss", 0.5, 0.0)]


def test_repeated_fault_has_expected_frequency() -> None:
    counts = [sum(one.kind == "loss" and one.number < 80 for one in draw_faults(many(), seed)) for seed in range(50)]
    assert 15 < sum(counts) / 50 < 30
    assert len(set(counts)) > 5


def test_swarm_draws_few_kinds_per_seed_and_all_over_many() -> None:
    scenario = parse("swarm", GOOD + 'swarm = 4\nduration = "1h"')
    drawn = [{one.kind for one in draw_faults(scenario, seed)} for seed in range(300)]
    assert all(1 <= len(kinds) <= 4 for kinds in drawn)
    able = {name for name, kind in KINDS.items() if kind.swarms and kind.is_supported_by(scenario)}
    assert set().union(*drawn) == able
    assert "cut-scopes" not in able


def test_swarm_draws_cluster_and_load_within_bounds() -> None:
    scenario = load("mayhem")
    drawn = [draw_shape(scenario, seed) for seed in range(2_000)]
    assert drawn == [draw_shape(scenario, seed) for seed in range(2_000)], "a seed is one shape"
    for part, name, least, most in (
        ("cluster", "servers", 1, 3),
        ("cluster", "agents", 1, 4),
        ("cluster", "nodes", 2, 6),
        ("cluster", "schedulers", 1, 2),
        ("cluster", "controllers", 1, 2),
        ("cluster", "batch", 1, 512),
        ("load", "standing_max", 10, 30),
        ("load", "size", 1, 3),
        ("load", "deletes", 0, 38),
        ("load", "operations", 0, 11),
        ("load", "quota", 60, 120),
    ):
        seen = {getattr(getattr(one, part), name) for one in drawn}
        assert (min(seen), max(seen)) == (least, most), name
    assert {len(one.load.kinds) for one in drawn} == set(range(4, 9))
    assert {kind for one in drawn for kind in one.load.kinds} == set(scenario.load.kinds)
    assert len({one.load.per_minute for one in drawn}) > 100
    rest = {(one.cluster.scopes, one.cluster.beat, one.cluster.store, one.cluster.rivals, one.faults) for one in drawn}
    assert len(rest) == 1, "other fields are not drawn"
    assert not [problem for one in drawn for problem in problems(one)]


def test_drawn_shape_stays_within_scenario_bounds() -> None:
    """Otherwise its replay could not be read."""
    named = parse("swarm", GOOD + "swarm = 1")
    for end in (0, 1):
        parts: dict[str, dict[str, float]] = {"cluster": {}, "load": {}}
        for name, bounds in scenarios.BOUNDS.items():
            part, _, field = name.partition(".")
            if field:
                parts[part][field] = bounds[end]
        scenario = replace(named, cluster=replace(named.cluster, **parts["cluster"]), load=replace(named.load, **parts["load"]))
        assert not [problem for seed in range(200) for problem in problems(draw_shape(scenario, seed))]
    small = replace(named, cluster=replace(named.cluster, batch=2))
    assert {draw_shape(small, seed).cluster.batch for seed in range(200)} == {1, 2}
    assert all(
        draw_shape(parse("x", GOOD + "swarm = 1\n[load]\nper_minute = 0.001"), seed).load.per_minute for seed in range(9)
    )


def test_shape_is_drawn_only_for_swarm() -> None:
    scenario = load("calm")
    assert draw_shape(scenario, 7) is scenario


def test_replay_keeps_drawn_shape() -> None:
    scenario = parse("swarm", GOOD + 'swarm = 1\nduration = "2s"\nheal = "1s"')
    first = Simulation(scenario, 5).run()
    assert first.effective_scenario == draw_shape(scenario, 5) != scenario
    again = Simulation(first.effective_scenario, 5, plan=first.plan).run()
    assert (again.digest, again.effective_scenario) == (first.digest, first.effective_scenario)


def test_swarm_on_sqlite_draws_no_memory_store_faults() -> None:
    scenario = parse("swarm", GOOD + 'swarm = 9\nduration = "1h"\n[cluster]\nstore = "sqlite"')
    drawn = {one.kind for seed in range(100) for one in draw_faults(scenario, seed)}
    assert len(drawn) > 15
    assert not drawn & {"compaction", "backup", "restore", "damage"}


def test_bundled_scenarios_use_default_heartbeat_or_faster() -> None:
    """So no liveness bound is stretched in the standing suite, as it is for long runs."""
    assert {name: load(name).cluster.beat for name in names() if load(name).cluster.heartbeat_ms > 2_000} == {}
