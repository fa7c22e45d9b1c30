"""Tests that the checklist "A kind" of CONTRIBUTING is complete: a kind is added to a copy of the source, in two files.

The copy is used by a process of its own (added_kind_walk.py), because the tables of kinds are built when modules are imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

KIND = '''
"""Kind Announcement: a message for the users of a region."""

from __future__ import annotations

from typing import Final

from remit.model.kinds.definition import KindDefinition, ListColumn, Reference, sample
from remit.model.metadata import Metadata, Name, Object, ObjectStatus, Record, Text
from remit.model.roles import OPERATORS


class AnnouncementSpec(Record, frozen=True):
    region: Name
    text: Text


class Announcement(Object, tag="Announcement", frozen=True, kw_only=True):
    metadata: Metadata
    spec: AnnouncementSpec
    status: ObjectStatus = ObjectStatus()


ANNOUNCEMENT: Final = KindDefinition(
    struct=Announcement,
    summary="a message for the users of a region",
    plural="announcements",
    aliases=("ann",),
    declared_by=OPERATORS,
    references=(Reference("spec.region", "Region"),),
    sample=sample("maintenance", {"region": "eu", "text": "maintenance on Sunday"}),
    columns=(ListColumn("REGION", "spec.region"), ListColumn("TEXT", "spec.text", fluid=True)),
)
'''

REGISTRY_EDITS = (
    (
        "from remit.model.kinds.config import",
        "from remit.model.kinds.announcement import ANNOUNCEMENT, Announcement\nfrom remit.model.kinds.config import",
    ),
    ("| Allotment |", "| Allotment | Announcement |"),
    ("REPLICA, ALLOTMENT,", "REPLICA, ALLOTMENT, ANNOUNCEMENT,"),
)


def test_kind_added_by_the_checklist__is_applied_listed_shown_guarded_and_recovered(tmp_path: Path) -> None:
    source = tmp_path / "src" / "remit"
    shutil.copytree(ROOT / "src" / "remit", source)
    (source / "model" / "kinds" / "announcement.py").write_text(KIND.lstrip())
    registry = source / "model" / "kinds" / "registry.py"
    text = registry.read_text()
    for before, after in REGISTRY_EDITS:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    registry.write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{ROOT}", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.model.added_kind_walk", str(source)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
