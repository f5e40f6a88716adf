"""The machine that rows were measured on: hardware only, never names or paths."""

import os
from pathlib import Path

_GIB = 1 << 30


def machine() -> str:
    """CPU model, cores that this process may use, memory."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB
    return f"{_cpu(Path('/proc/cpuinfo').read_text())}, {cores} cores, {memory:.0f} GiB"


def _cpu(cpuinfo: str) -> str:
    """Model and widest vector instructions, since models of virtual machines say little."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    fields = {key.strip(): value.strip() for key, found, value in lines if found}
    name = fields.get("model name", fields.get("CPU part", "CPU of unknown model"))
    family = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    widest = [flag for flag in ("amx_bf16", "avx512f", "avx2", "sve", "asimd") if flag in flags][:1]
    more = ", ".join((*family, *widest))
    return f"{name} ({more})" if more else name
