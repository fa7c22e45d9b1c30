"""How do tasks that work together fail as one? No work of its own is here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_failure() -> Iterator[None]:
    """Around a group of tasks: of its failures the first. If somebody has cancelled it meanwhile, that is what is raised: the
    group would forget it, and whoever catches the failure would go on.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except BaseExceptionGroup as failures:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from None
        raise failures.exceptions[0] from None
