"""`make crash`: every combination that has no result in the given file yet, then the table of all."""

import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.crash.combinations import everything
from tests.crash.rig import Lost, Rig
from tests.crash.table import table
from tests.crash.trial import Trial

FRESH_AFTER = 40
"""A history so long is given up for a new one: what is slow about long ones is not the question here."""


def main() -> int:
    """Run what is missing; status 1 if anything was lost."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    done = {json.loads(line)["name"] for line in path.read_text().splitlines()}
    todo = [one for one in everything() if one.name not in done]
    trial: Trial | None = None
    try:
        for place, combination in enumerate(todo):
            if trial is None or place % FRESH_AFTER == 0:
                _end(trial)
                trial = Trial(Rig(Path(tempfile.mkdtemp(prefix="graft-crash-"))))
            begun = time.monotonic()
            try:
                result, detail = trial.run(combination), ""
            except Lost as error:
                result, detail = "LOST", str(error)
                print(f"{combination.name}: LOST: {detail} (see {trial.rig.folder})", flush=True)
                trial.rig.close()
                trial = None
            with path.open("a") as file:
                seconds = round(time.monotonic() - begun, 1)
                file.write(json.dumps({"name": combination.name, "result": result, "detail": detail}) + "\n")
            print(f"{place + 1}/{len(todo)} {combination.name}: {result}, {seconds} s", flush=True)
    finally:
        _end(trial)
    results = {(found := json.loads(line))["name"]: found["result"] for line in path.read_text().splitlines()}
    print(table(results))
    return 1 if "LOST" in results.values() else 0


def _end(trial: Trial | None) -> None:
    if trial is not None:
        trial.rig.close()
        shutil.rmtree(trial.rig.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
