"""GPU trace and six published baseline policies.

The protocol is that of FGD (Weng et al., USENIX ATC 2023). The pods of the trace are shuffled; then random pods are added or
dropped until they request 1.3 times the GPUs of the cluster. Pods arrive one by one and never leave. A pod that fits nowhere
is skipped.

The policies are those measured by the authors of FGD, as they define them; no code of Remit decides here. All score nodes by
whole numbers up to 100 and take the first of the best in a random order of nodes. The rounding is part of the policies:
equal scores amount to a random choice, and FGD without rounding is several points worse.
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

from remit.model.resources import WHOLE_DEVICE
from remit.observation.column_table import ChangeLog
from remit.observation.node_columns import Bools, Floats, Ints
from remit.world.randomness import SeededRandomness

NODES_FILE: Final = "openb_nodes_gpu.csv"
OFFERED_LOAD: Final = 1.3
"""GPUs requested in total, relative to the GPUs of the cluster."""
GPUS_MAX: Final = 64
"""Maximum GPUs of one node; a larger number is an error in the file."""
AMOUNT_MAX: Final = 1 << 40


class TraceNode(NamedTuple):
    cpu: int
    memory_mib: int
    gpus: int
    model: str


class TracePod(NamedTuple):
    """A pod type. `share` is the requested part of each GPU, in thousandths; less than WHOLE only for a single GPU."""

    cpu: int
    memory_mib: int
    gpus: int
    share: int
    models: tuple[str, ...]

    @property
    def asked(self) -> int:
        """Requested GPUs in thousandths."""
        return self.gpus * self.share


class PodTrace(NamedTuple):
    """`sorts` are the distinct pods; `pods` lists the index into them for each pod of the trace."""

    workload: str
    machines: list[TraceNode]
    sorts: list[TracePod]
    pods: list[int]

    @property
    def capacity(self) -> int:
        """GPUs of the cluster, in thousandths."""
        return sum(one.gpus for one in self.machines) * WHOLE_DEVICE


class ArrivalOrder(NamedTuple):
    """Arrivals of one seed: pod types in order of arrival, and the order of the nodes, in which the first of equals is taken.
    """

    coming: list[int]
    machines: list[TraceNode]
    lots: SeededRandomness
    """For policies with random choices."""


def draw_arrivals(trace: PodTrace, seed: int) -> ArrivalOrder:
    lots = SeededRandomness(f"bench packing/{seed}")
    coming = lots.shuffled(trace.pods)
    asked = [one.asked for one in trace.sorts]
    total, wanted = sum(asked[sort] for sort in coming), OFFERED_LOAD * trace.capacity
    while total > wanted:
        total -= asked[coming.pop(lots.randrange(len(coming)))]
    while True:
        sort = lots.choice(trace.pods)
        if total + trace.sorts[sort].share > wanted:  # the share of one GPU, even for pods with several: as published
            break
        total += asked[sort]
        coming.append(sort)
    return ArrivalOrder(coming, lots.shuffled(trace.machines), lots.stream("policy"))


# ---------------------------------------------------------------------------------------------------------------- the files


def read_trace(directory: Path, workload: str) -> PodTrace:
    """Read a trace. Raises click.UsageError with the file, the problem and the fix."""
    machines = [machine for _, machine in _read_nodes(_find_file(directory, NODES_FILE))]
    pods = list(_read_pods(_find_file(directory, f"openb_pods_{workload}.csv")))
    if not sum(machine.gpus for machine in machines):
        raise click.UsageError(f"{directory / NODES_FILE}: no node has a GPU; packing needs a trace with GPUs")
    if not any(pod.gpus for pod in pods):
        raise click.UsageError(f"workload {workload!r} in {directory}: no pod requests a GPU; choose another workload")
    sorts = sorted(set(pods))
    at = {pod: place for place, pod in enumerate(sorts)}
    return PodTrace(workload, machines, sorts, [at[pod] for pod in pods])


def _find_file(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    there = sorted(path.name for path in directory.glob("openb_*"))
    raise click.UsageError(
        f"{directory / name} and {name}.gz do not exist; "
        + (f"the directory contains {', '.join(there)}" if there else "pass the directory of the trace files with --trace")
    )


def _read_nodes(path: Path) -> Iterator[tuple[int, TraceNode]]:
    for line, row in _read_rows(path, ("cpu_milli", "memory_mib", "gpu_count", "gpu_model")):
        gpus = _whole_number(path, line, row, "gpu_count", GPUS_MAX)
        cpu, memory = (_whole_number(path, line, row, name) for name in ("cpu_milli", "memory_mib"))
        yield line, TraceNode(cpu, memory, gpus, row["gpu_model"].strip())


def _read_pods(path: Path) -> Iterator[TracePod]:
    for line, row in _read_rows(path, ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")):
        cpu, memory = (_whole_number(path, line, row, name) for name in ("cpu_milli", "memory_mib"))
        gpus = _whole_number(path, line, row, "num_gpu", GPUS_MAX)
        if not gpus:
            yield TracePod(cpu, memory, 0, 0, ())
            continue
        share = _whole_number(path, line, row, "gpu_milli", WHOLE_DEVICE)
        if not share or (gpus > 1 and share < WHOLE_DEVICE):
            raise _file_error(
                path, line, f"gpu_milli is {share} with num_gpu {gpus}; expected 1 to 1000, and 1000 if num_gpu is not 1"
            )
        models = (row.get("gpu_spec") or "").split("|")
        yield TracePod(cpu, memory, gpus, share, tuple(sorted({model.strip() for model in models if model.strip()})))


def _read_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows with their line numbers."""
    seen = False
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise _file_error(path, 1, f"missing column {', '.join(missing)}; expected a header with {', '.join(columns)}")
            for row in reader:
                seen = True
                yield reader.line_num, row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise click.UsageError(f"{path} cannot be read as {'gzipped ' if path.suffix == '.gz' else ''}CSV: {error}") from error
    if not seen:
        raise _file_error(path, 2, "no rows below the header; expected one line per item")


def _whole_number(path: Path, line: int, row: dict[str, str], name: str, most: int = AMOUNT_MAX) -> int:
    text = row[name] if row[name] is not None else ""
    if not text.strip().isdecimal() or int(text) > most:
        raise _file_error(path, line, f"{name} is {text[:40]!r}; expected a whole number from 0 to {most}")
    return int(text)


def _file_error(path: Path, line: int, what: str) -> click.UsageError:
    return click.UsageError(f"{path}, line {line}: {what}; correct the file, or choose another with --trace or --workload")


CPU_MAX: Final = 128_000
GPU_MAX: Final = 8 * WHOLE_DEVICE
"""Capacity of the largest node, to which amounts are normalised."""
TYPICAL_SHARE: Final = 0.95
"""FGD considers the most frequent pods that make up this part of the trace."""
_DOES_NOT_FIT: Final = -1.0


class BaselinePolicy:
    """Base of the policies. Nodes are columns; the scores of each pod type are cached and updated only for changed nodes."""

    def __init__(self, trace: PodTrace, course: ArrivalOrder) -> None:
        machines = course.machines
        self.trace, self.lots = trace, course.lots
        self.models = sorted({one.model for one in machines})
        self.cpu: Ints = np.array([one.cpu for one in machines], dtype=np.int64)
        self.memory: Ints = np.array([one.memory_mib for one in machines], dtype=np.int64)
        self.gpus: Ints = np.array([one.gpus for one in machines], dtype=np.int64)
        self.model: Ints = np.array([self.models.index(one.model) for one in machines], dtype=np.int64)
        places = np.arange(int(self.gpus.max(initial=1)))
        self.left: Ints = np.where(places < self.gpus[:, None], WHOLE_DEVICE, 0)
        self.whole, self.total, self.most = self.gpus.copy(), self.left.sum(axis=1), self.left.max(axis=1)
        self._changed = ChangeLog()
        self._numbers: dict[int, tuple[int, Floats, Ints]] = {}
        self.begin()

    def begin(self) -> None:
        """Set up the state of a policy."""

    def rank(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        """Return the score of each of these rows, and the GPU that a share would use. The pod fits on all of them."""
        raise NotImplementedError

    def took(self, row: int, pod: TracePod) -> None:
        """Update the state of a policy after the pod was placed on the row."""

    def place(self, sort: int) -> bool:
        pod = self.trace.sorts[sort]
        row, at = self._best(sort, pod)
        if row < 0:
            return False
        self.cpu[row] -= pod.cpu
        self.memory[row] -= pod.memory_mib
        left = self.left[row]
        if pod.gpus and pod.share < WHOLE_DEVICE:
            left[at] -= pod.share
        elif pod.gpus:
            left[np.flatnonzero(left == WHOLE_DEVICE)[: pod.gpus]] = 0
        self.whole[row], self.total[row], self.most[row] = (left == WHOLE_DEVICE).sum(), left.sum(), left.max()
        self._changed.add(row)
        self.took(row, pod)
        return True

    def _best(self, sort: int, pod: TracePod) -> tuple[int, int]:
        if sort not in self._numbers:
            self._numbers[sort] = -1, np.zeros(len(self.cpu)), np.zeros(len(self.cpu), dtype=np.int64)
        seen, numbers, devices = self._numbers[sort]
        touched = self._changed.since(seen) if seen >= 0 else None
        rows = np.arange(len(self.cpu)) if touched is None else np.unique(touched)
        numbers[rows] = _DOES_NOT_FIT
        rows = rows[self.fits(pod, rows)]
        if len(rows):
            numbers[rows], devices[rows] = self.rank(pod, rows)
        self._numbers[sort] = self._changed.count, numbers, devices
        row = int(numbers.argmax())
        return (row, int(devices[row])) if numbers[row] > _DOES_NOT_FIT else (-1, -1)

    def fits(self, pod: TracePod, rows: Ints) -> Bools:
        found: Bools = (self.cpu[rows] >= pod.cpu) & (self.memory[rows] >= pod.memory_mib)
        if pod.gpus:
            found &= np.array([self.allowed(pod.models, model) for model in self.models])[self.model[rows]]
            found &= self.most[rows] >= pod.share if pod.share < WHOLE_DEVICE else self.whole[rows] >= pod.gpus
        return found

    @staticmethod
    def allowed(models: tuple[str, ...], model: str) -> bool:
        return not models or model in models

    def tightest(self, pod: TracePod, rows: Ints) -> Ints:
        """Return the GPU with the least free capacity that fits the share."""
        left = self.left[rows]
        return np.asarray(np.where(left >= pod.share, left, WHOLE_DEVICE + 1).argmin(axis=1))


class RandomPolicy(BaselinePolicy):
    """A random node that fits, and a random GPU on it."""

    def _best(self, sort: int, pod: TracePod) -> tuple[int, int]:
        rows = np.flatnonzero(self.fits(pod, np.arange(len(self.cpu))))
        if not len(rows):
            return -1, -1
        row = int(rows[self.lots.randrange(len(rows))])
        devices = np.flatnonzero(self.left[row] >= max(pod.share, 1))
        return row, int(devices[self.lots.randrange(len(devices))]) if len(devices) else -1


class DotProductPolicy(BaselinePolicy):
    """The node whose free resources are least aligned with the request (lowest dot product)."""

    def rank(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        alike = self.cpu[rows] / CPU_MAX * pod.cpu / CPU_MAX + self.total[rows] / GPU_MAX * pod.asked / GPU_MAX
        return np.floor(100 * (1 - alike / 2)), self.tightest(pod, rows)


class ClusteringPolicy(BaselinePolicy):
    """Nodes with pods that request the same number of GPUs."""

    def begin(self) -> None:
        self._tags: Ints = np.zeros(len(self.cpu), dtype=np.int64)

    def rank(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        if not pod.gpus:
            return 0.0, self.tightest(pod, rows)
        tags, own = self._tags[rows], self._tag(pod)
        beside = np.select([tags == own, (tags & own) > 0, tags == 0], [75, 50, 25], 0)
        return 25 * (GPU_MAX - self.total[rows]) // GPU_MAX + beside, self.tightest(pod, rows)

    def took(self, row: int, pod: TracePod) -> None:
        if pod.gpus:
            self._tags[row] |= self._tag(pod)

    @staticmethod
    def _tag(pod: TracePod) -> int:
        return 1 if pod.share < WHOLE_DEVICE else 1 << pod.gpus


class GpuPackingPolicy(BaselinePolicy):
    """Partly used GPUs first, then free GPUs of used nodes, then idle nodes."""

    def rank(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        at = self.tightest(pod, rows)
        if not pod.gpus:
            return 0.0, at
        whole = self.whole[rows]
        if pod.share < WHOLE_DEVICE:
            left = self.left[rows, at]
            used: Any = np.where(left < WHOLE_DEVICE, np.maximum(100 - left * 100 // WHOLE_DEVICE // 10, 50), 49)
        else:
            used = max(50 - pod.gpus, 33)
        return np.where(whole == self.gpus[rows], np.maximum(33 - whole, whole), used), at


class BestFitPolicy(BaselinePolicy):
    """The node with the least CPU and GPU capacity left after placement."""

    def rank(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        stays = (self.cpu[rows] - pod.cpu) / CPU_MAX + (self.total[rows] - pod.asked) / GPU_MAX
        return np.floor(100 * (1 - stays / 2)), self.tightest(pod, rows)


class FgdPolicy(BaselinePolicy):
    """The node on which the fewest GPUs become unusable for typical pods, which are known from the whole trace.

    Unusable for a pod is all free GPU capacity of a node on which it does not fit; otherwise that of GPUs with too little
    left. The mean over typical pods, weighted by frequency, is the fragmentation of the node. Pods without GPUs are among
    the typical pods and can use no GPU. Memory is ignored.
    """

    def begin(self) -> None:
        counts = Counter(self.trace.sorts[sort]._replace(memory_mib=0) for sort in self.trace.pods)
        typical, covered = [], 0
        for pod, count in sorted(counts.items(), key=lambda item: (item[1], _tie_break(item[0])), reverse=True):
            if covered >= TYPICAL_SHARE * len(self.trace.pods):
                break
            covered += count
            typical.append((pod, count))
        wanted = [(pod, count / covered) for pod, count in typical if pod.gpus]
        needs = sorted({(pod.share, pod.gpus) for pod, _ in wanted})
        self._steps: Ints = np.array(sorted({pod.cpu for pod, _ in wanted}), dtype=np.int64)
        self._weights = np.zeros((len(self.models), len(self._steps) + 1, len(needs)))
        """Frequency of typical pods of each GPU request, by model and by the number of CPU steps that the free CPU reaches."""
        for pod, part in wanted:
            fitting = [self.allowed(pod.models, model) for model in self.models]
            reached = int(np.searchsorted(self._steps, pod.cpu)) + 1
            self._weights[fitting, reached:, needs.index((pod.share, pod.gpus))] += part
        shares = np.array([share for share, _ in needs], dtype=np.int64)
        self._gpus: Ints = np.array([gpus for _, gpus in needs], dtype=np.int64)
        levels = np.arange(WHOLE_DEVICE + 1)[:, None]
        self._enough: Ints = (levels >= shares).astype(np.int64)
        self._short: Ints = np.where(levels < shares, levels, 0)
        self._able, self._lost = self._enough[self.left].sum(axis=1), self._short[self.left].sum(axis=1)
        self._before = self._useless(np.arange(len(self.cpu)), self.cpu, self.total, self._able, self._lost)

    def _useless(self, rows: Ints, cpu: Ints, total: Ints, able: Ints, lost: Ints) -> Floats:
        weights = self._weights[self.model[rows], np.searchsorted(self._steps, cpu, side="right")]
        useful = (weights * (able >= self._gpus) * (total[:, None] - lost)).sum(axis=1)
        return np.asarray(total - useful)

    def took(self, row: int, pod: TracePod) -> None:
        rows = np.array([row])
        left = self.left[row]
        self._able[row], self._lost[row] = self._enough[left].sum(axis=0), self._short[left].sum(axis=0)
        self._before[row] = self._useless(rows, self.cpu[rows], self.total[rows], self._able[rows], self._lost[rows])[0]

    def rank(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        cpu, able, lost = self.cpu[rows] - pod.cpu, self._able[rows], self._lost[rows]
        nowhere = np.zeros(len(rows), dtype=np.int64)
        if not pod.gpus or pod.share == WHOLE_DEVICE:
            able = able - pod.gpus * self._enough[WHOLE_DEVICE]
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
        numbers = np.full(left.shape, _DOES_NOT_FIT)
        numbers[at, device] = self._rounded(self._before[rows[at]] - after)
        best = numbers.argmax(axis=1)
        return numbers[np.arange(len(rows)), best], best

    @staticmethod
    def _rounded(gain: Floats) -> Floats:
        return np.asarray(np.floor(100 / (1 + np.exp(-gain / WHOLE_DEVICE))))


def _tie_break(pod: TracePod) -> tuple[object, ...]:
    """Tie-break between pods of equal frequency."""
    return pod.cpu, pod.share, pod.gpus, pod.models


BASELINES: Final[Mapping[str, type[BaselinePolicy]]] = {
    "random": RandomPolicy,
    "dotprod": DotProductPolicy,
    "clustering": ClusteringPolicy,
    "packing": GpuPackingPolicy,
    "bestfit": BestFitPolicy,
    "fgd": FgdPolicy,
}
