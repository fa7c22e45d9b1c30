"""Messages between agent and keeper, the agent's client stub, and the keeper launcher.

Words, and the agent's end of them; the keeper itself is in keeper.py.

The two are processes of one machine: they share its boot clock, and no network lies between them.

It starts one where there is none; what a keeper does is in keeper.py.

A keeper holds its lock while it lives, also while it is stopped. So one that does not answer and still has its lock is left
alone: a second one beside it would start again what it runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from remit.agent.attempts import Copy
from remit.world.interfaces import (
    Busy,
    Clock,
    Disk,
    Ended,
    Link,
    LinkError,
    Missing,
    Order,
    Running,
    Unheard,
    World,
    WorldError,
)

NEVER: Final = -1
"""The number of a start that was not begun: it may be asked for again."""

ANSWER_MS: Final = 10_000
"""So long a keeper is waited for. One that is stopped answers when it goes on; what was asked is then asked again."""


class Begun(Struct, frozen=True, omit_defaults=True):
    """One start of a copy, as the keeper knows it: the `number`th within its attempt. `ended` is there once it has.

    `since_ms` is when it was started, on the clock of `boot`. One that never ran says why not: `failed` and `cure`. One that
    was ended says `why` it was told to, where that is more than that nobody wants it any more.
    """

    node: str
    scope: str
    key: str
    uid: str
    attempt: int
    number: int = 0
    pid: int = 0
    began: str = ""
    group: str = ""
    since_ms: int = 0
    fence_ms: int = 0
    grace_ms: int = 0
    ports: dict[str, int] = {}
    ended: Ended | None = None
    ended_ms: int = 0
    fenced: bool = False
    """It was ended because nobody had renewed its node's lease for too long."""
    failed: str = ""
    cure: str = ""
    why: str = ""
    boot: str = ""

    @property
    def copy(self) -> Copy:
        return Copy(self.key, self.uid, self.attempt)

    @property
    def running(self) -> Running:
        return Running(self.pid, self.began, self.group)

    @property
    def alive(self) -> bool:
        return self.ended is None

    @property
    def stage(self) -> tuple[int, bool, bool]:
        """How far it has come: of two words on a copy the one that is further stands."""
        return self.number, self.ended is not None, self.pid != 0


class Use(Struct, frozen=True):
    """What a copy takes."""

    uid: str
    attempt: int
    cpu_ms: int
    memory_bytes: int


class Begin(Struct, frozen=True, tag="begin"):
    """Start a copy, unless that start was begun before, or its deadline has passed. `rooms` are directories that it needs, and
    that are made if they are not there.
    """

    order: Order
    number: int
    fence_ms: int
    grace_ms: int
    ports: dict[str, int]
    rooms: tuple[Path, ...] = ()


class Halt(Struct, frozen=True, tag="halt"):
    """End a copy and all that came of it: ask, and after `grace_ms` make it. `why` is told of it afterwards."""

    key: str
    uid: str
    attempt: int
    grace_ms: int
    why: str = ""


class Bar(Struct, frozen=True, tag="bar"):
    """Unless it runs, begin no more of this copy, whoever has asked for that or will."""

    key: str
    uid: str
    attempt: int


class Drop(Struct, frozen=True, tag="drop"):
    """Forget a copy that has ended: nobody will ask for it again."""

    key: str
    uid: str
    attempt: int


class Renewed(Struct, frozen=True, tag="renewed"):
    """A renewal of each of these nodes' leases that was sent at that instant has been answered."""

    sent_ms: dict[str, int]


class Uses(Struct, frozen=True, tag="uses"):
    """What do all copies take?"""


class Quit(Struct, frozen=True, tag="quit"):
    """End all copies, each as by `Halt`, and then yourself. It is answered once nothing runs any more."""

    grace_ms: int


Word = Begin | Halt | Bar | Drop | Renewed | Uses | Quit


class Answer(Struct, frozen=True, omit_defaults=True):
    """`kept` after a `Begin`; None there: it is past its deadline, and nothing was started. After a `Bar`: what is known."""

    kept: Begun | None = None
    uses: tuple[Use, ...] = ()


class Table(Struct, frozen=True, omit_defaults=True):
    """What changed among the starts. The first of a stream is the whole table."""

    whole: bool = False
    kept: tuple[Begun, ...] = ()
    gone: tuple[tuple[str, str, int], ...] = ()


def _encode_hook(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not said to a keeper")


def _decode_hook(type_: type, value: object) -> object:
    if type_ is Path:
        return Path(str(value))
    raise ValueError(f"expected a {type_.__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_encode_hook)
_words: msgspec.json.Decoder[Word] = msgspec.json.Decoder(Word, dec_hook=_decode_hook)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
_tables: msgspec.json.Decoder[Table] = msgspec.json.Decoder(Table)


def encode(said: Word | Answer | Table) -> bytes:
    return _encoder.encode(said)


def read_word(body: bytes) -> Word:
    return _words.decode(body)


class Keeping:
    """The agent's end. Raises `LinkError` where there is no answer in time: then the table says what came of it."""

    def __init__(self, link: Link, keeper: str, clock: Clock) -> None:
        self._link, self._keeper, self._clock = link, keeper, clock

    async def begin(
        self, order: Order, *, number: int, fence_ms: int, grace_ms: int, ports: Mapping[str, int], rooms: Sequence[Path] = ()
    ) -> Begun | None:
        return (await self._say(Begin(order, number, fence_ms, grace_ms, dict(ports), tuple(rooms)))).kept

    async def halt(self, copy: Copy, grace_ms: int, why: str = "") -> None:
        await self._say(Halt(*copy, grace_ms, why))

    async def bar(self, copy: Copy) -> Begun | None:
        """If what comes back is not alive, the copy does not run and never will."""
        return (await self._say(Bar(*copy))).kept

    async def drop(self, copy: Copy) -> None:
        await self._say(Drop(*copy))

    async def renewed(self, sent_ms: Mapping[str, int], within_ms: int = ANSWER_MS) -> None:
        await self._say(Renewed(dict(sent_ms)), within_ms)

    async def uses(self, within_ms: int = ANSWER_MS) -> Sequence[Use]:
        return (await self._say(Uses(), within_ms)).uses

    async def quit(self, grace_ms: int) -> None:
        """Returns when all work has ended, however long that takes."""
        await self._say(Quit(grace_ms), within_ms=2 * grace_ms + ANSWER_MS)

    async def table(self) -> AsyncGenerator[Table, None]:
        """The whole table, and then what changes, until the keeper is gone."""
        async for item in self._link.stream(self._keeper, b""):
            yield _tables.decode(item)

    async def _say(self, word: Word, within_ms: int = ANSWER_MS) -> Answer:
        try:
            async with self._clock.timeout_ms(within_ms):
                body = await self._link.request(self._keeper, encode(word))
        except TimeoutError:
            raise Unheard(
                f"the keeper did not answer for {within_ms} ms", "see whether it is stopped, and let it go on"
            ) from None
        try:
            return _answers.decode(body)
        except msgspec.DecodeError as error:
            raise LinkError(f"the keeper said what cannot be read ({error})", "do both run the same version?") from error


BACKOFF_MS: Final = 250
BACKOFF_MS_MAX: Final = 15_000
STEADY_MS: Final = 60_000
"""One that lived for so long had come up well: the pauses begin anew."""


class Reviver:
    """Called whenever the keeper does not answer. `order` starts one, in a session of its own: it outlives this process."""

    def __init__(self, world: World, order: Order, lock: Path, tell: Callable[[str], None]) -> None:
        self._world, self._order, self._lock, self._tell = world, order, lock, tell
        self._started: Running | None = None
        self._started_ms = 0
        self._failures = 0
        self._not_before_ms = 0

    async def __call__(self) -> None:
        if self._started is not None and not self._world.runner.alive(self._started):
            ended = await self._world.runner.wait(self._started)
            self._tell(
                f"the keeper (process {self._started.pid}) has ended: {ended.code if ended.signal is None else ended.signal}"
            )
            self._started = None
        now_ms = self._world.clock.now_ms()
        if now_ms < self._not_before_ms or await self._world.offload(lambda: is_held(self._world.disk, self._lock)):
            return
        self._failures = 0 if now_ms - self._started_ms > STEADY_MS else self._failures + 1
        self._not_before_ms = now_ms + min(BACKOFF_MS_MAX, BACKOFF_MS << min(self._failures, 10))
        self._started_ms = now_ms
        try:
            self._started = await self._world.runner.start(self._order)
        except WorldError as error:
            self._tell(f"no keeper can be started: {error}")


def is_held(disk: Disk, lock: Path) -> bool:
    """Does somebody have this lock now?"""
    try:
        with disk.lock(lock):
            return False
    except Busy:
        return True
    except Missing:  # its directory is not there
        return False
