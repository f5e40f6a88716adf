"""The OpenAPI document keeps to the rules of `redocly.yaml`, and these do find what is wrong."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.main import create_app
from app.settings import Settings
from tests.clients.tools import HERE, environment

pytestmark = pytest.mark.slow


def lint(document: dict[str, Any], folder: Path) -> list[str]:
    """Ids of the rules that the document breaks, warnings too."""
    path = folder / "openapi.json"
    path.write_text(json.dumps(document))
    command = ["redocly", "lint", str(path), "--config", str(HERE / "redocly.yaml"), "--format", "json"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    report = json.loads(ran.stdout)
    assert (ran.returncode == 0) == (report["totals"]["errors"] == 0), ran.stderr
    return sorted({problem["ruleId"] for problem in report["problems"]})


def test_the_document_has_no_fault(tmp_path: Path) -> None:
    """Not one error or warning."""
    assert lint(create_app(Settings()).openapi(), tmp_path) == []


def test_faults_are_found(tmp_path: Path) -> None:
    """Each thing that is asked of the document is missed where it is taken away."""
    document = create_app(Settings()).openapi()
    rollback = document["paths"]["/v1/rollback"]["post"]
    for member in ("operationId", "summary", "description"):
        del rollback[member]
    document["paths"]["/v1/digests"]["get"]["tags"] = []
    del rollback["requestBody"]["content"]["application/json"]["example"]
    del document["paths"]["/v1/status"]["get"]["responses"]["200"]["content"]["application/json"]["example"]
    refusals = document["paths"]["/v1/reload"]["post"]["responses"]
    del refusals["409"]["content"]["application/problem+json"]["examples"]
    refusals["412"]["content"] = {"application/json": {"schema": {"type": "string"}, "example": "no"}}
    receipt = refusals["200"]["content"]["application/json"]
    receipt["example"] = {**receipt["example"], "version": 7}
    assert lint(document, tmp_path) == [
        "no-invalid-media-type-examples",
        "operation-4xx-problem-details-rfc7807",
        "operation-description",
        "operation-operationId",
        "operation-summary",
        "rule/json-bodies-have-examples",
        "rule/operations-have-a-tag",
        "rule/problems-have-examples",
    ]
