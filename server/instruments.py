"""Counters and histograms as plain numbers; prometheus-client only writes them out.

An observation costs a dict look-up and a bisect, and no `_created` series appear.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

Labels = tuple[str, ...]


class Counter:
    """A counter with labels. `name` is without the `_total` that the exposition adds."""

    __slots__ = ("_labels", "_values", "help", "name")

    def __init__(
        self, name: str, help_text: str, labels: Labels = (), start: Sequence[Labels] = ((),)
    ) -> None:
        """`start`: label values that are exposed as 0 from the beginning."""
        self.name = name
        self.help = help_text
        self._labels = labels
        self._values: dict[Labels, float] = {
            values: 0.0 for values in start if len(values) == len(labels)
        }

    def add(self, amount: float = 1.0, labels: Labels = ()) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    @property
    def total(self) -> float:
        """The sum over all labels."""
        return sum(self._values.values())

    def family(self, name: str, model: str, *, merged: bool = False) -> CounterMetricFamily:
        """The exposition under `name`; `merged` drops the labels and sums."""
        labels = () if merged else self._labels
        family = CounterMetricFamily(name, self.help, labels=["model_name", *labels])
        values = {(): self.total} if merged else self._values
        for key, value in values.items():
            family.add_metric([model, *key], value)
        return family


class Histogram:
    """A histogram with labels; `buckets` are the upper bounds, +Inf is added."""

    __slots__ = ("_counts", "_labels", "_sums", "buckets", "help", "name")

    def __init__(
        self,
        name: str,
        help_text: str,
        buckets: Sequence[float],
        labels: Labels = (),
        start: Sequence[Labels] = ((),),
    ) -> None:
        self.name = name
        self.help = help_text
        self.buckets = tuple(buckets)
        self._labels = labels
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        for values in start:
            if len(values) == len(labels):
                self._open(values)

    def observe(self, value: float, labels: Labels = (), times: int = 1) -> None:
        counts = self._counts.get(labels) or self._open(labels)
        counts[bisect_left(self.buckets, value)] += times
        self._sums[labels] += value * times

    def _open(self, labels: Labels) -> list[int]:
        self._sums[labels] = 0.0
        counts = self._counts[labels] = [0] * (len(self.buckets) + 1)
        return counts

    def family(self, name: str, model: str, *, merged: bool = False) -> HistogramMetricFamily:
        """The exposition under `name`; `merged` drops the labels and sums."""
        labels = () if merged else self._labels
        family = HistogramMetricFamily(name, self.help, labels=["model_name", *labels])
        counts, sums = self._counts, self._sums
        if merged:
            counts = {(): [sum(column) for column in zip(*counts.values(), strict=True)]}
            sums = {(): sum(sums.values())}
        for key, column in counts.items():
            family.add_metric([model, *key], self._cumulative(column), sum_value=sums[key])
        return family

    def _cumulative(self, column: list[int]) -> list[tuple[str, float]]:
        bounds = [*(repr(float(bound)) for bound in self.buckets), "+Inf"]
        running, rows = 0, []
        for bound, count in zip(bounds, column, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows
