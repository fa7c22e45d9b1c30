"""Simulated work that reads a config gets it through the real delivery path, and files of ended work are removed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest

from remit.simulate.scenarios import load
from remit.simulate.simulation import simulate
from remit.simulate.world.disk import SimSecretFiles


def test_configs_are_delivered_to_services_while_agents_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    put, secret_files = list[dict[PurePosixPath, bytes]](), list[SimSecretFiles]()
    real, made = SimSecretFiles.put, SimSecretFiles.__init__

    def recording_put(self: SimSecretFiles, name: str, files: Mapping[PurePosixPath, bytes], user: str, /) -> Path:
        put.append(dict(files))
        return real(self, name, files, user)

    def recording_init(self: SimSecretFiles) -> None:
        made(self)
        secret_files.append(self)

    monkeypatch.setattr(SimSecretFiles, "put", recording_put)
    monkeypatch.setattr(SimSecretFiles, "__init__", recording_init)
    run = simulate(load("late-reading"), 3, until_s=90)
    assert not run.violations, "\n".join(map(str, run.violations))
    assert len(put) > 10 and all(one == {PurePosixPath("settings/MODE"): b"live"} for one in put)
    assert run.faults.get("kill-agent", 0) > 1
    assert max(len(one.files) for one in secret_files[-3:]) < len(put), "files of ended work are removed"
