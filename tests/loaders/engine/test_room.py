"""Room: what would not fit the machine's memory is refused before it is taken."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from schemas.problems import Code, ProblemError
from tests.loaders.engine.test_rebuild import Rank, handled, sums
from tests.loaders.engine.test_session import commit, hand, prepare, refusal, session

pytestmark = pytest.mark.vllm

__all__ = ["hand", "session"]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with 1,000 bytes left."""
    memory = SimpleNamespace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return memory


def group(folder: Path, limit: str) -> Path:
    """A container's own files."""
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text("700\n")
    lines = {"anon": 1, "inactive_file": 100, "active_file": 50, "slab_reclaimable": 30}
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
    return folder


def test_the_tighter_of_machine_and_container_counts(tmp_path: Path) -> None:
    """Caches of files count as free; no limit, or files of another form, leave the machine's."""
    from loaders.engine.room import Room

    assert Room(tmp_path / "none").available == 1000
    assert Room(group(tmp_path, "max\n")).available == 1000
    assert Room(group(tmp_path, "900\n")).available == 900 - 700 + 100 + 50 + 30
    assert Room(group(tmp_path, "400\n")).available == 0
    assert Room(group(tmp_path, "9000\n")).available == 1000
    (tmp_path / "memory.stat").write_text("nothing that is known\n")
    assert Room(tmp_path).available == 1000


def test_all_that_is_left_can_be_taken() -> None:
    """Another rank may have taken its part already, or need none: it is not kept for it."""
    from loaders.engine.room import Room

    Room().require(1000, "This")
    with pytest.raises(ProblemError, match="This takes 1001 bytes at least; 1000 are available") as refused:
        Room().require(1001, "This")
    assert refused.value.code is Code.ENGINE_MEMORY


def test_what_does_not_fit_is_not_prepared(session: Any, machine: Any, tmp_path: Path) -> None:
    """Two float32 values with their positions, then their undo: a byte too little, and nothing is held."""
    before = session.state()
    machine.available = 15
    assert refusal(prepare, session, tmp_path, 1.0) is Code.ENGINE_MEMORY
    machine.available = 16
    commit(session, tmp_path, 1.0)
    machine.available = 7
    assert refusal(prepare, session, tmp_path, 0.0, restore=0) is Code.ENGINE_MEMORY
    assert session.state().prepared == before.prepared == ()
    machine.available = 8
    commit(session, tmp_path, 0.0, restore=0)
    assert session.version == 2


def test_what_is_made_anew_counts(tmp_path: Path) -> None:
    """A packed weight with its elements, a derived tensor with its own."""
    from tests.loaders.engine import layers

    for method, wanted in ((handled, layers.ROWS * layers.COLUMNS * 4), (sums, layers.ROWS * 4)):
        rank = Rank(layers, lambda method=method: method(layers), tmp_path)
        assert rank.rebuilder.spare_nbytes(list(rank.atlas.sites.values())) == wanted
