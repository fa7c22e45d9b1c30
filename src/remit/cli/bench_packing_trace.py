"""Which nodes are there, and which pods come in which order? Reads a trace of GPU work as tables. Nothing is placed here.

The protocol is that of FGD (Weng and others, USENIX ATC 2023): the pods of the trace in random order, then more of them drawn
at random, or some dropped at random, until they ask for 1.3 times the GPUs there are. They come one by one and never leave;
one that fits nowhere is passed over.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click

from remit.model.resources import WHOLE
from remit.world.chance import SeededChance

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
