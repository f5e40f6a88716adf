"""Modules that derive state from the weights of another module once those are processed.

vLLM processes attention layers last. MLA's splits the `kv_b_proj` beside it into
`W_UV` and `W_UK_T` and runs from those; a patched `kv_b_proj` alone would be half a change.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer

from loaders.engine.private import is_owned
from loaders.engine.state import ModuleState, collect


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """A module and the modules that derive state from it, by name."""

    module: nn.Module
    dependents: tuple[tuple[str, nn.Module], ...] = ()

    def named(self, path: str, name: str) -> str:
        """The full name of what `path` leads to, in an assembly whose module is called `name`."""
        if not path.startswith("@"):
            return f"{name}.{path}"
        number, _, rest = path[1:].partition(".")
        return f"{self.dependents[int(number)][0]}.{rest}"

    def like(self, model_modules: dict[str, nn.Module], name: str) -> "Assembly":
        """The modules of the same names in another model."""
        dependents = tuple((other, _unwrapped(model_modules, other)) for other, _ in self.dependents)
        return Assembly(_unwrapped(model_modules, name), dependents)


def _unwrapped(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """The module of that name; LoRA puts a layer in its place and keeps it as `base_layer`."""
    return modules.get(f"{name}.base_layer", modules[name])


def collect_all(assembly: Assembly) -> ModuleState:
    """State of the module, and under `@0.…`, `@1.…` of its dependents."""
    state = collect(assembly.module)
    for number, (_, module) in enumerate(assembly.dependents):
        own = collect(module)
        state.tensors |= {f"@{number}.{path}": tensor for path, tensor in own.tensors.items()}
        state.handles |= {f"@{number}.{path}": handle for path, handle in own.handles.items()}
    return state


def collect_processed(processed: Assembly, twin: Assembly) -> ModuleState:
    """State of a processed copy of `twin`; of dependents only what processing has made.

    Raises ValueError if a dependent needed weights that were not given.
    """
    state, before = collect_all(processed), collect_all(twin)
    for path, tensor in list(state.tensors.items()):
        if not path.startswith("@"):
            continue
        if path in before.tensors and before.tensors[path] is tensor:
            del state.tensors[path]
        elif tensor.is_meta:
            raise ValueError(f"{path} is derived from several modules")
    return state


def assemblies(model: nn.Module) -> dict[str, Assembly]:
    """Every module that has parameters of its own, by name, with its dependents."""
    users: dict[int, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, module in model.named_modules():
        if is_deferred_attention_layer(module):
            for source in {id(found) for found in _referred(module)}:
                users[source].append((name, module))
    return {
        name: Assembly(module, tuple(users[id(module)]))
        for name, module in model.named_modules()
        if any(parameter is not None for parameter in module._parameters.values())
    }


def _referred(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that an attention layer, or an object of its own, holds on to."""
    yield from (child for child in module._modules.values() if child is not None)
    for value in vars(module).values():
        if isinstance(value, nn.Module):
            yield value
        elif is_owned(value):
            members = vars(value).values() if hasattr(value, "__dict__") else ()
            yield from (member for member in members if isinstance(member, nn.Module))
