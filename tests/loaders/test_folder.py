"""Checkpoint folders: which files count, what is refused, and writes that carry the bytes of a place."""

import json
import os
from pathlib import Path

import pytest

from loaders.folder import INDEX, CheckpointFolder
from loaders.header import HeaderLimits
from schemas.dtypes import Dtype
from schemas.problems import Code, ProblemError
from tests.fakes.safetensors import body

LIMITS = HeaderLimits()
ONE = body({"a": (Dtype.BF16, (2,), b"1234")})
TWO = body({"b": (Dtype.U8, (3,), b"123")})
STACK = bytes(range(24))
PLAIN = bytes(range(100, 108))


def names(folder: Path) -> dict[str, str]:
    """Tensor → file."""
    found = CheckpointFolder.open(folder, LIMITS)
    return {entry.name: shard.path.name for shard, entry in found.entries()}


def code(folder: Path, limits: HeaderLimits = LIMITS) -> Code:
    with pytest.raises(ProblemError) as caught:
        CheckpointFolder.open(folder, limits)
    return caught.value.code


def test_the_index_decides(tmp_path: Path) -> None:
    """Without one all safetensors files count, with one those that it names, whatever else lies there."""
    (tmp_path / "x.safetensors").write_bytes(ONE)
    (tmp_path / "y.safetensors").write_bytes(TWO)
    (tmp_path / "folder.safetensors").mkdir()
    assert names(tmp_path) == {"a": "x.safetensors", "b": "y.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"b": "y.safetensors"}}))
    assert names(tmp_path) == {"b": "y.safetensors"}


def test_what_is_beside_the_weights(tmp_path: Path) -> None:
    """Configuration and tokenizer are others; weights in any format and folders are not."""
    for name in ("config.json", INDEX, "merges.txt", "pytorch_model.bin", "x.gguf", "old.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    (tmp_path / "original").mkdir()
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "config.json")
    found = CheckpointFolder(tmp_path, ()).others()
    assert [path.name for path in found] == ["config.json", "merges.txt", INDEX, "tokenizer.json"]


@pytest.mark.parametrize("index", ["", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "\udc80"])
def test_a_bad_index(tmp_path: Path, index: str) -> None:
    """Whatever is wrong with it, it is the checkpoint that is bad."""
    (tmp_path / "x.safetensors").write_bytes(ONE)
    (tmp_path / INDEX).write_bytes(index.encode(errors="surrogateescape"))
    assert code(tmp_path) is Code.BAD_CHECKPOINT


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", ".", ""])
def test_an_index_that_leads_out(tmp_path: Path, name: str) -> None:
    """Only files of the folder itself."""
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert code(tmp_path) is Code.BAD_CHECKPOINT


@pytest.mark.parametrize("content", [b"", ONE[:5], ONE[:-1], ONE + b"0", b"{}" * 20])
def test_a_bad_file(tmp_path: Path, content: bytes) -> None:
    """Header and length must be right."""
    (tmp_path / "x.safetensors").write_bytes(content)
    assert code(tmp_path) is Code.BAD_CHECKPOINT


def test_nothing_there(tmp_path: Path) -> None:
    """No folder, an empty one, a file in its place, and a header over the limit."""
    assert code(tmp_path / "none") is Code.BAD_CHECKPOINT
    assert code(tmp_path) is Code.BAD_CHECKPOINT
    (tmp_path / "x.safetensors").write_bytes(ONE)
    assert code(tmp_path / "x.safetensors") is Code.BAD_CHECKPOINT
    assert code(tmp_path, HeaderLimits(nbytes=10)) is Code.BAD_CHECKPOINT


def test_changes_are_noticed(tmp_path: Path) -> None:
    """Rewritten in place, replaced, or gone."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(ONE)
    (shard,) = CheckpointFolder.open(tmp_path, LIMITS).shards
    assert shard.unchanged() and shard.nbytes == len(ONE)
    os.utime(path, ns=(1, 1))
    assert not shard.unchanged()
    path.unlink()
    assert not shard.unchanged()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files: a stack of three experts, and a plain tensor."""
    (tmp_path / "a.safetensors").write_bytes(
        body({"x": (Dtype.U8, (1,), b"\x07"), "stack": (Dtype.BF16, (3, 2, 2), STACK)})
    )
    (tmp_path / "b.safetensors").write_bytes(body({"plain": (Dtype.F32, (2,), PLAIN)}))
    return tmp_path


def test_writes_carry_the_bytes_of_their_places(folder: Path) -> None:
    """Whole tensors and experts' slices, each from the file that has it."""
    places = [("plain", None), ("stack", 2), ("stack", 0)]
    uploads = CheckpointFolder.open(folder, LIMITS).uploads(places)
    found = {}
    for upload in uploads:
        content = Path(upload.path).read_bytes()
        assert len(content) == upload.nbytes
        for write in upload.writes:
            span = write.values
            found[write.tensor, write.expert] = content[span.offset : span.offset + span.nbytes]
    assert found == {("plain", None): PLAIN, ("stack", 2): STACK[16:], ("stack", 0): STACK[:8]}


def test_an_unknown_tensor_is_a_key_error(folder: Path) -> None:
    """A checkpoint that lacks a tensor can't give its values."""
    with pytest.raises(KeyError, match="none"):
        CheckpointFolder.open(folder, LIMITS).uploads([("none", None)])


def test_headers_tell_files_apart(folder: Path) -> None:
    """Another name, shape or order of tensors is another header; other values are not."""
    before = CheckpointFolder.open(folder, LIMITS).headers
    assert sorted(before) == ["a.safetensors", "b.safetensors"]
    (folder / "b.safetensors").write_bytes(body({"plain": (Dtype.F32, (2,), PLAIN[::-1])}))
    assert CheckpointFolder.open(folder, LIMITS).headers == before
    (folder / "b.safetensors").write_bytes(body({"plain": (Dtype.F32, (2, 1), PLAIN)}))
    assert CheckpointFolder.open(folder, LIMITS).headers["b.safetensors"] != before["b.safetensors"]
