"""Stepping back: over the last change with what it had replaced, over earlier ones by making it anew."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from schemas.bridge import CommitRequest
from schemas.problems import Code, ProblemError
from tests.loaders.engine.atlases import Body
from tests.loaders.engine.test_rebuild import MAIN, Rank, beside, handled, outputs, same, sums
from tests.loaders.engine.test_session import apply, make, prepare

pytestmark = pytest.mark.vllm


@pytest.fixture(params=[handled, sums, beside], ids=["handle", "derived", "derived and moved"])
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Rank:
    """A layer that runs from a handle, from a derived tensor, from one that a parameter is moved into too."""
    from tests.loaders.engine import layers

    method: Callable[[Any], Any] = request.param
    return Rank(layers, lambda: method(layers), tmp_path, other=method is beside)


class Life:
    """A session over that layer, which counts how often something is made anew."""

    def __init__(self, rank: Rank, folder: Path) -> None:
        self.rank, self.folder, self.made = rank, folder, 0
        self.session = make(SimpleNamespace(atlas=rank.atlas, sites=rank.atlas.sites), rebuilder=self)

    def ensure_shards(self, touched: Any, main: Any) -> None:
        self.rank.rebuilder.ensure_shards(touched, MAIN)

    def spare_nbytes(self, touched: Any) -> int:
        found: int = self.rank.rebuilder.spare_nbytes(touched)
        return found

    def spares(self, moves: Any, touched: Any, main: Any) -> Any:
        self.made += 1
        return self.rank.rebuilder.spares(moves, touched, MAIN)

    def prepare(self, value: float, key: str = "k") -> None:
        body = Body(self.folder / f"body-{key}")
        for name in self.rank.base:
            body.write(name, torch.full((2,), value), torch.tensor([1, 8]))
        prepare(self.session, self.folder, 0.0, key, uploads=(body.staged(),))

    def commit(self, value: float) -> None:
        self.prepare(value)
        self.done()

    def rollback(self, version: int) -> None:
        prepare(self.session, self.folder, 0.0, restore=version)
        self.done()

    def done(self) -> None:
        apply(self.session, self.session.version + 1)
        self.session.settle("k")

    def look(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return self.rank.state(), outputs(self.rank.made, self.rank.live)


@pytest.fixture
def life(rank: Rank, tmp_path: Path) -> Life:
    return Life(rank, tmp_path)


def full(*_: Any) -> None:
    raise MemoryError


def alike(one: Any, other: Any) -> bool:
    return same(one[0], other[0]) and torch.equal(one[1], other[1])


def test_the_last_change_is_taken_back_without_making_anything(life: Life) -> None:
    """There and back, as often as one likes, bit for bit; only the change itself was made."""
    base = life.look()
    life.commit(3.0)
    changed = life.look()
    assert not alike(base, changed)
    for now, then in ((2, base), (3, changed), (4, base)):
        life.rollback(now - 2)
        assert life.session.version == now and alike(life.look(), then)
    assert life.made == 1


def test_earlier_changes_are_taken_back_too(life: Life) -> None:
    """Over two of them nothing is at hand, so it is made anew; then the last change is a rollback."""
    base = life.look()
    life.commit(3.0)
    life.commit(4.0)
    second = life.look()
    life.rollback(0)
    assert alike(life.look(), base) and life.made == 3
    life.rollback(2)
    assert alike(life.look(), second) and life.made == 3


def test_another_change_takes_the_room(life: Life) -> None:
    """What a change has replaced is held, and said to be, until the next is prepared."""
    base = life.look()
    life.commit(3.0)
    held = life.session.state().prepared_nbytes
    assert held > 0
    life.prepare(4.0, "other")
    life.session.drop("other")
    assert life.session.state().prepared_nbytes == 0
    life.rollback(0)
    assert alike(life.look(), base) and life.made == 3


def test_what_is_forgotten_is_not_held(life: Life) -> None:
    """What a change has replaced leads nowhere without its undo; that of another version is not touched."""
    life.commit(3.0)
    life.session.forget((0, 2))
    assert life.session.state().prepared_nbytes > 0
    life.session.forget((1,))
    state = life.session.state()
    assert state.prepared_nbytes == 0 and state.undo == {}


def test_a_change_that_cannot_be_kept_is_not_made(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """If what leads back could not be kept, what was written is put back, and the version is the old one."""
    base = life.look()
    life.prepare(3.0)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr("loaders.engine.rebuild.Spare.back", full)
        apply(life.session, 1)
    state = life.session.state()
    assert (state.version, state.undo, state.prepared) == (0, {}, ("k",)) and alike(life.look(), base)
    life.done()
    assert not alike(life.look(), base)


@pytest.mark.parametrize("replay", [True, False])
def test_a_change_without_undo_that_wrote_nothing_is_undone(life: Life, replay: bool) -> None:
    """Another rank failed: the version is the old one again, though there was nothing to go back with."""
    life.commit(3.0)
    there = life.look()
    body = Body(life.folder / "body")
    upload = body.staged().model_copy(update={"writes": ()})
    prepare(life.session, life.folder, 0.0, uploads=(upload,), replay=replay)
    apply(life.session, 2)
    life.session.forget((2,))
    life.session.undo("k")
    assert life.session.version == 1 and alike(life.look(), there)


def test_what_was_replaced_makes_room_first(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no reason to refuse values that fit once it is gone."""
    life.commit(3.0)

    def memory() -> Any:
        return SimpleNamespace(available=15 if life.session.state().prepared_nbytes else 1000)

    monkeypatch.setattr(psutil, "virtual_memory", memory)
    life.commit(4.0)
    assert life.session.version == 2


def test_a_rollback_that_is_undone_can_be_made_again(life: Life) -> None:
    """Another rank failed: the change is back, and then it is taken back after all."""
    base = life.look()
    life.commit(3.0)
    changed = life.look()
    prepare(life.session, life.folder, 0.0, restore=0)
    apply(life.session, 2)
    assert alike(life.look(), base)
    life.session.undo("k")
    assert life.session.version == 1 and alike(life.look(), changed)
    life.session.settle("k")
    life.rollback(0)
    assert alike(life.look(), base)


def test_a_rollback_that_is_stale_changes_nothing(life: Life) -> None:
    """It was prepared for a version that another change has left: the other's handles stay live."""
    life.commit(3.0)
    life.prepare(4.0, "other")
    prepare(life.session, life.folder, 0.0, restore=0)
    apply(life.session, 2, "other")
    life.session.settle("other")
    there = life.look()
    with pytest.raises(ProblemError) as refused:
        life.session.apply(CommitRequest(nonce="n", key="k", version=3))
    assert refused.value.code is Code.VERSION_MOVED and alike(life.look(), there)
    life.rollback(1)
    life.rollback(2)
    assert alike(life.look(), there)
