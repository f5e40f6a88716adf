"""The trace over toy models whose loaders are written as vLLM's are, against really loading them."""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from loaders.engine.checkpoint import TORCH_DTYPE, BaseTensor, Checkpoint
from loaders.engine.trace import Traced, trace
from schemas.dtypes import Dtype

Weights = Iterable[tuple[str, torch.Tensor]]


class Toy(nn.Module):
    """A model of bare parameters whose loader is a function of it and the weights."""

    def __init__(self, loader: Callable[["Toy", Weights], None], device: str, **shapes: Any) -> None:
        super().__init__()
        self.loader = loader
        for name, shape in shapes.items():
            value = shape() if callable(shape) else torch.zeros(shape, device=device, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self.register_buffer("aside", torch.zeros(4, device=device))

    def load_weights(self, weights: Weights) -> None:
        self.loader(self, weights)


class Unread(Checkpoint):
    """A checkpoint whose scalars are zero."""

    def read(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        return torch.zeros(tensor.numel, dtype=TORCH_DTYPE[tensor.dtype])


def base(name: str, shape: tuple[int, ...], dtype: Dtype = Dtype.F32) -> BaseTensor:
    return BaseTensor(name, dtype, shape, Path("unread"), 0)


def traced(
    loader: Callable[[Toy, Weights], None], tensors: dict[str, tuple[int, ...]], **shapes: Any
) -> Traced:
    found = trace(Toy(loader, "meta", **shapes), Unread({n: base(n, shape) for n, shape in tensors.items()}))
    assert set(found.regions) | set(found.refused) == set(tensors)
    assert not set(found.regions) & set(found.refused)
    return found


def check_against_loading(
    loader: Callable[[Toy, Weights], None], tensors: dict[str, tuple[int, ...]], **shapes: Any
) -> Traced:
    """Trace, load a real model with distinct numbers, and find each where its region says."""
    found = traced(loader, tensors, **shapes)
    assert not found.refused
    real = Toy(loader, "cpu", **shapes)
    values, count = {}, 0
    for name, shape in tensors.items():
        numel = int(torch.Size(shape).numel())
        values[name] = torch.arange(count + 1, count + 1 + numel, dtype=torch.float32).reshape(shape)
        count += numel
    real.load_weights((name, value.clone()) for name, value in values.items())
    expected = {name: torch.zeros_like(p).reshape(-1) for name, p in real.named_parameters()}
    for regions in found.regions.values():
        for region in regions:
            there = region.map.dst.view(expected[region.parameter])
            there.copy_(region.map.src.view(values[region.tensor].reshape(-1)))
    for name, parameter in real.named_parameters():
        assert torch.equal(parameter.reshape(-1), expected[name]), name
    return found


# -- ways that are followed ------------------------------------------------------------


def test_stacked_projections() -> None:
    """q, k and v narrowed into one parameter; a bias by slice assignment."""

    def load(toy: Toy, weights: Weights) -> None:
        start = 0
        for name, weight in weights:
            if name == "bias":
                toy.bias[1:4] = weight
            else:
                toy.qkv.data.narrow(0, start, weight.shape[0]).copy_(weight)
                start += weight.shape[0]

    found = check_against_loading(
        load, {"q": (4, 3), "k": (2, 3), "v": (2, 3), "bias": (3,)}, qkv=(8, 3), bias=(5,)
    )
    assert [r.parameter for r in found.regions["k"]] == ["qkv"]


def test_per_expert_transposed_and_interleaved() -> None:
    """One tensor per expert, transposed views, gate and up alternating, a select, chunks."""

    def load(toy: Toy, weights: Weights) -> None:
        for name, weight in weights:
            if name.startswith("gate_up"):
                gate, up = weight.t().contiguous().chunk(2, dim=0)
                toy.w13.data[int(name[-1])][0::2].copy_(gate)
                toy.w13.data[int(name[-1])][1::2].copy_(up)
            else:
                toy.w2[int(name[-1])].data.copy_(weight.t())

    tensors = {f"gate_up{e}": (3, 8) for e in range(3)} | {f"down{e}": (4, 3) for e in range(3)}
    check_against_loading(load, tensors, w13=(3, 8, 3), w2=(3, 3, 4))


def test_whole_stack_permuted() -> None:
    """gpt-oss: the stack of experts permuted, made contiguous, sliced and copied at once."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            part = weight.permute(0, 2, 1).contiguous()[:, 2:6, :]
            toy.w13.copy_(part.clone())

    check_against_loading(load, {"gate_up_proj": (3, 3, 8)}, w13=(3, 4, 3))


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
def test_any_rank_part(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """A part narrowed on every dimension, in any order of dimensions, with or without copies between."""
    narrow = []
    for extent in shape:
        start = data.draw(st.integers(0, extent - 1))
        narrow.append((start, data.draw(st.integers(1, extent - start))))
    order = data.draw(st.permutations(range(len(shape))))
    copies = data.draw(st.lists(st.booleans(), min_size=len(shape) + 1, max_size=len(shape) + 1))

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            for dim, (start, length) in enumerate(narrow):
                weight = weight.narrow(dim, start, length)
                weight = weight.clone() if copies[dim] else weight
            weight = weight.permute(order)
            toy.p.data.copy_(weight.contiguous() if copies[-1] else weight)

    check_against_loading(load, {"w": shape}, p=[narrow[d][1] for d in order])


@pytest.mark.parametrize(
    ("source", "target"), [((), (1,)), ((1,), ()), ((1, 1), (1,)), ((3,), (1, 3)), ((1, 3), (3,))]
)
def test_scalars_and_unit_dimensions(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    """One-element tensors and unit dimensions are no broadcast."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            toy.p.data.copy_(weight.view(target) if len(source) > len(target) else weight)

    check_against_loading(load, {"w": source}, p=target)


def test_padding_filled_beside_and_before() -> None:
    """Padding rows filled after loading, and a parameter zeroed before it, change nothing."""

    def load(toy: Toy, weights: Weights) -> None:
        toy.p.data.zero_()
        for _, weight in weights:
            toy.p[:3].data.copy_(weight)
            toy.p[3:].data.fill_(0)

    check_against_loading(load, {"w": (3, 2)}, p=(5, 2))


def test_one_tensor_in_two_parameters_and_unused_ones() -> None:
    """A tensor may have several places; one that is passed over has none, and is not refused."""

    def load(toy: Toy, weights: Weights) -> None:
        for name, weight in weights:
            if name == "w":
                toy.a.copy_(weight)
                toy.b.copy_(weight)

    found = check_against_loading(load, {"w": (3,), "unused": (2,), "empty": (0, 4)}, a=(3,), b=(3,))
    assert len(found.regions["w"]) == 2
    assert found.regions["unused"] == found.regions["empty"] == ()


def test_copied_twice_is_one_region() -> None:
    """The same copy made twice is one region."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            toy.p.copy_(weight)
            toy.p.copy_(weight)

    assert len(check_against_loading(load, {"w": (3,)}, p=(3,)).regions["w"]) == 1


CASTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[torch.dtype, ...], bool]] = {
    "in the copy": (lambda w: w, (), True),
    "before it, wider": (lambda w: w.to(torch.float64), (torch.float64,), True),
    "before it, to the same": (lambda w: w.to(torch.float32), (), True),
    "before it, narrower": (lambda w: w.float().to(torch.float16), (torch.float32, torch.float16), False),
    "of a part that is copied": (lambda w: w.to(torch.float32).clone(), (), True),
}


@pytest.mark.parametrize("case", CASTS)
def test_casts_are_followed_in_their_order(case: str) -> None:
    """The loader's casts are kept one by one, so that new values round as loaded ones did."""
    change, through, lossless = CASTS[case]

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            toy.p.copy_(change(weight))

    found = trace(Toy(load, "meta", p=(3,)), Unread({"w": base("w", (3,), Dtype.BF16)}))
    (region,) = found.regions["w"]
    assert (region.src_dtype, region.through, region.dst_dtype) == (torch.bfloat16, through, torch.float32)
    assert region.cast and region.lossless is lossless


def test_an_integer_may_become_a_float() -> None:
    """vLLM keeps the shape beside a packed weight as a float; the checkpoint's own cannot be told from it."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            toy.p.copy_(weight)

    found = trace(Toy(load, "meta", p=(3,)), Unread({"w": base("w", (3,), Dtype.I32)}))
    (region,) = found.regions["w"]
    assert region.cast and not region.lossless


def test_a_float_that_becomes_an_integer_is_refused() -> None:
    """What is cut off when it is loaded is no value that somebody would upload."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            toy.p.copy_(weight)

    whole = partial(torch.zeros, 3, dtype=torch.int32, device="meta")
    found = trace(Toy(load, "meta", p=whole), Unread({"w": base("w", (3,), Dtype.F32)}))
    assert found.refused["w"] == "stored as torch.float32, runs as torch.int32"


# -- ways that are refused -------------------------------------------------------------


def _one(change: Callable[[Toy, torch.Tensor], Any]) -> Callable[[Toy, Weights], None]:
    def load(toy: Toy, weights: Weights) -> None:
        for name, weight in weights:
            if name == "w":
                change(toy, weight)
            else:
                toy.q.copy_(weight)

    return load


def _replace(toy: Toy, weight: torch.Tensor) -> None:
    toy.p.data = weight


def _register(toy: Toy, weight: torch.Tensor) -> None:
    toy.p = nn.Parameter(weight, requires_grad=False)


def _in_place(toy: Toy, weight: torch.Tensor) -> None:
    toy.p.copy_(weight.mul_(2))


def _then(toy: Toy, weight: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> None:
    toy.p.copy_(weight)
    change(toy.p)


def _half_zeroed(toy: Toy, weight: torch.Tensor) -> None:
    weight[:2].zero_()
    toy.p.copy_(weight)


def _scratch(toy: Toy, weight: torch.Tensor) -> None:
    aside = torch.empty(4, device="meta")
    aside.copy_(weight)
    toy.p.copy_(aside)


def _kept_aside_too(toy: Toy, weight: torch.Tensor) -> None:
    toy.p.copy_(weight)
    toy.aside.copy_(weight)


def _copied_on(toy: Toy, weight: torch.Tensor) -> None:
    toy.p.copy_(weight)
    toy.r.copy_(toy.p.clone())


REFUSED: dict[str, tuple[Callable[[Toy, torch.Tensor], Any], str]] = {
    "arithmetic": (lambda toy, w: toy.p.copy_(w + 1), "goes through aten::add"),
    "cat": (lambda toy, w: toy.p.copy_(torch.cat([w[2:], w[:2]])), "goes through aten::cat"),
    "index": (lambda toy, w: toy.p.copy_(w[[3, 2, 1, 0]]), "goes through aten::index"),
    "flip": (lambda toy, w: toy.p.copy_(w.flip(0).clone()), "goes through aten::flip"),
    "reinterpreted": (lambda toy, w: toy.p.view(torch.int32).copy_(w.view(torch.int32)), "reinterpreted as"),
    "target reinterpreted": (lambda toy, w: toy.p.view(torch.int32).copy_(w), "not stored in the order"),
    "broadcast": (lambda toy, w: toy.p.copy_(w[:1]), "broadcast"),
    "expanded copy": (lambda toy, w: toy.p.copy_(w[:1].expand(4).clone()), "digits"),
    "expanded target": (lambda toy, w: toy.p[:1].expand(4).copy_(w), "digits"),
    "source changed": (_in_place, "changed by aten::mul_"),
    "source zeroed in part": (_half_zeroed, "changed by aten::zero_"),
    "target added to": (lambda toy, w: toy.p.add_(w), "written"),
    "target scattered": (lambda toy, w: toy.p.index_put_((torch.tensor([0, 1, 2, 3]),), w), "written"),
    "target changed later": (lambda toy, w: _then(toy, w, lambda p: p.mul_(2)), "written"),
    "target filled later": (lambda toy, w: _then(toy, w, lambda p: p[1:2].zero_()), "written over in p"),
    "target copied over": (
        lambda toy, w: _then(toy, w, lambda p: p[1:].copy_(torch.ones(3))),
        "written over in p",
    ),
    "out argument": (lambda toy, w: torch.mul(w, 1, out=toy.p), "written by aten::mul"),
    "list of tensors": (
        lambda toy, w: torch._foreach_copy_([toy.p.data], [w]),
        "written by aten::_foreach_copy_",
    ),
    "parameter replaced": (_replace, "p is replaced"),
    "parameter registered": (_register, "p is replaced"),
    "through a scratch tensor": (_scratch, "kept outside of the parameters"),
    "into a buffer too": (_kept_aside_too, "kept outside of the parameters"),
    "from parameter to parameter": (_copied_on, "read back from p"),
    "raises": (lambda toy, w: w.item(), "the engine's loader refused it"),
    "wrong shape": (lambda toy, w: toy.p.copy_(w[:3]), "the engine's loader refused it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_its_reason(case: str) -> None:
    """What is not followed is refused with what was in the way, and the tensor beside it is traced."""
    change, reason = REFUSED[case]
    found = traced(_one(change), {"w": (4,), "beside": (3,)}, p=(4,), q=(3,), r=(4,))
    assert reason in found.refused["w"]
    assert len(found.regions["beside"]) == 1


def test_two_tensors_in_one_place_are_told() -> None:
    """Tensors loaded over each other, wholly or partly, are followed, and each says with which."""

    def load(toy: Toy, weights: Weights) -> None:
        for name, weight in weights:
            toy.p[2:].copy_(weight) if name == "tail" else toy.p[:3].copy_(weight)

    found = traced(load, {"head": (3,), "tail": (2,)}, p=(4,))
    assert found.shared == {"head": {"tail"}, "tail": {"head"}}
    assert not found.refused


def test_a_tensor_that_shares_elements_with_a_refused_one_is_refused() -> None:
    """Two tensors in one place can only be changed alike, so neither can if one cannot."""

    def load(toy: Toy, weights: Weights) -> None:
        for name, weight in weights:
            if name == "tail":
                toy.p[2:].copy_(weight)
                toy.aside[:2].copy_(weight)
            else:
                toy.p[:3].copy_(weight)

    found = traced(load, {"head": (3,), "tail": (2,)}, p=(4,))
    assert set(found.refused) == {"head", "tail"}
    assert "head and tail share elements of p" in found.refused["head"]


def test_refusal_reaches_all_that_share_elements() -> None:
    """Of three in a row, each sharing with the next, none can be changed if the last cannot."""

    def load(toy: Toy, weights: Weights) -> None:
        for name, weight in weights:
            begin = {"first": 0, "second": 2, "third": 4}[name]
            toy.p[begin : begin + 3].copy_(weight)
            if name == "third":
                toy.aside[:3].copy_(weight)

    found = traced(load, {"first": (3,), "second": (3,), "third": (3,)}, p=(7,))
    assert set(found.refused) == {"first", "second", "third"}
    assert not found.shared


def test_a_tensor_that_meets_itself_is_refused() -> None:
    """Two parts of one tensor in one place: a fresh load hides the first, which a patch would show."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            toy.p.copy_(weight[:3])
            toy.p.copy_(weight[3:])

    found = traced(load, {"w": (6,)}, p=(3,))
    assert found.refused["w"] == "w and w share elements of p"


def test_large_tensors_in_one_place_are_refused() -> None:
    """What would have to be compared element by element is not a scale or a shape."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            toy.p.copy_(weight)

    found = traced(load, {"a": (5000,), "b": (5000,)}, p=(5000,))
    assert set(found.refused) == {"a", "b"}


def test_a_loader_may_look_at_scalars() -> None:
    """A loader that compares a scalar with what is there is followed as when the checkpoint was loaded."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            if toy.scale[0] != 1 and toy.scale[0] != weight:
                raise ValueError("differ")
            toy.scale[0].copy_(weight)

    found = traced(load, {"gate": (), "up": ()}, scale=lambda: torch.ones(2))
    assert found.shared == {"gate": {"up"}, "up": {"gate"}}


def test_mixed_tensors_are_refused_both() -> None:
    """Two tensors that are made into one are both refused."""

    def load(toy: Toy, weights: Weights) -> None:
        parts = [weight for _, weight in weights]
        toy.p.copy_(torch.cat(parts))

    found = traced(load, {"a": (2,), "b": (2,)}, p=(4,))
    assert {name: "aten::cat" in reason for name, reason in found.refused.items()} == {"a": True, "b": True}


def test_only_the_tensor_at_which_the_loader_raises_is_refused() -> None:
    """A loader that raises at two of four tensors is run on without them."""

    def load(toy: Toy, weights: Weights) -> None:
        for name, weight in weights:
            if name.startswith("bad"):
                raise KeyError(name)
            toy.get_parameter(name).copy_(weight)

    found = traced(load, {"a": (2,), "bad1": (2,), "bad2": (2,), "b": (3,)}, a=(2,), b=(3,))
    assert set(found.refused) == {"bad1", "bad2"} and "KeyError: 'bad1'" in found.refused["bad1"]
    assert len(found.regions["a"]) == len(found.regions["b"]) == 1


def test_a_loader_that_raises_at_its_end_is_nobodys_fault() -> None:
    """When all tensors were taken, none of them is blamed alone, and the trace ends."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            toy.p.copy_(weight)
        raise ValueError("weights are missing")

    found = traced(load, {"a": (2,), "b": (2,)}, p=(2,))
    assert set(found.refused) == {"a", "b"} and "weights are missing" in found.refused["a"]


def test_a_loader_that_takes_nothing_and_raises() -> None:
    """Then there is no tensor to blame, and the error goes on."""

    def load(toy: Toy, weights: Weights) -> None:
        raise RuntimeError("no such model")

    with pytest.raises(RuntimeError, match="no such model"):
        trace(Toy(load, "meta"), Unread({"w": base("w", (2,))}))


@pytest.mark.parametrize(
    "parameter",
    [
        lambda: torch.empty(3, 2, device="meta").t(),
        lambda: torch.empty(4, 3, device="meta")[2:],
        lambda: torch.empty(2, 6, device="meta")[:, :3],
    ],
)
def test_parameters_that_are_views_are_refused(parameter: Callable[[], torch.Tensor]) -> None:
    """Positions of a region count the parameter's elements in order, so it must be stored so."""
    found = traced(_one(lambda toy, w: toy.p.copy_(w)), {"w": (2, 3)}, p=parameter)
    assert "not stored in the order" in found.refused["w"]


def test_parameters_that_are_parts_of_one_storage() -> None:
    """A parameter in the storage of another is not taken for that one."""
    both = torch.empty(6, device="meta")

    def load(toy: Toy, weights: Weights) -> None:
        for name, weight in weights:
            toy.get_parameter(name).copy_(weight)

    found = traced(load, {"a": (3,), "b": (3,)}, a=lambda: both[:3], b=lambda: both[3:])
    assert [region.parameter for region in found.regions["a"]] == ["a"]
    assert "b" in found.refused


def test_tied_parameters_have_the_first_name() -> None:
    """A parameter registered twice gets its regions under its first name."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            toy.z.copy_(weight)

    toy = Toy(load, "meta", a=(3,))
    toy.z = toy.a
    (region,) = trace(toy, Unread({"w": base("w", (3,))})).regions["w"]
    assert region.parameter == "a"


def test_sizes_beyond_32_bits() -> None:
    """A tensor of more than 2**31 elements is traced; nothing is allocated for it."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            toy.p.data.narrow(1, 2**20, 2**20).copy_(weight.transpose(0, 1).contiguous().narrow(1, 0, 2**20))

    found = traced(load, {"w": (2**21, 2**13)}, p=(2**13, 2**22))
    (region,) = found.regions["w"]
    corner = torch.tensor([(2**20 - 1) * 2**13 + 2**13 - 1])
    assert region.map.map(corner)[1].tolist() == [(2**13 - 1) * 2**22 + 2**20 + 2**20 - 1]


def test_threads_do_not_see_each_other() -> None:
    """Two traces at once, and ordinary work beside them, are not mixed up."""

    def load(toy: Toy, weights: Weights) -> None:
        for _, weight in weights:
            toy.p.copy_(weight.t().contiguous())
            barrier.wait(10)

    barrier = threading.Barrier(2)
    found: list[Traced] = []

    def run(name: str) -> None:
        found.append(trace(Toy(load, "meta", p=(3, 2)), Unread({name: base(name, (2, 3))})))

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for each in found for name in each.regions) == ["a", "b"]
    assert all(len(regions) == 1 for each in found for regions in each.regions.values())


def test_zeroed_source_is_a_constant() -> None:
    """A source that a loader zeroes whole leaves nothing to write here, and is not refused."""
    found = traced(_one(lambda toy, w: toy.p.copy_(w.zero_())), {"w": (4,), "beside": (3,)}, p=(4,), q=(3,))
    assert found.regions["w"] == () and found.constant == {"w"} and found.refused == {}
