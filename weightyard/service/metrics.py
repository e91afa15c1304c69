"""Metrics for Prometheus: requests, their time, and bytes moved."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The numbers of one service. Not global, so that a test can have several services."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "weightyard_requests_total",
            "Requests answered",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "weightyard_request_seconds",
            "Time until the answer was sent",
            ("method", "route"),
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self.running = Gauge(
            "weightyard_requests_running", "Requests being answered", registry=self._registry
        )
        self.bytes = Counter(
            "weightyard_file_bytes_total",
            "Bytes of files moved through the service",
            ("direction",),
            registry=self._registry,
        )
        self.listeners = Gauge(
            "weightyard_event_listeners", "Open event streams", registry=self._registry
        )
        self.outbox = Gauge(
            "weightyard_outbox_entries",
            "Records that wait to be written to the store",
            registry=self._registry,
        )
        self.spool = Gauge(
            "weightyard_spool_bytes", "Temporary space in use", registry=self._registry
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)
