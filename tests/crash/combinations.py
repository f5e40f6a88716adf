"""Which process is killed where, during what: everything that the harness goes through."""

from dataclasses import dataclass

BRIDGE = [f"bridge.{name}.{when}" for name in ("state", "prepare", "commit") for when in ("before", "after")]
DIGESTS = ["bridge.digests.before", "bridge.digests.after"]
ENGINE = ["engine.prepare", "engine.commit.before", "engine.commit.middle", "engine.commit.after"]


def _step(name: str) -> list[str]:
    return [f"{name}.{when}" for when in ("before", "within", "after")]


CHANGE = [*BRIDGE, *_step("intent"), *_step("outcome"), *_step("reply"), *DIGESTS, *_step("digests"), *ENGINE]
BLOBS = ["blob.before", "blob.linked", "blob.after"]
POINTS: dict[str, list[str]] = {
    "commit": [*CHANGE, *BLOBS],
    "one-shot": [*CHANGE, *BLOBS, *_step("view"), "blob.drop"],
    "rollback": CHANGE,
    "rewind": CHANGE,
    "replay": [
        "bridge.describe.before",
        "bridge.describe.after",
        *BRIDGE,
        *DIGESTS,
        *_step("replayed"),
        "bridge.forget.before",
        "bridge.forget.after",
        *ENGINE,
    ],
    "settle": ["bridge.state.before", "bridge.state.after", *_step("outcome"), *DIGESTS],
    "baseline": _step("baseline"),
}
"""Operation → failpoints that it passes. `rewind` is a rollback without undo, `replay` follows the death of
an engine, `settle` that of an admin which had asked for a commit and did not write down how it ended."""

VICTIMS = ("admin", "engine", "both")


@dataclass(frozen=True)
class Combination:
    """One death: during `operation`, at `point`, of `victim`."""

    operation: str
    point: str
    victim: str

    @property
    def name(self) -> str:
        """How results call it."""
        return f"{self.operation}/{self.point}/{self.victim}"


def everything() -> list[Combination]:
    """All combinations, always in the same order."""
    return [
        Combination(operation, point, victim)
        for operation, points in POINTS.items()
        for point in points
        for victim in VICTIMS
    ]
