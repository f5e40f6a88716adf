"""How kinds of modules are learned and proved, on real layers of vLLM with made-up processing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from schemas.model import Treatment

pytestmark = pytest.mark.vllm

Process = Callable[[Any], object]
Kernel = Callable[[Any, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def made() -> Any:
    from tests.loaders.engine import layers

    return layers


def learned(made: Any, method: Any, **parameters: torch.Tensor) -> Any:
    from loaders.engine.dependents import Assembly
    from loaders.engine.kind import learn

    twin = made.layer(method, **parameters)
    before = dict(vars(twin))
    kind = learn(made.workshop(), Assembly(twin))
    assert vars(twin) == before and twin.weight.is_meta
    return kind


def read(name: str) -> Kernel:
    return lambda layer, x: x @ getattr(layer, name)


def pad_and_turn(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.nn.functional.pad(layer.weight.t(), (0, 3)), requires_grad=False)


def keep_closure(layer: Any) -> None:
    copy = layer.weight.t().clone()
    layer.run = lambda x: x @ copy


def sum_rows(layer: Any) -> None:
    layer.sums = layer.weight.sum(1)


def round_away(layer: Any) -> None:
    layer.low = layer.weight.t().to(torch.bfloat16).contiguous()


def double(layer: Any) -> None:
    layer.twice = layer.weight.t() * 2
    layer.weight = None


def need_numbers(layer: Any) -> None:
    if not bool((layer.weight.abs() > 1e-3).any()):
        raise RuntimeError("these are no weights")
    layer.turned = layer.weight.flip(0).t().contiguous()
    layer.weight = None


def count_positive(layer: Any) -> None:
    layer.found = layer.weight[layer.weight > 0]


def gather_all(layer: Any) -> None:
    torch.ops.vllm.all_reduce(layer.weight, "tp:0")


def shake(layer: Any) -> None:
    layer.noise = torch.rand(3)


def fail(layer: Any) -> None:
    raise AssertionError("only for eight experts")


DIRECT: dict[str, tuple[Process, Kernel, list[str]]] = {
    "left alone": (lambda layer: None, lambda layer, x: x @ layer.weight.t(), ["weight"]),
    "turned and padded": (pad_and_turn, lambda layer, x: (x @ layer.weight)[:, :4], ["weight"]),
    "kept twice": (
        lambda layer: setattr(layer, "copy", layer.weight.clone()),
        lambda layer, x: x @ layer.copy.t(),
        ["weight", "copy"],
    ),
    "kept in a closure": (keep_closure, lambda layer, x: layer.run(x), ["weight", "run.copy"]),
}


@pytest.mark.parametrize("case", DIRECT)
def test_what_is_moved_is_direct(made: Any, case: str) -> None:
    """Elements that stand somewhere as they are, be it in a copy that the kernel reads, are patched there."""
    process, kernel, paths = DIRECT[case]
    kind = learned(made, made.Method(process, kernel))
    assert kind.parameters["weight"].treatment is Treatment.DIRECT
    assert [spot.path for spot in kind.parameters["weight"].spots] == paths
    assert kind.derived == () and set(kind.tensors) == set(paths)


REBUILT: dict[str, tuple[Process, Kernel, tuple[str, ...]]] = {
    "sums": (sum_rows, lambda layer, x: x @ layer.weight.t() + layer.sums, ("sums",)),
    "a rounded copy that the kernel reads": (round_away, lambda layer, x: x.bfloat16() @ layer.low, ("low",)),
    "doubled": (double, read("twice"), ("twice",)),
    "codes refused": (need_numbers, read("turned"), ("turned",)),
}


@pytest.mark.parametrize("case", REBUILT)
def test_what_is_computed_is_rebuilt(made: Any, case: str) -> None:
    """Tensors that are no rearrangement of the weight are made anew, and the kind says which."""
    process, kernel, derived = REBUILT[case]
    kind = learned(made, made.Method(process, kernel))
    assert kind.parameters["weight"].treatment is Treatment.REBUILT
    assert kind.derived == derived


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_negative_weights_of_a_byte_are_proved_too(made: Any, dtype: torch.dtype) -> None:
    """Processing that changes only negative ones does not look as if it changed none."""

    def process(layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.float().clamp(min=0).to(dtype), requires_grad=False)

    method = made.Method(process, lambda layer, x: x @ layer.weight.float().t())
    kind = learned(made, method, weight=torch.empty(4, 6, dtype=dtype, device="meta"))
    assert kind.parameters["weight"].treatment is Treatment.REBUILT


ODD: dict[str, tuple[torch.dtype, Process]] = {
    "tiny scales": (torch.float32, lambda layer: layer.weight.clamp_(min=-1e30).abs_().clamp_(min=1e-10)),
    "huge ones": (torch.float32, lambda layer: layer.weight.clamp_(max=448.0)),
    "the highest bits of packed ones": (torch.int32, lambda layer: layer.weight.bitwise_and_(0x0FFFFFFF)),
    "one code of a byte": (torch.uint8, lambda layer: layer.weight.masked_fill_(layer.weight == 0x7F, 0)),
    "packed ones of four bits": (
        torch.int32,
        lambda layer: layer.weight.copy_(layer.weight << 28 | (layer.weight >> 4) & 0x0FFFFFFF),
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_changed_in_few_values_is_not_direct(made: Any, case: str) -> None:
    """Processing that leaves ordinary values alone, and others not, is seen to: on any bits."""
    dtype, change = ODD[case]

    method = made.Method(change, lambda layer, x: layer.weight.to(torch.float64).sum(0))
    kind = learned(made, method, weight=torch.empty(64, 64, dtype=dtype, device="meta"))
    assert kind.parameters["weight"].treatment is Treatment.REBUILT


def test_the_same_bits_under_another_dtype_are_direct(made: Any) -> None:
    """Exponents that the checkpoint has as bytes are those that the kernel takes for scales."""

    def process(layer: Any) -> None:
        turned = layer.weight.data.t().contiguous().view(torch.float8_e8m0fnu)
        layer.weight = nn.Parameter(turned, requires_grad=False)

    method = made.Method(process, lambda layer, x: layer.weight.float().sum(1))
    kind = learned(made, method, weight=torch.empty(4, 6, dtype=torch.uint8, device="meta"))
    assert kind.parameters["weight"].treatment is Treatment.DIRECT


def hide(layer: Any) -> None:
    layer.below = nn.Module()
    layer.below.copy = layer.weight.t().clone()


def drop(layer: Any) -> None:
    layer.weight = None


def test_what_is_kept_and_not_read_is_direct(made: Any) -> None:
    """A tensor that no kernel reads, as the shape beside a packed weight, is updated like any other."""
    kind = learned(made, made.Method(lambda layer: None, lambda layer, x: x * 2))
    assert kind.parameters["weight"].treatment is Treatment.DIRECT


REFUSED: dict[str, tuple[Process, Kernel, str]] = {
    "a copy that cannot be reached": (hide, lambda layer, x: x @ layer.below.copy, "does not equal"),
    "neither kept nor read": (drop, lambda layer, x: x * 2, "does not change the probe's output"),
    "random": (shake, lambda layer, x: x @ layer.weight.t() + layer.noise.sum(), "does not equal"),
    "collective": (gather_all, lambda layer, x: x @ layer.weight.t(), "needs all ranks at once"),
    "as many as are positive": (
        count_positive,
        lambda layer, x: x @ layer.weight.t(),
        "could not be learned",
    ),
    "raises": (fail, lambda layer, x: x @ layer.weight.t(), "only for eight experts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_proved_is_unsupported(made: Any, case: str) -> None:
    """Whatever processing does, learning ends, and says why it came to nothing."""
    process, kernel, reason = REFUSED[case]
    kind = learned(made, made.Method(process, kernel))
    assert kind.parameters["weight"].treatment is Treatment.UNSUPPORTED
    assert reason in kind.parameters["weight"].reason


def test_one_parameter_of_two(made: Any) -> None:
    """A layer may be changed in part: its bias where it is, its weight not, as it cannot be reached."""
    method = made.Method(hide, lambda layer, x: x @ layer.below.copy + layer.bias)
    kind = learned(made, method, bias=torch.empty(4, device="meta"))
    assert {name: one.treatment for name, one in kind.parameters.items()} == {
        "weight": Treatment.UNSUPPORTED,
        "bias": Treatment.DIRECT,
    }


def test_an_unquantised_layer_of_vllm(made: Any) -> None:
    """vLLM's own float32 linear runs from a handle and gives its weight up: rebuilt, but for the bias."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    kind = learned(made, UnquantizedLinearMethod(), bias=torch.empty(4, device="meta"))
    assert kind.parameters["bias"].treatment is Treatment.DIRECT
    assert kind.parameters["weight"].treatment is Treatment.REBUILT
    assert kind.handles and set(kind.tensors) == {"bias"}


def test_scales_that_a_kernel_reads_by_pointer_are_rebuilt(made: Any) -> None:
    """Once a handle was exchanged it reads its own scales, so those beside it are not written alone."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        Int8ScaledMMLinearLayerConfig,
    )

    names = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")

    def process(layer: Any) -> None:
        layer.logical_widths, layer.input_zero_point, layer.azp_adj = [4], None, None
        layer.kernel = CPUInt8ScaledMMLinearKernel(Int8ScaledMMLinearLayerConfig(True, True, True), names)
        layer.kernel.process_weights_after_loading(layer)

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kind = learned(
        made,
        made.Method(process, lambda layer, x: layer.kernel.apply_weights(layer, x)),
        weight=meta(4, 6, dtype=torch.int8),
        weight_scale=meta(4, 1),
        input_scale=meta(1),
    )
    assert {name: one.treatment for name, one in kind.parameters.items()} == {
        "weight": Treatment.REBUILT,
        "weight_scale": Treatment.REBUILT,
        "input_scale": Treatment.DIRECT,
    }


def test_computing_operations_of_vllm_are_no_collectives(made: Any) -> None:
    """Only what waits for other ranks is refused, not all that vLLM has registered."""
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define("graft_double(Tensor x) -> Tensor")
    library.impl("graft_double", lambda x: x * 2, "CPU")

    def process(layer: Any) -> None:
        layer.twice = torch.ops.vllm.graft_double(layer.weight.t())

    kind = learned(made, made.Method(process, read("twice")))
    assert kind.parameters["weight"].treatment is Treatment.REBUILT


def test_a_module_without_a_method_is_as_it_is(made: Any) -> None:
    """Where nothing processes, every parameter is where it was loaded."""
    from loaders.engine.dependents import Assembly
    from loaders.engine.kind import learn

    norm = nn.LayerNorm(3, device="meta")
    kind = learn(made.workshop(), Assembly(norm))
    assert {one.treatment for one in kind.parameters.values()} == {Treatment.DIRECT}
    assert kind.sharing == {("weight",), ("bias",)}


def test_a_module_of_an_unknown_class_is_unsupported(made: Any) -> None:
    """What nobody knows how to run cannot be proved."""
    from loaders.engine.dependents import Assembly
    from loaders.engine.kind import learn

    module = nn.Linear(2, 2, device="meta")
    module.quant_method = made.Method()
    kind = learn(made.workshop(), Assembly(module))
    assert "no probe is known for Linear" in kind.parameters["weight"].reason


def test_equal_kinds_have_equal_signatures(made: Any) -> None:
    """Names do not count; shapes, dtypes, members of the method and dependents do."""
    from loaders.engine.dependents import Assembly
    from loaders.engine.kind import signature

    first, second, third = (made.layer(made.Method()) for _ in range(3))
    first.prefix, second.prefix, third.quant_method.group_size = "a", "b", 32
    assert signature(Assembly(first)) == signature(Assembly(second)) != signature(Assembly(third))
    with_bias = made.layer(made.Method(), bias=torch.empty(4, device="meta"))
    assert signature(Assembly(first)) != signature(Assembly(with_bias))
    attended = Assembly(first, (("attention", made.Attention(first)),))
    assert signature(attended) != signature(Assembly(first))
