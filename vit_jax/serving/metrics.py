"""Prometheus metrics of a server."""

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """The metrics of one server.

    Args:
      sizes: batch sizes of the compiled programs; they are the bins of the batch size histogram.
    """

    def __init__(self, sizes: Sequence[int]):
        registry = self.registry = CollectorRegistry()
        answered = "Requests to /predict that were answered."
        self.requests = Counter("vit_jax_requests", answered, ["status"], registry=registry)
        duration = "From a request's first line to its answer."
        self.seconds = Histogram(
            "vit_jax_request_seconds", duration, registry=registry, buckets=SECONDS
        )
        self.images = Counter("vit_jax_images", "Images that were classified.", registry=registry)
        together = "Images that were computed at once."
        self.batch = Histogram("vit_jax_batch_images", together, buckets=sizes, registry=registry)
        self.waiting = Gauge(
            "vit_jax_waiting_images", "Images that have a place.", registry=registry
        )
        refused = "Connections above the limit, or too slow."
        self.connections = Counter("vit_jax_connections_refused", refused, registry=registry)
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
