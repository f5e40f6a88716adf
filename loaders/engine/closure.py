"""Closures: a module with all that is derived from it, live beside its twin, and its proved kind."""

from dataclasses import dataclass

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from loaders.engine.dependents import Assembly, assemblies, collect_all
from loaders.engine.hidden import hidden_copies
from loaders.engine.kind import Kind, learn, own_parameters, signature, unsupported
from loaders.engine.proofs import Proofs
from loaders.engine.state import ModuleState, is_dense
from loaders.engine.workshop import Workshop, quant_method
from schemas.model import Treatment


@dataclass(frozen=True, slots=True, eq=False)
class Closure:
    """A module and its dependents, live and as twin: parameters and all that is derived from them."""

    name: str
    live: Assembly
    twin: Assembly
    kind: Kind
    state: ModuleState
    """State of the live modules; its tensors are the ones that the kernels read."""
    sites: dict[str, str]
    """Local parameter name → site."""

    def target(self, path: str) -> str:
        """Name of the runtime tensor that `path` leads to."""
        return self.live.named(path, self.name)

    @property
    def rebuilt(self) -> bool:
        """Whether some parameter is rebuilt: then all of them are needed in checkpoint format."""
        return any(kind.treatment is Treatment.REBUILT for kind in self.kind.parameters.values())

    def problems(self, local: str) -> list[str]:
        """Why the parameter cannot be updated; empty if it can."""
        kind = self.kind.parameters[local]
        refused = kind.treatment is Treatment.UNSUPPORTED
        return [
            *([f"{self.name}: {kind.reason}"] if refused else []),
            *_mismatches(self),
            *_copies(self, local),
        ]


def _kind_of(
    vllm_config: VllmConfig, workshop: Workshop, assembly: Assembly, proofs: Proofs, key: object
) -> Kind:
    """Proved now or at an earlier start, unless where the weights are changes behind Graft's back."""
    if vllm_config.parallel_config.enable_eplb and isinstance(assembly.module, RoutedExperts):
        return unsupported(assembly.module, "expert load balancing (EPLB) moves experts between slots")
    known = proofs.find(key)
    if known is None:
        known = learn(workshop, assembly)
        if known.proved:
            proofs.keep(key, known)
    return known


def closures_of(
    vllm_config: VllmConfig, workshop: Workshop, live: nn.Module, twin: nn.Module
) -> dict[str, Closure]:
    """Every module with parameters of its own, by name, with its proved kind and live state."""
    kinds: dict[object, Kind] = {}
    proofs = Proofs.of(vllm_config)
    first_names: dict[int, str] = {}
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        first_names.setdefault(id(parameter), name)
    live_modules = dict(live.named_modules())
    closures = {}
    for name, assembly in assemblies(twin).items():
        key = signature(assembly)
        if key not in kinds:
            kinds[key] = _kind_of(vllm_config, workshop, assembly, proofs, key)
        living = assembly.like(live_modules, name)
        closures[name] = Closure(
            name,
            living,
            assembly,
            kinds[key],
            _live_state(living, kinds[key]),
            {
                local: first_names[id(parameter)]
                for local, parameter in own_parameters(assembly.module).items()
            },
        )
    return closures


def _live_state(live: Assembly, kind: Kind) -> ModuleState:
    """All state of the module, and of dependents what was seen to be derived."""
    state = collect_all(live)
    state.tensors = {
        path: tensor
        for path, tensor in state.tensors.items()
        if not path.startswith("@") or path in kind.tensors
    }
    return state


def _sizes(closure: Closure) -> list[str]:
    """Each runtime tensor must hold the parameter's blocks, as many as were not learned too."""
    wrong = []
    for local, parameter in own_parameters(closure.twin.module).items():
        for spot in closure.kind.parameters[local].spots:
            numel = parameter.numel()
            wanted = numel if spot.is_identity else numel // spot.src_block * spot.dst_block
            tensor = closure.state.tensors.get(spot.path)
            if tensor is not None and (tensor.numel() != wanted or not is_dense(tensor)):
                wrong.append(f"{closure.target(spot.path)} has {tensor.numel()} elements, or gaps")
    return wrong


def _mismatches(closure: Closure) -> list[str]:
    """The live module must look as its kind did when it was proved."""
    found = {path: tensor.dtype for path, tensor in closure.state.tensors.items()}
    if found != closure.kind.tensors or tuple(closure.state.handles) != closure.kind.handles:
        return [f"{closure.name} holds other state than its kind: {sorted(found)}"]
    if closure.state.sharing() != closure.kind.sharing:
        return [f"{closure.name} shares memory otherwise than its kind: {sorted(closure.state.sharing())}"]
    return _sizes(closure)


def _copies(closure: Closure, local: str) -> list[str]:
    """Where nothing is processed nothing was proved either, so copies are looked for."""
    if quant_method(closure.twin.module) is not None:
        return []
    copy = hidden_copies(closure.live.module).get(local)
    return [f"{closure.name} keeps a copy of {local} at {copy}"] if copy else []
