"""Which process is killed where, during what: everything that the harness goes through."""

from dataclasses import dataclass

BRIDGE = [f"bridge.{name}.{when}" for name in ("state", "prepare", "commit") for when in ("before", "after")]
DESCRIBE = ["bridge.describe.before", "bridge.describe.after"]
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
    "reload": ["bridge.read.before", "bridge.read.after", *CHANGE],
    "replay": [
        *DESCRIBE,
        *BRIDGE,
        *DIGESTS,
        *ENGINE,
    ],
    "settle": ["bridge.state.before", "bridge.state.after", *_step("outcome"), *DIGESTS],
    "abandon": [*DESCRIBE, *_step("abandon"), *_step("loaded")],
    "baseline": _step("baseline"),
    "begin": ["ledger.create", *DESCRIBE, *_step("base"), *DIGESTS, *_step("digests"), *_step("loaded")],
}
"""Operation → failpoints that it passes. `rewind` is a rollback without undo, `replay` follows the death of
an engine, `settle` that of an admin which had asked for a commit and did not write down how it ended,
`abandon` that of both at this moment. `begin` is the first start of all."""

VICTIMS = ("admin", "engine", "both")


@dataclass(frozen=True)
class Combination:
    """One death: during `operation`, at `point`, of `victim`."""

    operation: str
    point: str
    victim: str

    @staticmethod
    def of(name: str) -> "Combination":
        """The one of that name."""
        return Combination(*name.split("/"))

    @property
    def name(self) -> str:
        """How results call it."""
        return f"{self.operation}/{self.point}/{self.victim}"


def everything() -> list[Combination]:
    """All combinations on the fake engine, always in the same order."""
    return [
        Combination(operation, point, victim)
        for operation, points in POINTS.items()
        for point in points
        for victim in VICTIMS
    ]


ON_VLLM = [
    Combination.of(name)
    for name in (
        "commit/intent.after/admin",
        "commit/bridge.prepare.after/engine",
        "commit/bridge.commit.before/both",
        "commit/bridge.commit.after/admin",
        "commit/bridge.commit.after/engine",
        "commit/outcome.within/both",
        "commit/soon.20/engine",
        "one-shot/soon.30/both",
        "one-shot/outcome.before/admin",
        "one-shot/digests.before/engine",
        "rollback/bridge.commit.before/admin",
        "rollback/bridge.commit.after/engine",
        "rollback/outcome.before/both",
        "rewind/bridge.commit.after/admin",
        "rewind/bridge.commit.after/engine",
        "reload/bridge.commit.after/admin",
        "reload/bridge.commit.before/engine",
        "reload/outcome.within/both",
        "replay/bridge.commit.after/admin",
        "replay/bridge.prepare.after/engine",
        "replay/bridge.commit.before/both",
        "settle/outcome.within/admin",
    )
]
"""Those on the real engine, where each death of it costs half a minute. It has no failpoints of its own:
`soon.20` is 20 ms after the request was sent, wherever it is then."""
