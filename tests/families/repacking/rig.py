"""A served layer whose weights one of vLLM's functions rearranged, with Graft's session over it."""

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm.config import DeviceConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.utils.torch_utils import set_default_torch_dtype

from loaders.engine import atlas
from loaders.engine.dependents import Assembly, collect_all
from loaders.engine.readback import gather
from loaders.engine.session import Session
from schemas.bridge import CommitRequest, PrepareRequest, ReadTensor
from tests.families.repacking.functions import Case, resolve
from tests.families.repacking.stand_ins import standing_in
from tests.loaders.engine.atlases import Body
from tests.loaders.engine.layers import Method, Model, config

ROUNDS = 3
MAIN: Any = SimpleNamespace(call=lambda function: function(), check=lambda: None)
Values = dict[str, torch.Tensor]


CPU = torch.device("cpu")


def device() -> torch.device:
    """Where vLLM serves: on a GPU nothing is replaced."""
    return torch.device(DeviceConfig().device_type)


class Experts(RoutedExperts):  # type: ignore[misc]
    """Experts with parameters of any names."""

    def __init__(self, experts: int) -> None:
        nn.Module.__init__(self)
        self.local_num_experts = self.num_experts = self.global_num_experts = experts
        self.hidden_size = 64
        self.moe_config = SimpleNamespace()


class Reading(Method):
    """Processes as the case says; the kernel depends on every bit that processing left."""

    is_monolithic = False

    def __init__(self, case: Case) -> None:
        super().__init__(lambda layer: None, checksums)
        self.case, self.processing = case, case.title

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        with standing_in(self.case.stand_ins if device() == CPU else ()):
            self.case.process(resolve(self.case.name), layer)


def checksums(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A sum over all tensors of the layer in which each byte counts by its place."""
    sums = []
    for _, tensor in sorted(_tensors(layer)):
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
        sums.append(((raw + 1) * (torch.arange(raw.numel()) * 2654435761 % 1000003 + 1)).sum())
    return torch.stack(sums)


def _tensors(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in (*layer._parameters.items(), *vars(layer).items()):
        if isinstance(value, torch.Tensor):
            yield name, value


def layer_of(case: Case, values: Values) -> Any:
    """The layer before processing; on the meta device if the values are."""
    made: Any = Experts(case.experts) if case.experts else LinearBase(6, 4, disable_tp=True)
    made.quant_method = Reading(case)
    for name, member in case.members.items():
        setattr(made, name, copy(member))
    for name, value in values.items():
        made.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return made


def drawn(case: Case, seed: int) -> Values:
    """A checkpoint of the layer: any bits where they are packed, numbers elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _drawn(generator, name, *spec) for name, spec in case.parameters.items()}


def _drawn(generator: torch.Generator, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point and dtype.itemsize > 1:
        noise = torch.randn(shape, generator=generator)
        return (noise.exp() if "scale" in name else noise).to(dtype)
    if "scale" in name and dtype is torch.uint8:
        return torch.randint(118, 132, shape, generator=generator, dtype=torch.uint8)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype.is_floating_point:
        raw &= 0x3F if "scale" in name else 0xBF
    return raw.view(dtype).reshape(shape)


class Served:
    """A live layer, loaded from a checkpoint in `folder` and processed, and a session over it."""

    def __init__(self, case: Case, values: Values, folder: Path) -> None:
        self.case, self._folder = case, folder
        save_file({f"layer.{name}": value for name, value in values.items()}, folder / "model.safetensors")
        self.live = processed(case, values)
        meta = {name: value.to("meta") for name, value in values.items()}
        served = config()
        served.model_config = SimpleNamespace(dtype=torch.bfloat16, hf_config=None, model=str(folder))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(atlas, "build_twin", lambda *_: Model(layer_of(case, meta)))
            self.session = Session(0, served, self.live, folder)
        self.session._failpoints = SimpleNamespace(reach=lambda point: None)  # type: ignore[assignment]

    @property
    def treatments(self) -> dict[str, tuple[str, str | None]]:
        """Treatment of every parameter, with the reason if it is refused."""
        views = self.session.atlas.catalogue
        return {view.name.removeprefix("layer."): (view.treatment.value, view.reason) for view in views}

    def upload(self, values: Values, picks: dict[str, Any]) -> None:
        """Commit values: of each parameter all, some experts (`["expert", …]`), or elements at positions."""
        body = Body(self._folder / "body")
        for name, value in values.items():
            pick = picks.get(name)
            if pick is None:
                body.write(f"layer.{name}", value)
            elif isinstance(pick, list):
                for expert in pick:
                    body.write(f"layer.{name}", value[expert], expert=expert)
            else:
                bits = value.view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[value.itemsize])
                body.write(f"layer.{name}", bits[pick].view(value.dtype), pick)
        self._commit(uploads=(body.staged(),))

    def rollback(self, version: int) -> None:
        """To an earlier version."""
        self._commit(restore=version)

    def _commit(self, **what: Any) -> None:
        session = self.session
        request = PrepareRequest(nonce="n", key="k", base_version=session.version, timeout_s=60, **what)
        session.prepare(request, MAIN)
        session.apply(CommitRequest(nonce="n", key="k", version=session.version + 1))
        session.settle("k")

    def read(self, name: str) -> torch.Tensor:
        """The parameter in checkpoint format, flat, as bytes."""
        shape, dtype = self.case.parameters[name]
        out = torch.empty(torch.Size(shape).numel(), dtype=dtype)
        wanted = ReadTensor(name=f"layer.{name}", tensor=f"layer.{name}")
        assert gather(self.session.atlas, wanted, out) == out.numel()
        return out.view(torch.uint8)


def processed(case: Case, values: Values) -> Model:
    """A fresh layer with these values, after vLLM's function: the oracle, which Graft has no part in."""
    made = Model(layer_of(case, {name: value.clone().to(device()) for name, value in values.items()}))
    with torch.no_grad(), set_default_torch_dtype(torch.bfloat16):
        made.layer.quant_method.process_weights_after_loading(made.layer)
    return made


def state(model: Model) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Every tensor of the layer, down to bits."""
    return {
        path: (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for path, tensor in collect_all(Assembly(model.layer)).tensors.items()
    }


def rounds(served: Served) -> None:
    """Own weights change nothing; changed ones equal the function run afresh; back bit for bit; thrice."""
    case, live = served.case, served.live
    base, start = drawn(case, 1), state(live)
    assert start == state(processed(case, base))
    for number in range(ROUNDS):
        served.upload(base, {})
        assert state(live) == start
        version, values = served.session.version, {name: value.clone() for name, value in base.items()}
        for picks in _picks(case, number):
            new = drawn(case, 100 + number)
            served.upload({name: new[name] for name in picks}, picks)
            for name, pick in picks.items():
                _change(values[name], new[name], pick)
            changed = state(live)
            assert changed == state(processed(case, values))
            for name in picks:
                assert torch.equal(served.read(name), values[name].view(-1).view(torch.uint8))
        assert changed != start
        served.rollback(version)
        assert state(live) == start


def _picks(case: Case, number: int) -> Iterator[dict[str, Any]]:
    """Some elements of every parameter; then some experts; then whole ones, each in one of the rounds."""
    generator = torch.Generator().manual_seed(number)
    count = {name: torch.Size(shape).numel() for name, (shape, _) in case.parameters.items()}
    yield {name: torch.randperm(n, generator=generator)[: max(1, n // 20)] for name, n in count.items()}
    if case.experts:
        yield {name: [number % case.experts, case.experts - 1] for name in case.parameters}
    for name in list(case.parameters)[number::ROUNDS]:
        yield {name: None}


def _change(value: torch.Tensor, new: torch.Tensor, pick: Any) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[value.element_size()]
    ours, theirs = value.view(bits), new.view(bits)
    if pick is None:
        ours.copy_(theirs)
    elif isinstance(pick, list):
        ours[pick] = theirs[pick]
    else:
        ours.view(-1)[pick] = theirs.view(-1)[pick]
