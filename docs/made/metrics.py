"""The page of metrics, from what `/metrics` says."""

from prometheus_client.parser import text_string_to_metric_families

from app.metrics import Metrics
from docs.made.tables import table

INTRODUCTION = """# Metrics

`GET /metrics` has them in Prometheus's text format. A token is needed as everywhere else.

"""
CREATED = "_created"
"""Ends the names of gauges that only say since when a counter counts."""


def page() -> str:
    """One row per metric of Graft's own."""
    families = text_string_to_metric_families(Metrics().render({}).decode())
    rows = (
        [f"`{family.name}{'_total' if family.type == 'counter' else ''}`", family.type, family.documentation]
        for family in families
        if family.name.startswith("graft_") and not family.name.endswith(CREATED)
    )
    return INTRODUCTION + table(["metric", "type", "meaning"], rows)
