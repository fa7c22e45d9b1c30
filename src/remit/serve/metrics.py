"""How are metrics written? As Prometheus reads them, when it asks; a sample in no table is a bug. Nothing is counted here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from remit.model.tallies import Buckets
from remit.serve.meters import METERS, Metered

OPENMETRICS: Final = "application/openmetrics-text"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


class Sample(NamedTuple):
    """One value of a metric, or how values are spread; `labels` in the order of its meter."""

    name: str
    value: float | Buckets
    labels: tuple[str, ...] = ()


Source = Callable[[], Iterable[Sample]]
"""Says how things stand, whenever it is asked: nothing is kept between two askings but what was counted meanwhile."""


class Metrics:
    """Of one process: all that its parts have to tell. Satisfies prometheus-client's `Collector`."""

    def __init__(self, *sources: Source) -> None:
        self._sources = list(sources)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def add(self, source: Source) -> None:
        self._sources.append(source)

    def describe(self) -> Iterator[Metric]:
        """Nothing is asked of parts before they are there."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily] = {}
        for source in self._sources:
            for sample in source():
                family = families.get(sample.name)
                if family is None:
                    family = families[sample.name] = _family(METERS[sample.name])
                _add(family, sample)
        yield from families.values()

    def written(self, accept: str = "") -> tuple[bytes, str]:
        """As the asker likes it best of the two ways there are; and its type."""
        if any(one.partition(";")[0].strip().lower() == OPENMETRICS for one in accept.split(",")):
            written: bytes = generate_openmetrics(self._registry)  # type: ignore[no-untyped-call]
            return written, OPENMETRICS_TYPE
        return generate_latest(self._registry), PLAIN_TYPE


def _family(meter: Metered) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    match meter.type:
        case "counter":
            return CounterMetricFamily(meter.name, meter.help, labels=meter.labels)
        case "gauge":
            return GaugeMetricFamily(meter.name, meter.help, labels=meter.labels)
        case "histogram":
            return HistogramMetricFamily(meter.name, meter.help, labels=meter.labels)


def _add(family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily, sample: Sample) -> None:
    if isinstance(family, HistogramMetricFamily):
        if not isinstance(sample.value, Buckets):
            raise TypeError(f"{sample.name} is a histogram")
        buckets = [
            ("+Inf" if bound == float("inf") else repr(float(bound)), count) for bound, count in sample.value.cumulative()
        ]
        family.add_metric(sample.labels, buckets, sample.value.sum)
    elif isinstance(sample.value, Buckets):
        raise TypeError(f"{sample.name} is no histogram")
    else:
        family.add_metric(sample.labels, sample.value)
