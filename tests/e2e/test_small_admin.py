"""The admin stays small and answers while a gigabyte is uploaded through it to the real engine's model."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.e2e.stack import SAFETENSORS, Stack

MIB = 1 << 20
GIB = 1024 * MIB


def gigabyte(model: Path) -> Iterator[bytes]:
    """A patch batch of more than 1 GiB: every tensor of the model, then some of them again."""
    (file,) = model.glob("*.safetensors")
    with file.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(length))
        header.pop("__metadata__", None)
        inside = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        total = inside[-1][1]["data_offsets"][1]
        pieces = inside + [item for item in inside if item[1]["data_offsets"][0] < GIB - total]
        entries, patches, end = {}, [], 0
        for number, (name, entry) in enumerate(pieces):
            begin, end = end, end + entry["data_offsets"][1] - entry["data_offsets"][0]
            entries[f"p{number}"] = {**entry, "data_offsets": [begin, end]}
            patches.append(
                {"name": name, "shape": entry["shape"], "dtype": entry["dtype"], "values": f"p{number}"}
            )
        assert end > GIB
        text = json.dumps({"__metadata__": {"patches": json.dumps(patches)}, **entries}).encode()
        yield len(text).to_bytes(8, "little") + text
        for _, entry in pieces:
            begin, stop = entry["data_offsets"]
            source.seek(8 + length + begin)
            while begin < stop:
                piece = source.read(min(MIB, stop - begin))
                begin += len(piece)
                yield piece


def peak(pid: int) -> int:
    """Peak resident bytes of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def test_gigabyte_upload_costs_little_memory_and_keeps_answering(demo_stack: Stack) -> None:
    """1 GiB received and checked raises the admin's peak by less than 64 MiB; it answers within 100 ms."""
    assert demo_stack.process is not None
    pid = demo_stack.process.pid
    demo_stack.json("GET", "/v1/model/tensors")
    before = peak(pid)
    done = threading.Event()
    waits: list[float] = []

    def poll() -> None:
        with httpx.Client(timeout=30) as client:
            while not done.wait(0.05):
                begin = time.monotonic()
                client.get(f"{demo_stack.admin}/health/live").raise_for_status()
                waits.append(time.monotonic() - begin)

    watcher = threading.Thread(target=poll)
    watcher.start()
    with demo_stack.transaction() as transaction:
        path = f"/v1/transactions/{transaction.id}/patches"
        try:
            upload = demo_stack.json("POST", path, content=gigabyte(demo_stack.model), headers=SAFETENSORS)
        finally:
            done.set()
            watcher.join()
        demo_stack.json("DELETE", f"/v1/transactions/{transaction.id}")
    assert upload["nbytes"] > GIB
    assert peak(pid) - before < 64 * MIB
    assert len(waits) > 20
    assert sorted(waits)[len(waits) * 95 // 100] < 0.1  # the machine may hold up one in twenty
    assert demo_stack.staged_files() == []
