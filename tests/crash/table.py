"""The table of what was killed and what was lost."""

from collections.abc import Mapping

from tests.crash.combinations import VICTIMS


def table(results: Mapping[str, str]) -> str:
    """Markdown: a row per operation, with how often each victim was killed; nothing should be lost."""
    rows = [
        "| during | admin killed | engine killed | both killed | not reached | lost |",
        "|---|---|---|---|---|---|",
    ]
    total = dict.fromkeys((*VICTIMS, "not reached", "LOST"), 0)
    for operation in dict.fromkeys(name.split("/")[0] for name in results):
        counts = dict.fromkeys(total, 0)
        for name, result in results.items():
            during, _, victim = name.split("/")
            if during == operation:
                counts[victim if result == "kept" else result] += 1
        for kind, count in counts.items():
            total[kind] += count
        rows.append(_row(operation, counts))
    return "\n".join([*rows, _row("all", total)])


def _row(name: str, counts: Mapping[str, int]) -> str:
    return f"| {name} | {' | '.join(str(counts[kind]) for kind in counts)} |"
