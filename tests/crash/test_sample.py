"""A sample of `make crash`: real processes, killed; what was acknowledged is there afterwards."""

from collections.abc import Iterator

import pytest

from tests.crash.combinations import ON_VLLM, POINTS, VICTIMS, Combination, everything
from tests.crash.fake import FakeEngineRig
from tests.crash.model import State
from tests.crash.rig import Lost
from tests.crash.table import table
from tests.crash.trial import Trial

pytestmark = pytest.mark.slow

SAMPLE = [
    "commit/intent.after/admin",
    "commit/engine.commit.middle/both",
    "one-shot/bridge.commit.after/admin",
    "rollback/bridge.commit.before/admin",
    "rewind/outcome.before/admin",
    "reload/outcome.within/both",
    "replay/bridge.commit.after/admin",
    "settle/outcome.within/admin",
    "abandon/abandon.within/admin",
    "baseline/baseline.within/admin",
    "begin/ledger.create/admin",
]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """One pair of processes whose history grows."""
    rig = FakeEngineRig(tmp_path_factory.mktemp("crash") / "rig")
    yield Trial(rig)
    rig.close()


@pytest.mark.parametrize("name", SAMPLE)
def test_nothing_acknowledged_is_lost(trial: Trial, name: str) -> None:
    """Killed at that point, started again: the old version or the new one, bit for bit, made once at most."""
    assert trial.run(Combination.of(name)) == "kept"


def test_a_loss_is_noticed(trial: Trial) -> None:
    """The harness fails on weights other than the version's, and on a version that it does not know."""
    right = trial.model.versions[-1]
    trial.model.versions[-1] = State(right.checkpoint, right.expert + 1)
    with pytest.raises(Lost, match="other weights"):
        trial.agree()
    trial.model.versions[-1] = right
    trial.model.versions.append(right)
    with pytest.raises(Lost, match="is served"):
        trial.agree()
    trial.model.versions.pop()
    trial.agree()


def test_there_are_enough_combinations() -> None:
    """At least 300 and 20 on vLLM, each once; the sample is among them and has a few of every operation."""
    for found, least in ((everything(), 300), (ON_VLLM, 20)):
        names = [one.name for one in found]
        assert len(names) == len(set(names)) >= least
    assert set(SAMPLE) <= {one.name for one in everything()}
    assert {name.split("/")[0] for name in SAMPLE} == set(POINTS)


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
