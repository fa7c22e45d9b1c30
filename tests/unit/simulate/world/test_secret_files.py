"""Does simulated work that reads a config get it by the real way, again and again, and is nothing kept of what is gone?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest

from remit.simulate.scenarios import load
from remit.simulate.simulation import simulate
from remit.simulate.world.disk import SimSecretFiles


def test_what_services_read_comes_through_the_door_while_agents_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    put, vaults = list[dict[PurePosixPath, bytes]](), list[SimSecretFiles]()
    real, made = SimSecretFiles.put, SimSecretFiles.__init__

    def noting(self: SimSecretFiles, name: str, files: Mapping[PurePosixPath, bytes], user: str, /) -> Path:
        put.append(dict(files))
        return real(self, name, files, user)

    def making(self: SimSecretFiles) -> None:
        made(self)
        vaults.append(self)

    monkeypatch.setattr(SimSecretFiles, "put", noting)
    monkeypatch.setattr(SimSecretFiles, "__init__", making)
    run = simulate(load("late-reading"), 3, until_s=90)
    assert not run.violations, "\n".join(map(str, run.violations))
    assert len(put) > 10 and all(one == {PurePosixPath("settings/MODE"): b"live"} for one in put)
    assert run.faults.get("kill-agent", 0) > 1
    assert max(len(one.files) for one in vaults[-3:]) < len(put), "what has ended is forgotten"
