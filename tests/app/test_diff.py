"""Two checkpoints → a patch batch: what is in it, what is refused, and that memory does not grow."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import diff
from app.diff import Difference, DiffError, difference
from loaders.header import HeaderLimits, parse_header
from schemas.dtypes import Dtype
from schemas.patches import PATCHES
from schemas.problems import ProblemError
from tests.fakes.admin import OCTETS, running
from tests.fakes.checkpoint import parts, write_checkpoint
from tests.fakes.engine import base_weights
from tests.fakes.safetensors import Part, parse, write_file

Parts = dict[str, Part]


def compared(old: Path, new: Path) -> tuple[Difference, bytes]:
    """The difference and its whole body."""
    with difference(old, new, old.parent, lambda done, total: None) as found:
        content = b"".join(found.body.chunks()) if found.body else b""
        assert len(content) == (found.body.nbytes if found.body else 0)
    return found, content


def between(folder: Path, old: Parts, new: Parts) -> tuple[Difference, bytes]:
    """The difference of two files."""
    for name, found in (("old", old), ("new", new)):
        write_file(folder / name, found)
    return compared(folder / "old", folder / "new")


def applied(old: Parts, batch: bytes) -> Parts:
    """What the patches of a batch make of `old`, by the words of the contract."""
    header = parse_header(batch, HeaderLimits())
    body, result = parse(batch), dict(old)
    for patch in PATCHES.validate_python(json.loads(header.metadata["patches"])):
        dtype, shape, data = result[patch.name]
        assert (patch.dtype, patch.shape) == (dtype, shape)
        values = body[patch.values][2]
        if patch.indices is not None:
            kind, _, raw = body[patch.indices]
            whole = np.frombuffer(data, f"u{dtype.nbytes}").copy()
            whole[np.frombuffer(raw, f"i{kind.nbytes}")] = np.frombuffer(values, f"u{dtype.nbytes}")
            values = whole.tobytes()
        result[patch.name] = (dtype, shape, values)
    return result


@given(st.data())
def test_patches_lead_from_old_to_new(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any tensors with any bits changed, windows of a few bytes: what is applied gives the new bits."""
    old, new = {}, {}
    for number, dtype in enumerate(data.draw(st.lists(st.sampled_from(list(Dtype)), min_size=1, max_size=4))):
        count = data.draw(st.integers(0, 40))
        size = count * dtype.nbytes
        before = data.draw(st.binary(min_size=size, max_size=size))
        places = data.draw(st.lists(st.integers(0, max(size - 1, 0)), max_size=6)) if size else []
        after = bytearray(before)
        for place in places:
            after[place] ^= 0x80
        old[f"t{number}"], new[f"t{number}"] = (dtype, (count,), before), (dtype, (count,), bytes(after))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diff, "_WINDOW_NBYTES", 16)
        found, batch = between(tmp_path_factory.mktemp("diff"), old, new)
    changed = [name for name in old if old[name] != new[name]]
    assert found.sparse + found.dense == len(changed)
    assert found.tensors == len(old)
    assert (applied(old, batch) if batch else old) == new
    for entry in parse_header(batch, HeaderLimits()).entries.values() if batch else ():
        assert entry.begin % entry.dtype.nbytes == 0


def test_nan_and_negative_zero_are_seen(tmp_path: Path) -> None:
    """Bits are compared, not numbers: 0 to -0 is a change, a NaN that stays is none, another NaN is one."""
    floats = np.zeros(64, np.uint32)
    floats[1:3] = 0x7FC00000
    changed = floats.copy()
    changed[0], changed[2] = 0x80000000, 0x7FC00001
    old, new = ({"t": (Dtype.F32, (64,), bits.tobytes())} for bits in (floats, changed))
    found, batch = between(tmp_path, old, new)
    assert (found.sparse, found.elements) == (1, 2)
    assert applied(old, batch) == new


@pytest.mark.parametrize(("changed", "sparse"), [(1, 1), (33, 1), (34, 0), (100, 0)])
def test_the_smaller_form_is_taken(tmp_path: Path, changed: int, sparse: int) -> None:
    """bf16 at int32 positions takes six bytes an element instead of two: below a third it is sparse."""
    bits = np.zeros(100, np.uint16)
    bits[:changed] = 7
    old = {"t": (Dtype.BF16, (10, 10), bytes(200))}
    found, batch = between(tmp_path, old, {"t": (Dtype.BF16, (10, 10), bits.tobytes())})
    assert (found.sparse, found.dense) == (sparse, 1 - sparse)
    assert sum(len(part[2]) for part in parse(batch).values()) == min(6 * changed, 200)


def test_equal_checkpoints_have_no_body(tmp_path: Path) -> None:
    """There is nothing to push, which is no error."""
    same: Parts = {"t": (Dtype.BF16, (2,), b"abcd"), "none": (Dtype.F32, (0,), b"")}
    found, _ = between(tmp_path, same, same)
    assert found == Difference(None, 2, 0, 0, 0)


T: Part = (Dtype.F32, (2, 2), bytes(16))


@pytest.mark.parametrize(
    ("new", "why"),
    [
        ({"t": T}, "u is only in the old checkpoint"),
        ({"t": T, "u": T, "v": T}, "v is only in the new checkpoint"),
        ({"t": T, "u": (Dtype.I32, (2, 2), bytes(16))}, "u was F32 and is I32"),
        ({"t": T, "u": (Dtype.F32, (4,), bytes(16))}, "u was [2, 2] and is [4]"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, new: Parts, why: str) -> None:
    """Patches change values alone: names, dtypes and shapes have to be the same; what is not is named."""
    with pytest.raises(DiffError) as raised:
        between(tmp_path, {"t": T, "u": T}, new)
    assert why in str(raised.value).splitlines()


def test_long_lists_of_faults_are_cut(tmp_path: Path) -> None:
    """Ten are named, the others counted."""
    with pytest.raises(DiffError, match="and 15 more"):
        between(tmp_path, {f"t{number}": T for number in range(25)}, {})


def test_broken_files_are_refused(tmp_path: Path) -> None:
    """A file that is no safetensors file, cut short or not there, and a folder that has a tensor twice."""
    write_file(tmp_path / "good", {"t": T})
    (tmp_path / "cut").write_bytes((tmp_path / "good").read_bytes()[:-1])
    (tmp_path / "empty").write_bytes(b"")
    for name in ("cut", "empty", "missing"):
        with pytest.raises(ProblemError, match="bad_checkpoint"):
            compared(tmp_path / "good", tmp_path / name)
    (tmp_path / "twice").mkdir()
    for name in ("a", "b"):
        write_file(tmp_path / "twice" / f"{name}.safetensors", {"t": T})
    with pytest.raises(DiffError, match=r"t is in .*a.safetensors and in .*b.safetensors"):
        compared(tmp_path / "twice", tmp_path / "twice")


@pytest.mark.anyio
async def test_the_service_takes_the_batch(tmp_path: Path) -> None:
    """Folders of several files, sparse and dense changes: pushed, the engine runs the new checkpoint."""
    new = base_weights()
    del new["model.odd"]
    for number, name in enumerate(sorted(new)[::3]):
        new[name] = new[name].copy()
        new[name][: len(new[name]) if number % 2 else 1] ^= 1
    before = {name: part for name, part in parts(base_weights()).items() if name != "model.odd"}
    after = {name: (dtype, shape, new[name].tobytes()) for name, (dtype, shape, _) in before.items()}
    old_folder, new_folder = (
        write_checkpoint(tmp_path / "old", before),
        write_checkpoint(tmp_path / "new", after),
    )
    found, batch = compared(old_folder, new_folder)
    assert found.sparse
    assert found.dense
    async with running(tmp_path / "state") as admin:
        answer = await admin.http.post("/v1/patches", content=batch, headers=OCTETS)
        assert answer.status_code == 200, answer.text
        for name, bits in new.items():
            assert admin.engine.weights(name).tobytes() == bits.tobytes(), name


def test_memory_does_not_grow_with_the_checkpoints(tmp_path: Path) -> None:
    """Tensors of 96 MiB, one changed in places and one as a whole, are compared and written in windows."""
    size = 96 << 20
    for name, flips in (("old", 0), ("new", 1)):
        head = {"a": (Dtype.BF16, (size // 2,), b""), "b": (Dtype.BF16, (size // 2,), b"")}
        _write_big(tmp_path / name, head, size, flips)
    tracemalloc.start()
    try:
        with difference(tmp_path / "old", tmp_path / "new", tmp_path, lambda done, total: None) as found:
            assert (found.sparse, found.dense) == (1, 1)
            assert found.body is not None
            written = sum(len(chunk) for chunk in found.body.chunks())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written == found.body.nbytes > size
    assert peak < 48 << 20


def _write_big(path: Path, head: Parts, size: int, flips: int) -> None:
    """Two tensors of `size` bytes: zeros with some other elements, and all of one value."""
    entries = {
        name: {"dtype": str(dtype), "shape": list(shape), "data_offsets": [at * size, (at + 1) * size]}
        for at, (name, (dtype, shape, _)) in enumerate(head.items())
    }
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        file.truncate(begin + 2 * size)
        for place in range(0, size, 8 << 20):
            file.seek(begin + place)
            file.write(bytes([flips]))
        file.seek(begin + size)
        for _ in range(size >> 20):
            file.write(bytes([flips]) * (1 << 20))
