"""The page of all metrics."""

from __future__ import annotations

from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics
from scripts.reference.markdown import codes, page, table


def metrics_page() -> str:
    """Every metric: its type, labels and meaning."""
    rows = (
        (f"`{each.name}`", each.kind, codes(each.labels) or "–", each.text)
        for each in Metrics(Fleet()).declared
    )
    return page(
        """
        # Metrics

        `scripts/docs` writes this page from `proxy/observe/`: what `/metrics` shows, with the text of each
        metric's `HELP`. Times are in seconds. `/metrics` answers in OpenMetrics if the client asks for it, as
        Prometheus does. How to read them: [watching](../operations.md#watching),
        [dashboards and alerts](../observe.md).

        An embedded engine has [its own metrics](../engines/embedded.md) on its port; a llama-server that
        kvpin starts has llama.cpp's on `/metrics`.
        """,
        table(("metric", "type", "labels", "meaning"), rows),
    )
