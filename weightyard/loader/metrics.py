"""Loads counted for Prometheus, by the hook `on_event` of a yard. Needs prometheus_client.

metrics = LoadMetrics()  # in the registry that the program exposes anyway
yard = weightyard.open(on_event=metrics)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightyard.errors import Unsupported
from weightyard.loader.report import LoadEvent, LoadFailed, LoadReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 180, 600)


class LoadMetrics:
    """The numbers of all loads whose events it is told. Thread-safe."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry`: None is the one prometheus_client exposes. Raises Unsupported."""
        try:
            from prometheus_client import REGISTRY, Counter, Histogram
        except ImportError:
            raise Unsupported("metrics need prometheus_client: pip install it") from None
        into = REGISTRY if registry is None else registry
        self._loads = Counter(
            "weightyard_loads_total",
            "Loads that gave their tensors",
            ("device", "source"),
            registry=into,
        )
        self._failures = Counter(
            "weightyard_load_failures_total", "Loads that failed", ("error",), registry=into
        )
        self._seconds = Histogram(
            "weightyard_load_seconds",
            "From the ref to the last tensor",
            ("source",),
            buckets=_BUCKETS_S,
            registry=into,
        )
        self._stages = Counter(
            "weightyard_load_stage_seconds_total",
            "Time by stage; locate, fetch and decode summed over threads",
            ("stage",),
            registry=into,
        )
        self._tensor_bytes = Counter(
            "weightyard_load_tensor_bytes_total",
            "Bytes of tensors, as they are stored",
            ("source",),
            registry=into,
        )
        self._stored_bytes = Counter(
            "weightyard_load_stored_bytes_total",
            "Bytes that came from the store, by the way they came",
            ("path",),
            registry=into,
        )
        self._distance_bytes = Counter(
            "weightyard_load_distance_bytes_total",
            "The same, by how far away the DataNode was",
            ("distance",),
            registry=into,
        )
        self._requests = Counter(
            "weightyard_load_requests_total", "Reads of the store", registry=into
        )
        self._failed_over = Counter(
            "weightyard_load_failed_over_total",
            "Replicas that failed or had wrong bytes",
            registry=into,
        )
        self._events = Counter(
            "weightyard_read_events_total",
            "What happened to reads and did not end them",
            ("kind",),
            registry=into,
        )

    def __call__(self, event: LoadEvent) -> None:
        """Count an event."""
        if isinstance(event, LoadReport):
            self._count(event)
        elif isinstance(event, LoadFailed):
            self._failures.labels(event.error).inc()
        else:
            self._events.labels(event.kind.value).inc()

    def _count(self, report: LoadReport) -> None:
        source = "snapshot" if report.from_snapshot else "store"
        self._loads.labels(report.device, source).inc()
        self._seconds.labels(source).observe(report.seconds)
        self._tensor_bytes.labels(source).inc(report.bytes)
        for stage, seconds in report.stages.items():
            self._stages.labels(stage).inc(seconds)
        for path, amount in report.read_paths.items():
            self._stored_bytes.labels(path).inc(amount)
        for distance, amount in report.distances.items():
            self._distance_bytes.labels(distance).inc(amount)
        self._requests.inc(report.requests)
        self._failed_over.inc(report.failed_over)
