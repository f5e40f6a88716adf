"""The table of metrics in docs/operations.md, made from the metrics themselves.

`python -m tests.ops.metrics_table` writes it into the page.
"""

from pathlib import Path

from prometheus_client.metrics_core import Metric

from app.metrics import Metrics

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BEGIN = "<!-- metrics: python -m tests.ops.metrics_table -->\n"
END = "<!-- end of metrics -->"


def families() -> list[Metric]:
    """Every metric of Graft's own that `/metrics` shows; those of its process are Prometheus's."""
    metrics = Metrics()
    metrics.answered("GET", "/", 200, None)  # what has labels is not there before it was counted
    return [metric for metric in metrics.registry.collect() if metric.name.startswith("graft_")]


def shown_name(metric: Metric) -> str:
    """The name as a query has it."""
    return metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")


def metrics_table() -> str:
    """One row per metric."""
    rows = [
        f"| `{shown_name(metric)}` | {metric.type} | {_labels(metric)} | {metric.documentation} |"
        for metric in families()
    ]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _labels(metric: Metric) -> str:
    labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
    return ", ".join(f"`{label}`" for label in sorted(labels))


def table_in(page: str) -> str:
    """The table that stands in the page."""
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Write the table anew."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + begin + metrics_table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
