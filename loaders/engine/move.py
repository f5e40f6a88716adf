"""Moves: ready values and the exact runtime elements that they replace."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from loaders.engine.layout import Layout

_PIECE = 1 << 15
"""Single elements that are written at once: torch gives more of them to threads that it has to wake."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → the integers that carry its bits."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers: moves carry bits, whatever they mean.

    Torch cannot index every dtype, and must not convert any.
    """
    return tensor.view(WORDS[tensor.element_size()])


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and every bit are equal: NaN equals itself, and -0 differs from 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(bits_of(a.contiguous().view(-1)), bits_of(b.contiguous().view(-1))))


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Single elements at `positions`, int32 or int64 [n], without repeats; fastest if they rise."""

    positions: torch.Tensor


Place = Layout | Scatter
"""Which elements of a flat target a move writes."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Write `values` to `place` in the target of that name.

    They are flat, contiguous and private, as integers of the target's element size, and on the
    CPU wherever the target is.
    """

    target: str
    place: Place
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the move writes."""
        return self.values.numel() * self.values.element_size()

    @property
    def held_nbytes(self) -> int:
        """Bytes that keeping the move takes, or its undo: of single elements positions too."""
        positions = self.place.positions.nbytes if isinstance(self.place, Scatter) else 0
        return self.nbytes + positions

    def taken_from(self, flat: torch.Tensor) -> "Move":
        """The move that puts back what `flat` holds now at the same place."""
        return replace(self, values=read(flat, self.place))

    def write(self, flat: torch.Tensor) -> None:
        """Write the values into the flat target.

        Raises ValueError if its elements have another size.
        """
        bits = bits_of(flat)
        if bits.dtype != self.values.dtype:
            raise ValueError(f"{self.target} is stored as {flat.dtype}, not in words of {self.values.dtype}")
        if isinstance(self.place, Layout):
            _copy(self.place.view(bits), self.values.view(self.place.size))
        else:
            _put(bits, self.place.positions, self.values)

    def parts(self, nbytes: int) -> Iterator["Move"]:
        """Moves of about so many bytes that can be made in any order, and do together what this one does."""
        step = max(1, nbytes // self.values.element_size())
        for at in range(0, self.values.numel(), step):
            values = self.values[at : at + step]
            if isinstance(self.place, Scatter):
                yield replace(self, place=Scatter(self.place.positions[at : at + step]), values=values)
            elif self.place.is_contiguous:
                layout = Layout(self.place.offset + at, (values.numel(),), (1,))
                yield replace(self, place=layout, values=values)
            else:
                yield self
                return

    def key(self) -> tuple[object, ...]:
        """Equal keys mean the same elements; undo taken from a move keeps its place object."""
        return (self.target, self.place if isinstance(self.place, Layout) else id(self.place))


def read(flat: torch.Tensor, place: Place) -> torch.Tensor:
    """A flat private copy of the elements at `place`, as integers, on the CPU: a GPU's memory serves."""
    bits = bits_of(flat)
    if isinstance(place, Layout):
        return place.view(bits).clone(memory_format=torch.contiguous_format).reshape(-1).cpu()
    return bits.index_select(0, place.positions.to(bits.device)).cpu()


def landed() -> None:
    """Wait until a GPU has made all moves: other threads read its memory in streams of their own."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    """Fill a view; numpy copies within the CPU's memory up to twice as fast as torch and wakes no threads."""
    if target.device.type == "cpu":
        np.copyto(target.numpy(), values.numpy())
    else:
        target.copy_(values)


def _put(bits: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write single elements. Torch scatters fast by 64 bits only, so positions are widened piece by piece."""
    for at in range(0, positions.numel(), _PIECE):
        piece = slice(at, at + _PIECE)
        bits.scatter_(0, positions[piece].to(bits.device, torch.int64), values[piece].to(bits.device))


def compacted(moves: list[Move]) -> list[Move]:
    """The same effect without moves whose every element is written again by a later one.

    Only equal places are recognised; undo of undo shares its places, so chains of
    rollbacks do not grow.
    """
    kept: dict[tuple[object, ...], Move] = {}
    for move in reversed(moves):
        kept.setdefault(move.key(), move)
    return list(reversed(kept.values()))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, on the CPU without a copy."""
    flat: npt.NDArray[np.uint8] = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return flat.data


def digest_of(moves: Sequence[Move]) -> str:
    """BLAKE3 over targets, places and values in order: what a commit writes on this rank."""
    hasher = blake3()
    for move in moves:
        hasher.update(move.target.encode() + b"\0")
        if isinstance(move.place, Layout):
            hasher.update(repr(move.place).encode())
        else:
            hasher.update(bytes_of(move.place.positions))
        hasher.update(bytes_of(move.values))
    return hasher.hexdigest()
