"""Uploads: 1 GiB to a checked, digested, durable blob, against nginx and `b3sum` in the same folder."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.nginx import await_port, nginx
from benchmarks.receiver import TENSOR
from benchmarks.row import Row, Sense
from benchmarks.turns import in_turns, spread

NBYTES = 1 << 30
_LIMIT = """\
Per GiB, this takes about 1.4 s of CPU: 0.25 s to read from the socket, 0.3 to 0.4 s in which
uvicorn passes the bytes on (they are copied twice before they reach the thread that writes
them), 0.18 s to hash, 0.25 to 0.4 s to write, 0.25 s to look for NaN and infinity. nginx and
`b3sum` together take 0.7 s, and look at no value. The sender takes 0.25 s more on either side,
so on two cores 0.8 s is the least that this can take, and on busy ones the ratio is that of the
CPU times. Reading from the socket into memory that is used again, past uvicorn's events, would
save about 0.3 s; it is not done. The disk is waited for meanwhile: made durable too, nginx and
`b3sum` come within some 15 %, as the last figure says.
"""
_ROUNDS = 7
_SEND = 1 << 20
CONNECTIONS = {"upload_1": 1, "upload_4": 4}


class Bodies:
    """As many bodies as there are connections, of `NBYTES` together; random and finite."""

    def __init__(self, connections: int) -> None:
        self.elements = NBYTES // 2 // connections
        rng = np.random.default_rng(5)
        noise = rng.integers(0, 1 << 16, self.elements + connections, np.uint16) & 0xBFFF
        entry = {"dtype": "BF16", "shape": [self.elements], "data_offsets": [0, 2 * self.elements]}
        header = json.dumps({TENSOR: entry}).encode()
        self.head = len(header).to_bytes(8, "little") + header
        self.data = [noise[n : n + self.elements].data.cast("B") for n in range(connections)]

    def send(self, port: int) -> list[str]:
        """PUT all at once, each over a connection of its own; what was answered."""
        with ThreadPoolExecutor(len(self.data)) as pool:
            return list(pool.map(lambda n: self._put(port, n), range(len(self.data))))

    def _put(self, port: int, number: int) -> str:
        length = len(self.head) + self.data[number].nbytes
        lines = (
            f"PUT /body{number} HTTP/1.1",
            "Host: 127.0.0.1",
            "Content-Type: application/octet-stream",
            f"Content-Length: {length}",
            "Connection: close",
        )
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall("\r\n".join((*lines, "", "")).encode() + self.head)
            connection.sendall(self.data[number])
            answer = b"".join(iter(lambda: connection.recv(_SEND), b"")).decode()
        status, _, rest = answer.partition("\r\n")
        if status.split()[1] not in ("201", "204"):
            raise RuntimeError(answer)
        return rest.partition("\r\n\r\n")[2]


@contextmanager
def graft(folder: Path, elements: int) -> Iterator[tuple[int, Path]]:
    """Port of the receiver, and where its blobs are."""
    blobs = folder / "blobs"
    blobs.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.receiver", str(folder), str(elements)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            await_port(port)
            yield port, blobs
        finally:
            child.terminate()


def measure(names: list[str]) -> Iterator[Row]:
    """The rows of this module."""
    for name in names:
        yield _row(name, CONNECTIONS[name])


def _row(name: str, connections: int) -> Row:
    bodies = Bodies(connections)
    with (
        tempfile.TemporaryDirectory() as folder,
        graft(Path(folder) / "graft", bodies.elements) as (ours, blobs),
        nginx(Path(folder) / "nginx") as (theirs, files),
    ):
        sums: list[str] = []

        def empty() -> None:
            for path in (*blobs.iterdir(), *files.iterdir()):
                path.unlink()
            os.sync()

        def by_graft() -> None:
            sums[:] = bodies.send(ours)

        def by_nginx() -> None:
            bodies.send(theirs)
            found = _b3sums(files)
            if sums and sorted(found) != sorted(sums):
                raise RuntimeError("Graft and b3sum do not agree")

        def by_nginx_durable() -> None:
            by_nginx()
            for path in files.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

        sides: dict[str, Callable[[], None]] = {
            "Graft": by_graft,
            "nginx and b3sum": by_nginx,
            "the same and fsync": by_nginx_durable,
        }
        empty()
        in_turns(sides, 1, empty)
        taken = in_turns(sides, _ROUNDS, empty)
    ours_s, theirs_s = median(taken["Graft"]), median(taken["nginx and b3sum"])
    figures = tuple((label, spread(found)) for label, found in taken.items())
    durable = median(taken["the same and fsync"]) / ours_s
    plural = "one connection" if connections == 1 else f"{connections} connections"
    return Row(
        name,
        f"1 GiB over {plural} to a checked, digested, durable blob",
        "nginx (DAV PUT, same folder), then `b3sum`",
        theirs_s / ours_s,
        Sense.AT_LEAST,
        0.8,
        (*figures, ("ratio to what is durable too", f"{durable:.3g}")),
        limit=" ".join(_LIMIT.split()),
    )


def _b3sums(folder: Path) -> list[str]:
    found = subprocess.run(["b3sum", "--no-names", *folder.iterdir()], capture_output=True, check=True)
    return found.stdout.decode().split()
