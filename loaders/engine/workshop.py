"""The workshop: materialised copies of twin modules, processed as vLLM would, and probed.

What is learned here (where elements go, whether a patch equals a reload) is learned
from vLLM's own processing and kernels, on modules that serve nobody. Runs vLLM
code, so only in the worker's main thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.utils.torch_utils import set_default_torch_dtype

from loaders.engine.dependents import Assembly
from loaders.engine.private import private_copy

Values = dict[str, torch.Tensor]
"""Parameter name (within the module) → all its elements, in the twin's shape."""


class NoProbe(Exception):
    """There is no known way to run this kind of module on its own."""


class CollectiveProcessing(ValueError):
    """Processing exchanges something between ranks, which may not be at it at the same time."""


_COLLECTIVES = ("all_reduce", "allreduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""What is in the names of vLLM's own operations that wait for other ranks."""


class _WithoutCollectives(TorchDispatchMode):
    """Refuses operations that wait for other ranks."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_collective(func._schema.name):
            raise CollectiveProcessing(f"its processing needs all ranks at once ({func._schema.name})")
        return func(*args, **(kwargs or {}))


def _is_collective(qualified: str) -> bool:
    namespace, _, name = qualified.partition("::")
    if namespace == "vllm":
        return any(part in name for part in _COLLECTIVES)
    return namespace in ("c10d", "_c10d_functional") or name.startswith("shm_")


class Workshop:
    """Makes and runs private copies of twin modules."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._config = vllm_config
        self._device = torch.device(vllm_config.device_config.device_type)

    @contextmanager
    def _context(self) -> Iterator[None]:
        dtype = self._config.model_config.dtype
        with set_default_torch_dtype(dtype), set_current_vllm_config(self._config), torch.no_grad():
            yield

    def processed(self, twin: Assembly, values: Values) -> Assembly:
        """A private copy of `twin` loaded with `values` and processed after loading.

        `values` are given away: processing may write into them. The twin stays as it is.

        Raises CollectiveProcessing if the ranks would have to do it together.
        """
        clone = _materialised(twin.module, {name: value.to(self._device) for name, value in values.items()})
        method = quant_method(clone)
        with self._context(), _WithoutCollectives():
            if method is not None:
                method.process_weights_after_loading(clone)
            instead = {id(twin.module): clone}
            dependents = tuple((name, private_copy(module, instead)) for name, module in twin.dependents)
            for _, module in dependents:
                derive: Any = module
                derive.process_weights_after_loading(self._config.model_config.dtype)
        return Assembly(clone, dependents)

    def probe(self, twin: nn.Module, experts: int | None = None) -> "Probe":
        """A probe of this kind of module, as `probe_for` makes it."""
        return probe_for(twin, self._config.model_config.dtype, experts, device=self._device)

    def outputs(self, module: nn.Module, probe: "Probe") -> list[torch.Tensor]:
        """Outputs of the module's kernels on fixed inputs, on the CPU."""
        with self._context():
            return [output.cpu() for output in probe(module)]


Probe = Callable[[nn.Module], list[torch.Tensor]]
"""Runs a module on fixed inputs."""


def quant_method(module: nn.Module) -> QuantizeMethodBase | None:
    """The method that processes and applies the module's weights, if it has one."""
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None


def _materialised(twin: nn.Module, values: Values) -> nn.Module:
    clone = private_copy(twin)
    clone._parameters = {
        name: None if meta is None else _parameter(meta, values[name])
        for name, meta in twin._parameters.items()
    }
    return clone


def _parameter(meta: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """`value` dressed as the twin's parameter: its class and loader attributes."""
    parameter = nn.Parameter(value, requires_grad=False)
    parameter.__class__ = meta.__class__
    parameter.__dict__ = dict(meta.__dict__)
    return parameter


class _Inputs:
    """Random inputs of a probe, drawn on the CPU, so that they are the same on every device."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype, self._device = dtype, device

    def rows(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Numbers about 0, [rows, columns], in the model's dtype unless another is given."""
        drawn = torch.randn(rows, columns, generator=self._generator, dtype=torch.float32)
        return drawn.to(self._device, dtype or self._dtype)

    def shares(self, rows: int, columns: int) -> torch.Tensor:
        """Numbers from 0 to 1, float32 [rows, columns]."""
        return torch.rand(rows, columns, generator=self._generator).to(self._device)

    def indices(self, below: int, count: int) -> torch.Tensor:
        """Indices below a number, int64 [count]."""
        return torch.randint(below, (count,), generator=self._generator).to(self._device)

    def choices(self, rows: int, top: int, of: int) -> torch.Tensor:
        """Different indices in every row, int32 [rows, top]."""
        drawn = torch.stack([torch.randperm(of, generator=self._generator)[:top] for _ in range(rows)])
        return drawn.to(self._device, torch.int32)


_CPU = torch.device("cpu")


def probe_for(
    twin: nn.Module,
    dtype: torch.dtype,
    experts: int | None = None,
    seed: int = 0,
    device: torch.device = _CPU,
) -> Probe:
    """A probe that drives every kernel of this kind of module, on `device`.

    Inputs are drawn from `seed` alone, in the model's dtype, so outputs of two modules can
    be compared. `experts` is how many experts the probed copies hold, all if not given.

    Raises NoProbe if the class of the module is not known.
    """
    inputs = _Inputs(seed, dtype, device)
    if isinstance(twin, RoutedExperts):
        return _experts_probe(twin, inputs, experts or local_experts(twin))
    if isinstance(twin, VocabParallelEmbedding):
        return _embedding_probe(twin, inputs)
    if isinstance(twin, LinearBase):
        return _linear_probe(twin, inputs)
    raise NoProbe(f"no probe is known for {type(twin).__name__}")


def local_experts(twin: RoutedExperts) -> int:
    """How many experts this rank holds."""
    count: Any = twin.local_num_experts
    return int(count)


def _linear_probe(twin: LinearBase, inputs: _Inputs) -> Probe:
    x = inputs.rows(8, getattr(twin, "input_size_per_partition", twin.input_size))

    def run(module: nn.Module) -> list[torch.Tensor]:
        method: Any = module.quant_method
        return [method.apply(module, x, module._parameters.get("bias"))]

    return run


def _embedding_probe(twin: VocabParallelEmbedding, inputs: _Inputs) -> Probe:
    rows, columns = twin.weight.shape
    ids, x = inputs.indices(rows, 16), inputs.rows(8, columns)

    def run(module: nn.Module) -> list[torch.Tensor]:
        method: Any = module.quant_method
        return [method.embedding(module, ids), method.apply(module, x)]

    return run


def _experts_probe(twin: RoutedExperts, inputs: _Inputs, experts: int) -> Probe:
    x, top = inputs.rows(8, twin.hidden_size), min(2, experts)
    ids, weights = inputs.choices(8, top, experts), inputs.shares(8, top)
    logits = inputs.rows(8, experts, torch.float32)

    def run(module: nn.Module) -> list[torch.Tensor]:
        method: Any = module.quant_method
        if method.is_monolithic:
            return [method.apply_monolithic(module, x.clone(), logits)]
        out = method.apply(module, x.clone(), weights, ids, None, None)
        return [out]

    return run
