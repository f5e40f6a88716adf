"""What a reload reads: the files of a checkpoint folder as writes to every tensor of the engine's model."""

from collections.abc import Iterator
from dataclasses import dataclass

from loaders.catalogue import Catalogue
from loaders.folder import CheckpointFolder, Shard
from loaders.header import TensorEntry
from loaders.refusal import Fault, fault, listed, shown
from loaders.staged import file_digest
from loaders.values import opened, same_bytes
from schemas.bridge import Span, StagedUpload, TensorWrite
from schemas.model import CheckpointTensor, Treatment
from schemas.problems import Code, ProblemError

Found = dict[str, tuple[Shard, TensorEntry]]


@dataclass(frozen=True)
class Source:
    """A checkpoint folder that fits the engine's model."""

    folder: CheckpointFolder
    uploads: tuple[StagedUpload, ...]
    """One per file: dense writes of everything in it that can be updated."""
    fixed: tuple[CheckpointTensor, ...]
    """What can't be updated, and so has to be in the folder as the engine has it already."""

    @staticmethod
    def read(folder: CheckpointFolder, catalogue: Catalogue) -> "Source":
        """Compare the folder with the engine's tensors and hash its files; blocking.

        Raises bad_checkpoint (a tensor is in two files), checkpoint_mismatch, tied_tensor.
        """
        found = require_same(folder, catalogue)
        tensors = catalogue.tensors()
        _require_tied(found, tensors)
        fixed = tuple(tensor for tensor in tensors if tensor.treatment is Treatment.UNSUPPORTED)
        skipped = {tensor.name for tensor in fixed}
        uploads = tuple(_upload(shard, skipped) for shard in folder.shards)
        return Source(folder, tuple(upload for upload in uploads if upload.writes), fixed)

    def require_unchanged(self) -> None:
        """Raises bad_checkpoint if a file was written to since its header was read; blocking."""
        for shard in self.folder.shards:
            if not shard.unchanged():
                raise ProblemError(Code.BAD_CHECKPOINT, f"{shard.path} was changed while it was being read.")

    def require_fixed(self, read: CheckpointFolder) -> None:
        """Raises tensor_unsupported unless the `fixed` tensors are as in `read`, the engine's; blocking."""
        here, there = _found(self.folder), _found(read)
        faults = [
            fault(one.name, f"{one.name} differs and can't be updated: {one.reason}")
            for one in self.fixed
            if not _equal(here[one.name], there[one.name])
        ]
        if faults:
            raise listed(Code.TENSOR_UNSUPPORTED, faults)


def _found(folder: CheckpointFolder) -> Found:
    found: Found = {}
    for shard, entry in folder.entries():
        if entry.name in found:
            detail = f"{shown(entry.name)} is in two files of {folder.path}."
            raise ProblemError(Code.BAD_CHECKPOINT, detail)
        found[entry.name] = (shard, entry)
    return found


def require_same(folder: CheckpointFolder, catalogue: Catalogue) -> Found:
    """All tensors of a folder, if they are the engine's by names, shapes and dtypes.

    Raises checkpoint_mismatch, which lists the first differences, and bad_checkpoint.
    """
    found = _found(folder)
    faults = list(_differences(found, {tensor.name: tensor for tensor in catalogue.tensors()}))
    if faults:
        raise listed(Code.CHECKPOINT_MISMATCH, faults)
    return found


def _differences(found: Found, tensors: dict[str, CheckpointTensor]) -> Iterator[Fault]:
    for name, tensor in tensors.items():
        if name not in found:
            yield fault(name, f"{name} is missing")
            continue
        entry = found[name][1]
        if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            wanted = f"{tensor.dtype} {list(tensor.shape)}"
            yield fault(name, f"{name} is {entry.dtype} {list(entry.shape)}, not {wanted}")
    for name in found:
        if name not in tensors:
            yield fault(name, f"{shown(name)} is not a tensor of the model")


def _require_tied(found: Found, tensors: list[CheckpointTensor]) -> None:
    """Tensors that live in one place on the engine must be equal."""
    faults = [
        fault(one.name, f"{one.name} and {one.tied_to} are tied, but differ")
        for one in tensors
        if one.tied_to is not None and not _equal(found[one.name], found[one.tied_to])
    ]
    if faults:
        raise listed(Code.TIED_TENSOR, faults)


def _equal(one: tuple[Shard, TensorEntry], other: tuple[Shard, TensorEntry]) -> bool:
    """Whether two tensors of equal size have the same bits."""
    (first, a), (second, b) = one, other
    with opened(first.path) as left, opened(second.path) as right:
        return same_bytes((left, a.begin), (right, b.begin), a.nbytes)


def _upload(shard: Shard, skipped: set[str]) -> StagedUpload:
    path = shard.path.resolve()
    writes = (
        TensorWrite(tensor=entry.name, values=Span(offset=entry.begin, nbytes=entry.nbytes))
        for entry in shard.header.entries.values()
        if entry.nbytes and entry.name not in skipped
    )
    return StagedUpload(
        external=True,
        path=str(path),
        nbytes=shard.nbytes,
        blake3=file_digest(path),
        writes=tuple(writes),
    )
