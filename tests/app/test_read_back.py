"""What comes back says where it was read, and whether it is what the checkpoint would hold."""

from pathlib import Path

import pytest

from loaders.header import HeaderLimits, parse_header
from schemas.dtypes import Dtype
from tests.fakes.admin import Q_PROJ, Admin, running
from tests.fakes.engine import FakeEngine

pytestmark = pytest.mark.anyio
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


async def said(admin: Admin, path: str) -> dict[str, str]:
    """The metadata of a file that is read back."""
    answer = await admin.http.get(path)
    assert answer.status_code == 200, answer.text
    return dict(parse_header(answer.content, HeaderLimits()).metadata)


async def test_a_read_back_says_that_it_is_exact(tmp_path: Path) -> None:
    """Weights are read where the engine has them; as long as nothing was cast they are the checkpoint's."""
    async with running(tmp_path) as admin:
        for path in (f"/v1/tensors/{Q_PROJ}", "/v1/experts/0/1"):
            assert await said(admin, path) == {"graft.read_from": "engine", "graft.lossless": "true"}


@pytest.mark.parametrize("lossless", [True, False])
async def test_a_cast_tensor_says_whether_it_lost_bits(tmp_path: Path, lossless: bool) -> None:
    """A tensor that runs in another dtype says so, and so does an expert that holds one; others do not."""
    engine = FakeEngine()
    engine.alter(GATE_UP, runtime_dtype=Dtype.F16, lossless=lossless)
    expected = {
        f"/v1/tensors/{GATE_UP}": lossless,
        "/v1/experts/0/1": lossless,
        "/v1/experts/1/1": True,
        f"/v1/tensors/{Q_PROJ}": True,
    }
    async with running(tmp_path, engine=engine) as admin:
        for path, exact in expected.items():
            assert (await said(admin, path))["graft.lossless"] == str(exact).lower(), path
        listed = await admin.http.get("/v1/model/tensors", params={"prefix": GATE_UP})
        first = listed.json()["tensors"][0]
        assert (first["runtime_dtype"], first["lossless"]) == ("F16", lossless)
