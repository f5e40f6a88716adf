"""Packed experts: a weight and its scale under all their names, in every form, and what is no such form."""

from pathlib import Path

import pytest

from loaders.catalogue import Catalogue
from loaders.upload import CheckedUpload, check_batch, check_expert
from schemas.dtypes import Dtype
from schemas.problems import Code
from tests.loaders.bodies import Tensor, bf16, body, i64, staged
from tests.loaders.models import catalogue, tensor
from tests.loaders.test_upload import batch_body, patch, refusal_of

EXPERTS, INNER, HIDDEN = 2, 64, 32
PREFIX = "model.layers.0.mlp.experts."
STREAMED = {
    "gate_up_proj_blocks": "w13_weight",
    "gate_up_proj_scales": "w13_weight_scale",
    "gate_up_proj_bias": "w13_bias",
    "down_proj_blocks": "w2_weight",
    "down_proj_scales": "w2_weight_scale",
    "down_proj_bias": "w2_bias",
}
PACKED = STREAMED | {"gate_up_proj_blocks": "w13_weight_packed", "down_proj_blocks": "w2_weight_packed"}
NAMINGS = {
    "checkpoint": {name: name for name in STREAMED},
    "streaming": STREAMED,
    "streaming packed": PACKED,
    "streaming in full": {name: f"{PREFIX}routed_experts.1.{new}" for name, new in STREAMED.items()},
    "checkpoint in full": {name: PREFIX + name for name in STREAMED},
}
HALVES = [
    (f"{matrix}_proj_{one}", f"{matrix}_proj_{other}")
    for matrix in ("gate_up", "down")
    for one, other in (("blocks", "scales"), ("scales", "blocks"))
]


def u8(*shape: int, value: int = 120) -> Tensor:
    """Bytes of one value."""
    numel = 1
    for size in shape:
        numel *= size
    return "U8", shape, bytes([value]) * numel


def mxfp4() -> Catalogue:
    """One layer of gpt-oss's experts in MXFP4; every row of a scale of `gate_up_proj` is one exponent."""
    return catalogue(
        tensor(PREFIX + "gate_up_proj_blocks", EXPERTS, 2 * INNER, HIDDEN // 32, 16, dtype=Dtype.U8),
        tensor(PREFIX + "gate_up_proj_scales", EXPERTS, 2 * INNER, HIDDEN // 32, dtype=Dtype.U8),
        tensor(PREFIX + "gate_up_proj_bias", EXPERTS, 2 * INNER),
        tensor(PREFIX + "down_proj_blocks", EXPERTS, HIDDEN, INNER // 32, 16, dtype=Dtype.U8),
        tensor(PREFIX + "down_proj_scales", EXPERTS, HIDDEN, INNER // 32, dtype=Dtype.U8),
        tensor(PREFIX + "down_proj_bias", EXPERTS, HIDDEN),
        experts=EXPERTS,
    )


def expert() -> dict[str, Tensor]:
    """All tensors of one expert under their checkpoint names."""
    return {
        "gate_up_proj_blocks": u8(2 * INNER, HIDDEN // 32, 16),
        "gate_up_proj_scales": u8(2 * INNER, HIDDEN // 32),
        "gate_up_proj_bias": bf16(*[1.0] * 2 * INNER),
        "down_proj_blocks": u8(HIDDEN, INNER // 32, 16),
        "down_proj_scales": u8(HIDDEN, INNER // 32),
        "down_proj_bias": bf16(*[1.0] * HIDDEN),
    }


def check(folder: Path, tensors: dict[str, Tensor], partial: bool = False) -> CheckedUpload:
    """Check them as expert 1 of layer 0."""
    return check_expert(staged(folder, body(tensors)), mxfp4(), 0, 1, partial, allow_nonfinite=False)


@pytest.mark.parametrize("naming", NAMINGS)
def test_s3_all_names_are_the_same_expert(tmp_path: Path, naming: str) -> None:
    """Under every naming the writes are those under the checkpoint's own names."""
    names = NAMINGS[naming]
    checked = check(tmp_path, {names[name]: tensor for name, tensor in expert().items()})
    assert checked.names == tuple(PREFIX + name for name in expert())
    assert {write.expert for write in checked.upload.writes} == {1}
    sizes = [write.values.nbytes for write in checked.upload.writes]
    assert sizes == [len(data) for _, _, data in expert().values()]


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(("sent", "missing"), HALVES)
def test_s1_a_weight_or_scale_alone_needs_partial(
    tmp_path: Path, naming: str, sent: str, missing: str
) -> None:
    """Half of a packed weight is refused, naming both halves, under every name; `partial` allows it."""
    names = NAMINGS[naming]
    tensors = {names[n]: t for n, t in expert().items() if n != missing}
    refusal = refusal_of(lambda: check(tmp_path, tensors))
    assert refusal.code is Code.MISSING_TENSOR and refusal.problem().status == 422
    [fault] = refusal.members["errors"]
    assert (fault["name"], fault["half"]) == (missing, names[sent])
    assert missing in fault["detail"] and names[sent] in fault["detail"] and "partial" in fault["detail"]
    assert check(tmp_path, tensors, partial=True).tensors == 5
    alone = {names[sent]: expert()[sent]}
    assert check(tmp_path, alone, partial=True).names == (PREFIX + sent,)
    refusal = refusal_of(lambda: check(tmp_path, alone))
    assert refusal.members["count"] == 5
    assert refusal.members["errors"][0]["name"] == missing and names[sent] in (refusal.detail or "")


@pytest.mark.parametrize(
    ("weight", "scale"),
    [("weight_packed", "weight_scale"), ("weight", "weight_scale"), ("weight", "weight_scale_inv")],
)
def test_halves_of_experts_with_their_own_tensors(tmp_path: Path, weight: str, scale: str) -> None:
    """Where each expert has its own tensors the halves of each matrix are known as well."""
    names = [f"w{number}.{part}" for number in (1, 2, 3) for part in (weight, scale)]
    prefix = "model.layers.0.block_sparse_moe.experts.0."
    model = catalogue(*(tensor(prefix + name, 2, dtype=Dtype.F32) for name in names), experts=1)
    for number, half in enumerate(names):
        sent = {name: ("F32", (2,), bytes(8)) for name in names if name != half}
        file = staged(tmp_path, body(sent))
        refusal = refusal_of(
            lambda file=file: check_expert(file, model, 0, 0, partial=False, allow_nonfinite=False)
        )
        [fault] = refusal.members["errors"]
        assert (fault["name"], fault["half"]) == (half, names[number ^ 1])


@pytest.mark.parametrize(
    "parts",
    [
        ("weight_packed", "weight_scale", "weight_global_scale"),
        ("weight_packed", "weight_scale", "weight_zero_point"),
        ("qweight", "scales", "qzeros"),
        ("weight", "weight_scale", "weight_scale_2"),
    ],
)
def test_each_part_of_a_packed_weight_is_missed(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """Codes, scales and zero points of one matrix need each other; those of the next matrix do not count."""
    prefix = "model.layers.0.mlp.experts.0."
    names = [f"{matrix}.{part}" for matrix in ("gate_proj", "down_proj") for part in parts]
    model = catalogue(*(tensor(prefix + name, 2, dtype=Dtype.F32) for name in names), experts=1)
    for missing in names:
        sent = {name: ("F32", (2,), bytes(8)) for name in names if name != missing}
        file = staged(tmp_path, body(sent))
        refusal = refusal_of(
            lambda file=file: check_expert(file, model, 0, 0, partial=False, allow_nonfinite=False)
        )
        [fault] = refusal.members["errors"]
        assert fault["name"] == missing
        assert fault["half"] in sent and fault["half"].startswith(missing.partition(".")[0])


def test_a_missing_bias_has_no_other_half(tmp_path: Path) -> None:
    """What is neither weight nor scale is missing for itself."""
    tensors = {n: t for n, t in expert().items() if n != "down_proj_bias"}
    [fault] = refusal_of(lambda: check(tmp_path, tensors)).members["errors"]
    assert fault["name"] == "down_proj_bias" and "half" not in fault


def test_both_names_of_a_packed_weight_are_one(tmp_path: Path) -> None:
    """`w13_weight` and `w13_weight_packed` in one body are refused as twice the same."""
    tensors = expert() | {"w2_weight": u8(HIDDEN, INNER // 2), "w2_weight_packed": u8(HIDDEN, INNER // 2)}
    del tensors["down_proj_blocks"]
    assert refusal_of(lambda: check(tmp_path, tensors)).code is Code.DUPLICATE_TENSOR


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("gate_up_proj_blocks", u8(2 * INNER, HIDDEN // 2)),
        ("gate_up_proj_blocks", u8(2 * INNER, HIDDEN // 32, 16, 1)),
        ("gate_up_proj_blocks", u8(2 * INNER, HIDDEN // 2, 1, 1)),
        ("gate_up_proj_scales", u8(2 * INNER)),
        ("gate_up_proj_scales", u8(2 * INNER, 1, 1)),
        ("down_proj_blocks", u8(HIDDEN, INNER // 2)),
        ("down_proj_bias", bf16(*[1.0] * HIDDEN, shape=(HIDDEN, 1))),
    ],
)
def test_s1_forms_that_are_taken(tmp_path: Path, name: str, sent: Tensor) -> None:
    """Blocks without their dimension and trailing ones are the same bytes in the same order."""
    assert check(tmp_path, expert() | {name: sent}).tensors == 6


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("down_proj_blocks", u8(HIDDEN * INNER // 2)),
        ("down_proj_blocks", u8(HIDDEN, INNER)),
        ("down_proj_blocks", u8(HIDDEN, INNER // 32, 32)),
        ("down_proj_blocks", u8(HIDDEN, INNER // 16, 8)),
        ("down_proj_blocks", u8(HIDDEN * INNER // 32, 16)),
        ("down_proj_blocks", u8(INNER // 2 // 16, HIDDEN, 16)),
        ("down_proj_blocks", u8(1, HIDDEN, INNER // 2)),
        ("down_proj_blocks", u8(EXPERTS, HIDDEN, INNER // 32, 16)),
        ("down_proj_scales", u8(HIDDEN * INNER // 32)),
        ("down_proj_scales", u8(INNER // 32, HIDDEN)),
        ("down_proj_scales", u8(HIDDEN, INNER // 32, 16)),
        ("gate_up_proj_scales", u8(1, 2 * INNER)),
    ],
)
def test_s1_forms_that_are_refused(tmp_path: Path, name: str, sent: Tensor) -> None:
    """Unpacked, transposed, all flat, a stack: refused with the shape that is needed."""
    refusal = refusal_of(lambda: check(tmp_path, expert() | {name: sent}))
    assert refusal.code is Code.WRONG_SHAPE
    assert refusal.members["errors"][0]["name"] == name


@pytest.mark.parametrize("dtype", ["I8", "F8_E8M0", "F8_E4M3"])
def test_other_bytes_are_not_taken(tmp_path: Path, dtype: str) -> None:
    """Bytes under another dtype than the checkpoint's are refused: a loader would convert them."""
    sent = expert() | {"down_proj_scales": (dtype, (HIDDEN, INNER // 32), bytes(HIDDEN * INNER // 32))}
    assert refusal_of(lambda: check(tmp_path, sent)).code is Code.WRONG_DTYPE


def test_an_exponent_that_is_nan_is_refused(tmp_path: Path) -> None:
    """255 in a scale is NaN (OCP MX, E8M0), in blocks two codes: shared by both, it is seen in the scale."""
    check(tmp_path, expert() | {"down_proj_blocks": u8(HIDDEN, INNER // 32, 16, value=255)})
    scales = u8(HIDDEN, INNER // 32, value=255)
    file = staged(tmp_path, body(expert() | {"down_proj_scales": scales}))
    refusal = refusal_of(lambda: check_expert(file, mxfp4(), 0, 1, partial=False, allow_nonfinite=False))
    assert refusal.code is Code.NONFINITE
    assert check_expert(file, mxfp4(), 0, 1, partial=False, allow_nonfinite=True).tensors == 6
    shapes = (("blocks", [EXPERTS, HIDDEN, INNER // 32, 16]), ("scales", [EXPERTS, HIDDEN, INNER // 32]))
    patches = [
        patch(f"{PREFIX}down_proj_{last}", shape, "v", "i") | {"dtype": "U8"} for last, shape in shapes
    ]
    shared = staged(tmp_path, batch_body(patches, {"v": ("U8", (2,), b"\1\xff"), "i": i64(4, 0)}))
    refusal = refusal_of(lambda: check_batch(shared, mxfp4(), False))
    assert refusal.code is Code.NONFINITE
    assert refusal.members["errors"][0] | {"detail": ""} == {
        "name": "patches[1]",
        "detail": "",
        "position": 1,
    }


@pytest.mark.parametrize("shape", [(1,), (), (1, 1)])
def test_s4_a_sparse_patch_of_one_byte(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """One element may come as a scalar or with more ones; positions count bytes, the last one included."""
    name, numel = f"{PREFIX}1.w2_weight_packed", HIDDEN * INNER // 2
    for at, fine in ((0, True), (numel - 1, True), (numel, False)):
        listed = [patch(name, [HIDDEN, INNER // 2], "v", "i") | {"dtype": "U8"}]
        file = staged(tmp_path, batch_body(listed, {"v": ("U8", shape, b"\7"), "i": i64(at)}))
        if fine:
            assert check_batch(file, mxfp4(), False).elements == 1
        else:
            assert refusal_of(lambda file=file: check_batch(file, mxfp4(), False)).code is Code.BAD_INDEX


def test_s4_a_batch_may_hold_a_weight_alone(tmp_path: Path) -> None:
    """Batches name elements, and shards of a checkpoint split where they will: a half is no fault there."""
    tensors = {PREFIX + "down_proj_blocks": u8(EXPERTS, HIDDEN, INNER // 32, 16)}
    assert check_batch(staged(tmp_path, body(tensors)), mxfp4(), False).tensors == 1
    one = {PREFIX + "0.w13_weight_scale": u8(2 * INNER)}
    assert check_batch(staged(tmp_path, body(one)), mxfp4(), False).tensors == 1
