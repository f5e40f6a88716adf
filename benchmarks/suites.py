"""Which module measures which rows: `measure(names)` of it yields them in any order."""

SUITES: dict[str, tuple[str, ...]] = {
    "benchmarks.sparse": (
        "sparse_001",
        "sparse_01",
        "sparse_1",
        "sparse_30",
        "sparse_packed_1",
        "sparse_memory",
    ),
    "benchmarks.upload": ("upload_1", "upload_4"),
    "benchmarks.many_small": ("many_small",),
    "benchmarks.plan_120b": ("plan_120b",),
    "benchmarks.replay": ("replay_100",),
    "benchmarks.stall_expert": ("stall_expert", "recompute", "serving_share"),
    "benchmarks.stall_model": ("stall_model_1", "stall_rollback", "stall_model_dense"),
}
"""In the order of the report. Rows that share what is dear to make share a module."""


def all_names() -> list[str]:
    """Every row."""
    return [name for names in SUITES.values() for name in names]


def chosen(names: list[str]) -> dict[str, list[str]]:
    """Modules with the rows that are wanted of them; all, if none is named.

    Raises ValueError for a name that is no row.
    """
    unknown = [name for name in names if name not in all_names()]
    if unknown:
        raise ValueError(f"no such rows: {', '.join(unknown)}; there are {', '.join(all_names())}")
    wanted = set(names or all_names())
    picked = {module: [name for name in rows if name in wanted] for module, rows in SUITES.items()}
    return {module: rows for module, rows in picked.items() if rows}
