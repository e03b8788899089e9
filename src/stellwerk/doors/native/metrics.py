"""Metrics in Prometheus' words, gathered when someone asks: nothing costs while nobody looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stellwerk.core.queries import Counts
from stellwerk.core.run import State
from stellwerk.kernel.kernel import Kernel
from stellwerk.web.routes import Route

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What does not change between two looks is made once."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)
        PlatformCollector(registry=self._process)
        GCCollector(registry=self._process)

    async def text(self, routes: Sequence[Route]) -> bytes:
        """All metrics, true at one stamp."""
        counts = await self._kernel.count()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Now(self._kernel, counts, routes))
        return generate_latest(registry) + generate_latest(self._process)


class _Now(Collector):
    def __init__(self, kernel: Kernel, counts: Counts, routes: Sequence[Route]) -> None:
        self._kernel = kernel
        self._counts = counts
        self._routes = routes

    def collect(self) -> Iterator[Metric]:
        kernel, counts = self._kernel, self._counts
        runs = GaugeMetricFamily("stellwerk_runs", "Runs that are kept, by state.", labels=["state"])
        for state in State:
            runs.add_metric([state.value], counts.states.get(state, 0))
        yield runs
        queues = GaugeMetricFamily(
            "stellwerk_queue_runs", "Runs that are kept, by queue and state.", labels=["queue", "state"]
        )
        for (queue, state), number in sorted(counts.queues.items()):
            queues.add_metric([queue, state.value], number)
        yield queues
        yield GaugeMetricFamily("stellwerk_last_event_id", "The EventId at which this is true.", counts.event_id)
        yield GaugeMetricFamily("stellwerk_followers", "Followers who wait for events.", kernel.feed.followers)
        yield CounterMetricFamily("stellwerk_commits", "Transactions since the start.", kernel.committer.commits)
        yield GaugeMetricFamily(
            "stellwerk_contended_turns", "Decisions that meet conflict after conflict now.", kernel.turner.contended
        )
        yield GaugeMetricFamily(
            "stellwerk_store_trouble", "1 while the store refuses writes.", int(kernel.committer.trouble is not None)
        )
        requests = CounterMetricFamily(
            "stellwerk_http_requests", "Requests answered since the start.", labels=["method", "path", "status"]
        )
        for route in self._routes:
            for status, number in sorted(route.answered.items()):
                requests.add_metric([route.method, route.path, str(status)], number)
        yield requests
