"""The probe: how each tensor of a checkpoint would be treated, told by an engine that serves nobody.

Run as `python -m loaders.engine.probe MODEL VLLM-ARGS…` in the engine's environment;
prints one JSON document. Loads the model as vLLM would, so it needs the same memory.
"""

import os
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from loaders.engine.catalogued import Catalogued, described
from loaders.engine.rpc import Answer
from schemas.bridge import EngineDescription

EXTENSION = "loaders.engine.worker.GraftWorker"


def probe(model: str, vllm_args: Sequence[str]) -> EngineDescription:
    """Load the model, learn and prove its treatments, and say what they are.

    Raises RuntimeError if a rank cannot tell.
    """
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args([*vllm_args, "--model", model, "--worker-extension-cls", EXTENSION])
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    _ask(llm, "graft_begin")
    return described([Catalogued.model_validate(value) for value in _ask(llm, "graft_describe")])


def _ask(llm: LLM, method: str) -> list[Any]:
    answers = [Answer.model_validate_json(a) for a in llm.collective_rpc(method, args=(uuid.uuid4().hex,))]
    for answer in answers:
        if answer.error is not None:
            raise RuntimeError(f"rank {answer.rank}: {answer.error.detail}")
    return [answer.value for answer in answers]


def main() -> None:
    """Print what was found, alone on stdout."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM and its libraries print what they like
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    found = probe(sys.argv[1], sys.argv[2:])
    out.write(found.model_dump_json())
    out.close()


if __name__ == "__main__":
    main()
