"""A sample of `make crash`: real processes, killed; what was acknowledged is there afterwards."""

from collections.abc import Iterator

import pytest

from tests.crash.combinations import VICTIMS, Combination, everything
from tests.crash.rig import Lost, Rig
from tests.crash.table import table
from tests.crash.trial import Trial

pytestmark = pytest.mark.long

SAMPLE = [
    "commit/intent.after/admin",
    "commit/engine.commit.middle/both",
    "commit/outcome.within/admin",
    "one-shot/bridge.commit.after/admin",
    "one-shot/outcome.after/both",
    "one-shot/blob.linked/engine",
    "rollback/engine.commit.after/engine",
    "rollback/bridge.commit.before/admin",
    "rewind/outcome.before/admin",
    "replay/bridge.commit.after/admin",
    "replay/engine.commit.middle/both",
    "settle/outcome.within/admin",
]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """One pair of processes whose history grows."""
    rig = Rig(tmp_path_factory.mktemp("crash") / "rig")
    yield Trial(rig)
    rig.close()


@pytest.mark.parametrize("name", SAMPLE)
def test_nothing_acknowledged_is_lost(trial: Trial, name: str) -> None:
    """Killed at that point, started again: the old version or the new one, bit for bit, made once at most."""
    assert trial.run(Combination(*name.split("/"))) == "kept"


def test_a_loss_is_noticed(trial: Trial) -> None:
    """The harness fails on one wrong bit, and on a version that it does not know."""
    trial.model.versions[-1]["model.norm.weight"][0] ^= 1
    with pytest.raises(Lost, match="other weights"):
        trial._agree()
    trial.model.versions[-1]["model.norm.weight"][0] ^= 1
    trial.model.versions.append(trial.model.versions[-1])
    with pytest.raises(Lost, match="is served"):
        trial._agree()
    trial.model.versions.pop()
    trial._agree()


def test_there_are_enough_combinations() -> None:
    """At least 300, each once, and the sample is among them."""
    names = [one.name for one in everything()]
    assert len(names) == len(set(names)) >= 300
    assert set(SAMPLE) <= set(names)


def test_the_table_counts_what_was_lost() -> None:
    """Every result is in one column of its operation's row and of the sum."""
    results = {one.name: "kept" for one in everything()}
    results["commit/intent.before/admin"] = "LOST"
    results["rollback/reply.before/engine"] = "not reached"
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table(results).splitlines()]
    total = dict(zip(rows[0], rows[-1], strict=True))
    assert (total["lost"], total["not reached"]) == ("1", "1")
    assert sum(int(cell) for cell in rows[-1][1:]) == len(results)
    assert len(rows[0]) == 1 + len(VICTIMS) + 2
