"""From bodies to checked uploads: experts, patch batches, plain files, and every way to get them wrong."""

import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loaders.catalogue import Catalogue
from loaders.upload import CheckedUpload, check_batch, check_expert
from schemas.dtypes import Dtype
from schemas.problems import Code, ProblemError
from tests.loaders.bodies import Tensor, bf16, body, f32, i32, i64, staged
from tests.loaders.models import HIDDEN, INTER, catalogue, gpt_oss, mixtral, tensor

Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NAN = math.nan


def ones(*shape: int) -> Tensor:
    """A BF16 tensor of ones."""
    return bf16(*[1.0] * math.prod(shape), shape=shape)


def gpt_oss_expert() -> dict[str, Tensor]:
    """All tensors of one expert of `gpt_oss()`."""
    return {
        "gate_up_proj": ones(HIDDEN, 2 * INTER),
        "gate_up_proj_bias": ones(2 * INTER),
        "down_proj": ones(INTER, HIDDEN),
        "down_proj_bias": ones(HIDDEN),
    }


def patch(
    name: str, shape: list[int], values: str, indices: str | None = None, **more: Any
) -> dict[str, Any]:
    """One element of the patch list."""
    found = {"name": name, "shape": shape, "dtype": "BF16", "values": values, **more}
    return found if indices is None else {**found, "indices": indices}


def batch_body(patches: object, tensors: dict[str, Tensor]) -> bytes:
    """A patch batch."""
    text = patches if isinstance(patches, str) else json.dumps(patches)
    return body(tensors, {"patches": text, "format": "pt"})


def check(
    folder: Path, content: bytes, model: Catalogue | None = None, nonfinite: bool = False
) -> CheckedUpload:
    """Check a batch or a plain file."""
    return check_batch(staged(folder, content), model or gpt_oss(), nonfinite)


def refusal_of(action: Callable[[], object]) -> ProblemError:
    """What the action is refused with; the answer stays small."""
    with pytest.raises(ProblemError) as refusal:
        action()
    assert len(refusal.value.problem().model_dump_json()) < 30_000
    return refusal.value


# experts


def test_expert(tmp_path: Path) -> None:
    """Every tensor of an expert becomes a write to its slice, with offsets into the file."""
    content = body(gpt_oss_expert())
    file = staged(tmp_path, content)
    checked = check_expert(file, gpt_oss(), 1, 2, partial=False, allow_nonfinite=False)
    assert (checked.kind, checked.tensors) == ("expert", 4)
    assert checked.elements == 2 * HIDDEN * INTER + 2 * INTER + INTER * HIDDEN + HIDDEN
    assert checked.nbytes == 2 * checked.elements
    assert checked.upload.path == str(file.path)
    assert (checked.upload.nbytes, checked.upload.blake3) == (len(content), file.blake3)
    assert {write.expert for write in checked.upload.writes} == {2}
    for write in checked.upload.writes:
        entry = file.header.entries[write.tensor.rpartition(".")[2]]
        assert write.tensor.startswith("model.layers.1.mlp.experts.")
        assert (write.values.offset, write.values.nbytes) == (entry.begin, entry.nbytes)
        assert write.indices is None


def test_expert_of_its_own_tensors(tmp_path: Path) -> None:
    """Where every expert has its own tensors they are written whole."""
    content = body(
        {
            "w1.weight": ones(INTER, HIDDEN),
            "w2.weight": ones(HIDDEN, INTER),
            "model.layers.0.block_sparse_moe.experts.3.w3.weight": ones(INTER, HIDDEN),
        }
    )
    checked = check_expert(staged(tmp_path, content), mixtral(), 0, 3, partial=False, allow_nonfinite=False)
    assert {write.expert for write in checked.upload.writes} == {None}
    assert checked.names[2] == "model.layers.0.block_sparse_moe.experts.3.w3.weight"


def test_partial_expert(tmp_path: Path) -> None:
    """A subset needs `partial`, and what is missing is listed without it."""
    file = staged(tmp_path, body({"down_proj": ones(INTER, HIDDEN), "w2_bias": ones(HIDDEN)}))
    assert check_expert(file, gpt_oss(), 0, 0, partial=True, allow_nonfinite=False).tensors == 2
    refusal = refusal_of(lambda: check_expert(file, gpt_oss(), 0, 0, partial=False, allow_nonfinite=False))
    assert refusal.code is Code.MISSING_TENSOR
    assert [fault["name"] for fault in refusal.members["errors"]] == ["gate_up_proj", "gate_up_proj_bias"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"gate_up": ones(1)}, Code.UNKNOWN_TENSOR),
        ({"model.layers.1.mlp.experts.down_proj": ones(INTER, HIDDEN)}, Code.UNKNOWN_TENSOR),
        ({"model.layers.0.mlp.experts.1.w2_weight": ones(INTER, HIDDEN)}, Code.UNKNOWN_TENSOR),
        ({"w2_weight": ones(INTER, HIDDEN)}, Code.DUPLICATE_TENSOR),
        ({"down_proj": ones(HIDDEN, INTER)}, Code.WRONG_SHAPE),
        ({"down_proj": ones(3, INTER, HIDDEN)}, Code.WRONG_SHAPE),
        ({"down_proj": ones(INTER * HIDDEN)}, Code.WRONG_SHAPE),
        ({"down_proj_bias": f32(1, 1, 1, 1)}, Code.WRONG_DTYPE),
        ({"down_proj_bias": ("F16", (HIDDEN,), bytes(2 * HIDDEN))}, Code.WRONG_DTYPE),
        ({"down_proj_bias": bf16(0, 0, NAN, 0)}, Code.NONFINITE),
    ],
)
def test_bad_expert(tmp_path: Path, change: dict[str, Tensor], code: Code) -> None:
    """Wrong names, shapes, dtypes and values of an otherwise right expert are refused."""
    file = staged(tmp_path, body({**gpt_oss_expert(), **change}))
    refusal = refusal_of(lambda: check_expert(file, gpt_oss(), 0, 0, partial=False, allow_nonfinite=False))
    assert refusal.code is code
    assert refusal.members["errors"][0]["name"] in change


def test_expert_with_patch_list(tmp_path: Path) -> None:
    """A patch batch sent to an expert's path is not taken for an expert."""
    file = staged(tmp_path, body(gpt_oss_expert(), {"patches": "[]"}))
    refusal = refusal_of(lambda: check_expert(file, gpt_oss(), 0, 0, partial=False, allow_nonfinite=False))
    assert refusal.code is Code.BAD_PATCH


@pytest.mark.parametrize("partial", [True, False])
def test_empty_expert(tmp_path: Path, partial: bool) -> None:
    """A body without tensors has nothing to apply."""
    file = staged(tmp_path, body({}))
    refusal = refusal_of(lambda: check_expert(file, gpt_oss(), 0, 0, partial, allow_nonfinite=False))
    assert refusal.code is Code.NOTHING_TO_APPLY


# plain files


def test_plain_file(tmp_path: Path) -> None:
    """Every tensor of a plain file is written whole to the one of its name, old spelling or new."""
    content = body(
        {
            NORM: ones(HIDDEN),
            "model.layers.1.mlp.experts.routed_experts.down_proj": ones(3, INTER, HIDDEN),
            "model.layers.0.mlp.experts.2.w2_bias": ones(HIDDEN),
        },
        {"format": "pt"},
    )
    checked = check(tmp_path, content)
    assert checked.kind == "plain"
    assert [(write.tensor, write.expert) for write in checked.upload.writes] == [
        (NORM, None),
        ("model.layers.1.mlp.experts.down_proj", None),
        ("model.layers.0.mlp.experts.down_proj_bias", 2),
    ]


def test_scalar(tmp_path: Path) -> None:
    """A tensor without dimensions is one element, with as many dimensions of 1 as there may be."""
    model = catalogue(tensor("scale", dtype=Dtype.F32))
    assert check(tmp_path, body({"scale": f32(2, shape=())}), model).elements == 1
    assert check(tmp_path, body({"scale": f32(2, shape=(1, 1))}), model).elements == 1
    two = body({"scale": f32(2, 2)})
    assert refusal_of(lambda: check(tmp_path, two, model)).code is Code.WRONG_SHAPE


_EXPERTS = "model.layers.0.mlp.experts."


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ({}, Code.NOTHING_TO_APPLY),
        ({NORM: ones(HIDDEN), "model." + NORM: ones(HIDDEN)}, Code.UNKNOWN_TENSOR),
        ({NORM + " ": ones(HIDDEN)}, Code.UNKNOWN_TENSOR),
        ({NORM: ones(HIDDEN + 1)}, Code.WRONG_SHAPE),
        ({Q: ones(HIDDEN * HIDDEN)}, Code.WRONG_SHAPE),
        ({NORM: f32(1, 1, 1, 1)}, Code.WRONG_DTYPE),
        ({NORM: bf16(1, 1, 1, math.inf)}, Code.NONFINITE),
        (
            {_EXPERTS + "down_proj_bias": ones(3, 4), _EXPERTS + "routed_experts.down_proj_bias": ones(3, 4)},
            Code.DUPLICATE_TENSOR,
        ),
        ({_EXPERTS + "down_proj_bias": ones(3, 4), _EXPERTS + "1.w2_bias": ones(4)}, Code.DUPLICATE_TENSOR),
        ({_EXPERTS + "1.w2_bias": ones(4), _EXPERTS + "down_proj_bias": ones(3, 4)}, Code.DUPLICATE_TENSOR),
        ({_EXPERTS + "1.w2_bias": ones(4), _EXPERTS + "1.down_proj_bias": ones(4)}, Code.DUPLICATE_TENSOR),
        ({_EXPERTS + "3.w2_bias": ones(4)}, Code.UNKNOWN_TENSOR),
    ],
)
def test_bad_plain_file(tmp_path: Path, tensors: dict[str, Tensor], code: Code) -> None:
    """Unknown names, two names for one tensor, wrong shapes, dtypes and values are refused."""
    assert refusal_of(lambda: check(tmp_path, body(tensors))).code is code


@pytest.mark.parametrize(
    ("model", "names", "meant"),
    [
        (gpt_oss(), ["down_proj", "gate_up_proj_bias"], True),
        (gpt_oss(), [NORM, "w2_weight"], True),
        (gpt_oss(), ["down_proj", "down"], False),
        (mixtral(), ["w1.weight", "w2.weight", "w3.weight"], True),
        (catalogue(tensor("model.layers.0.mlp.down_proj.weight", 4, 4)), ["down_proj.weight"], False),
    ],
)
def test_an_expert_sent_as_a_plain_file(
    tmp_path: Path, model: Catalogue, names: list[str], meant: bool
) -> None:
    """If all unknown names are an expert's own, the refusal says how one is sent; else it does not."""
    refusal = refusal_of(lambda: check(tmp_path, body(dict.fromkeys(names, ones(4))), model))
    assert refusal.code is Code.UNKNOWN_TENSOR
    assert ("graft push-expert LAYER EXPERT FILE" in refusal.detail) is meant
    assert refusal.members["count"] == len(set(names) - {NORM})


def test_slices_of_two_experts(tmp_path: Path) -> None:
    """Two experts' slices of one stack do not collide."""
    content = body({_EXPERTS + "0.w2_bias": ones(4), _EXPERTS + "1.w2_bias": ones(4)})
    assert check(tmp_path, content).tensors == 1


def test_nonfinite_can_be_allowed(tmp_path: Path) -> None:
    """`allow_nonfinite` lets NaN and infinity through, and the refusal without it says where they are."""
    content = body({NORM: bf16(1, 1, NAN, math.inf)})
    assert check(tmp_path, content, nonfinite=True).elements == HIDDEN
    refusal = refusal_of(lambda: check(tmp_path, content))
    assert refusal.members["errors"] == [
        {"name": NORM, "detail": f"Element 2 of '{NORM}' is NaN or infinite", "position": 2}
    ]


def test_bad_bool(tmp_path: Path) -> None:
    """A truth value of 2 is refused, whatever else is allowed."""
    model = catalogue(tensor("mask", 2, dtype=Dtype.BOOL))
    assert check(tmp_path, body({"mask": ("BOOL", (2,), b"\0\1")}), model).elements == 2
    content = body({"mask": ("BOOL", (2,), b"\0\2")})
    assert refusal_of(lambda: check(tmp_path, content, model, nonfinite=True)).code is Code.BAD_VALUE


def test_unsupported_tensor(tmp_path: Path) -> None:
    """What the engine cannot update is refused with the engine's reason, before its values are looked at."""
    model = catalogue(tensor("odd", 1, reason="no way to the handle"), tensor("even", 1))
    refusal = refusal_of(lambda: check(tmp_path, body({"even": ones(1), "odd": bf16(NAN)}), model))
    assert refusal.code is Code.TENSOR_UNSUPPORTED
    assert refusal.members["errors"][0]["reason"] == "no way to the handle"


# tied tensors


@pytest.mark.parametrize(
    ("tensors", "fine"),
    [
        ({EMBED: ones(10, HIDDEN)}, True),
        ({HEAD: ones(10, HIDDEN)}, True),
        ({EMBED: ones(10, HIDDEN), HEAD: ones(10, HIDDEN)}, True),
        ({EMBED: ones(10, HIDDEN), HEAD: bf16(*[1.0] * 39, 2.0, shape=(10, HIDDEN))}, False),
    ],
)
def test_tied_tensors(tmp_path: Path, tensors: dict[str, Tensor], fine: bool) -> None:
    """One of two tied tensors may be sent, or both with the same bytes."""
    if fine:
        assert check(tmp_path, body(tensors)).tensors == len(tensors)
    else:
        assert refusal_of(lambda: check(tmp_path, body(tensors))).code is Code.TIED_TENSOR


@pytest.mark.parametrize(
    ("indices", "values", "fine"),
    [
        (i64(1, 2), bf16(5, 6), True),
        (i64(1, 3), bf16(5, 6), False),
        (i64(1, 2), bf16(5, 7), False),
        (i64(2, 1), bf16(5, 6), False),
        (i64(1), bf16(5), False),
    ],
)
def test_tied_patches(tmp_path: Path, indices: Tensor, values: Tensor, fine: bool) -> None:
    """Sparse patches of both must name the same positions and values."""
    content = batch_body(
        [patch(EMBED, [10, HIDDEN], "v", "i"), patch(HEAD, [10, HIDDEN], "w", "j")],
        {"v": bf16(5, 6), "i": i64(1, 2), "w": values, "j": indices},
    )
    if fine:
        assert check(tmp_path, content).elements == 4
    else:
        assert refusal_of(lambda: check(tmp_path, content)).code is Code.TIED_TENSOR


# patch batches


def test_patches(tmp_path: Path) -> None:
    """Sparse and dense patches mix, keep their order, may repeat a name and share tensors of the body."""
    content = batch_body(
        [
            patch(Q, [4, 4], "v", "i"),
            patch(NORM, [4], "n"),
            patch(Q, [4, 4], "v", "j"),
            patch("model.layers.1.self_attn.q_proj.weight", [4, 4], "flat"),
        ],
        {"v": bf16(1, 2), "i": i32(15, 0), "j": i64(3, 1), "n": ones(4), "flat": ones(16)},
    )
    file = staged(tmp_path, content)
    checked = check_batch(file, gpt_oss(), False)
    assert (checked.kind, checked.tensors, checked.elements) == ("patches", 3, 2 + 4 + 2 + 16)
    assert checked.names == (Q, NORM, "model.layers.1.self_attn.q_proj.weight")
    first, norm, second, _ = checked.upload.writes
    assert [write.tensor for write in (first, norm, second)] == [Q, NORM, Q]
    assert first.indices is not None
    assert (first.indices.dtype, first.indices.nbytes) == (Dtype.I32, 8)
    assert first.indices.offset == file.header.entries["i"].begin
    assert first.values == second.values
    assert norm.indices is None


def test_s3_patch_under_an_old_name(tmp_path: Path) -> None:
    """The write names the checkpoint's tensor, whatever the patch calls it."""
    name = _EXPERTS + "routed_experts.down_proj_bias"
    content = batch_body([patch(name, [3, 4], "v", "i")], {"v": ones(1), "i": i32(11)})
    assert check(tmp_path, content).names == (_EXPERTS + "down_proj_bias",)


@pytest.mark.parametrize("inserted", ["", "routed_experts.", "base_layer."])
@pytest.mark.parametrize("last", ["w2_bias", "down_proj_bias"])
def test_s3_patches_of_one_experts_slice(tmp_path: Path, inserted: str, last: str) -> None:
    """Where experts are stacked a patch may name one of them: shape and positions are then the slice's."""
    name = f"{_EXPERTS}{inserted}2.{last}"
    content = batch_body(
        [patch(name, [4], "v", "i"), patch(name, [4], "all")],
        {"v": bf16(1, 2), "i": i32(3, 0), "all": ones(4)},
    )
    sparse, dense = check(tmp_path, content).upload.writes
    assert {(write.tensor, write.expert) for write in (sparse, dense)} == {(_EXPERTS + "down_proj_bias", 2)}
    assert sparse.indices is not None and dense.indices is None


@pytest.mark.parametrize(
    ("name", "shape", "indices", "code"),
    [
        ("3.w2_bias", [4], i64(0), Code.UNKNOWN_TENSOR),
        ("2.w3_bias", [4], i64(0), Code.UNKNOWN_TENSOR),
        ("2.w2_bias", [3, 4], i64(0), Code.WRONG_SHAPE),
        ("2.w2_bias", [4], i64(4), Code.BAD_INDEX),
        ("2.w2_bias", [4], i64(-1), Code.BAD_INDEX),
        ("w2_bias", [4], i64(0), Code.WRONG_SHAPE),
    ],
)
def test_s3_bad_patches_of_a_slice(
    tmp_path: Path, name: str, shape: list[int], indices: Tensor, code: Code
) -> None:
    """Experts that there are not, and shapes and positions of the whole stack, are refused."""
    content = batch_body([patch(_EXPERTS + name, shape, "v", "i")], {"v": ones(1), "i": indices})
    assert refusal_of(lambda: check(tmp_path, content)).code is code


V, AT = {"v": bf16(1, 2)}, {"i": i64(0, 1)}
OK = patch(Q, [4, 4], "v", "i")


@pytest.mark.parametrize(
    ("patches", "tensors", "code", "place"),
    [
        ("", {}, Code.BAD_PATCH, "patches"),
        ("[", {}, Code.BAD_PATCH, "patches"),
        ("{}", {}, Code.BAD_PATCH, "patches"),
        ("null", {}, Code.BAD_PATCH, "patches"),
        ('"[]"', {}, Code.BAD_PATCH, "patches"),
        ("[" * 100_000, {}, Code.BAD_PATCH, "patches"),
        ("[NaN]", {}, Code.BAD_PATCH, "patches"),
        ("[]", {}, Code.NOTHING_TO_APPLY, None),
        ("[]", V, Code.NOTHING_TO_APPLY, None),
        ("[1]", {}, Code.BAD_PATCH, "patches[0]"),
        ("[[]]", {}, Code.BAD_PATCH, "patches[0]"),
        ("[{}]", {}, Code.BAD_PATCH, "patches[0].name"),
        ('[{"name":"a","name":"b"}]', {}, Code.BAD_PATCH, "patches"),
        ('[{"name":"\\ud800"}]', {}, Code.BAD_PATCH, "patches"),
        ([OK, {**OK, "mode": "add"}], V | AT, Code.BAD_PATCH, "patches[1].mode"),
        ([{**OK, "name": 7}], V | AT, Code.BAD_PATCH, "patches[0].name"),
        ([{**OK, "name": ""}], V | AT, Code.BAD_PATCH, "patches[0].name"),
        ([{**OK, "name": "n" * 2000}], V | AT, Code.BAD_PATCH, "patches[0].name"),
        ([{**OK, "values": None}], V | AT, Code.BAD_PATCH, "patches[0].values"),
        ([{**OK, "dtype": "bf16"}], V | AT, Code.BAD_PATCH, "patches[0].dtype"),
        ([{**OK, "shape": [4, "4"]}], V | AT, Code.BAD_PATCH, "patches[0].shape[1]"),
        ([{**OK, "shape": [4.0, 4]}], V | AT, Code.BAD_PATCH, "patches[0].shape[0]"),
        ([{**OK, "shape": [True, 4]}], V | AT, Code.BAD_PATCH, "patches[0].shape[0]"),
        ([{**OK, "shape": [-4, -4]}], V | AT, Code.BAD_PATCH, "patches[0].shape[0]"),
        ([{**OK, "shape": 16}], V | AT, Code.BAD_PATCH, "patches[0].shape"),
        ([OK, {**OK, "name": Q + "x"}], V | AT, Code.UNKNOWN_TENSOR, Q + "x"),
        ([{**OK, "shape": [16]}], V | AT, Code.WRONG_SHAPE, "patches[0].shape"),
        ([{**OK, "shape": [2**20, 2**20]}], V | AT, Code.WRONG_SHAPE, "patches[0].shape"),
        ([OK, {**OK, "dtype": "F32"}], V | AT, Code.WRONG_DTYPE, "patches[1].dtype"),
        ([{**OK, "values": "x"}], V | AT, Code.BAD_PATCH, "patches[0].values"),
        ([{**OK, "indices": "x"}], V | AT, Code.BAD_PATCH, "patches[0].indices"),
        ([OK], V | AT | {"more": ones(1)}, Code.BAD_PATCH, "more"),
        ([OK], {"v": f32(1, 2)} | AT, Code.WRONG_DTYPE, "patches[0]"),
        ([OK], V | {"i": f32(0, 1)}, Code.WRONG_DTYPE, "patches[0]"),
        ([OK], V | {"i": ("U32", (2,), bytes(8))}, Code.WRONG_DTYPE, "patches[0]"),
        ([OK], V | {"i": ("I16", (2,), bytes(4))}, Code.WRONG_DTYPE, "patches[0]"),
        ([OK], {"v": bf16(1)} | {"i": i64(0, 1, 2)}, Code.WRONG_SHAPE, "patches[0]"),
        ([OK], {"v": bf16(1, 2, 3)} | AT, Code.WRONG_SHAPE, "patches[0]"),
        ([OK], {"v": bf16(1, 2, shape=(1, 2))} | AT, Code.WRONG_SHAPE, "patches[0]"),
        ([OK], V | {"i": ("I64", (1, 2), i64(0, 1)[2])}, Code.WRONG_SHAPE, "patches[0]"),
        ([OK], {"v": ones(1, 2), "i": ("I64", (1, 2), i64(0, 1)[2])}, Code.WRONG_SHAPE, "patches[0]"),
        ([OK], {"v": bf16(1, shape=())} | {"i": ("I64", (), bytes(8))}, Code.WRONG_SHAPE, "patches[0]"),
        ([OK], V | {"i": i64(0, -1)}, Code.BAD_INDEX, "patches[0]"),
        ([OK], V | {"i": i64(0, 16)}, Code.BAD_INDEX, "patches[0]"),
        ([OK], V | {"i": i64(0, 2**63 - 1)}, Code.BAD_INDEX, "patches[0]"),
        ([OK], V | {"i": i32(0, 0)}, Code.BAD_INDEX, "patches[0]"),
        ([OK], {"v": ones(17), "i": i32(*range(17))}, Code.BAD_INDEX, "patches[0]"),
        ([OK, patch(NORM, [4], "v", "i")], V | {"i": i64(0, 4)}, Code.BAD_INDEX, "patches[1]"),
        ([OK], {"v": bf16(1, NAN)} | AT, Code.NONFINITE, "patches[0]"),
        ([patch(Q, [4, 4], "v")], {"v": ones(15)}, Code.WRONG_SHAPE, "patches[0]"),
        ([patch(Q, [4, 4], "v")], {"v": ones(2, 8)}, Code.WRONG_SHAPE, "patches[0]"),
        ([patch(Q, [4, 4], "v")], {"v": ones(4, 1, 4)}, Code.WRONG_SHAPE, "patches[0]"),
        ([OK], {"v": ones(0), "i": i64()}, Code.NOTHING_TO_APPLY, None),
    ],
)
def test_bad_patches(
    tmp_path: Path, patches: object, tensors: dict[str, Tensor], code: Code, place: str | None
) -> None:
    """Every fault of a batch has its code and names the place in the list, and none of the values there."""
    refusal = refusal_of(lambda: check(tmp_path, batch_body(patches, tensors)))
    assert refusal.code is code
    if place is not None:
        assert refusal.members["errors"][0]["name"] == place
        assert refusal.detail


def test_values_are_never_echoed(tmp_path: Path) -> None:
    """A refused patch list does not come back in the answer."""
    secret = "s3cr3t-value"
    for wrong in (
        {**OK, "shape": [secret]},
        {**OK, "dtype": secret},
        {**OK, "mode": secret},
        [secret],
        secret,
    ):
        content = batch_body([wrong], V | AT)
        refusal = refusal_of(partial(check, tmp_path, content))
        assert secret not in refusal.problem().model_dump_json()


def test_patch_of_no_element_among_others(tmp_path: Path) -> None:
    """A patch with no indices is no fault when others have some; it becomes no write."""
    content = batch_body(
        [patch(NORM, [4], "none", "nowhere"), OK], V | AT | {"none": ones(0), "nowhere": i64()}
    )
    checked = check(tmp_path, content)
    assert (checked.names, checked.elements) == ((Q,), 2)


def test_all_faults_are_listed(tmp_path: Path) -> None:
    """All unknown names are listed, not just the first; a long list is cut and counted."""
    content = body({f"x.{n}": ones(1) for n in range(50)})
    refusal = refusal_of(lambda: check(tmp_path, content))
    assert refusal.members["count"] == 50
    assert [fault["name"] for fault in refusal.members["errors"]] == [f"x.{n}" for n in range(20)]


_NUMEL = 16


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    positions=st.lists(st.integers(-2, _NUMEL + 1), max_size=8),
    surplus=st.sampled_from([0, 0, 0, 1, -1]),
    dtype=st.sampled_from([i32, i64]),
)
def test_indices_as_a_reference_sees_them(
    tmp_path: Path, positions: list[int], surplus: int, dtype: Callable[..., Tensor]
) -> None:
    """A sparse patch passes exactly if numpy could write it without wrapping, repeating or broadcasting."""
    count = max(0, len(positions) + surplus)
    content = batch_body([patch(Q, [4, 4], "v", "i")], {"v": ones(count), "i": dtype(*positions)})
    right = (
        count == len(positions) == len(set(positions)) > 0 and min(positions) >= 0 and max(positions) < _NUMEL
    )
    try:
        checked = check(tmp_path, content)
    except ProblemError as error:
        assert not right
        assert error.code in (Code.BAD_INDEX, Code.WRONG_SHAPE, Code.NOTHING_TO_APPLY)
    else:
        assert right
        assert checked.elements == count


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 20)
    | st.text(max_size=4)
    | st.sampled_from([Q, "v", "i", "BF16"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*OK, "x"]), inner, max_size=6)
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(patches=_JSON | st.text(max_size=20))
def test_any_patch_list_is_refused_properly(tmp_path: Path, patches: object) -> None:
    """Any JSON or text in place of a patch list is refused, and with nothing but a refusal."""
    refusal = refusal_of(lambda: check(tmp_path, batch_body(patches, {"u": ones(1)})))
    assert refusal.problem().status == 422


@pytest.mark.parametrize("sparse", [True, False])
def test_thousands_of_tensors(tmp_path: Path, sparse: bool) -> None:
    """5,000 small tensors are checked in about a second against a catalogue of 20,000."""
    names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(20_000)]
    model = catalogue(*(tensor(name, 4, 4, dtype=Dtype.F32) for name in names))
    values = np.ones(16, "<f4").tobytes()
    if sparse:
        tensors = {f"v{n}": f32(1, 2, 3) for n in range(5000)} | {f"i{n}": i64(7, 1, 5) for n in range(5000)}
        patches = [
            {**patch(name, [4, 4], f"v{n}", f"i{n}"), "dtype": "F32"} for n, name in enumerate(names[:5000])
        ]
        file = staged(tmp_path, batch_body(patches, tensors))
    else:
        file = staged(tmp_path, body(dict.fromkeys(names[:5000], ("F32", (4, 4), values))))
    begin = time.process_time()
    assert check_batch(file, model, False).tensors == 5000
    assert time.process_time() - begin < 3  # 0.1 to 0.3 s; a scan per name would take minutes
