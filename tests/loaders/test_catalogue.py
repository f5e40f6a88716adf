"""Names of tensors and experts, in every spelling, for every style of checkpoint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaders.catalogue import Catalogue, Place
from loaders.names import STREAMING, Nearest, canonical, parse_expert
from schemas.dtypes import Dtype
from schemas.problems import Code, ProblemError
from tests.loaders.models import HIDDEN, INTER, catalogue, gpt_oss, mixtral, qwen3, tensor


def upload_names(model: Catalogue, layer: int, expert: int) -> list[str]:
    """What an upload of that expert must hold."""
    return [slot.upload.name for slot in model.experts(layer, expert).slots]


def test_stacked_expert() -> None:
    """A gpt-oss expert is the slice of each stack, under the last part of its name."""
    layout = gpt_oss().experts(1, 2)
    assert [(slot.upload.name, slot.upload.shape) for slot in layout.slots] == [
        ("down_proj", (INTER, HIDDEN)),
        ("down_proj_bias", (HIDDEN,)),
        ("gate_up_proj", (HIDDEN, 2 * INTER)),
        ("gate_up_proj_bias", (2 * INTER,)),
    ]
    assert {slot.place.expert for slot in layout.slots} == {2}
    assert layout.slots[0].place.tensor.name == "model.layers.1.mlp.experts.down_proj"
    assert layout.slots[0].place.shape == (INTER, HIDDEN)


def test_single_experts() -> None:
    """Mixtral and Qwen3-MoE experts are their own tensors, named by what follows the expert's number."""
    assert upload_names(mixtral(), 0, 3) == ["w1.weight", "w2.weight", "w3.weight"]
    assert upload_names(qwen3(), 1, 0) == ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]
    slot = mixtral().experts(1, 3).slots[1]
    assert slot.place == Place(
        tensor("model.layers.1.block_sparse_moe.experts.3.w2.weight", HIDDEN, INTER), None
    )


def test_granite_experts() -> None:
    """Granite stacks experts under names that do not say so; those of its dense layers are no stacks."""
    prefix = "model.layers.0.block_sparse_moe."
    model = catalogue(
        tensor(prefix + "input_linear.weight", 3, 2 * INTER, HIDDEN),
        tensor(prefix + "output_linear.weight", 3, HIDDEN, INTER),
        tensor(prefix + "router.layer.weight", 3, HIDDEN),
        tensor("model.layers.0.shared_mlp.input_linear.weight", 3, HIDDEN),
        tensor("model.layers.1.block_sparse_moe.input_linear.weight", 2 * INTER, HIDDEN),
        experts=3,
    )
    slots = model.experts(0, 2).slots
    assert [(slot.upload.name, slot.upload.shape) for slot in slots] == [
        ("input_linear.weight", (2 * INTER, HIDDEN)),
        ("output_linear.weight", (HIDDEN, INTER)),
    ]
    assert {slot.place.expert for slot in slots} == {2}
    assert model.expert_layers == (0,)
    for alias in ("input_linear.weight", prefix + "input_linear.weight"):
        assert model.experts(0, 2).find(alias) == slots[0]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("w13_weight", "gate_up_proj"),
        ("w13_bias", "gate_up_proj_bias"),
        ("w2_weight", "down_proj"),
        ("w2_bias", "down_proj_bias"),
        ("model.layers.1.mlp.experts.gate_up_proj", "gate_up_proj"),
        ("model.layers.1.mlp.experts.2.w13_weight", "gate_up_proj"),
        ("model.layers.1.mlp.experts.2.w2_bias", "down_proj_bias"),
        ("model.layers.1.mlp.experts.2.down_proj", "down_proj"),
        ("model.layers.1.mlp.experts.routed_experts.down_proj_bias", "down_proj_bias"),
        ("model.layers.1.mlp.experts.routed_experts.2.w2_bias", "down_proj_bias"),
        ("model.layers.1.mlp.experts.base_layer.gate_up_proj", "gate_up_proj"),
    ],
)
def test_s3_names_of_a_stacked_expert(alias: str, name: str) -> None:
    """Full names, streaming names and those with inserted parts mean the same slice."""
    found = gpt_oss().experts(1, 2).find(alias)
    assert found is not None
    assert (found.upload.name, found.place.expert) == (name, 2)


@pytest.mark.parametrize(
    "alias",
    [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.1.w13_weight",
        "gate_up_proj ",
        "gate_up",
        "w1.weight",
        "",
    ],
)
def test_other_names_are_no_aliases(alias: str) -> None:
    """Another layer's or expert's full name, or a name that is only similar, is not taken."""
    assert gpt_oss().experts(1, 2).find(alias) is None


def test_quantised_streaming_names() -> None:
    """Packed stacks have their streaming names too."""
    prefix = "model.layers.0.mlp.experts."
    model = catalogue(
        tensor(prefix + "gate_up_proj_blocks", 2, 8, 1, 16, dtype=Dtype.U8),
        tensor(prefix + "gate_up_proj_scales", 2, 8, 1, dtype=Dtype.U8),
        experts=2,
    )
    layout = model.experts(0, 1)
    for name in ("w13_weight_packed", "w13_weight", "w13_weight_scale"):
        assert layout.find(name) is not None
    assert {name for names in STREAMING.values() for name in names} >= {
        *("w13_weight", "w2_weight", "w13_bias", "w2_bias"),
        *("w13_weight_scale", "w2_weight_scale", "w13_weight_packed", "w2_weight_packed"),
    }


@pytest.mark.parametrize("part", ["weight", "weight_scale", "input_scale", "bias"])
@pytest.mark.parametrize(("matrix", "short"), [("gate_up_proj", "w13"), ("down_proj", "w2")])
def test_s3_streaming_names_of_quarks_experts(matrix: str, short: str, part: str) -> None:
    """Where each expert has tensors of its own, streaming names, short and in full, are that expert's."""
    prefix = "model.layers.0.mlp.experts."
    model = catalogue(*(tensor(f"{prefix}{n}.{matrix}.{part}", 4) for n in range(2)), experts=2)
    for stack in (prefix, f"{prefix}routed_experts."):
        for name in (f"{stack}1.{matrix}.{part}", f"{stack}1.{short}_{part}"):
            place = model.place(name)
            assert place is not None and place.expert is None
            assert place.tensor.name == f"{prefix}1.{matrix}.{part}"
            slot = model.experts(0, 1).find(name)
            assert slot is not None and slot.place == place
            assert model.experts(0, 0).find(name) is None
    assert model.experts(0, 1).find(f"{short}_{part}") is not None
    assert model.place(f"{prefix}{short}_{part}") is None
    assert model.place(f"{prefix}2.{short}_{part}") is None


@pytest.mark.parametrize(
    ("model", "layer", "expert"),
    [
        (gpt_oss(), 2, 0),
        (gpt_oss(), -1, 0),
        (gpt_oss(), 0, 3),
        (gpt_oss(), 0, -1),
        (mixtral(), 0, 4),
        (qwen3(), 0, 0),
        (catalogue(tensor("model.layers.0.mlp.gate_proj.weight", 2)), 0, 0),
    ],
)
def test_unknown_expert(model: Catalogue, layer: int, expert: int) -> None:
    """A layer without experts, a number out of range and a dense model are told apart from a wrong body."""
    with pytest.raises(ProblemError) as refusal:
        model.experts(layer, expert)
    assert refusal.value.code is Code.UNKNOWN_EXPERT
    assert refusal.value.problem().status == 404


def test_stack_of_another_size_is_no_expert() -> None:
    """A tensor below `experts` whose first dimension is not the number of experts is not sliced."""
    model = catalogue(
        tensor("model.layers.0.mlp.experts.down_proj", 3, 2),
        tensor("model.layers.0.mlp.experts.scale", 5),
        tensor("model.layers.0.mlp.experts.scalar"),
        experts=3,
    )
    assert upload_names(model, 0, 0) == ["down_proj"]


def test_draft_layers_do_not_mix_in() -> None:
    """Layers of a draft model that count from 0 again do not add to the main model's experts."""
    model = catalogue(
        tensor("mtp.layers.0.mlp.experts.down_proj", 3, 2),
        tensor("model.layers.0.mlp.experts.down_proj", 3, 2),
        experts=3,
    )
    slots = model.experts(0, 0).slots
    assert [slot.place.tensor.name for slot in slots] == ["model.layers.0.mlp.experts.down_proj"]


def test_expert_layers() -> None:
    """Layers with experts are known by number."""
    assert qwen3().expert_layers == (1,)
    assert gpt_oss().expert_layers == (0, 1)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.down_proj_bias",
        "model.layers.0.mlp.experts.routed_experts.down_proj_bias",
        "model.layers.0.mlp.experts.base_layer.down_proj_bias",
        "model.layers.0.mlp.experts.base_layer.routed_experts.down_proj_bias",
    ],
)
def test_s3_old_and_new_names_resolve(name: str) -> None:
    """Names from before and after vLLM's refactor, and those of wrapped layers, are one tensor."""
    assert gpt_oss().resolve(name).name == "model.layers.0.mlp.experts.down_proj_bias"


def test_s3_a_checkpoint_with_new_names() -> None:
    """A checkpoint that has the inserted part itself resolves both spellings."""
    name = "model.layers.0.mlp.experts.routed_experts.w2_bias"
    model = catalogue(tensor(name, 3, 2), experts=3)
    assert model.resolve("model.layers.0.mlp.experts.w2_bias").name == name
    assert model.resolve(name).name == name
    assert model.experts(0, 1).find("w2_bias") is not None


def test_s3_streaming_names_are_places() -> None:
    """A streaming key is one expert's slice, without a number the stack; nothing else is either."""
    model = gpt_oss()
    stack = model.resolve("model.layers.0.mlp.experts.gate_up_proj")
    for inserted in ("", "routed_experts.", "base_layer.", "base_layer.routed_experts."):
        prefix = f"model.layers.0.mlp.experts.{inserted}"
        assert model.place(prefix + "2.w13_weight") == model.place(prefix + "2.gate_up_proj")
        assert model.place(prefix + "2.w13_weight") == Place(stack, 2)
        assert model.place(prefix + "w13_weight") == model.place(prefix + "gate_up_proj") == Place(stack)
    for wrong in (
        *("0.mlp.experts.3.w13_weight", "0.moe.experts.2.w13_weight", "0.mlp.experts.2.w1_weight"),
        *("2.mlp.experts.w13_weight", "0.moe.experts.w13_weight", "0.mlp.experts.w1_weight"),
    ):
        assert model.place("model.layers." + wrong) is None


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("language_model.model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("model.layers.0.self_attn.q_prj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("model.layers.0.self_atn.sinks", "model.layers.0.self_attn.sinks"),
        ("model.norm.weight ", "model.norm.weight"),
        ("Model.norm.weight", "model.norm.weight"),
        ("model.layers.7.mlp.router.weight", "model.layers.0.mlp.router.weight"),
    ],
)
def test_nearest_names(wrong: str, right: str) -> None:
    """An unknown name is refused, and the one that was meant is among the nearest."""
    with pytest.raises(ProblemError) as refusal:
        gpt_oss().resolve(wrong)
    assert refusal.value.code is Code.UNKNOWN_TENSOR
    [fault] = refusal.value.members["errors"]
    assert fault["name"] == wrong
    assert right in fault["nearest"]


def test_refusals_stay_small() -> None:
    """Thousands of unknown, long names give a short answer with their number."""
    refusal = gpt_oss().unknown([f"{n}" * 900 for n in range(3000)])
    assert refusal.members["count"] == 3000
    assert len(refusal.problem().model_dump_json()) < 50_000


def test_tensors_by_page() -> None:
    """Names come sorted, by prefix, and go on after the last one of a page."""
    model = gpt_oss()
    names = [one.name for one in model.tensors()]
    assert names == sorted(names)
    assert len(names) == 17
    layer = [one.name for one in model.tensors("model.layers.1.")]
    assert layer == [name for name in names if name.startswith("model.layers.1.")]
    assert [one.name for one in model.tensors("model.layers.1.", after=layer[2])] == layer[3:]
    assert model.tensors("model.layers.1.", after=layer[-1]) == []
    assert model.tensors("x") == []
    assert model.tensors(after="zzz") == []


_PARTS = st.lists(
    st.sampled_from(["model", "layers", "0", "1", "7", "mlp", "experts", "down_proj", "w1", "weight", ""]),
    max_size=9,
)


@given(parts=_PARTS)
def test_any_name_is_looked_up(parts: list[str]) -> None:
    """Every name, however odd, is found or not; nothing else happens, and what is found has that spelling."""
    name = ".".join(parts)
    for model in (gpt_oss(), mixtral()):
        place = model.place(name)
        if place is not None and place.expert is None:
            assert place.tensor.name == canonical(name)
        found = parse_expert(canonical(name))
        if found is not None:
            middle = [] if found.expert is None else [str(found.expert)]
            assert ".".join([found.group, *middle, found.last]) == canonical(name)


@given(parts=_PARTS, inserted=st.sampled_from(["routed_experts", "base_layer"]), data=st.data())
def test_s3_inserted_parts_change_nothing(parts: list[str], inserted: str, data: st.DataObject) -> None:
    """Wherever vLLM inserts its parts, the name resolves as without them."""
    at = data.draw(st.integers(0, len(parts)))
    longer = [*parts[:at], inserted, *parts[at:]]
    assert mixtral().find(".".join(longer)) == mixtral().find(".".join(parts))


@given(known=st.lists(st.text(max_size=30), max_size=60), name=st.text(max_size=300))
def test_nearest_are_known(known: list[str], name: str) -> None:
    """At most three names come back, each a known one, whatever is asked."""
    nearest = Nearest(known).to(name)
    assert len(nearest) <= 3
    assert set(nearest) <= set(known)
