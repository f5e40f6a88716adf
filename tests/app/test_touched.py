"""Which version last wrote to each expert: through commits, rollbacks, reloads and restarts."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.touched import Touched, expert_map
from loaders.catalogue import Catalogue
from schemas.bridge import IndexSpan, Span, StagedUpload, TensorWrite
from schemas.dtypes import Dtype
from schemas.model import ModelInfo
from schemas.versions import VersionKind
from tests.fakes.admin import OCTETS, Admin, bf16, running
from tests.fakes.engine import EXPERTS, HIDDEN, INNER, LAYERS, tensors
from tests.fakes.safetensors import body

SPAN = Span(offset=0, nbytes=2)
CATALOGUE = Catalogue(
    tensors(),
    ModelInfo(model="m", architecture="a", dtype="d", quantization=None, layers=LAYERS, experts=EXPERTS),
)
Grid = list[list[int | None]]


def write(layer: int, expert: int | None, *, among: tuple[int, ...] | None = None) -> TensorWrite:
    """A write to one expert, to some of them by positions, or to all of a layer."""
    indices = IndexSpan(offset=0, nbytes=8, dtype=Dtype.I64) if among is not None else None
    name = f"model.layers.{layer}.mlp.experts.down_proj"
    return TensorWrite(tensor=name, expert=expert, values=SPAN, indices=indices, experts=among)


def upload(*writes: TensorWrite) -> StagedUpload:
    """A body with these writes."""
    return StagedUpload(path="", nbytes=1, blake3="0" * 64, writes=writes)


def grid(touched: Touched, version: int) -> Grid:
    """Layer by layer what the map says."""
    return [list(one.versions) for one in expert_map(version, touched.at(version), CATALOGUE).layers]


def test_any_history_is_as_its_replay() -> None:
    """Commits on any earlier version, asked for in any order: as if the writes had been made one by one."""
    rng = random.Random(11)
    for _ in range(60):
        touched, expected = Touched(), {0: [[0] * EXPERTS for _ in range(LAYERS)]}
        touched.add(0, VersionKind.BASE, None, ())
        for version in range(1, 25):
            before = version - 1 if rng.random() < 0.7 else rng.randrange(version)
            writes = [some(rng) for _ in range(rng.randrange(3))]
            touched.add(version, VersionKind.COMMIT, before, [upload(one) for one in writes])
            expected[version] = [list(row) for row in expected[before]]
            for one in writes:
                for expert in reach(one):
                    expected[version][int(one.tensor.split(".")[2])][expert] = version
            asked = rng.choice([version, rng.randrange(version + 1)])
            assert grid(touched, asked) == expected[asked]


def some(rng: random.Random) -> TensorWrite:
    """Any write."""
    kind, layer = rng.randrange(3), rng.randrange(LAYERS)
    if kind == 0:
        return write(layer, rng.randrange(EXPERTS))
    return write(layer, None) if kind == 1 else write(layer, None, among=(rng.randrange(EXPERTS),))


def reach(one: TensorWrite) -> tuple[int, ...]:
    """The experts that it writes to."""
    if one.experts is not None:
        return one.experts
    return tuple(range(EXPERTS)) if one.expert is None else (one.expert,)


def test_long_histories_are_small() -> None:
    """Versions that write to every expert of a large model take some kilobytes each, as all are kept."""
    everything = upload(*(write(layer, None, among=tuple(range(128))) for layer in range(36)))
    touched = Touched()
    touched.add(0, VersionKind.BASE, None, ())
    tracemalloc.start()
    try:
        for version in range(1, 101):
            touched.add(version, VersionKind.COMMIT, version - 1, [everything])
        assert tracemalloc.get_traced_memory()[0] < 100 * 16_000
    finally:
        tracemalloc.stop()


def test_reloads_and_adopted_versions() -> None:
    """A reload is all that there is; of what was there before this history nothing is known."""
    touched = Touched()
    touched.add(0, VersionKind.BASE, None, ())
    touched.add(1, VersionKind.COMMIT, 0, [upload(write(0, 1))])
    touched.add(2, VersionKind.RELOAD, 1, [])
    touched.add(3, VersionKind.COMMIT, 2, [upload(write(1, 2))])
    assert grid(touched, 3) == [[2, 2, 2, 2], [2, 2, 3, 2]]
    adopted = Touched()
    adopted.add(5, VersionKind.ADOPTED, None, ())
    adopted.add(6, VersionKind.COMMIT, 5, [upload(write(0, 3))])
    assert grid(adopted, 6) == [[None, None, None, 6], [None] * 4]


def test_other_tensors_touch_no_expert() -> None:
    """Attention and the like stand in no cell."""
    touched = Touched()
    touched.add(0, VersionKind.BASE, None, ())
    other = TensorWrite(tensor="model.layers.0.self_attn.q_proj.weight", values=SPAN)
    touched.add(1, VersionKind.COMMIT, 0, [upload(other)])
    assert grid(touched, 1) == [[0] * EXPERTS] * LAYERS


async def shown(admin: Admin) -> Any:
    """What the route says, without the layers' numbers."""
    answer = (await admin.http.get("/v1/model/experts")).json()
    assert [one["layer"] for one in answer["layers"]] == list(range(LAYERS))
    assert answer["version"] == await admin.version()
    return [one["versions"] for one in answer["layers"]]


async def sparse(admin: Admin, *positions: int) -> None:
    """Patch elements of a stack of experts."""
    entry = {
        "name": "model.layers.1.mlp.experts.down_proj",
        "shape": [EXPERTS, INNER, HIDDEN],
        "dtype": "BF16",
        "values": "v",
        "indices": "i",
    }
    where = np.array(positions, np.int64)
    parts = {
        "v": (Dtype.BF16, (len(where),), bf16(3, len(where))),
        "i": (Dtype.I64, (len(where),), where.tobytes()),
    }
    content = body(parts, {"patches": json.dumps([entry])})
    (await admin.http.post("/v1/patches", content=content, headers=OCTETS)).raise_for_status()


@pytest.mark.anyio
async def test_the_route_follows_the_engine(tmp_path: Path) -> None:
    """Commits show, sparse ones by position; a rollback shows the old state; a restart changes nothing."""
    async with running(tmp_path) as admin:
        assert await shown(admin) == [["0"] * 4, ["0"] * 4]
        await admin.commit()
        assert await shown(admin) == [["1", "0", "0", "0"], ["0"] * 4]
        size = INNER * HIDDEN
        await sparse(admin, 3 * size + 5, size, 3 * size - 1)
        second = [["1", "0", "0", "0"], ["0", "2", "2", "2"]]
        assert await shown(admin) == second
        await admin.http.post("/v1/rollback", json={"to_version": 1})
        assert await shown(admin) == [["1", "0", "0", "0"], ["0"] * 4]
        await sparse(admin, 0)
        fourth = [["1", "0", "0", "0"], ["4", "0", "0", "0"]]
        assert await shown(admin) == fourth
        engine = admin.engine
    async with running(tmp_path, engine=engine) as admin:
        assert await shown(admin) == fourth
        await admin.http.post("/v1/rollback", json={"to_version": 2})
        assert await shown(admin) == second
