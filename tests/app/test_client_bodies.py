"""What clients send: bodies made of arrays and patches, and patches made of two states."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from app.client import Body, Dense, Sparse, Tensor, changes, split_experts
from app.remote.bodies import safetensors
from app.remote.patches import batch, body_of
from loaders.header import HeaderLimits, parse_header
from schemas.dtypes import Dtype
from schemas.model import ExpertTensor
from schemas.patches import PATCHES
from schemas.status import Model
from tests.fakes.admin import running
from tests.fakes.safetensors import parse

TORCH = [
    (torch.bool, Dtype.BOOL),
    (torch.uint8, Dtype.U8),
    (torch.int8, Dtype.I8),
    (torch.float8_e4m3fn, Dtype.F8_E4M3),
    (torch.float8_e5m2, Dtype.F8_E5M2),
    (torch.float8_e8m0fnu, Dtype.F8_E8M0),
    (torch.uint16, Dtype.U16),
    (torch.int16, Dtype.I16),
    (torch.float16, Dtype.F16),
    (torch.bfloat16, Dtype.BF16),
    (torch.uint32, Dtype.U32),
    (torch.int32, Dtype.I32),
    (torch.float32, Dtype.F32),
    (torch.uint64, Dtype.U64),
    (torch.int64, Dtype.I64),
    (torch.float64, Dtype.F64),
]


def content(body: Body) -> bytes:
    """All of a body, whose size must be the announced one."""
    whole = b"".join(body.chunks())
    assert len(whole) == body.nbytes
    return whole


@pytest.mark.parametrize(("kind", "dtype"), TORCH, ids=[str(dtype) for _, dtype in TORCH])
def test_torch_tensors_of_every_type(kind: torch.dtype, dtype: Dtype) -> None:
    """Each dtype keeps its name and bits, also from a parameter, a transposed view, a scalar or nothing."""
    bits = torch.arange(24, dtype=torch.uint8).repeat_interleave(kind.itemsize) % 2
    whole = bits.view(kind).reshape(4, 6)
    sent = {"t": whole.T, "scalar": whole[1, 1], "none": whole[:0]}
    assert {Tensor.of(tensor).dtype for tensor in sent.values()} == {dtype}
    back = parse(content(Body.of_tensors(sent)))
    for name, tensor in sent.items():
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        assert back[name] == (dtype, tuple(tensor.shape), raw)


def test_parameters_are_sent_as_they_are() -> None:
    """What is being trained can be sent without being detached first."""
    weight = torch.nn.Parameter(torch.randn(3, 5))
    assert torch.equal(load(content(Body.of_tensors({"w": weight})))["w"], weight)


def test_numpy_arrays_and_raw_bits() -> None:
    """numpy's own types by themselves, others as raw bits; a wrong number of bytes is noticed."""
    floats = np.arange(6, dtype=np.float32).reshape(2, 3)
    bits = (floats.view(np.uint32) >> 16).astype(np.uint16)
    back = load(content(Body.of_tensors({"f": floats.T, "b": Tensor(Dtype.BF16, (2, 3), bits)})))
    assert torch.equal(back["f"], torch.from_numpy(floats.T.copy()))
    assert torch.equal(back["b"], torch.from_numpy(floats).bfloat16())
    with pytest.raises(ValueError, match="takes 14 bytes, not 12"):
        content(Body.of_tensors({"b": Tensor(Dtype.BF16, (7,), bits)}))


@pytest.mark.parametrize(
    "odd", [np.zeros(2, complex), np.zeros(2, ">f4"), torch.zeros(2, dtype=torch.complex64), [1.0]]
)
def test_what_is_no_tensor_is_refused(odd: Any) -> None:
    """Types that safetensors lacks, foreign byte orders and lists are refused before anything is sent."""
    with pytest.raises(TypeError, match="can't be sent"):
        Body.of_tensors({"t": odd})


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.integers(0, 5), max_size=6), st.booleans())
def test_headers_are_what_the_service_reads(sizes: dict[str, int], described: bool) -> None:
    """Any names and sizes: the service's strict reader accepts the file and finds everything in it."""
    sizes.pop("__metadata__", None)
    parts = {name: Tensor.of(np.full((size, 3), size, np.int16)) for name, size in sizes.items()}
    whole = content(safetensors(parts, {"k": "v"} if described else None))
    header = parse_header(whole, HeaderLimits())
    assert (header.nbytes, header.metadata) == (len(whole), {"k": "v"} if described else {})
    assert {name: entry.shape for name, entry in header.entries.items()} == {
        name: (size, 3) for name, size in sizes.items()
    }


def test_batches_list_their_patches_in_order() -> None:
    """Sparse and dense patches, a name twice: the list is the wire's, the tensors are those it names."""
    body = batch(
        [
            Sparse("a", (4, 2), torch.tensor([7, 0]), torch.tensor([1.0, 2.0])),
            Dense("b", torch.ones(2, 2, dtype=torch.bfloat16)),
            Sparse("a", (4, 2), np.array([3], np.int32), np.array([9], np.float32)),
        ]
    )
    whole = content(body)
    header = parse_header(whole, HeaderLimits())
    patches = PATCHES.validate_python(json.loads(header.metadata["patches"]))
    assert [(p.name, p.shape, p.dtype, p.indices is None) for p in patches] == [
        ("a", (4, 2), Dtype.F32, False),
        ("b", (2, 2), Dtype.BF16, True),
        ("a", (4, 2), Dtype.F32, False),
    ]
    tensors = load(whole)
    assert tensors[patches[0].indices or ""].tolist() == [7, 0]
    assert tensors[patches[2].values].tolist() == [9]


def test_every_form_of_weights(tmp_path: Path) -> None:
    """A mapping, patches, a path and bytes all become the same kind of body."""
    whole = content(Body.of_tensors({"a": np.zeros(2, np.float32)}))
    (tmp_path / "f").write_bytes(whole)
    forms = ({"a": np.zeros(2, np.float32)}, tmp_path / "f", whole, body_of(whole))
    assert {content(body_of(form)) for form in forms} == {whole}
    assert b"patches" in content(body_of([Dense("a", np.zeros(2, np.float32))]))


def test_changes_are_bitwise_and_in_the_smaller_form() -> None:
    """-0 and NaN payloads count as changes, equal NaNs do not; few changes are sparse, many dense."""
    old = {
        "same": torch.tensor([float("nan"), 1.0]),
        "sign": torch.zeros(64),
        "all": torch.zeros(8, 8, dtype=torch.bfloat16),
        "nan": torch.tensor([0x7FC00000] * 64, dtype=torch.int32).view(torch.float32),
    }
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["sign"][5] = -0.0
    new["all"] += 1
    new["nan"].view(torch.int32)[9] += 1
    made = {patch.name: patch for patch in changes(old, new)}
    assert made.keys() == {"sign", "all", "nan"}
    sign, nan = made["sign"], made["nan"]
    assert isinstance(sign, Sparse)
    assert isinstance(nan, Sparse)
    assert (np.asarray(sign.indices).tolist(), np.asarray(nan.indices).tolist()) == ([5], [9])
    assert isinstance(made["all"], Dense)
    tensors = load(content(batch(made.values())))
    assert torch.signbit(tensors["0.values"]).tolist() == [True]
    assert list(changes(new, new)) == []


@pytest.mark.parametrize(
    "other", [{"b": torch.zeros(4)}, {"a": torch.zeros(2, 2)}, {"a": torch.zeros(4, dtype=torch.int32)}]
)
def test_changes_need_the_same_tensors(other: dict[str, torch.Tensor]) -> None:
    """Another name, shape or dtype is no change of a value."""
    with pytest.raises(ValueError, match=r"only in one|another dtype or shape"):
        list(changes({"a": torch.zeros(4)}, other))


def model_of(*names: tuple[str, str], layers: tuple[int, ...] = (1, 3)) -> Model:
    """A model of two experts whose tensors have these short and full names."""
    tensors = tuple(
        ExpertTensor(name=short, dtype=Dtype.F32, shape=(2,), aliases=(full,)) for short, full in names
    )
    info = {"model": "m", "architecture": "A", "dtype": "float32", "quantization": None}
    return Model(**info, layers=4, experts=2, expert_layers=layers, expert_tensors=tensors)


def test_experts_with_tensors_of_their_own() -> None:
    """Whole experts are taken out of a state dict by layer and number; one that lacks a tensor stays."""
    name = "model.layers.{}.moe.experts.{}.w{}.weight"
    state = {name.format(layer, e, w): torch.randn(2) for layer in (1, 3) for e in (0, 1) for w in (1, 2)}
    del state[name.format(3, 1, 2)]
    state["model.norm.weight"] = torch.ones(2)
    split = split_experts(state, model_of(*((f"w{w}.weight", name.format(1, 0, w)) for w in (1, 2))))
    assert split.experts.keys() == {(1, 0), (1, 1), (3, 0)}
    assert split.experts[1, 1]["w2.weight"] is state[name.format(1, 1, 2)]
    assert split.rest.keys() == {name.format(3, 1, 1), "model.norm.weight"}


def test_experts_cut_from_stacks() -> None:
    """Where the checkpoint stacks experts each is a slice of the stack, in its memory."""
    name = "model.layers.{}.mlp.experts.down_proj"
    state = {name.format(layer): torch.randn(2, 2) for layer in (1, 3)}
    split = split_experts(state, model_of(("down_proj", name.format(1))))
    assert split.experts.keys() == {(1, 0), (1, 1), (3, 0), (3, 1)}
    assert split.experts[3, 1]["down_proj"].data_ptr() == state[name.format(3)][1].data_ptr()
    assert split.rest == {}


@pytest.mark.anyio
async def test_the_service_names_experts_as_the_helper_expects(tmp_path: Path) -> None:
    """With the model as the service tells it, every expert of the fake engine is found."""
    async with running(tmp_path) as admin:
        model = Model.model_validate_json((await admin.http.get("/v1/model")).content)
        split = split_experts(admin.engine.ranks[0].weights, model)
        assert split.experts.keys() == {(layer, e) for layer in (0, 1) for e in range(4)}
        assert "model.norm.weight" in split.rest
        assert not any(".experts." in name for name in split.rest)
