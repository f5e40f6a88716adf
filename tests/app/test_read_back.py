"""What comes back says where it was read, and whether it is what the checkpoint would hold."""

from pathlib import Path
from typing import Any

import pytest

from schemas.dtypes import Dtype
from schemas.model import CheckpointTensor
from tests.fakes import engine as fake
from tests.fakes.admin import Q_PROJ, running
from tests.fakes.safetensors import metadata

pytestmark = pytest.mark.anyio
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def cast(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Tensor → how the fake engine runs it; whatever is put in counts from the next engine on."""
    casts: dict[str, dict[str, Any]] = {}
    plain = fake.tensors

    def tensors() -> tuple[CheckpointTensor, ...]:
        return tuple(one.model_copy(update=casts.get(one.name, {})) for one in plain())

    monkeypatch.setattr(fake, "tensors", tensors)
    return casts


async def test_a_read_back_says_that_it_is_exact(tmp_path: Path) -> None:
    """Weights are read where the engine has them; as long as nothing was cast they are the checkpoint's."""
    async with running(tmp_path) as admin:
        for path in (f"/v1/tensors/{Q_PROJ}", "/v1/experts/0/1"):
            answer = await admin.http.get(path)
            assert metadata(answer.content) == {"graft.read_from": "engine", "graft.lossless": "true"}


@pytest.mark.parametrize("lossless", [True, False])
async def test_a_cast_tensor_says_whether_it_lost_bits(
    tmp_path: Path, cast: dict[str, dict[str, Any]], lossless: bool
) -> None:
    """A tensor that runs in another dtype says so, and an expert that holds one does; others do not."""
    cast[GATE_UP] = {"runtime_dtype": Dtype.F16, "lossless": lossless}
    said = str(lossless).lower()
    async with running(tmp_path) as admin:
        for path, expected in (
            (f"/v1/tensors/{GATE_UP}", said),
            ("/v1/experts/0/1", said),
            ("/v1/experts/1/1", "true"),
            (f"/v1/tensors/{Q_PROJ}", "true"),
        ):
            answer = await admin.http.get(path)
            assert metadata(answer.content)["graft.lossless"] == expected, path
        listed = await admin.http.get("/v1/model/tensors", params={"prefix": GATE_UP})
        first = listed.json()["tensors"][0]
        assert (first["runtime_dtype"], first["lossless"]) == ("F16", lossless)
