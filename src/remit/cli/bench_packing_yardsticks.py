"""Where would others put it? The six policies that FGD's authors measured, as they define them. Nothing of Remit decides here.

All rank by whole numbers, 100 the best, and take the first of equals in a random order of nodes. The rounding is part of them:
what rounds to the same is as good as drawn by lot, and FGD without it comes out points lower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from remit.cli.bench_packing_trace import Course, Pod, Trace
from remit.law.columns import Bools, Floats, Ints
from remit.law.growing import Changes
from remit.model.resources import WHOLE

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
