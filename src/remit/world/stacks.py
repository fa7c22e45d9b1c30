"""What is this process doing just now? Where each thread and each task stands, by file and line; nothing of what they hold."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Final

STANDS_MAX: Final = 200
DEPTH_MAX: Final = 30


def threads() -> dict[str, list[str]]:
    """By name, the innermost place first."""
    names = {one.ident: one.name for one in threading.enumerate()}
    frames = list(sys._current_frames().items())[:STANDS_MAX]
    return {f"{names.get(ident, 'unknown')} {ident}": _places(frame) for ident, frame in frames}


def tasks() -> list[str]:
    """Of the running event loop: what each is called, and where it waits."""
    found = sorted((_task(one) for one in asyncio.all_tasks()), key=str)
    return found[:STANDS_MAX] + ([f"and {len(found) - STANDS_MAX} more"] if len(found) > STANDS_MAX else [])


def _task(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = _place(frames[-1]) if frames else "done"
    coroutine = getattr(task.get_coro(), "__qualname__", "")
    # Tasks are named after what they do, and a name may hold an object's: no words of people here.
    return f"{coroutine} at {where}"


def _places(frame: FrameType | None) -> list[str]:
    found: list[str] = []
    while frame is not None and len(found) < DEPTH_MAX:
        found.append(_place(frame))
        frame = frame.f_back
    return found


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return (
        f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"
    )
