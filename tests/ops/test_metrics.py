"""Metrics, and what is built on them: the table, the alert rules, the dashboard, the scrape."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import Metrics
from app.settings import Settings
from tests.fakes.admin import OCTETS, code, q_proj_body, running
from tests.ops.metrics_table import PAGE, families, metrics_table, shown_name, table_in
from tests.ops.tools import DEPLOY, ran

NAME = re.compile(r"\b(?:graft|process)_[a-z_]+\b")
RULES = DEPLOY / "alerts.yaml"
UNITS = ("_seconds", "_bytes", "_total", "_info")


def _expressions() -> Iterator[tuple[str, str]]:
    """Where a query stands, and the query."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def _samples() -> dict[str, set[str]]:
    """Names of the samples in `/metrics` before anything has happened, and their labels."""
    metrics = Metrics()
    metrics.answered("GET", "/", 200, None)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render({}).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_table_lists_what_is_measured() -> None:
    """Every metric with its type, labels and meaning, and no other."""
    assert table_in(PAGE.read_text()) == metrics_table(), "run: python -m tests.ops.metrics_table"


def test_names_follow_the_conventions() -> None:
    """promtool finds no fault; counters end in _total, times and sizes in their base unit."""
    metrics = Metrics()
    metrics.answered("GET", "/", 200, None)
    assert ran("promtool", "check", "metrics", stdin=metrics.render({}).decode()) == ""
    for metric in families():
        assert "millisecond" not in metric.name and "_ms" not in metric.name
        if re.search("bytes|seconds", metric.name):
            assert metric.name.endswith(UNITS), metric.name
    assert len({shown_name(metric) for metric in families()}) == len(families())


def test_the_rules_are_valid_and_fire_when_they_should() -> None:
    """promtool checks the rules, and runs tests/ops/alerts.yaml, which has a case for each of them."""
    ran("promtool", "check", "rules", RULES)
    cases = Path(__file__).with_name("alerts.yaml")
    ran("promtool", "test", "rules", cases)
    alerts = {
        rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    }
    tried = [
        (test["alertname"], bool(test["exp_alerts"]))
        for case in yaml.safe_load(cases.read_text())["tests"]
        for test in case["alert_rule_test"]
    ]
    assert {name for name, fires in tried if fires} == {name for name, fires in tried if not fires} == alerts


@pytest.mark.parametrize(("where", "query"), list(_expressions()))
def test_queries_name_what_there_is(where: str, query: str) -> None:
    """Every metric and label in an alert or panel is in `/metrics` from the start."""
    samples = _samples()
    names = set(NAME.findall(query))
    assert names or query.startswith("up{"), where
    assert names - samples.keys() == set()
    given = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query))
    grouped = {word for words in re.findall(r"by \(([^)]*)\)", query) for word in re.split(r",\s*", words)}
    known = {label for name in names for label in samples[name]} | {"instance", "job"}
    assert (given | grouped) - known == set()


def test_panels_are_valid_queries(tmp_path: Path) -> None:
    """promtool parses each, with Grafana's variables filled in."""
    panels = [query.replace("$instance", ".*") for _, query in _expressions() if "$instance" in query]
    assert len(panels) > 20
    rules = [{"record": f"panel:{place}", "expr": query} for place, query in enumerate(panels)]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    ran("promtool", "check", "rules", file)


def test_the_dashboard_can_be_imported() -> None:
    """Panels have ids, places that do not overlap, and a data source that is chosen on import."""
    dashboard: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    panels = dashboard["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)", json.dumps(dashboard))) - {"__all"} <= variables


def test_the_scrape_configuration_is_valid() -> None:
    """Prometheus takes it, and sends the token that a file holds."""
    ran("promtool", "check", "config", "--syntax-only", DEPLOY / "prometheus.yaml")
    jobs = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["graft", "vllm"]
    assert "credentials_file" in jobs[0]["authorization"]


@pytest.mark.anyio
async def test_what_happens_is_measured(tmp_path: Path) -> None:
    """Stall, prepare, bytes, density, refusals by code, budgets: the numbers that the answers have."""
    budgets = {"staged_bytes": 10_000, "undo_bytes": 20_000, "blob_bytes": 30_000}
    async with running(tmp_path, **budgets) as admin:
        content = q_proj_body()
        receipt = (await admin.http.post("/v1/patches", content=content, headers=OCTETS)).json()
        assert code(await admin.http.post("/v1/rollback", json={"to_version": 7})) == "version_not_held"
        await admin.http.post("/v1/transactions")
        text = (await admin.http.get("/metrics")).text
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    timing = receipt["timing"]
    stall_s = (timing["pause_ms"] + timing["apply_ms"] + timing["resume_ms"]) / 1000
    assert values[("graft_stall_seconds_sum",)] == pytest.approx(stall_s)
    assert values[("graft_prepare_seconds_sum",)] == pytest.approx(timing["prepare_ms"] / 1000)
    assert values[("graft_uploaded_bytes_total",)] == values[("graft_blob_bytes",)] == len(content)
    assert values[("graft_written_bytes_total",)] == receipt["nbytes"]["written"]
    assert values[("graft_undo_bytes",)] == receipt["nbytes"]["undo"]
    assert values[("graft_upload_density_sum",)] == 1
    assert values[("graft_refusals_total", ("code", "version_not_held"))] == 1
    assert values[("graft_refusals_total", ("code", "disk_full"))] == 0
    route = (("method", "POST"), ("route", "/v1/patches"), ("status", "200"))
    assert values[("graft_requests_total", *route)] == 1
    assert values[("graft_versions",)] == values[("graft_versions_held",)] == 2
    assert values[("graft_open_transactions",)] == values[("graft_writable",)] == 1
    assert values[("graft_engine_silent_seconds",)] == values[("graft_state_unknown",)] == 0
    settings = Settings.model_validate(budgets)
    for name in ("staged", "undo", "blob"):
        assert values[(f"graft_{name}_budget_bytes",)] == getattr(settings, f"{name}_bytes")
