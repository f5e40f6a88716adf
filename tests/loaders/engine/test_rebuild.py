"""From a small live model to spares: what is derived is made anew and moved in place, and back."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loaders.engine.checkpoint import BaseTensor
from loaders.engine.layout import Layout
from loaders.engine.move import Move, Scatter, bits_of
from loaders.engine.readback import gather
from schemas.bridge import ReadTensor
from schemas.dtypes import Dtype
from schemas.model import Treatment
from schemas.problems import ProblemError

pytestmark = pytest.mark.vllm

MAIN: Any = SimpleNamespace(call=lambda function: function())
NAME, OTHER = "layer.weight", "layer.other"
Layers = Any


@pytest.fixture(scope="module")
def made() -> Layers:
    from tests.loaders.engine import layers

    return layers


class Rank:
    """A live model of one layer, its atlas, and what makes spares for it."""

    def __init__(
        self, made: Layers, method: Callable[[], Any], folder: Path, attention: bool = False, **options: Any
    ) -> None:
        from loaders.engine import atlas, closure
        from loaders.engine.rebuild import Rebuilder
        from loaders.engine.shards import Shards

        self.made, self.method, self.attention = made, method, attention
        self.more = {"other": made.drawn(2)} if options.pop("other", False) else {}
        self.live = options.pop("live", None) or self.processed(made.drawn(1))
        self.base = {NAME: made.drawn(1)} | {f"layer.{name}": value for name, value in self.more.items()}
        checkpoint: Any = SimpleNamespace(
            tensors={
                name: BaseTensor(name, Dtype.F32, (made.ROWS, made.COLUMNS), Path("unread"), 0)
                for name in self.base
            },
            read=lambda name: self.base[name].flatten().clone(),
        )
        config = made.config()
        for name, value in options.items():
            setattr(config.parallel_config, name, value)
        meta = {name: torch.empty_like(value, device="meta") for name, value in self.more.items()}
        twin = made.Model(made.layer(method(), **meta), attention)
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("GRAFT_CACHE_DIR", str(folder / "cache"))
            patched.setattr(atlas, "build_twin", lambda config, live: twin)
            patched.setattr(closure, "RoutedExperts", made.LinearBase)
            self.atlas = atlas.build_atlas(config, self.live, checkpoint, made.workshop())
        self.rebuilder = Rebuilder(self.atlas, made.workshop(), Shards(self.atlas, folder))
        self.view = self.atlas.catalogue[0]

    def processed(self, weight: torch.Tensor, **more: torch.Tensor) -> Any:
        """A live model with that weight, processed as vLLM would."""
        layer = self.made.layer(self.method(), weight, **{**self.more, **more})
        model = self.made.Model(layer, self.attention)
        with torch.no_grad():
            model.layer.quant_method.process_weights_after_loading(model.layer)
            if self.attention:
                model.attention.process_weights_after_loading(torch.float32)
        return model

    def spare(self, moves: list[Move]) -> Any:
        """The spare of the layer after the moves."""
        site = self.atlas.sites[NAME]
        self.rebuilder.ensure_shards([site], MAIN)
        (spare,) = self.rebuilder.spares(moves, [site], MAIN)
        return spare

    def write(self, moves: list[Move]) -> list[Move]:
        """Write moves; returns what undoes them."""
        undo = [move.taken_from(self.atlas.targets[move.target]) for move in moves]
        for move in moves:
            move.write(self.atlas.targets[move.target])
        return undo

    def change(self, value: float = 5.0) -> list[Move]:
        """Three elements of the weight, wherever it is kept in checkpoint format."""
        values = bits_of(torch.full((3,), value))
        return [Move(self.atlas.sites[NAME].source, Scatter(torch.tensor([1, 8, 20])), values)]

    def state(self, model: Any = None) -> dict[str, torch.Tensor]:
        """All tensors of the live model, or of another one."""
        from loaders.engine.dependents import collect_all

        modules = dict((model or self.live).named_modules())
        assembly = self.atlas.closures["layer"].twin.like(modules, "layer")
        return {path: tensor.clone() for path, tensor in collect_all(assembly).tensors.items()}


def sums(made: Layers) -> Any:
    """The weight as it is, and sums of its rows."""

    def process(layer: Any) -> None:
        layer.sums = layer.weight.sum(1)

    return made.Method(process, lambda layer, x: x @ layer.weight.t() + layer.sums)


def doubled(made: Layers) -> Any:
    """Only twice the weight, turned."""

    def process(layer: Any) -> None:
        layer.twice = layer.weight.t() * 2
        layer.weight = None

    return made.Method(process, lambda layer, x: x @ layer.twice)


def beside(made: Layers) -> Any:
    """The weight rounded; the other one only turned, which may as well be derived from both."""

    def process(layer: Any) -> None:
        layer.turned, layer.low = layer.other.t().contiguous(), layer.weight.bfloat16()
        layer.weight = layer.other = None

    return made.Method(process, lambda layer, x: x @ layer.turned + x @ layer.low.float().t())


def handled(made: Layers) -> Any:
    """vLLM's own float32 linear: a oneDNN handle."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    return UnquantizedLinearMethod()


def outputs(made: Layers, model: Any) -> torch.Tensor:
    x = torch.randn(5, made.COLUMNS, generator=torch.Generator().manual_seed(3))
    found: torch.Tensor = model.layer.quant_method.apply(model.layer, x)
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[path], b[path]) for path in a)


@pytest.mark.parametrize(
    ("method", "attention"), [(sums, False), (doubled, False), (handled, False), (sums, True)]
)
def test_a_rebuilt_layer_equals_a_fresh_one_and_comes_back(
    made: Layers, tmp_path: Path, method: Any, attention: bool
) -> None:
    """A patch, its spare exchanged and written: as if loaded so; undone: as before; no address moves."""
    rank = Rank(made, lambda: method(made), tmp_path, attention)
    assert rank.view.treatment is Treatment.REBUILT
    before, out = rank.state(), outputs(made, rank.live)
    addresses = {name: target.data_ptr() for name, target in rank.atlas.targets.items()}
    changed = made.drawn(1)
    changed.view(-1)[[1, 8, 20]] = 5.0
    fresh = rank.processed(changed)

    spare = rank.spare(rank.change())
    assert same(rank.state(), before) and torch.equal(outputs(made, rank.live), out)
    undo = rank.write([*rank.change(), *spare.tensors])
    spare.exchange()
    assert same(rank.state(), rank.state(fresh))
    assert torch.equal(outputs(made, rank.live), outputs(made, fresh))
    spare.exchange()
    rank.write(undo[::-1])
    assert same(rank.state(), before) and torch.equal(outputs(made, rank.live), out)
    assert {n: rank.atlas.targets[n].data_ptr() for n in addresses} == addresses


def test_a_parameter_that_is_moved_beside_one_that_is_rebuilt(made: Layers, tmp_path: Path) -> None:
    """It has a shard, for the rebuilds to come; that is made when it is first read or changed."""
    rank = Rank(made, lambda: beside(made), tmp_path, other=True)
    treatments = {tensor.name: tensor.treatment for tensor in rank.atlas.catalogue}
    assert treatments == {NAME: Treatment.REBUILT, OTHER: Treatment.DIRECT}
    site, values = rank.atlas.sites[OTHER], bits_of(torch.full((2,), 7.0))
    rank.rebuilder.ensure_shards([site], MAIN)
    places = list(site.places())
    rank.write([Move(t, Scatter(spot.positions(torch.tensor([3, 9]))), values) for t, spot in places])
    other = made.drawn(2)
    other.view(-1)[[3, 9]] = 7.0
    read = torch.empty(made.ROWS * made.COLUMNS)
    assert gather(rank.atlas, ReadTensor(name=OTHER, tensor=OTHER), read) == read.numel()
    assert torch.equal(read, other.flatten())
    changed = made.drawn(1)
    changed.view(-1)[[1, 8, 20]] = 5.0
    rank.write([*rank.change(), *rank.spare(rank.change()).tensors])
    assert same(rank.state(), rank.state(rank.processed(changed, other=other)))


def test_reading_what_is_not_as_it_was_learned(made: Layers, tmp_path: Path) -> None:
    """A live layer of another form is refused as unsupported, whatever is kept of it."""
    live = made.Model(made.layer(doubled(made), made.drawn(1)))
    rank = Rank(made, lambda: doubled(made), tmp_path, live=live)
    wanted, out = ReadTensor(name=NAME, tensor=NAME), torch.empty(made.ROWS * made.COLUMNS)
    with pytest.raises(ProblemError, match="cannot be read: layer holds other state"):
        gather(rank.atlas, wanted, out)


def test_a_spare_says_what_it_takes(made: Layers, tmp_path: Path) -> None:
    """A packed weight counts with its elements; a spare without handles has none."""
    rank = Rank(made, lambda: handled(made), tmp_path)
    assert rank.spare(rank.change()).nbytes == made.ROWS * made.COLUMNS * 4
    rank = Rank(made, lambda: sums(made), tmp_path)
    assert rank.spare(rank.change()).nbytes == 0


def test_a_spare_keeps_what_its_handles_were_made_from(made: Layers, tmp_path: Path) -> None:
    """A kernel may read scales by pointer: they live as long as the primitive, what it packed does not."""

    def method() -> Any:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        class Scaled(UnquantizedLinearMethod):  # type: ignore[misc]
            def process_weights_after_loading(self, layer: Any) -> None:
                layer.scales, layer.whole = layer.weight.abs().sum(1), layer.weight.clone()
                super().process_weights_after_loading(layer)

        return Scaled()

    rank = Rank(made, method, tmp_path)
    spare = rank.spare(rank.change())
    (handle,) = spare.handles.values()
    assert [tuple(tensor.shape) for tensor in handle.graft_kept] == [(made.ROWS,)]
    kept = [tensor.data_ptr() for tensor in handle.graft_kept]
    assert kept and not set(kept) & {target.data_ptr() for target in rank.atlas.targets.values()}
    spare.exchange()
    (live,) = rank.atlas.closures["layer"].state.handles.values()
    assert [tensor.data_ptr() for tensor in live.graft_kept] == kept


def test_handles_of_another_shape_are_not_exchanged(made: Layers, tmp_path: Path) -> None:
    """Nothing is exchanged then."""
    rank = Rank(made, lambda: handled(made), tmp_path)
    spare = rank.spare(rank.change())
    out = outputs(made, rank.live)
    (handle,) = spare.handles.values()
    handle.n += 1
    with pytest.raises(ValueError, match="handle shapes differ"):
        spare.exchange()
    assert torch.equal(outputs(made, rank.live), out)


@pytest.mark.parametrize("method", [doubled, handled])
def test_a_checkpoint_that_changed_on_disk_is_noticed(made: Layers, tmp_path: Path, method: Any) -> None:
    """Before a shard is kept, what it gives is compared with what the live layer runs."""
    from loaders.engine.rebuild import BaseChanged

    rank = Rank(made, lambda: method(made), tmp_path)
    rank.base[NAME][0, 0] += 1
    with pytest.raises(BaseChanged, match="layer does not run"):
        rank.spare(rank.change())
    assert rank.atlas.sites[NAME].shard not in rank.atlas.targets


def test_a_live_layer_that_shares_memory_otherwise(made: Layers, tmp_path: Path) -> None:
    """A copy in the learned kind that is one memory in the live layer is not written as if it were two."""

    def process(layer: Any) -> None:
        layer.copy = layer.weight.t().contiguous().t()

    method = made.Method(process, lambda layer, x: x @ layer.weight.t() + x @ layer.copy.t())
    live = made.Model(made.layer(method, made.drawn(1)))
    live.layer.copy = live.layer.weight.data.view(made.COLUMNS, made.ROWS)
    rank = Rank(made, lambda: method, tmp_path, live=live)
    assert rank.view.treatment is Treatment.UNSUPPORTED
    assert "layer shares memory otherwise than its kind" in str(rank.view.reason)


def test_a_live_layer_that_lacks_what_was_learned(made: Layers, tmp_path: Path) -> None:
    """State that is missing, or more than there was, is not guessed about."""
    live = made.Model(made.layer(sums(made), made.drawn(1)))
    rank = Rank(made, lambda: sums(made), tmp_path, live=live)
    assert "layer holds other state than its kind" in str(rank.view.reason)


def test_experts_that_the_engine_moves_are_unsupported(made: Layers, tmp_path: Path) -> None:
    """With EPLB an expert's slot is not where it was."""
    rank = Rank(made, lambda: sums(made), tmp_path, enable_eplb=True)
    assert rank.view.treatment is Treatment.UNSUPPORTED and "EPLB" in str(rank.view.reason)


def test_a_layer_below_an_adapter(made: Layers, tmp_path: Path) -> None:
    """Where LoRA has put itself around a layer, the layer below it is the one that is changed."""
    live = made.Model(made.layer(made.Method(), made.drawn(1)))
    inner = live.layer
    live.layer = torch.nn.Module()
    live.layer.base_layer = inner
    rank = Rank(made, made.Method, tmp_path, live=live)
    assert rank.view.treatment is Treatment.DIRECT
    rank.write([Move(NAME, Layout.contiguous((24,)), bits_of(torch.zeros(24)))])
    assert bool((inner.weight == 0).all())


def test_a_failure_is_not_remembered(made: Layers, tmp_path: Path) -> None:
    """What could not be learned at one start, perhaps for want of memory, is tried again at the next."""
    full = False

    def process(layer: Any) -> None:
        if full:
            raise MemoryError("no room")
        layer.sums = layer.weight.sum(1)

    def method() -> Any:
        return made.Method(process, lambda layer, x: x @ layer.weight.t() + layer.sums)

    live = Rank(made, method, tmp_path / "other").live
    full = True
    rank = Rank(made, method, tmp_path, live=live)
    assert rank.view.reason == "layer: could not be learned: MemoryError: no room"
    full = False
    assert Rank(made, method, tmp_path, live=live).view.treatment is Treatment.REBUILT
