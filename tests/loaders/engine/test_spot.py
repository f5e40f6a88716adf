"""Learned spots: any fixed permutation with padding per expert, and nothing else."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.engine.spot import Spot, identity, learn_spots

DTYPES = {
    1: [torch.uint8, torch.int8, torch.float8_e4m3fn],
    2: [torch.bfloat16, torch.float16],
    4: [torch.float32],
    8: [torch.float64],
}
Tensors = dict[str, torch.Tensor]


class Packing:
    """Parameters of mixed dtypes with an expert dimension, packed by dtype and permuted with padding."""

    def __init__(self, draw: Any, sizes: tuple[int, ...] = (1, 2, 4)) -> None:
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        inner = draw(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(sizes)), min_size=1, max_size=4))
        for number, (extent, size) in enumerate(inner):
            self.shapes[f"p{number}"] = ((2, extent), draw(st.sampled_from(DTYPES[size])))
        self.tables: dict[int, torch.Tensor] = {}
        for size in {dtype.itemsize for _, dtype in self.shapes.values()}:
            block = sum(shape[1] for shape, dtype in self.shapes.values() if dtype.itemsize == size)
            self.tables[size] = torch.tensor(draw(st.permutations(range(block + draw(st.integers(0, 4))))))

    def process(self, parameters: Tensors) -> Tensors:
        out = {}
        for size, table in self.tables.items():
            same = [p for p in parameters.values() if p.element_size() == size]
            experts = same[0].shape[0]
            words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
            joined = torch.cat([p.view(words) for p in same], dim=1)
            padded = torch.zeros(experts, table.numel(), dtype=words)
            padded[:, table[: joined.shape[1]]] = joined
            out[f"packed{size}"] = padded.view(same[0].dtype).reshape(-1, table.numel())
        return out


@settings(deadline=None)
@given(st.data())
def test_learned_on_two_experts_right_for_five(data: st.DataObject) -> None:
    """What is learned from two experts gives what processing five random ones gives, bit for bit."""
    packing = Packing(data.draw)
    spots = learn_spots(packing.shapes, 2, packing.process)
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    values = {}
    for name, (shape, dtype) in packing.shapes.items():
        raw = torch.randint(0, 256, (5, shape[1] * dtype.itemsize), generator=seed, dtype=torch.uint8)
        values[name] = raw.view(dtype)
    expected = packing.process(values)
    found = {path: torch.zeros_like(tensor).view(-1) for path, tensor in expected.items()}
    for name, value in values.items():
        (spot,) = spots[name]
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[value.element_size()]
        elements = torch.arange(value.numel())
        found[spot.path].view(words)[spot.positions(elements)] = value.reshape(-1).view(words)
    for path, tensor in expected.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), found[path].view(torch.uint8))


def test_eight_byte_parameters() -> None:
    """Codes fit into 64-bit elements too."""
    shapes = {"p": ((2, 3), torch.float64), "q": ((2, 2), torch.bfloat16)}
    spots = learn_spots(shapes, 2, lambda p: {"p": p["p"].flip(1).contiguous(), "q": p["q"]})
    assert spots["p"][0].positions(torch.arange(6)).tolist() == [2, 1, 0, 5, 4, 3]
    assert spots["q"][0].is_identity
    only = learn_spots({"p": ((4,), torch.int64)}, 1, lambda p: {"r": p["p"].flip(0).contiguous()})
    assert only["p"][0].positions(torch.arange(4)).tolist() == [3, 2, 1, 0]


def test_more_elements_than_two_bytes_can_count() -> None:
    """70000 bf16 elements get codes of 17 bits, carried in two passes."""
    shapes = {"p": ((70000,), torch.bfloat16)}
    (spot,) = learn_spots(shapes, 1, lambda p: {"r": p["p"].flip(0).contiguous()})["p"]
    assert spot.positions(torch.tensor([0, 69999])).tolist() == [69999, 0]


def test_several_places_and_none() -> None:
    """A parameter may stand in two runtime tensors or in none; tails of padding do not hide an identity."""

    def process(p: Tensors) -> Tensors:
        return {"a": p["p"], "b": torch.nn.functional.pad(p["p"], (0, 3)), "c": torch.zeros(5)}

    spots = learn_spots({"p": ((4,), torch.float32), "q": ((2,), torch.float32)}, 1, process)
    assert [spot.path for spot in spots["p"]] == ["a", "b"]
    assert [spot.is_identity for spot in spots["p"]] == [True, False]
    assert all(spot.positions(torch.arange(4)).tolist() == [0, 1, 2, 3] for spot in spots["p"])
    assert spots["q"] == []


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (lambda p: p[:, :2].contiguous(), "holds 4 of 6"),
        (lambda p: torch.cat([p, p], 1), "holds 12 of 6"),
        (lambda p: torch.cat([p[:, :1], p[:, :1], p[:, 2:]], 1), "twice"),
        (lambda p: torch.stack([p[0], p[1].flip(0)]), "differently"),
        (lambda p: p.t().contiguous(), "differently"),
        (lambda p: torch.cat([torch.zeros(1), p.reshape(-1)]), "not made of 2 blocks"),
    ],
)
def test_what_is_no_injection_per_expert(process: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """Dropped, doubled, replaced and expert-dependent elements have no spots, and the log says why."""
    caplog.set_level(logging.DEBUG, "loaders.engine.spot")
    spots = learn_spots({"p": ((2, 3), torch.float32)}, 2, lambda p: {"r": process(p["p"])})
    assert spots == {"p": []}
    assert reason in caplog.text


def test_words_of_another_size_hold_no_elements() -> None:
    """Numbers in a tensor of wider elements that look like codes do not hide where a parameter stands."""

    def process(p: Tensors) -> Tensors:
        counted = torch.arange(40, dtype=torch.int32)
        return {"turned": p["p"].flip(0).contiguous(), "counted": counted}

    (spot,) = learn_spots({"p": ((30,), torch.uint8)}, 1, process)["p"]
    assert spot.path == "turned" and spot.positions(torch.tensor([0, 29])).tolist() == [29, 0]


def test_combined_elements_leave_no_spot() -> None:
    """Sums and scaled values are not taken for moved ones."""
    spots = learn_spots({"p": ((64,), torch.float32)}, 1, lambda p: {"r": p["p"] * 2 + 1})
    assert spots["p"] == []


def test_identity_of_nothing_and_of_wide_positions() -> None:
    """Empty parameters and positions past 32 bits."""
    assert identity("x", 0).positions(torch.empty(0, dtype=torch.int64)).numel() == 0
    spot = Spot("x", 3, 5, torch.tensor([4, 0, 2], dtype=torch.int32))
    far = 3 * 2**31
    assert spot.positions(torch.tensor([far, far + 1, far + 2])).tolist() == [
        5 * 2**31 + i for i in (4, 0, 2)
    ]
