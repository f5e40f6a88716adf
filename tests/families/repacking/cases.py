"""The functions of vLLM that rearrange weights in plain torch, each on a small layer."""

from tests.families.repacking.floats import FLOATS
from tests.families.repacking.kernels import KERNELS
from tests.families.repacking.marlin import MARLIN
from tests.families.repacking.marlin_floats import MARLIN_FLOATS
from tests.families.repacking.packed import PACKED

CASES = (*MARLIN, *MARLIN_FLOATS, *KERNELS, *FLOATS, *PACKED)
