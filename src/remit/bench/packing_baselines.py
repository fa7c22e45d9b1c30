"""GPU trace and six published baseline policies.

Reads a trace of GPU work as tables. Nothing is placed here.

The protocol is that of FGD (Weng and others, USENIX ATC 2023): the pods of the trace in random order, then more of them drawn
at random, or some dropped at random, until they ask for 1.3 times the GPUs there are. They come one by one and never leave;
one that fits nowhere is passed over.

The six policies that FGD's authors measured, as they define them. Nothing of Remit decides here.

All rank by whole numbers, 100 the best, and take the first of equals in a random order of nodes. The rounding is part of them:
what rounds to the same is as good as drawn by lot, and FGD without it comes out points lower.
"""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import numpy as np

from remit.model.resources import WHOLE
from remit.observation.column_table import Changes
from remit.observation.node_columns import Bools, Floats, Ints
from remit.world.randomness import SeededChance

NODES: Final = "openb_nodes_gpu.csv"
OFFERED: Final = 1.3
"""GPUs asked for in all, as a share of those there are."""
GPUS_MAX: Final = 64
"""On one node: more is a slip in the file."""
AMOUNT_MAX: Final = 1 << 40


class Machine(NamedTuple):
    cpu: int
    memory_mib: int
    gpus: int
    model: str


class Pod(NamedTuple):
    """`share` is of each GPU, in thousandths; below WHOLE only where it asks for one."""

    cpu: int
    memory_mib: int
    gpus: int
    share: int
    models: tuple[str, ...]

    @property
    def asked(self) -> int:
        """Thousandths of GPUs in all."""
        return self.gpus * self.share


class Trace(NamedTuple):
    """`sorts` are the distinct pods; `pods` has the place of each pod of the trace in them."""

    workload: str
    machines: list[Machine]
    sorts: list[Pod]
    pods: list[int]

    @property
    def capacity(self) -> int:
        """Thousandths of GPUs."""
        return sum(one.gpus for one in self.machines) * WHOLE


class Course(NamedTuple):
    """One seed's: which sorts come, in this order, and the order of the machines, for the first of equals is taken."""

    coming: list[int]
    machines: list[Machine]
    lots: SeededChance
    """For a policy that draws."""


def course(trace: Trace, seed: int) -> Course:
    lots = SeededChance(f"bench packing/{seed}")
    coming = lots.shuffled(trace.pods)
    asked = [one.asked for one in trace.sorts]
    total, wanted = sum(asked[sort] for sort in coming), OFFERED * trace.capacity
    while total > wanted:
        total -= asked[coming.pop(lots.below(len(coming)))]
    while True:
        sort = lots.choice(trace.pods)
        if total + trace.sorts[sort].share > wanted:  # of one GPU, however many it asks for: so it was published
            break
        total += asked[sort]
        coming.append(sort)
    return Course(coming, lots.shuffled(trace.machines), lots.stream("policy"))


# ---------------------------------------------------------------------------------------------------------------- the files


def read(directory: Path, workload: str) -> Trace:
    """Raises click.UsageError, which names the file, what is wrong and what would help."""
    machines = [machine for _, machine in _machines(_found(directory, NODES))]
    pods = list(_pods(_found(directory, f"openb_pods_{workload}.csv")))
    if not sum(machine.gpus for machine in machines):
        raise click.UsageError(f"{directory / NODES} has no node with a GPU; packing is measured on GPUs")
    if not any(pod.gpus for pod in pods):
        raise click.UsageError(f"no pod of the workload {workload!r} in {directory} asks for a GPU; take a workload that does")
    sorts = sorted(set(pods))
    at = {pod: place for place, pod in enumerate(sorts)}
    return Trace(workload, machines, sorts, [at[pod] for pod in pods])


def _found(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    there = sorted(path.name for path in directory.glob("openb_*"))
    raise click.UsageError(
        f"{directory / name} is not there, nor {name}.gz; "
        + (f"the directory has {', '.join(there)}" if there else "name the directory of the trace's files with --trace")
    )


def _machines(path: Path) -> Iterator[tuple[int, Machine]]:
    for line, row in _rows(path, ("cpu_milli", "memory_mib", "gpu_count", "gpu_model")):
        gpus = _whole(path, line, row, "gpu_count", GPUS_MAX)
        cpu, memory = (_whole(path, line, row, name) for name in ("cpu_milli", "memory_mib"))
        yield line, Machine(cpu, memory, gpus, row["gpu_model"].strip())


def _pods(path: Path) -> Iterator[Pod]:
    for line, row in _rows(path, ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")):
        cpu, memory = (_whole(path, line, row, name) for name in ("cpu_milli", "memory_mib"))
        gpus = _whole(path, line, row, "num_gpu", GPUS_MAX)
        if not gpus:
            yield Pod(cpu, memory, 0, 0, ())
            continue
        share = _whole(path, line, row, "gpu_milli", WHOLE)
        if not share or (gpus > 1 and share < WHOLE):
            raise _wrong(
                path, line, f"gpu_milli is {share} with num_gpu {gpus}; expected 1 to 1000, and 1000 if num_gpu is not 1"
            )
        models = (row.get("gpu_spec") or "").split("|")
        yield Pod(cpu, memory, gpus, share, tuple(sorted({model.strip() for model in models if model.strip()})))


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """With the number of the line each ends on."""
    seen = False
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise _wrong(path, 1, f"no column {', '.join(missing)}; expected a header with {', '.join(columns)}")
            for row in reader:
                seen = True
                yield reader.line_num, row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise click.UsageError(f"{path} cannot be read as {'gzipped ' if path.suffix == '.gz' else ''}CSV: {error}") from error
    if not seen:
        raise _wrong(path, 2, "there is nothing below the header; expected a line for each")


def _whole(path: Path, line: int, row: dict[str, str], name: str, most: int = AMOUNT_MAX) -> int:
    text = row[name] if row[name] is not None else ""
    if not text.strip().isdecimal() or int(text) > most:
        raise _wrong(path, line, f"{name} is {text[:40]!r}; expected a whole number from 0 to {most}")
    return int(text)


def _wrong(path: Path, line: int, what: str) -> click.UsageError:
    return click.UsageError(f"{path}, line {line}: {what}; mend the file, or name another with --trace or --workload")


CPU_MAX: Final = 128_000
GPU_MAX: Final = 8 * WHOLE
"""What the largest node is taken to have, by which amounts are made shares."""
TYPICAL: Final = 0.95
"""FGD looks at the most popular pods that come to this part of the trace."""
_NEVER: Final = -1.0


class Yardstick:
    """Nodes as columns, and for each sort of pod a number a node, renewed where something changed."""

    def __init__(self, trace: Trace, course: Course) -> None:
        machines = course.machines
        self.trace, self.lots = trace, course.lots
        self.models = sorted({one.model for one in machines})
        self.cpu: Ints = np.array([one.cpu for one in machines], dtype=np.int64)
        self.memory: Ints = np.array([one.memory_mib for one in machines], dtype=np.int64)
        self.gpus: Ints = np.array([one.gpus for one in machines], dtype=np.int64)
        self.model: Ints = np.array([self.models.index(one.model) for one in machines], dtype=np.int64)
        places = np.arange(int(self.gpus.max(initial=1)))
        self.left: Ints = np.where(places < self.gpus[:, None], WHOLE, 0)
        self.whole, self.total, self.most = self.gpus.copy(), self.left.sum(axis=1), self.left.max(axis=1)
        self._changed = Changes()
        self._numbers: dict[int, tuple[int, Floats, Ints]] = {}
        self.begin()

    def begin(self) -> None:
        """Whatever the policy keeps of its own."""

    def rank(self, pod: Pod, rows: Ints) -> tuple[Any, Ints]:
        """How good each of these rows is, and which of its GPUs a share goes to; the pod fits on all of them."""
        raise NotImplementedError

    def took(self, row: int, pod: Pod) -> None:
        """The row took the pod."""

    def place(self, sort: int) -> bool:
        pod = self.trace.sorts[sort]
        row, at = self._best(sort, pod)
        if row < 0:
            return False
        self.cpu[row] -= pod.cpu
        self.memory[row] -= pod.memory_mib
        left = self.left[row]
        if pod.gpus and pod.share < WHOLE:
            left[at] -= pod.share
        elif pod.gpus:
            left[np.flatnonzero(left == WHOLE)[: pod.gpus]] = 0
        self.whole[row], self.total[row], self.most[row] = (left == WHOLE).sum(), left.sum(), left.max()
        self._changed.add(row)
        self.took(row, pod)
        return True

    def _best(self, sort: int, pod: Pod) -> tuple[int, int]:
        if sort not in self._numbers:
            self._numbers[sort] = -1, np.zeros(len(self.cpu)), np.zeros(len(self.cpu), dtype=np.int64)
        seen, numbers, devices = self._numbers[sort]
        touched = self._changed.since(seen) if seen >= 0 else None
        rows = np.arange(len(self.cpu)) if touched is None else np.unique(touched)
        numbers[rows] = _NEVER
        rows = rows[self.fits(pod, rows)]
        if len(rows):
            numbers[rows], devices[rows] = self.rank(pod, rows)
        self._numbers[sort] = self._changed.count, numbers, devices
        row = int(numbers.argmax())
        return (row, int(devices[row])) if numbers[row] > _NEVER else (-1, -1)

    def fits(self, pod: Pod, rows: Ints) -> Bools:
        found: Bools = (self.cpu[rows] >= pod.cpu) & (self.memory[rows] >= pod.memory_mib)
        if pod.gpus:
            found &= np.array([self.allowed(pod.models, model) for model in self.models])[self.model[rows]]
            found &= self.most[rows] >= pod.share if pod.share < WHOLE else self.whole[rows] >= pod.gpus
        return found

    @staticmethod
    def allowed(models: tuple[str, ...], model: str) -> bool:
        return not models or model in models

    def tightest(self, pod: Pod, rows: Ints) -> Ints:
        """The GPU with the least left on which a share fits."""
        left = self.left[rows]
        return np.asarray(np.where(left >= pod.share, left, WHOLE + 1).argmin(axis=1))


class Random(Yardstick):
    """Any node that fits, and any GPU on it."""

    def _best(self, sort: int, pod: Pod) -> tuple[int, int]:
        rows = np.flatnonzero(self.fits(pod, np.arange(len(self.cpu))))
        if not len(rows):
            return -1, -1
        row = int(rows[self.lots.below(len(rows))])
        devices = np.flatnonzero(self.left[row] >= max(pod.share, 1))
        return row, int(devices[self.lots.below(len(devices))]) if len(devices) else -1


class DotProd(Yardstick):
    """Where what is asked and what is left are least alike."""

    def rank(self, pod: Pod, rows: Ints) -> tuple[Any, Ints]:
        alike = self.cpu[rows] / CPU_MAX * pod.cpu / CPU_MAX + self.total[rows] / GPU_MAX * pod.asked / GPU_MAX
        return np.floor(100 * (1 - alike / 2)), self.tightest(pod, rows)


class Clustering(Yardstick):
    """Beside pods that ask for as many GPUs."""

    def begin(self) -> None:
        self._tags: Ints = np.zeros(len(self.cpu), dtype=np.int64)

    def rank(self, pod: Pod, rows: Ints) -> tuple[Any, Ints]:
        if not pod.gpus:
            return 0.0, self.tightest(pod, rows)
        tags, own = self._tags[rows], self._tag(pod)
        beside = np.select([tags == own, (tags & own) > 0, tags == 0], [75, 50, 25], 0)
        return 25 * (GPU_MAX - self.total[rows]) // GPU_MAX + beside, self.tightest(pod, rows)

    def took(self, row: int, pod: Pod) -> None:
        if pod.gpus:
            self._tags[row] |= self._tag(pod)

    @staticmethod
    def _tag(pod: Pod) -> int:
        return 1 if pod.share < WHOLE else 1 << pod.gpus


class Packing(Yardstick):
    """On used GPUs first, then on free ones of used nodes, then on idle nodes."""

    def rank(self, pod: Pod, rows: Ints) -> tuple[Any, Ints]:
        at = self.tightest(pod, rows)
        if not pod.gpus:
            return 0.0, at
        whole = self.whole[rows]
        if pod.share < WHOLE:
            left = self.left[rows, at]
            used: Any = np.where(left < WHOLE, np.maximum(100 - left * 100 // WHOLE // 10, 50), 49)
        else:
            used = max(50 - pod.gpus, 33)
        return np.where(whole == self.gpus[rows], np.maximum(33 - whole, whole), used), at


class BestFit(Yardstick):
    """Where the least stays free of cpu and GPUs together."""

    def rank(self, pod: Pod, rows: Ints) -> tuple[Any, Ints]:
        stays = (self.cpu[rows] - pod.cpu) / CPU_MAX + (self.total[rows] - pod.asked) / GPU_MAX
        return np.floor(100 * (1 - stays / 2)), self.tightest(pod, rows)


class Fgd(Yardstick):
    """Where the fewest GPUs become useless to a typical pod, which are known from the whole trace.

    Useless to a pod is all that is left of a node on which it does not fit, else what is left of GPUs too small for it; the
    mean over typical pods, by how often they come, is the node's fragmentation. Pods without GPUs are among the typical, and
    find nothing useful. Memory is not looked at.
    """

    def begin(self) -> None:
        counts = Counter(self.trace.sorts[sort]._replace(memory_mib=0) for sort in self.trace.pods)
        typical, covered = [], 0
        for pod, count in sorted(counts.items(), key=lambda item: (item[1], _order(item[0])), reverse=True):
            if covered >= TYPICAL * len(self.trace.pods):
                break
            covered += count
            typical.append((pod, count))
        wanted = [(pod, count / covered) for pod, count in typical if pod.gpus]
        needs = sorted({(pod.share, pod.gpus) for pod, _ in wanted})
        self._steps: Ints = np.array(sorted({pod.cpu for pod, _ in wanted}), dtype=np.int64)
        self._weights = np.zeros((len(self.models), len(self._steps) + 1, len(needs)))
        """Of the pods of each need that fit by model and cpu: by model, and by how many steps of cpu are reached."""
        for pod, part in wanted:
            fitting = [self.allowed(pod.models, model) for model in self.models]
            reached = int(np.searchsorted(self._steps, pod.cpu)) + 1
            self._weights[fitting, reached:, needs.index((pod.share, pod.gpus))] += part
        shares = np.array([share for share, _ in needs], dtype=np.int64)
        self._gpus: Ints = np.array([gpus for _, gpus in needs], dtype=np.int64)
        levels = np.arange(WHOLE + 1)[:, None]
        self._enough: Ints = (levels >= shares).astype(np.int64)
        self._short: Ints = np.where(levels < shares, levels, 0)
        self._able, self._lost = self._enough[self.left].sum(axis=1), self._short[self.left].sum(axis=1)
        self._before = self._useless(np.arange(len(self.cpu)), self.cpu, self.total, self._able, self._lost)

    def _useless(self, rows: Ints, cpu: Ints, total: Ints, able: Ints, lost: Ints) -> Floats:
        weights = self._weights[self.model[rows], np.searchsorted(self._steps, cpu, side="right")]
        useful = (weights * (able >= self._gpus) * (total[:, None] - lost)).sum(axis=1)
        return np.asarray(total - useful)

    def took(self, row: int, pod: Pod) -> None:
        rows = np.array([row])
        left = self.left[row]
        self._able[row], self._lost[row] = self._enough[left].sum(axis=0), self._short[left].sum(axis=0)
        self._before[row] = self._useless(rows, self.cpu[rows], self.total[rows], self._able[rows], self._lost[rows])[0]

    def rank(self, pod: Pod, rows: Ints) -> tuple[Any, Ints]:
        cpu, able, lost = self.cpu[rows] - pod.cpu, self._able[rows], self._lost[rows]
        nowhere = np.zeros(len(rows), dtype=np.int64)
        if not pod.gpus or pod.share == WHOLE:
            able = able - pod.gpus * self._enough[WHOLE]
            after = self._useless(rows, cpu, self.total[rows] - pod.asked, able, lost)
            return self._rounded(self._before[rows] - after), nowhere
        left = self.left[rows]
        at, device = np.nonzero(left >= pod.share)
        level = left[at, device]
        after = self._useless(
            rows[at],
            cpu[at],
            self.total[rows[at]] - pod.share,
            able[at] - self._enough[level] + self._enough[level - pod.share],
            lost[at] - self._short[level] + self._short[level - pod.share],
        )
        numbers = np.full(left.shape, _NEVER)
        numbers[at, device] = self._rounded(self._before[rows[at]] - after)
        best = numbers.argmax(axis=1)
        return numbers[np.arange(len(rows)), best], best

    @staticmethod
    def _rounded(gain: Floats) -> Floats:
        return np.asarray(np.floor(100 / (1 + np.exp(-gain / WHOLE))))


def _order(pod: Pod) -> tuple[object, ...]:
    """Between pods that come as often."""
    return pod.cpu, pod.share, pod.gpus, pod.models


YARDSTICKS: Final[Mapping[str, type[Yardstick]]] = {
    "random": Random,
    "dotprod": DotProd,
    "clustering": Clustering,
    "packing": Packing,
    "bestfit": BestFit,
    "fgd": Fgd,
}
