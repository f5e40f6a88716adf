"""S3: old and new names of experts' tensors, from the body to the engine."""

import json
from pathlib import Path

import numpy as np
import pytest

from schemas.dtypes import Dtype
from tests.fakes.admin import OCTETS, bf16, running
from tests.fakes.engine import EXPERTS, HIDDEN
from tests.fakes.safetensors import body

pytestmark = pytest.mark.anyio
STACK = "model.layers.0.mlp.experts.down_proj_bias"
INSERTED = ["", "routed_experts.", "base_layer.", "base_layer.routed_experts."]


@pytest.mark.parametrize("inserted", INSERTED)
@pytest.mark.parametrize("last", ["w2_bias", "down_proj_bias"])
@pytest.mark.parametrize("way", ["plain", "dense", "sparse", "whole"])
async def test_s3_every_name_reaches_the_same_weights(
    tmp_path: Path, inserted: str, last: str, way: str
) -> None:
    """As a tensor of a plain file, and as dense and sparse patch, of one expert or of the stack."""
    prefix = f"model.layers.0.mlp.experts.{inserted}"
    async with running(tmp_path) as admin:
        expected = admin.engine.weights(STACK).copy()
        name, shape, where = f"{prefix}2.{last}", (HIDDEN,), np.arange(HIDDEN)
        if way == "whole":
            name, shape, where = f"{prefix}{last}", (EXPERTS, HIDDEN), np.array([3, 2 * HIDDEN + 1])
            expected.reshape(-1)[where] = np.frombuffer(bf16(5, 2), np.uint16)
        elif way == "sparse":
            where = np.array([6, 1])
            expected[2][where] = np.frombuffer(bf16(5, 2), np.uint16)
        else:
            expected[2] = np.frombuffer(bf16(5, HIDDEN), np.uint16)
        values = {"v": (Dtype.BF16, where.shape, bf16(5, where.size))}
        patch = {"name": name, "shape": shape, "dtype": "BF16", "values": "v"}
        if way == "plain":
            content = body({name: values["v"]})
        elif way == "dense":
            content = body(values, {"patches": json.dumps([patch])})
        else:
            positions = (Dtype.I64, where.shape, where.tobytes())
            content = body(values | {"i": positions}, {"patches": json.dumps([patch | {"indices": "i"}])})
        answer = await admin.http.post("/v1/patches", content=content, headers=OCTETS)
        assert answer.status_code == 200, answer.text
        assert np.array_equal(admin.engine.weights(STACK), expected)
