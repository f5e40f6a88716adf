"""`make crash`: every combination that has no result in the given file yet, then the table of all."""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.crash.combinations import ON_VLLM, everything
from tests.crash.fake import FakeEngineRig
from tests.crash.rig import Lost, Rig
from tests.crash.table import table
from tests.crash.trial import Trial

FRESH_AFTER = 40
"""A history so long is given up for a new one: what is slow about long ones is not the question here."""


def main() -> int:
    """Run what is missing; status 1 if anything was lost."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("fake", "vllm"), default="fake")
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    path: Path = given.results
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    done = {result["name"] for result in _read(path)}
    todo = [one for one in (ON_VLLM if given.engine == "vllm" else everything()) if one.name not in done]
    trial: Trial | None = None
    try:
        for place, combination in enumerate(todo):
            if trial is None or place % FRESH_AFTER == 0:
                _end(trial)
                trial = _begin(given.engine)
            begun = time.monotonic()
            try:
                result, detail = trial.run(combination), ""
            except Lost as error:
                result, detail = "LOST", str(error)
                print(f"{combination.name}: LOST: {detail} (see {trial.rig.folder})", flush=True)
                trial.rig.close()
                trial = None
            seconds = round(time.monotonic() - begun, 1)
            line = {"name": combination.name, "result": result, "detail": detail, "seconds": seconds}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{place + 1}/{len(todo)} {combination.name}: {result}, {seconds} s", flush=True)
    finally:
        _end(trial)
    results = {found["name"]: found["result"] for found in _read(path)}
    print(table(results))
    print(f"{sum(found['seconds'] for found in _read(path)) / 60:.0f} minutes")
    return 1 if "LOST" in results.values() else 0


def _begin(engine: str) -> Trial:
    folder = Path(tempfile.mkdtemp(prefix="graft-crash-"))
    rig = _rig(engine, folder)
    try:
        return Trial(rig)
    except BaseException:
        rig.close()
        raise


def _rig(engine: str, folder: Path) -> Rig:
    if engine == "vllm":
        from tests.crash.vllm import VllmRig  # which imports torch

        return VllmRig(folder)
    return FakeEngineRig(folder)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _end(trial: Trial | None) -> None:
    if trial is not None:
        trial.rig.close()
        shutil.rmtree(trial.rig.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
