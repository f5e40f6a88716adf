"""Uploads to moves on a made-up rank, against plain numpy: apply, undo, compaction, read-back."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.engine.failpoints import Failpoints
from loaders.engine.hands import Hands
from loaders.engine.move import Move, compacted, digest_of
from loaders.engine.planner import plan, values_nbytes
from loaders.engine.prepared import Applied, Prepared, taken
from loaders.engine.readback import gather
from loaders.engine.spot import Spot, identity
from schemas.bridge import ReadTensor
from schemas.dtypes import Dtype
from tests.loaders.engine.atlases import Body, Hand, Place, simple

DTYPES = {1: Dtype.U8, 2: Dtype.U16, 4: Dtype.U32}
TORCH = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32}
HANDS = Hands()


class Rank:
    """Two stacked tensors packed together per expert, one plain tensor in two places, one of another rank.

    `part` says for each dimension which slice of the checkpoint is on this rank.
    """

    def __init__(self, draw: Any) -> None:
        self.size = draw(st.sampled_from([1, 2, 4]))
        experts = draw(st.integers(1, 4))
        self.shapes = {
            "up": (experts, draw(st.integers(1, 4)), draw(st.integers(1, 4))),
            "bias": (experts, draw(st.integers(1, 5))),
            "plain": (draw(st.integers(1, 5)), draw(st.integers(1, 5))),
            "elsewhere": (2, 2),
        }
        self.full = {name: self.random(draw, shape) for name, shape in self.shapes.items()}
        self.part = {
            name: tuple(self.slice(draw, extent) for extent in shape) for name, shape in self.shapes.items()
        }
        self.order = draw(st.permutations(range(3)))
        # Rank-local experts; both stacked tensors must agree on them.
        self.part["bias"] = (self.part["up"][0], *self.part["bias"][1:])
        self.order = [0, *(d for d in self.order if d)]
        local = {name: self.local(name).size for name in self.shapes}
        self.experts = self.part["up"][0].stop - self.part["up"][0].start
        per_expert = local["up"] // self.experts + local["bias"] // self.experts
        self.block = per_expert + draw(st.integers(0, 3))
        self.table = np.array(draw(st.permutations(range(self.block))))[:per_expert]
        self.hand = self.build()

    def random(self, draw: Any, shape: tuple[int, ...]) -> Any:
        seed = draw(st.integers(0, 2**32 - 1))
        return np.random.default_rng(seed).integers(0, 2 ** (8 * self.size), shape, dtype=NUMPY[self.size])

    def slice(self, draw: Any, extent: int) -> slice:
        start = draw(st.integers(0, extent - 1))
        return slice(start, draw(st.integers(start + 1, extent)))

    def local(self, name: str) -> Any:
        part = self.full[name][self.part[name]]
        return np.ascontiguousarray(part.transpose(self.order) if name == "up" else part)

    def expected(self) -> dict[str, Any]:
        """What the targets hold if the checkpoint were loaded as it now is."""
        packed = np.zeros((self.experts, self.block), dtype=NUMPY[self.size])
        up = self.local("up").reshape(self.experts, -1)
        packed[:, self.table] = np.concatenate([up, self.local("bias").reshape(self.experts, -1)], 1)
        plain = self.local("plain").reshape(-1)
        return {"packed": packed.reshape(-1), "plain": plain, "copy": plain, "plain@shard": plain}

    def build(self) -> Hand:
        hand = Hand()
        dtype = TORCH[self.size]
        for name, shape in self.shapes.items():
            hand.add_tensor(name, shape, DTYPES[self.size])
            if name == "elsewhere":
                continue
            source = torch.empty(shape, dtype=dtype)[self.part[name]]
            source = source.permute(self.order) if name == "up" else source
            hand.add_region(name, f"{name}_site", source, torch.empty(source.shape, dtype=dtype), dtype)
        ups = self.local("up").size // self.experts
        table = torch.tensor(self.table, dtype=torch.int32)
        for name, part in (("up", table[:ups]), ("bias", table[ups:])):
            spot = Spot("packed", part.numel(), self.block, part)
            hand.sites[f"{name}_site"] = Place(f"{name}_site", self.local(name).shape, (("packed", spot),))
        numel = self.local("plain").size
        hand.sites["plain_site"] = Place(
            "plain_site",
            self.local("plain").shape,
            (("plain", identity("plain", numel)), ("copy", Spot("copy", numel, numel, torch.arange(numel)))),
            sharded=True,
        )
        expected = self.expected()
        expected["plain_site@shard"] = expected.pop("plain@shard")
        hand.targets = {name: torch.from_numpy(value.copy()) for name, value in expected.items()}
        return hand

    def write(self, draw: Any, body: Body) -> None:
        """One random write, into the body and into the truth."""
        name = draw(st.sampled_from(list(self.shapes)))
        shape = self.shapes[name]
        kind = draw(st.sampled_from(["dense", "sparse", "expert"]))
        if kind == "expert" and name in ("up", "bias"):
            expert = draw(st.integers(0, shape[0] - 1))
            if draw(st.booleans()):
                self.scatter(draw, body, name, expert)
                return
            values = self.random(draw, shape[1:])
            self.full[name][expert] = values
            body.write(name, torch.from_numpy(values), expert=expert)
        elif kind == "sparse":
            self.scatter(draw, body, name, None)
        else:
            values = self.random(draw, shape)
            self.full[name][:] = values
            body.write(name, torch.from_numpy(values))

    def scatter(self, draw: Any, body: Body, name: str, expert: int | None) -> None:
        """A sparse write to a tensor, or to one expert's slice of it."""
        flat = self.full[name].reshape(-1) if expert is None else self.full[name][expert].reshape(-1)
        where = draw(st.lists(st.integers(0, flat.size - 1), min_size=1, max_size=flat.size, unique=True))
        values = self.random(draw, (len(where),))
        flat[where] = values
        indices = torch.tensor(where, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
        body.write(name, torch.from_numpy(values), indices, expert)

    def prepare(self, draw: Any, folder: Path) -> Prepared:
        uploads = []
        for number in range(draw(st.integers(1, 2))):
            body = Body(folder / f"{number}")
            for _ in range(draw(st.integers(1, 5))):
                self.write(draw, body)
            uploads.append(body.staged())
        made = plan(self.hand.atlas, tuple(uploads))
        assert values_nbytes(self.hand.atlas, tuple(uploads)) <= sum(move.held_nbytes for move in made.moves)
        return ready(made.moves, self.hand.targets)

    def holds(self, expected: dict[str, Any]) -> None:
        found = {name: target.numpy() for name, target in self.hand.targets.items()}
        found["plain@shard"] = found.pop("plain_site@shard")
        for name, value in expected.items():
            assert np.array_equal(found[name], value), name


def ready(moves: Sequence[Move], targets: dict[str, torch.Tensor]) -> Prepared:
    """As a session prepares it on what the targets hold now."""
    return Prepared("t", 0, tuple(moves), taken(moves, targets), (), 0, 0, digest_of(list(moves)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_writes_undo_and_compaction(data: st.DataObject) -> None:
    """Any mix of writes, in order, gives what loading the changed checkpoint gives, and takes no less than
    was said before; undo of several commits, compacted into one, brings the first back bit for bit."""
    rank = Rank(data.draw)
    first = {name: value.copy() for name, value in rank.expected().items()}
    undo: list[Move] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(data.draw(st.integers(1, 3))):
            before = {name: value.copy() for name, value in rank.expected().items()}
            prepared = rank.prepare(data.draw, Path(folder))
            applied = Applied(prepared, rank.hand.targets, HANDS)
            applied.apply(Failpoints(0))
            rank.holds(rank.expected())
            assert sum(move.nbytes for move in applied.undo()) == prepared.nbytes
            undo = applied.undo() + undo
            twice = Applied(ready(prepared.moves, rank.hand.targets), rank.hand.targets, HANDS)
            twice.apply(Failpoints(0))
            rank.holds(rank.expected())
            twice.revert()
            rank.holds(rank.expected())
            assert before.keys() == first.keys()
    short = compacted(undo)
    assert len(short) <= len(undo)
    # A rollback is a commit too: it can be undone, and rolling back again does not grow.
    back = Applied(ready(short, rank.hand.targets), rank.hand.targets, HANDS)
    back.apply(Failpoints(0))
    rank.holds(first)
    again = compacted([*back.undo()])
    assert len(again) == len(short)
    back.revert()
    rank.holds(rank.expected())


@settings(deadline=None)
@given(st.data())
def test_read_back_is_what_was_loaded(data: st.DataObject) -> None:
    """Tensors and expert slices that are here whole are read back bit for bit; others are refused."""
    rank = Rank(data.draw)
    for name, shape in rank.shapes.items():
        stacked = name in ("up", "bias")
        for expert in (None, *range(shape[0])) if stacked else (None,):
            wanted = ReadTensor(name="x", tensor=name, expert=expert)
            whole = rank.full[name] if expert is None else rank.full[name][expert]
            on_rank = rank.part[name] if expert is None else rank.part[name][1:]
            covers = all(p == slice(0, n) for p, n in zip(on_rank, whole.shape, strict=True))
            here = expert is None or rank.part[name][0].start <= expert < rank.part[name][0].stop
            if name != "elsewhere" and covers and here:
                out = torch.zeros(whole.size, dtype=torch.from_numpy(whole).dtype)
                assert gather(rank.hand.atlas, wanted, out) == whole.size
                assert np.array_equal(out.numpy(), whole.reshape(-1))
            elif name != "elsewhere":
                out = torch.zeros(whole.size, dtype=torch.from_numpy(whole).dtype)
                assert gather(rank.hand.atlas, wanted, out) < whole.size


def run(hand: Hand, body: Body) -> list[Move]:
    moves = plan(hand.atlas, (body.staged(),)).moves
    for move in moves:
        move.write(hand.targets[move.target])
    return moves


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [
        (Dtype.BF16, torch.bfloat16),
        (Dtype.F8_E8M0, torch.float8_e8m0fnu),
        (Dtype.F8_E4M3, torch.float8_e4m3fn),
        (Dtype.BOOL, torch.bool),
        (Dtype.U16, torch.uint16),
        (Dtype.F64, torch.float64),
    ],
)
def test_every_bit_pattern_of_every_dtype(tmp_path: Path, dtype: Dtype, torch_dtype: torch.dtype) -> None:
    """NaN payloads, negative zeros and dtypes that torch cannot index pass bit for bit, dense and sparse."""
    raw = torch.arange(16 * torch_dtype.itemsize, dtype=torch.uint8) * 37
    values = (raw % 2 if dtype is Dtype.BOOL else raw).view(torch_dtype)
    for indices in (None, torch.arange(15, -1, -1)):
        hand = simple((16,), dtype, torch_dtype)
        body = Body(tmp_path / "body")
        body.write("w", values, indices)
        run(hand, body)
        expected = values.view(torch.uint8).reshape(16, -1)
        found = hand.targets["p"].view(torch.uint8).reshape(16, -1)
        assert torch.equal(found, expected if indices is None else expected.flip(0))


def test_moves_do_not_alias_the_upload(tmp_path: Path) -> None:
    """What is staged is private: the file may change or go once it is prepared."""
    hand = simple()
    body = Body(tmp_path / "body")
    body.write("w", torch.ones(4, 3))
    body.write("w", torch.full((2,), 2.0), torch.tensor([0, 5]))
    moves = plan(hand.atlas, (body.staged(),)).moves
    body.path.write_bytes(bytes(len(body.data)))
    for move in moves:
        move.write(hand.targets["p"])
    assert hand.targets["p"].sum().item() == 14.0


def test_unaligned_values(tmp_path: Path) -> None:
    """safetensors does not promise alignment."""
    hand = simple()
    body = Body(tmp_path / "body")
    body.data += b"x"
    body.write("w", torch.arange(12.0).reshape(4, 3))
    run(hand, body)
    assert hand.targets["p"].tolist() == list(range(12))


def test_positions_beyond_32_bits_stay_wide(tmp_path: Path) -> None:
    """Positions that do not fit into 32 bits are kept in 64."""
    hand = Hand()
    hand.add_tensor("w", (2**16, 2**16), Dtype.F32)
    big = torch.empty(2**16, 2**16, device="meta")
    hand.add_region("w", "p", big, big, torch.float32)
    hand.sites["p"] = Place("p", (2**16, 2**16), (("p", identity("p", 2**32)),))
    body = Body(tmp_path / "body")
    body.write("w", torch.ones(2), torch.tensor([2**31 - 1, 2**32 - 1]))
    body.write("w", torch.ones(1), torch.tensor([2**31 - 1]))
    wide, narrow = plan(hand.atlas, (body.staged(),)).moves
    assert wide.place.positions.tolist() == [2**31 - 1, 2**32 - 1]  # type: ignore[union-attr]
    assert narrow.place.positions.dtype is torch.int32  # type: ignore[union-attr]


def test_disagreements_with_the_admin_are_raised(tmp_path: Path) -> None:
    """Values, indices, sizes, names and treatments that do not fit never become moves."""
    good = Body(tmp_path / "good")
    good.write("w", torch.ones(4, 3))

    def refused(hand: Hand, body: Body, kind: type[Exception], match: str) -> None:
        with pytest.raises(kind, match=match):
            plan(hand.atlas, (body.staged(),))

    for values, indices, match in [
        (torch.ones(11), None, "12 values"),
        (torch.ones(13), None, "12 values"),
        (torch.ones(3), torch.tensor([0, 1]), "as many indices"),
        (torch.ones(1), torch.tensor([0, 1]), "as many indices"),
    ]:
        body = Body(tmp_path / "body")
        body.write("w", values, indices)
        refused(simple(), body, ValueError, match)
    unknown = Body(tmp_path / "unknown")
    unknown.write("v", torch.ones(4, 3))
    refused(simple(), unknown, KeyError, "v")
    hand = simple()
    hand.sites["p"].unsupported = "because"
    refused(hand, good, ValueError, "because")
    short = good.staged()
    with pytest.raises(ValueError, match="bytes, not"):
        plan(simple().atlas, (short.model_copy(update={"nbytes": short.nbytes + 1}),))
    beyond = short.writes[0].model_copy(
        update={"values": short.writes[0].values.model_copy(update={"offset": short.nbytes})}
    )
    with pytest.raises(ValueError, match="are not in a file"):
        plan(simple().atlas, (short.model_copy(update={"writes": (beyond,)}),))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_cast_tensor_is_rounded_as_the_loader_does(tmp_path: Path, sparse: bool) -> None:
    """Stored in one dtype and run in another: cast step by step on the way in, and back on the way out."""
    hand = Hand()
    hand.add_tensor("w", (4,), Dtype.F32)
    hand.add_region("w", "p", torch.empty(4), torch.empty(4), torch.float32)
    region = hand.regions["w"][0]
    steps = (torch.float32, torch.float32, (torch.bfloat16,))
    hand.regions["w"] = (type(region)("w", "p", region.map, *steps),)
    hand.sites["p"] = Place("p", (4,), (("p", identity("p", 4)),))
    hand.targets["p"] = torch.zeros(4)
    values = torch.tensor([1.0, 0.1, 65505.0, -0.0])
    body = Body(tmp_path / "body")
    if sparse:
        body.write("w", values.flip(0), torch.tensor([3, 2, 1, 0]))
    else:
        body.write("w", values)
    for move in plan(hand.atlas, (body.staged(),)).moves:
        move.write(hand.targets["p"])
    rounded = values.to(torch.bfloat16).float()
    assert torch.equal(hand.targets["p"].view(torch.int32), rounded.view(torch.int32))
    out = torch.zeros(4)
    assert gather(hand.atlas, ReadTensor(name="x", tensor="w"), out) == 4
    assert torch.equal(out, rounded)
    assert not hand.regions["w"][0].lossless


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_values_take_is_known_before_they_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """A rank's part alone, as it runs; single elements have positions; no file is looked at.

    Of 16 single elements of 24, four at least are among the rank's twelve.
    """
    hand = Hand()
    hand.add_tensor("w", (4, 6), Dtype.F32)
    hand.add_tensor("elsewhere", (4, 6), Dtype.F32)
    whole, part = torch.empty(4, 6), torch.empty(2, 6)
    hand.add_region("w", "p", whole[1:3], part, torch.float32)
    hand.regions["w"] = tuple(replace(region, dst_dtype=dtype) for region in hand.regions["w"])
    body = Body(tmp_path / "body")
    body.write("w", whole)
    body.write("elsewhere", whole)
    single = Body(tmp_path / "single")
    single.write("w", torch.zeros(16), torch.arange(16))
    single.write("w", torch.zeros(8), torch.arange(8))
    uploads = body.staged(), single.staged()
    body.path.unlink()
    single.path.unlink()
    assert values_nbytes(hand.atlas, uploads[:1]) == 12 * dtype.itemsize
    assert values_nbytes(hand.atlas, uploads[1:]) == 4 * (dtype.itemsize + 4)
    assert values_nbytes(hand.atlas, uploads) == 12 * dtype.itemsize
