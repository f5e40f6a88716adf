"""The page of events, from their models."""

from inspect import getdoc
from typing import get_args

from docs.made.shapes import anchor
from docs.made.tables import table
from schemas.base import Output
from schemas.events import Event

INTRODUCTION = """# Events

What `GET /v1/events` tells; [how to follow it](../how-to/events.md). The name of an event is also the
`type` in its data; `at` is when it happened. Every event says how something stands, not what changed of
it. New types and new members may be added.

"""


def models() -> tuple[type[Output], ...]:
    """The data of each type of event, in the order of the schema."""
    union, *_ = get_args(Event)
    found: tuple[type[Output], ...] = get_args(union)
    return found


def page() -> str:
    """One row per type; the shapes of the data are those of the API."""
    return INTRODUCTION + table(["event", "tells", "data", "members"], map(_row, models()))


def _row(model: type[Output]) -> list[str]:
    name = model.__name__
    members = (f"`{member}`" for member in model.model_fields if member != "type")
    shape = f"[`{name}`](api.md#{anchor(name)})"
    return [f"`{model.model_fields['type'].default}`", getdoc(model) or "", shape, ", ".join(members)]
