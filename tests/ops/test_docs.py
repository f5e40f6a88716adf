"""The pages that are made from the code say all that the code has, and the site holds together."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families

from app.commands.graft import app
from app.main import create_app
from app.metrics import Metrics
from app.settings import Settings
from docs.made import api, cli, errors, events, metrics, settings, shapes
from docs.made.tables import table
from schemas.problems import STATUS, Code

ROOT = Path(__file__).parents[2]


def _operations() -> list[tuple[str, str, dict[str, Any]]]:
    paths = create_app().openapi()["paths"]
    return [
        (m.upper(), path, operation) for path, methods in paths.items() for m, operation in methods.items()
    ]


def _section(method: str, path: str) -> str:
    found = re.search(
        rf"^## {re.escape(f'{method} {path}')}\n(.*?)(?=^#)", api.page(), re.MULTILINE | re.DOTALL
    )
    assert found, (method, path)
    return found[1]


def test_every_operation_has_its_section() -> None:
    """Each names its operation id, every parameter, and every code of a problem but those of all routes."""
    assert len(_operations()) > 30
    for method, path, operation in _operations():
        section = _section(method, path)
        assert f"`{operation['operationId']}`" in section
        for parameter in operation.get("parameters", ()):
            assert f"| `{parameter['name']}` | {parameter['in']} |" in section
        for response in operation["responses"].values():
            codes = set(response.get("content", {}).get(api.PROBLEM, {}).get("examples", ()))
            told = {code for code in codes - set(api.EVERYWHERE) if f"`{code}`" in section}
            assert told == codes - set(api.EVERYWHERE), (method, path)


def test_problems_of_every_route_are_those_of_every_route() -> None:
    """What the page says once for all routes is in the document at each of them."""
    for method, path, operation in _operations():
        text = str(operation["responses"])
        assert [code for code in api.EVERYWHERE if f"`{code}`" not in text] == [], (method, path)


def test_an_upload_says_what_its_parameters_do() -> None:
    """Docstrings of the wire models are the meanings in the page; a link leads to the shape of the answer."""
    section = _section("PUT", "/v1/experts/{layer}/{expert}")
    assert "Refuse to commit on any other version." in section
    assert "`application/vnd.safetensors`: bytes" in section
    assert "[`Receipt`](#shape-receipt)" in section


def test_shapes_that_are_named_are_there() -> None:
    """Every link within the page has its anchor."""
    page = api.page()
    links, anchors = set(re.findall(r"\(#([\w-]+)\)", page)), set(re.findall(r"\{: #([\w-]+) \}", page))
    assert len(links) > 20
    assert links - anchors == set()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 9}, "integer ≥ `0`, < `9`"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string or null"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/Rank"}}, "array of [`Rank`](#shape-rank)"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "object of string"),
        ({"type": "string", "format": "binary"}, "bytes"),
        ({}, "any JSON"),
    ],
)
def test_types_in_words(schema: dict[str, Any], words: str) -> None:
    """Schemas of each form are told as a reader would say them."""
    assert shapes.type_of(schema) == words


def test_cells_stay_in_their_row() -> None:
    """A line break or a bar in a text does not end its cell."""
    assert table(["a"], [["one\n  two | three"]]) == "| a |\n| --- |\n| one two \\| three |\n"


def test_every_code_setting_metric_and_command_is_listed() -> None:
    """One row each, settings with their meaning."""
    assert [code for code in Code if f"| `{code}` | {STATUS[code][0]} |" not in errors.page()] == []
    page = settings.page()
    for name, field in Settings.model_fields.items():
        assert f"| `GRAFT_{name.upper()}` |" in page
        assert field.description, f"{name} has no docstring"
    told = [
        f
        for f in text_string_to_metric_families(Metrics().render({}).decode())
        if f.name.startswith("graft_")
    ]
    assert len(told) > 8
    assert [
        f.name for f in told if f"`{f.name}" not in metrics.page() and not f.name.endswith("_created")
    ] == []
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in commands if f"## `graft {name}`\n" not in cli.page()] == []


def test_every_event_is_listed() -> None:
    """One row for each type of the stream, with every member; the shape that it links to is there."""
    schemas = create_app().openapi()["components"]["schemas"]
    types = schemas["Event"]["discriminator"]["mapping"]
    row = re.compile(r"^\| `(\w+)` \| .+ \| .*\(api\.md#([\w-]+)\) \| (.*) \|$", re.MULTILINE)
    found = {
        name: (link, re.findall(r"`(\w+)`", members)) for name, link, members in row.findall(events.page())
    }
    assert set(found) == set(types)
    for name, (link, members) in found.items():
        shape = schemas[types[name].rpartition("/")[2]]
        assert f"{{: #{link} }}" in api.page()
        assert members == [member for member in shape["properties"] if member != "type"]


def test_sizes_are_told_as_they_are_written() -> None:
    """Defaults of sizes can be copied into a variable as they stand in the page."""
    found = dict(re.findall(r"\| `GRAFT_(\w+_BYTES)` \| `(\w+)` \|", settings.page()))
    assert set(found) == {name.upper() for name in Settings.model_fields if name.endswith("_bytes")}
    for name, size in found.items():
        given = Settings.model_validate({name.lower(): size})
        assert getattr(given, name.lower()) == Settings.model_fields[name.lower()].default


def test_every_module_is_named_in_the_architecture() -> None:
    """By its path, or by its name alone if no other module has the same; and none that is not there."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = ("app", "loaders", "schemas")
    modules = [
        path for package in packages for path in (ROOT / package).rglob("*.py") if path.stem != "__init__"
    ]
    names = Counter(path.name for path in modules)
    paths = {path: str(path.relative_to(ROOT)) for path in modules}
    assert len(modules) > 150
    unnamed = [
        name
        for path, name in paths.items()
        if f"`{name}`" not in text and (names[path.name] > 1 or f"`{path.name}`" not in text)
    ]
    assert unnamed == []
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    there = {
        *names,
        *paths.values(),
        *(str(p.relative_to(ROOT)) for p in (ROOT / "docs" / "made").glob("*.py")),
    }
    assert named - there == set()


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors and fences hold, every page is listed, and nothing is loaded from elsewhere."""
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = {page: page.read_text() for page in (tmp_path / "site").rglob("*.html")}
    assert [page for page, text in pages.items() if "```" in text] == []  # a fence that is none
    home = (tmp_path / "site" / "index.html").read_text()
    loaded = re.findall(
        r'<(?:script|img)[^>]+src="([^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="([^"]+)"', home
    )
    assert loaded
    assert [one for one in loaded if "//" in "".join(one)] == []
