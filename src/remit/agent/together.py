"""What blocks and comes at once, how does it leave the event loop? In one piece for all who ask; what it does is theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from remit.world.promises import Offload

T = TypeVar("T")


class _Piece(NamedTuple):
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class Together:
    """To call it is to have a piece of blocking work done. Whoever asks while another group is at it is in the next one."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._turn = asyncio.Lock()
        self._waiting: list[_Piece] = []

    async def __call__(self, work: Callable[[], T], /) -> T:
        piece = _Piece(work, asyncio.get_running_loop().create_future())
        self._waiting.append(piece)
        if len(self._waiting) == 1:  # the first of a group has it done for all
            await self._do_group()
        result: T = await piece.done
        return result

    async def _do_group(self) -> None:
        group: list[_Piece] = []
        try:
            async with self._turn:
                await asyncio.sleep(0)  # whoever asks in the same moment is in it, too
                group, self._waiting = self._waiting, []
                answers = await self._offload(lambda: _all_of(group))
        except BaseException:
            if not group:
                group, self._waiting = self._waiting, []
            for piece in group:
                piece.done.cancel()
            raise
        for piece, (result, error) in zip(group, answers, strict=True):
            if piece.done.done():  # nobody waits for it any more
                continue
            if error is None:
                piece.done.set_result(result)
            else:
                piece.done.set_exception(error)


def _all_of(group: Sequence[_Piece]) -> list[tuple[Any, Exception | None]]:
    answers: list[tuple[Any, Exception | None]] = []
    for piece in group:
        try:
            answers.append((piece.work(), None))
        except Exception as error:  # noqa: BLE001 - it is the asker's, whatever it is
            answers.append((None, error))
    return answers
