"""Hidden copies: tensors that hold a parameter's values somewhere else than the parameter.

A module without post-processing is patched where its parameters are. That is right
only if nobody copied them: an attention backend may keep its sinks in another dtype.
"""

from torch import nn

from loaders.engine.kind import own_parameters
from loaders.engine.state import collect


def hidden_copies(module: nn.Module) -> dict[str, str]:
    """Parameter of the live module → where in it or below it another tensor has equal values.

    Only looks at tensors of the parameter's size outside of its storage; children with
    parameters of their own are kinds of their own.
    """
    own = own_parameters(module)
    storages = {parameter.untyped_storage()._cdata for parameter in own.values()}
    found: dict[str, str] = {}
    for child_name, child in module.named_modules():
        if child is not module and own_parameters(child):
            continue
        for path, tensor in collect(child).tensors.items():
            if tensor.untyped_storage()._cdata in storages or not tensor.is_floating_point():
                continue
            for name, parameter in own.items():
                if tensor.numel() == parameter.numel() and bool(
                    (tensor.reshape(-1).float() == parameter.reshape(-1).float()).all()
                ):
                    found[name] = ".".join(part for part in (child_name, path) if part)
    return found
