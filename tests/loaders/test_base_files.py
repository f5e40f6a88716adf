"""The base checkpoint's files: their headers, and writes that carry exactly the bytes of a place."""

import json
from pathlib import Path

import pytest

from loaders.base_files import INDEX, BaseFiles
from schemas.dtypes import Dtype
from schemas.problems import ProblemError
from tests.fakes.safetensors import body

STACK = bytes(range(24))
PLAIN = bytes(range(100, 108))


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
    uploads = BaseFiles.open(folder).uploads(places)
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
        BaseFiles.open(folder).uploads([("none", None)])


def test_headers_tell_files_apart(folder: Path) -> None:
    """Another name, shape or order of tensors is another header; other values are not."""
    before = BaseFiles.open(folder).headers
    assert sorted(before) == ["a.safetensors", "b.safetensors"]
    (folder / "b.safetensors").write_bytes(body({"plain": (Dtype.F32, (2,), PLAIN[::-1])}))
    assert BaseFiles.open(folder).headers == before
    (folder / "b.safetensors").write_bytes(body({"plain": (Dtype.F32, (2, 1), PLAIN)}))
    assert BaseFiles.open(folder).headers["b.safetensors"] != before["b.safetensors"]


def test_the_index_says_which_files_count(folder: Path) -> None:
    """Files that the index does not name are none of the checkpoint's."""
    (folder / INDEX).write_text(json.dumps({"weight_map": {"plain": "b.safetensors"}}))
    assert list(BaseFiles.open(folder).headers) == ["b.safetensors"]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, folder: Path) -> None:
    """No folder, no files, and a file that is cut off."""
    with pytest.raises(FileNotFoundError):
        BaseFiles.open(tmp_path / "none")
    path = folder / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ProblemError, match="truncated"):
        BaseFiles.open(folder)
