"""The state of a module: what its kernels may read, by path, and how it lies in memory."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytestmark = pytest.mark.vllm

_SIZES = st.lists(st.integers(0, 4), max_size=4)


@given(sizes=_SIZES, data=st.data())
def test_spans_of_any_strides(sizes: list[int], data: st.DataObject) -> None:
    """A span is the memory from first to last element; dense is when each place of it is one element."""
    from loaders.engine.state import is_dense, span

    strides = data.draw(st.lists(st.integers(0, 12), min_size=len(sizes), max_size=len(sizes)))
    tensor = torch.arange(200).as_strided(sizes, strides, 3)
    places = sorted((tensor - 3).flatten().tolist())
    flat = span(tensor)
    assert flat.is_contiguous() and flat.numel() == (places[-1] + 1 if places else 0)
    if places:
        assert flat.data_ptr() == tensor.data_ptr()
        assert torch.equal(flat.as_strided(sizes, strides, tensor.storage_offset()), tensor)
    assert is_dense(tensor) is (places == list(range(len(places))))


@given(order=st.permutations(range(3)), sizes=st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_permuted_tensors_are_dense(order: list[int], sizes: list[int]) -> None:
    """In whatever order the dimensions stand in memory, a write to the span reaches the tensor."""
    from loaders.engine.state import is_dense, span

    tensor = torch.zeros(sizes).permute(order)
    assert is_dense(tensor) and not is_dense(tensor.unsqueeze(0).expand(2, *tensor.shape))
    span(tensor).fill_(1)
    assert bool((tensor == 1).all())


def test_what_shares_memory_is_told() -> None:
    """Views of one storage are one group, however they overlap."""
    from loaders.engine.state import ModuleState

    both = torch.zeros(6)
    state = ModuleState({"a": both[:3], "b": both[3:], "c": torch.zeros(3)})
    assert state.sharing() == {("a", "b"), ("c",)}


def test_everything_that_is_reached() -> None:
    """Parameters, buffers, attributes, containers, closures, defaults, partials, own objects; each once."""
    from loaders.engine.state import collect

    def kernel(x: Any, default: torch.Tensor = torch.ones(8)) -> Any:  # noqa: B008 - as kernels keep them
        return x + enclosed

    enclosed = torch.ones(5)
    own: Any = type("Own", (), {"__module__": "vllm.made_up"})()
    own.packed = torch.ones(6)
    module: Any = nn.Module()
    module.weight = nn.Parameter(torch.ones(1))
    module.register_buffer("scale", torch.ones(2))
    module.hidden = torch.ones(3)
    module.table = {"key": [torch.ones(4)]}
    module.kernel = kernel
    module.own = own
    module.later = functools.partial(len, torch.ones(7))
    module.again = own.packed
    module.nothing = torch.empty(0)
    module.kv_cache = torch.ones(9)
    module.child = nn.Linear(2, 2)
    assert list(collect(module).tensors) == [
        *("weight", "scale", "hidden", "table.key.0", "kernel.enclosed", "kernel.default0"),
        *("own.packed", "later.args.0"),
    ]
