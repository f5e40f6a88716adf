"""The page of settings, from the model that reads them."""

from typing import Any

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from app.settings import Settings
from docs.made.tables import table

INTRODUCTION = """# Settings

Each is a variable of the environment; `graft serve` has options for the most used ones ([command
line](cli.md)), and those win. Names that end in `_BYTES` are sizes (`8GiB` works too), those in `_S`
seconds.

"""
OTHERS = """
Beside these, `GRAFT_ENGINE_HOST` and `GRAFT_ENGINE_PORT` say where a vLLM that `graft serve` starts
listens, `GRAFT_URL` where the other commands look for the service, and `GRAFT_CACHE_DIR` where the
engine keeps what it has proved (otherwise in the user's cache folder). vLLM's own variables are passed
on to it.
"""


def page() -> str:
    """One row per setting."""
    rows = (
        [f"`GRAFT_{name.upper()}`", _default(field), field.description or ""]
        for name, field in Settings.model_fields.items()
    )
    return INTRODUCTION + table(["variable", "default", "meaning"], rows) + OTHERS


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if value is None:
        return "none"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable(separator='').replace('.0', '')}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"
