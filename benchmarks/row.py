"""Rows: what one measurement came to."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Sense(StrEnum):
    """On which side of its target a ratio has to be."""

    AT_LEAST = ">="
    AT_MOST = "<="


@dataclass(frozen=True, slots=True)
class Condition:
    """Something else that has to hold for the row to be met."""

    text: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, side by side with what a user would pick instead, as a ratio."""

    name: str
    what: str
    """What is measured."""
    against: str
    """What it is compared with."""
    ratio: float
    sense: Sense
    target: float | None
    """None of what is only reported."""
    figures: tuple[tuple[str, str], ...] = ()
    """What the ratio was made from, and the steps beside it: label and value with its unit."""
    conditions: tuple[Condition, ...] = ()
    limit: str = ""
    """Where the time goes and what it is bounded by; shown where the target is missed."""

    @property
    def met(self) -> bool:
        """Whether the target and all conditions are."""
        if self.target is None:
            return all(condition.holds for condition in self.conditions)
        within = self.ratio >= self.target if self.sense is Sense.AT_LEAST else self.ratio <= self.target
        return within and all(condition.holds for condition in self.conditions)

    def line(self) -> str:
        """The line of JSON that the row ends in."""
        members = {"name": self.name, "ratio": rounded(self.ratio), "target": self.target, "met": self.met}
        return json.dumps(members)

    def dump(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self)

    @staticmethod
    def load(members: dict[str, Any]) -> "Row":
        """The row of a `dump`."""
        figures = tuple((label, value) for label, value in members.pop("figures"))
        conditions = tuple(Condition(**one) for one in members.pop("conditions"))
        sense = Sense(members.pop("sense"))
        return Row(**members, sense=sense, figures=figures, conditions=conditions)


def rounded(number: float) -> float:
    """Three digits that count: nothing here is measured better."""
    return float(f"{number:.3g}")
