"""Finds usable cgroup hierarchies.

Each mounted hierarchy is tried, with a group and a child; their use is in cgroups.py.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from remit.world.process.cgroups import PARENT, V1, V2, WANTED, Cgroups, Hierarchy

_MOUNTS: Final = Path("/proc/self/mountinfo")
_OWN: Final = Path("/proc/self/cgroup")


class Mounted(NamedTuple):
    """One hierarchy: where it is, and what it controls (version 1; of version 2 that is read inside)."""

    version: int
    place: Path
    controllers: tuple[str, ...]


class Tried(NamedTuple):
    """What came of it: the hierarchy if it is usable, or why not."""

    found: Hierarchy | None
    why: str = ""


def find(parent: str = PARENT, *, mounts: str | None = None) -> Cgroups:
    """All that is usable, with our groups in the directory `parent` of each. Takes a few milliseconds: it forks."""
    places = mounted(_text(_MOUNTS) if mounts is None else mounts)
    tries = [try_one(place, parent) for place in places if place.version == 2 or set(place.controllers) & set(WANTED)]
    usable = [one.found for one in tries if one.found is not None]
    usable = [one for one in usable if one.controllers or one.kills]
    if any(one.version == "v2" for one in usable):
        # Time is counted in every group of version 2: one more directory for each start would tell the same.
        usable = [one for one in usable if one.version == "v2" or one.controllers != {"cpuacct"}]
    has = {name for one in usable for name in one.controllers}
    missing = [name for name in ("cpu", "memory", "pids") if name not in has]
    if not missing:
        return Cgroups(usable)
    whys = list(dict.fromkeys(one.why for one in tries if one.why))
    told = "; ".join(whys) if whys else "no cgroups are mounted that control it" if places else "no cgroups are mounted"
    return Cgroups(usable, f"no limit of {', '.join(missing)}: {told}")


def mounted(text: str) -> list[Mounted]:
    """The lines of mountinfo that are about cgroups."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        place = Path(fields[4].encode().decode("unicode_escape"))  # a space is written \040
        if kind[0] == "cgroup2":
            found.append(Mounted(2, place, ()))
        elif kind[0] == "cgroup":
            found.append(Mounted(1, place, tuple(name for name in WANTED if name in kind[2].split(","))))
    return found


def try_one(mount: Mounted, parent: str) -> Tried:
    """At the root of the hierarchy, else as near to it as we may: a service is often let in only further down."""
    whys = []
    for base in bases(mount):
        tried = _try_at(mount, base, base / parent)
        if tried.found is not None:
            return tried
        whys.append(tried.why)
    return Tried(None, whys[0])


def bases(mount: Mounted) -> list[Path]:
    """The groups that we are in ourselves, from the root of the hierarchy on."""
    found = [mount.place]
    for line in _text(_OWN).splitlines():
        _, names, path = line.split(":", 2)
        mine = names == "" if mount.version == 2 else bool(set(names.split(",")) & set(mount.controllers))
        if mine:
            for part in Path(path).parts[1:]:
                found.append(found[-1] / part)
    return [base for base in found if base.is_dir()]


def own_groups() -> list[tuple[Mounted, list[Path]]]:
    return [(mount, bases(mount)) for mount in mounted(_text(_MOUNTS))]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _try_at(mount: Mounted, base: Path, parent: Path) -> Tried:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        controllers = _delegated(base, parent) if mount.version == 2 else mount.controllers
        kills = _join(parent / f".trial-{os.getpid()}")
    except OSError as error:
        return Tried(None, f"{parent} cannot be used ({(error.strerror or str(error)).lower()})")
    return Tried(V2(parent, controllers, kills=kills) if mount.version == 2 else V1(parent, controllers))


def _delegated(base: Path, parent: Path) -> tuple[str, ...]:
    """Version 2 hands each controller down step by step. What is not handed down to us does not limit anything."""
    steps = [base, *reversed([place for place in (parent, *parent.parents) if base in place.parents])]
    for place in steps:
        for name in WANTED:
            with suppress(OSError):
                (place / "cgroup.subtree_control").write_text(f"+{name}")
    handed = (parent / "cgroup.subtree_control").read_text().split()
    return tuple(name for name in WANTED if name in handed)


def _join(trial: Path) -> bool:
    """Can a child be put into a new group? Tells also whether a group can be killed at a stroke."""
    trial.mkdir()
    try:
        child = os.fork()
        if not child:
            _enter(trial)
        _, status = os.waitpid(child, 0)
        if code := os.waitstatus_to_exitcode(status):
            raise OSError(code, os.strerror(code))
        return (trial / "cgroup.kill").exists()
    finally:
        trial.rmdir()


def _enter(trial: Path) -> None:
    code = 255
    try:
        (trial / "cgroup.procs").write_text("0")
        code = 0
    except OSError as error:
        code = error.errno or code
    finally:
        os._exit(code)
