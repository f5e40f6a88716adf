"""Tensors of the checkpoint that no rank loads: sent as they are they change nothing, else are refused."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from schemas.dtypes import Dtype
from schemas.model import Treatment
from tests.fakes.admin import OCTETS, Admin, code, expert_parts, running
from tests.fakes.checkpoint import FILES, write_checkpoint
from tests.fakes.engine import EXPERTS, INNER, FakeEngine, base_weights
from tests.fakes.safetensors import Part, body

pytestmark = pytest.mark.anyio

STACK = "model.layers.0.mlp.experts.gate_up_proj_bias"
SHORT = "gate_up_proj_bias"


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[Admin]:
    """An admin whose engine does not load one tensor of the experts."""
    engine = FakeEngine()
    engine.checkpoint = str(write_checkpoint(root / "served"))
    engine.alter(STACK, treatment=Treatment.UNSUPPORTED, reason="not loaded", loaded=False)
    async with running(root / "state", engine=engine) as admin:
        yield admin


def slice_of(expert: int) -> bytes:
    """The expert's part of the tensor, as the checkpoint has it."""
    return base_weights()[STACK].reshape(EXPERTS, 2 * INNER)[expert].tobytes()


def parts(own: bytes | None) -> dict[str, Part]:
    """A changed expert with these bytes for the tensor; none: without it."""
    found = expert_parts(5)
    del found[SHORT]
    return found if own is None else found | {SHORT: (Dtype.BF16, (2 * INNER,), own)}


@pytest.mark.parametrize("sent", [True, False])
async def test_an_expert_with_or_without_it_is_whole(tmp_path: Path, sent: bool) -> None:
    """It may be missing or as in the checkpoint: the same three tensors are written, and it is not."""
    async with serving(tmp_path) as admin:
        before = admin.engine.weights(STACK).copy()
        content = body(parts(slice_of(2) if sent else None))
        answer = await admin.http.put("/v1/experts/0/2", content=content, headers=OCTETS)
        assert (answer.status_code, answer.json()["tensors"]) == (200, 3), answer.text
        assert (admin.engine.weights(STACK) == before).all()


async def test_other_values_are_refused(tmp_path: Path) -> None:
    """Another expert's bytes are: 422 with the reason, and no version is used up."""
    async with serving(tmp_path) as admin:
        answer = await admin.http.put("/v1/experts/0/2", content=body(parts(slice_of(1))), headers=OCTETS)
        assert code(answer) == "tensor_unsupported"
        (fault,) = answer.json()["errors"]
        assert fault["name"] == SHORT and fault["reason"] == "not loaded"
        assert "as in its checkpoint" in fault["detail"]
        assert await admin.version() == "0" and admin.files == []


async def test_a_file_of_the_checkpoint_can_be_sent_as_it_is(tmp_path: Path) -> None:
    """A whole shard with the tensor in it is taken; so is the tensor alone, which writes nothing."""
    async with serving(tmp_path) as admin:
        before = {name: bits.copy() for name, bits in admin.engine.ranks[0].weights.items()}
        held = [name for name in FILES if STACK.encode() in (tmp_path / "served" / name).read_bytes()]
        content = (tmp_path / "served" / held[0]).read_bytes()
        alone = body({STACK: (Dtype.BF16, (EXPERTS, 2 * INNER), base_weights()[STACK].tobytes())})
        for number, sent in enumerate((content, alone), 1):
            answer = await admin.http.post("/v1/patches", content=sent, headers=OCTETS)
            assert (answer.status_code, answer.json()["version"]) == (200, str(number)), answer.text
        assert answer.json()["tensors"] == 0
        assert all((admin.engine.ranks[0].weights[name] == bits).all() for name, bits in before.items())


async def test_without_the_checkpoint_it_is_refused(tmp_path: Path) -> None:
    """Files that are gone can't be compared with, and the refusal says so; without the tensor all is well."""
    async with serving(tmp_path) as admin:
        shutil.rmtree(tmp_path / "served")
        answer = await admin.http.put("/v1/experts/0/2", content=body(parts(slice_of(2))), headers=OCTETS)
        assert code(answer) == "tensor_unsupported" and "can't be compared" in answer.json()["detail"]
        answer = await admin.http.put("/v1/experts/0/2", content=body(parts(None)), headers=OCTETS)
        assert answer.status_code == 200


async def test_it_is_listed_as_not_loaded(tmp_path: Path) -> None:
    """The list of tensors says of it, and of no other, that the engine does not load it."""
    async with serving(tmp_path) as admin:
        listed = (await admin.http.get("/v1/model/tensors?limit=1000")).json()["tensors"]
        assert [one["name"] for one in listed if not one["loaded"]] == [STACK]
