"""`python -m benchmarks.cuda_apply`: a commit's writes on a GPU, against copies of the same bytes.

It needs torch, numpy and blake3, no vLLM and no model: moves as a session prepares them are taken and written
on parameters of this device. Sizes follow the free memory. `--device cpu` tries it without a GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.turns import seconds
from loaders.engine.layout import Layout
from loaders.engine.move import Move, Place, Scatter, bits_of, same_bits

_ROUNDS = 10
_MOST = 4 << 30
"""Bytes of the parameter; more shows nothing else."""
_TRIED = 64 << 20
"""On a CPU, where this is only tried."""
_PARTS = 8
"""The parameter, values, undo and what they are compared with have to fit side by side."""
_DENSITIES = (1e-4, 1e-3, 1e-2, 0.3)
_HIDDEN = 2880


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of move beside a copy of the bytes that it writes, within the device."""

    name: str
    nbytes: int
    undo_s: float
    write_s: float
    copy_s: float
    same: bool
    """Whether the undo brought back every bit."""

    def line(self) -> str:
        """As the rows of `make bench` end; there is no target."""
        return json.dumps(
            {"name": self.name, "ratio": float(f"{self.ratio:.3g}"), "target": None, "met": self.same}
        )

    @property
    def ratio(self) -> float:
        """How many copies of the bytes the write takes; the undo is taken before the pause."""
        return self.write_s / self.copy_s

    def text(self) -> str:
        """For people."""
        return (
            f"{self.name}: {self.nbytes / 1e6:.4g} MB; undo {1e3 * self.undo_s:.3g} ms, "
            f"write {1e3 * self.write_s:.3g} ms, copy {1e3 * self.copy_s:.3g} ms"
        )


class Bench:
    """A bf16 parameter [n, 2880] on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        rows = size_of(device) // (2 * _HIDDEN)
        self._flat = torch.randn(rows * _HIDDEN, device=device, dtype=torch.bfloat16)
        self._rows = rows

    def findings(self) -> list[Finding]:
        """Dense as it lies, dense through a transpose, single elements; moves on the host, and on the device.

        Sessions keep moves on the host; the others show what memory set aside on the device would give.
        """
        places = {
            "dense": Layout.contiguous((self._rows * _HIDDEN,)),
            "transposed": Layout(0, (_HIDDEN, self._rows), (1, _HIDDEN)),
        } | {f"sparse_{100 * share:g}": self._drawn(share) for share in _DENSITIES}
        homes = {"host": torch.device("cpu"), "device": self._device}
        return [
            self._measured(f"cuda_{name}_from_{home}", place, device)
            for name, place in places.items()
            for home, device in homes.items()
        ]

    def _drawn(self, share: float) -> Scatter:
        count = int(share * self._flat.numel())
        drawn, _ = torch.randint(self._flat.numel(), (count,), device=self._device).sort()
        return Scatter(torch.unique_consecutive(drawn).to(torch.int32))

    def _measured(self, name: str, place: Place, home: torch.device) -> Finding:
        if isinstance(place, Scatter):
            place = Scatter(place.positions.to(home))
        count = place.numel if isinstance(place, Layout) else place.positions.numel()
        values = torch.randn(count, device=home, dtype=torch.bfloat16)
        move = Move("p", place, bits_of(values))
        before = self._flat.clone()
        undo = move.taken_from(self._flat)
        undo_s = self._seconds(lambda: move.taken_from(self._flat))
        write_s = self._seconds(lambda: move.write(self._flat))
        source = values.to(self._device)
        target = torch.empty_like(source)
        copy_s = self._seconds(lambda: target.copy_(source))
        undo.write(self._flat)
        return Finding(name, move.nbytes, undo_s, write_s, copy_s, same_bits(before, self._flat))

    def _seconds(self, run: Callable[[], object]) -> float:
        def to_the_end() -> None:
            run()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        to_the_end()  # kernels are loaded when they are first used
        return median(seconds(to_the_end) for _ in range(_ROUNDS))


def size_of(device: torch.device) -> int:
    """Bytes of the parameter."""
    if device.type != "cuda":
        return _TRIED
    free, _ = torch.cuda.mem_get_info(device)
    return min(_MOST, free // _PARTS)


def main(arguments: list[str] | None = None) -> int:
    """Status 0 if every undo brought back every bit, 2 without such a device."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_apply", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try it")
    device = torch.device(parser.parse_args(arguments).device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "cuda_apply: torch sees no CUDA device here; --device cpu tries it without one", file=sys.stderr
        )
        return 2
    with torch.no_grad():
        found = Bench(device).findings()
    for finding in found:
        print(finding.text(), file=sys.stderr)
        print(finding.line(), flush=True)
    return 0 if all(finding.same for finding in found) else 1


if __name__ == "__main__":
    sys.exit(main())
