"""Element types of safetensors files: names, widths, and which of them can hold NaN."""

from enum import StrEnum


class Dtype(StrEnum):
    """A safetensors dtype tag, as it stands in file headers and in Graft's JSON."""

    BOOL = "BOOL"
    U8 = "U8"
    I8 = "I8"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    F8_E8M0 = "F8_E8M0"
    U16 = "U16"
    I16 = "I16"
    F16 = "F16"
    BF16 = "BF16"
    U32 = "U32"
    I32 = "I32"
    F32 = "F32"
    U64 = "U64"
    I64 = "I64"
    F64 = "F64"

    @property
    def nbytes(self) -> int:
        """Width of one element in bytes."""
        return _NBYTES[self]

    @property
    def is_floating(self) -> bool:
        """Whether the type can hold NaN or infinity."""
        return self.value.startswith(("F", "BF"))


_NBYTES = {
    Dtype.BOOL: 1,
    Dtype.U8: 1,
    Dtype.I8: 1,
    Dtype.F8_E4M3: 1,
    Dtype.F8_E5M2: 1,
    Dtype.F8_E8M0: 1,
    Dtype.U16: 2,
    Dtype.I16: 2,
    Dtype.F16: 2,
    Dtype.BF16: 2,
    Dtype.U32: 4,
    Dtype.I32: 4,
    Dtype.F32: 4,
    Dtype.U64: 8,
    Dtype.I64: 8,
    Dtype.F64: 8,
}
