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
    def gpu_request(self) -> int:
        """Requested GPUs in thousandths."""
        return self.gpus * self.share


class PodTrace(NamedTuple):
    """`pod_types` are the distinct pods; `pods` lists the index into them for each pod of the trace."""

    workload: str
    nodes: list[TraceNode]
    pod_types: list[TracePod]
    pods: list[int]

    @property
    def capacity(self) -> int:
        """GPUs of the cluster, in thousandths."""
        return sum(node.gpus for node in self.nodes) * WHOLE_DEVICE


class ArrivalOrder(NamedTuple):
    """Arrivals of one seed: pod types in order of arrival, and nodes in the order that decides between equal scores."""

    arrivals: list[int]
    nodes: list[TraceNode]
    rng: SeededRandomness
    """For policies with random choices."""


def draw_arrivals(trace: PodTrace, seed: int) -> ArrivalOrder:
    rng = SeededRandomness(f"bench packing/{seed}")
    arrivals = rng.shuffled(trace.pods)
    requests = [pod.gpu_request for pod in trace.pod_types]
    total, offered = sum(requests[pod_type] for pod_type in arrivals), OFFERED_LOAD * trace.capacity
    while total > offered:
        total -= requests[arrivals.pop(rng.randrange(len(arrivals)))]
    while True:
        pod_type = rng.choice(trace.pods)
        if total + trace.pod_types[pod_type].share > offered:  # the share of one GPU, even for pods with several: as published
            break
        total += requests[pod_type]
        arrivals.append(pod_type)
    return ArrivalOrder(arrivals, rng.shuffled(trace.nodes), rng.stream("policy"))


# ---------------------------------------------------------------------------------------------------------------- the files


def read_trace(directory: Path, workload: str) -> PodTrace:
    """Read a trace. Raises click.UsageError with the file, the problem and the fix."""
    nodes = [machine for _, machine in _read_nodes(_find_file(directory, NODES_FILE))]
    pods = list(_read_pods(_find_file(directory, f"openb_pods_{workload}.csv")))
    if not sum(machine.gpus for machine in nodes):
        raise click.UsageError(f"{directory / NODES_FILE}: no node has a GPU; packing needs a trace with GPUs")
    if not any(pod.gpus for pod in pods):
        raise click.UsageError(f"workload {workload!r} in {directory}: no pod requests a GPU; choose another workload")
    pod_types = sorted(set(pods))
    index_of = {pod: index for index, pod in enumerate(pod_types)}
    return PodTrace(workload, nodes, pod_types, [index_of[pod] for pod in pods])


def _find_file(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    files = sorted(path.name for path in directory.glob("openb_*"))
    raise click.UsageError(
        f"{directory / name} and {name}.gz do not exist; "
        + (f"the directory contains {', '.join(files)}" if files else "pass the directory of the trace files with --trace")
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
    has_rows = False
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise _file_error(path, 1, f"missing column {', '.join(missing)}; expected a header with {', '.join(columns)}")
            for row in reader:
                has_rows = True
                yield reader.line_num, row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise click.UsageError(f"{path} cannot be read as {'gzipped ' if path.suffix == '.gz' else ''}CSV: {error}") from error
    if not has_rows:
        raise _file_error(path, 2, "no rows below the header; expected one line per item")


def _whole_number(path: Path, line: int, row: dict[str, str], name: str, most: int = AMOUNT_MAX) -> int:
    text = row[name] if row[name] is not None else ""
    if not text.strip().isdecimal() or int(text) > most:
        raise _file_error(path, line, f"{name} is {text[:40]!r}; expected a whole number from 0 to {most}")
    return int(text)


def _file_error(path: Path, line: int, problem: str) -> click.UsageError:
    return click.UsageError(f"{path}, line {line}: {problem}; correct the file, or choose another with --trace or --workload")


CPU_MAX: Final = 128_000
GPU_MAX: Final = 8 * WHOLE_DEVICE
"""Capacity of the largest node, to which amounts are normalised."""
TYPICAL_SHARE: Final = 0.95
"""FGD considers the most frequent pods that make up this part of the trace."""
_DOES_NOT_FIT: Final = -1.0


class BaselinePolicy:
    """Base of the policies. Nodes are columns; the scores of each pod type are cached and updated only for changed nodes."""

    def __init__(self, trace: PodTrace, arrivals: ArrivalOrder) -> None:
        nodes = arrivals.nodes
        self.trace, self.rng = trace, arrivals.rng
        self.models = sorted({node.model for node in nodes})
        self.cpu: Ints = np.array([node.cpu for node in nodes], dtype=np.int64)
        self.memory: Ints = np.array([node.memory_mib for node in nodes], dtype=np.int64)
        self.gpus: Ints = np.array([node.gpus for node in nodes], dtype=np.int64)
        self.model: Ints = np.array([self.models.index(node.model) for node in nodes], dtype=np.int64)
        positions = np.arange(int(self.gpus.max(initial=1)))
        self.free: Ints = np.where(positions < self.gpus[:, None], WHOLE_DEVICE, 0)
        self.free_gpus, self.free_total, self.free_max = self.gpus.copy(), self.free.sum(axis=1), self.free.max(axis=1)
        self._changed = ChangeLog()
        self._scores: dict[int, tuple[int, Floats, Ints]] = {}
        self.set_up()

    def set_up(self) -> None:
        """Set up the state of a policy."""

    def score(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        """Return the score of each of these rows, and the GPU that a share would use. The pod fits on all of them."""
        raise NotImplementedError

    def on_placed(self, row: int, pod: TracePod) -> None:
        """Update the state of a policy after the pod was placed on the row."""

    def place(self, pod_type: int) -> bool:
        pod = self.trace.pod_types[pod_type]
        row, device = self._best(pod_type, pod)
        if row < 0:
            return False
        self.cpu[row] -= pod.cpu
        self.memory[row] -= pod.memory_mib
        free = self.free[row]
        if pod.gpus and pod.share < WHOLE_DEVICE:
            free[device] -= pod.share
        elif pod.gpus:
            free[np.flatnonzero(free == WHOLE_DEVICE)[: pod.gpus]] = 0
        self.free_gpus[row], self.free_total[row], self.free_max[row] = (free == WHOLE_DEVICE).sum(), free.sum(), free.max()
        self._changed.add(row)
        self.on_placed(row, pod)
        return True

    def _best(self, pod_type: int, pod: TracePod) -> tuple[int, int]:
        if pod_type not in self._scores:
            self._scores[pod_type] = -1, np.zeros(len(self.cpu)), np.zeros(len(self.cpu), dtype=np.int64)
        seen_count, scores, devices = self._scores[pod_type]
        touched = self._changed.since(seen_count) if seen_count >= 0 else None
        rows = np.arange(len(self.cpu)) if touched is None else np.unique(touched)
        scores[rows] = _DOES_NOT_FIT
        rows = rows[self.fits(pod, rows)]
        if len(rows):
            scores[rows], devices[rows] = self.score(pod, rows)
        self._scores[pod_type] = self._changed.count, scores, devices
        row = int(scores.argmax())
        return (row, int(devices[row])) if scores[row] > _DOES_NOT_FIT else (-1, -1)

    def fits(self, pod: TracePod, rows: Ints) -> Bools:
        fits: Bools = (self.cpu[rows] >= pod.cpu) & (self.memory[rows] >= pod.memory_mib)
        if pod.gpus:
            fits &= np.array([self.allows_model(pod.models, model) for model in self.models])[self.model[rows]]
            fits &= self.free_max[rows] >= pod.share if pod.share < WHOLE_DEVICE else self.free_gpus[rows] >= pod.gpus
        return fits

    @staticmethod
    def allows_model(models: tuple[str, ...], model: str) -> bool:
        return not models or model in models

    def tightest_gpu(self, pod: TracePod, rows: Ints) -> Ints:
        """Return the GPU with the least free capacity that fits the share."""
        free = self.free[rows]
        return np.asarray(np.where(free >= pod.share, free, WHOLE_DEVICE + 1).argmin(axis=1))


class RandomPolicy(BaselinePolicy):
    """A random node that fits, and a random GPU on it."""

    def _best(self, pod_type: int, pod: TracePod) -> tuple[int, int]:
        rows = np.flatnonzero(self.fits(pod, np.arange(len(self.cpu))))
        if not len(rows):
            return -1, -1
        row = int(rows[self.rng.randrange(len(rows))])
        devices = np.flatnonzero(self.free[row] >= max(pod.share, 1))
        return row, int(devices[self.rng.randrange(len(devices))]) if len(devices) else -1


class DotProductPolicy(BaselinePolicy):
    """The node whose free resources are least aligned with the request (lowest dot product)."""

    def score(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        alignment = self.cpu[rows] / CPU_MAX * pod.cpu / CPU_MAX + self.free_total[rows] / GPU_MAX * pod.gpu_request / GPU_MAX
        return np.floor(100 * (1 - alignment / 2)), self.tightest_gpu(pod, rows)


class ClusteringPolicy(BaselinePolicy):
    """Nodes with pods that request the same number of GPUs."""

    def set_up(self) -> None:
        self._tags: Ints = np.zeros(len(self.cpu), dtype=np.int64)

    def score(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        if not pod.gpus:
            return 0.0, self.tightest_gpu(pod, rows)
        tags, tag = self._tags[rows], self._tag(pod)
        similarity = np.select([tags == tag, (tags & tag) > 0, tags == 0], [75, 50, 25], 0)
        return 25 * (GPU_MAX - self.free_total[rows]) // GPU_MAX + similarity, self.tightest_gpu(pod, rows)

    def on_placed(self, row: int, pod: TracePod) -> None:
        if pod.gpus:
            self._tags[row] |= self._tag(pod)

    @staticmethod
    def _tag(pod: TracePod) -> int:
        return 1 if pod.share < WHOLE_DEVICE else 1 << pod.gpus


class GpuPackingPolicy(BaselinePolicy):
    """Partly used GPUs first, then free GPUs of used nodes, then idle nodes."""

    def score(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        device = self.tightest_gpu(pod, rows)
        if not pod.gpus:
            return 0.0, device
        free_gpus = self.free_gpus[rows]
        if pod.share < WHOLE_DEVICE:
            free = self.free[rows, device]
            used: Any = np.where(free < WHOLE_DEVICE, np.maximum(100 - free * 100 // WHOLE_DEVICE // 10, 50), 49)
        else:
            used = max(50 - pod.gpus, 33)
        return np.where(free_gpus == self.gpus[rows], np.maximum(33 - free_gpus, free_gpus), used), device


class BestFitPolicy(BaselinePolicy):
    """The node with the least CPU and GPU capacity left after placement."""

    def score(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        remaining = (self.cpu[rows] - pod.cpu) / CPU_MAX + (self.free_total[rows] - pod.gpu_request) / GPU_MAX
        return np.floor(100 * (1 - remaining / 2)), self.tightest_gpu(pod, rows)


class FgdPolicy(BaselinePolicy):
    """The node on which the fewest GPUs become unusable for typical pods, which are known from the whole trace.

    Unusable for a pod is all free GPU capacity of a node on which it does not fit; otherwise that of GPUs with too little
    left. The mean over typical pods, weighted by frequency, is the fragmentation of the node. Pods without GPUs are among
    the typical pods and can use no GPU. Memory is ignored.
    """

    def set_up(self) -> None:
        counts = Counter(self.trace.pod_types[pod_type]._replace(memory_mib=0) for pod_type in self.trace.pods)
        typical, covered = [], 0
        for pod, count in sorted(counts.items(), key=lambda item: (item[1], _tie_break(item[0])), reverse=True):
            if covered >= TYPICAL_SHARE * len(self.trace.pods):
                break
            covered += count
            typical.append((pod, count))
        gpu_pods = [(pod, count / covered) for pod, count in typical if pod.gpus]
        needs = sorted({(pod.share, pod.gpus) for pod, _ in gpu_pods})
        self._cpu_steps: Ints = np.array(sorted({pod.cpu for pod, _ in gpu_pods}), dtype=np.int64)
        self._weights = np.zeros((len(self.models), len(self._cpu_steps) + 1, len(needs)))
        """Frequency of typical pods of each GPU request, by model and by the number of CPU steps that the free CPU reaches."""
        for pod, weight in gpu_pods:
            fitting = [self.allows_model(pod.models, model) for model in self.models]
            reached = int(np.searchsorted(self._cpu_steps, pod.cpu)) + 1
            self._weights[fitting, reached:, needs.index((pod.share, pod.gpus))] += weight
        shares = np.array([share for share, _ in needs], dtype=np.int64)
        self._gpu_counts: Ints = np.array([gpus for _, gpus in needs], dtype=np.int64)
        levels = np.arange(WHOLE_DEVICE + 1)[:, None]
        self._is_enough: Ints = (levels >= shares).astype(np.int64)
        self._wasted_at: Ints = np.where(levels < shares, levels, 0)
        self._fitting_gpus, self._wasted = self._is_enough[self.free].sum(axis=1), self._wasted_at[self.free].sum(axis=1)
        self._fragmentation = self._unusable(
            np.arange(len(self.cpu)), self.cpu, self.free_total, self._fitting_gpus, self._wasted
        )

    def _unusable(self, rows: Ints, cpu: Ints, total: Ints, fitting: Ints, wasted: Ints) -> Floats:
        weights = self._weights[self.model[rows], np.searchsorted(self._cpu_steps, cpu, side="right")]
        useful = (weights * (fitting >= self._gpu_counts) * (total[:, None] - wasted)).sum(axis=1)
        return np.asarray(total - useful)

    def on_placed(self, row: int, pod: TracePod) -> None:
        rows = np.array([row])
        free = self.free[row]
        self._fitting_gpus[row], self._wasted[row] = self._is_enough[free].sum(axis=0), self._wasted_at[free].sum(axis=0)
        self._fragmentation[row] = self._unusable(
            rows, self.cpu[rows], self.free_total[rows], self._fitting_gpus[rows], self._wasted[rows]
        )[0]

    def score(self, pod: TracePod, rows: Ints) -> tuple[Any, Ints]:
        cpu, fitting, wasted = self.cpu[rows] - pod.cpu, self._fitting_gpus[rows], self._wasted[rows]
        no_device = np.zeros(len(rows), dtype=np.int64)
        if not pod.gpus or pod.share == WHOLE_DEVICE:
            fitting = fitting - pod.gpus * self._is_enough[WHOLE_DEVICE]
            after = self._unusable(rows, cpu, self.free_total[rows] - pod.gpu_request, fitting, wasted)
            return self._rounded_score(self._fragmentation[rows] - after), no_device
        free = self.free[rows]
        row_index, device = np.nonzero(free >= pod.share)
        level = free[row_index, device]
        after = self._unusable(
            rows[row_index],
            cpu[row_index],
            self.free_total[rows[row_index]] - pod.share,
            fitting[row_index] - self._is_enough[level] + self._is_enough[level - pod.share],
            wasted[row_index] - self._wasted_at[level] + self._wasted_at[level - pod.share],
        )
        scores = np.full(free.shape, _DOES_NOT_FIT)
        scores[row_index, device] = self._rounded_score(self._fragmentation[rows[row_index]] - after)
        best = scores.argmax(axis=1)
        return scores[np.arange(len(rows)), best], best

    @staticmethod
    def _rounded_score(gain: Floats) -> Floats:
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
