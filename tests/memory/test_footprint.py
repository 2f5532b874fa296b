"""Counts on a model without weights, compared with a ledger of a real pass on the CPU."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lora_rocm.adapters.attach import inject
from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.adapters.training_adapter import attach_training_adapter
from lora_rocm.base_models.loading import builtin_folder
from lora_rocm.children import plan as child
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.errors import AdapterError, ModelError
from lora_rocm.families.base import LoadedModel, ModelFamily, family_for
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.families.common.unet.fused_unet import fuse
from lora_rocm.families.objectives.base import Draws, Prediction
from lora_rocm.families.objectives.loss import losses
from lora_rocm.hardware.settings import Settings
from lora_rocm.kernels.fingerprint import _place_weights
from lora_rocm.memory import footprint as counting
from lora_rocm.memory.footprint import (
    adapter_bytes,
    count,
    count_recomputed,
    counted,
    largest_of,
    meta_model,
    state_bytes,
)
from lora_rocm.memory.op_counter import Ledger
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.planning.step_choice import by_worth
from lora_rocm.planning.step_plan import Footprint, Rates, SampleCost, activation_bytes
from lora_rocm.processes.jobs import PlanJob
from lora_rocm.processes.tool import write_job
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.optim_sections import OptimSection, ProdigySection
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.sections import MAX_RANK
from tests.optim.test_base import SECTIONS
from tests.planning.test_step_plan import FLUX
from tests.tiny_llm import write_tiny_llm
from tests.tiny_models import hollow_builtin
from tests.wording import saying

CPU, META = torch.device("cpu"), torch.device("meta")
SIDE_PX = 96
SHAPE = SampleShape.of(h=SIDE_PX, w=SIDE_PX)
BASE = SMALLER = ""
"""Models without weights, of fixture ``shallow``."""
FEWER_LAYERS = {"layers_per_block": 1, "transformer_layers_per_block": [1, 1, 1]}


ONE_LEVEL: dict[str, dict[str, Any]] = {
    "unet": {
        "layers_per_block": 1,
        "transformer_layers_per_block": [1],
        "down_block_types": ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"],
        "block_out_channels": [48],
        "attention_head_dim": [3],
    },
    "text_encoder": {"num_hidden_layers": 2},
    "text_encoder_2": {"num_hidden_layers": 2},
}


@pytest.fixture(scope="module", autouse=True)
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The model that ships with the package, with fewer layers: counting takes its time for each operation."""
    with pytest.MonkeyPatch.context() as patch:
        for name, changes in (("BASE", {"unet": FEWER_LAYERS}), ("SMALLER", ONE_LEVEL)):
            folder = hollow_builtin(tmp_path_factory.mktemp("base") / "model", changes)
            patch.setattr(sys.modules[__name__], name, f"random:{folder}")
        yield


def recipe(folder: Path, base: str = "", **lora: Any) -> Recipe:
    return recipe_from(
        {
            "model": {"name_or_path": base or SMALLER},
            "data": {"path": str(folder), "resolution": SIDE_PX, "bucket_step": 32},
            "lora": {"rank": 4, "targets": "attention"} | lora,
            "train": {"max_train_steps": 1},
            "cache": {"dir": str(folder / "cache")},
        }
    )


class Real:
    """The same model with weights, on the CPU."""

    def __init__(self, its: Recipe, shape: SampleShape = SHAPE) -> None:
        self.shape = shape
        self.family: ModelFamily = family_for(its)
        self.model: LoadedModel = self.family.load(torch.float32, CPU)
        self.adapter = inject(self.family, self.model, its.lora, 0)
        attach_training_adapter(self.family, self.model, its.model.training_adapter)
        self.family.fuse(self.model)
        for component in self.model.components.values():
            component.train()

    def activations(self, chosen: list[nn.Module] | None, rows: int = 1, apart: bool = False, **how: Any) -> int:
        """The most that a pass takes in addition to weights and gradients, in bytes.

        ``apart``: whether each block is recomputed alone even if all are.
        """
        together = chosen is None and not apart
        self.family.recompute_activations(self.model, Recomputing(self.model, chosen, together, **how))
        if how.get("inputs") is not None:  # its main memory, which is the CPU's too, is not counted
            self.backward(rows)
        gc.collect()
        batch, draws = self.inputs(rows)
        known = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        known += [_place_weights(CPU)] if how.get("inputs") is not None else []  # may be frozen, so not among them
        leaves = self.adapter.leaves.values()
        drops = [leaf.register_post_accumulate_grad_hook(_drop) for leaf in leaves]
        with Ledger(iter(known)) as ledger:
            losses(self.family, self.model, batch, draws).sum().backward()
        for drop in drops:
            drop.remove()
        assert ledger.live_bytes == 0, "the pass is over: all has gone"
        return ledger.peak_bytes

    def inputs(self, rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        batch = self.family.example(self.shape, rows)
        return batch, self.family.objective.draw(batch, list(range(rows))).tensors

    def backward(self, rows: int) -> None:
        losses(self.family, self.model, *self.inputs(rows)).sum().backward()
        for leaf in self.adapter.leaves.values():
            leaf.grad = None


def _drop(leaf: Tensor) -> None:
    leaf.grad = None


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Footprint, Real]:
    its = recipe(tmp_path_factory.mktemp("Zähler und Modell"), BASE)
    real = Real(its)
    hollow = meta_model(real.family, its, torch.float32, False)
    # on the CPU attention is fused too, but keeps what that kernel keeps
    return count(real.family, hollow, its, SHAPE), real


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Footprint:
    """Of the smaller model, because it is compared only with other counts of the same model."""
    its = recipe(tmp_path_factory.mktemp("small"))
    family = family_for(its)
    return count(family, meta_model(family, its, torch.float32, False), its, SHAPE)


class ToyFamily:
    """Frozen blocks in a row, called by keyword or by position: only their recomputation keeps their inputs."""

    @property
    def objective(self) -> ToyFamily:
        return self

    def __init__(self, by_keyword: bool) -> None:
        self.by_keyword, self.run = by_keyword, Recomputing(LoadedModel({}, torch.float32, META), chosen=())

    def model(self) -> LoadedModel:
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4)]
        frozen = nn.Sequential(*layers).requires_grad_(False)
        return LoadedModel({"net": frozen.to(META), "first": nn.Linear(64, 64).to(META)}, torch.float32, META)

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        return list(model.components["net"])  # type: ignore[call-overload]

    def example(self, shape: SampleShape, rows: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(rows, shape.cost, 64)}

    def draw(self, batch: Any, seeds: Any) -> Draws:
        return Draws({})

    def recompute_activations(self, model: LoadedModel, run: Any = None) -> None:
        self.run = run

    def predict(self, model: LoadedModel, batch: dict[str, Tensor], draws: Any) -> Prediction:
        x = model.components["first"](batch["x"])
        for block in self.blocks(model):
            x = block(input=x) if self.by_keyword else block(x)
        return Prediction(x, torch.zeros_like(x), x.new_ones(len(x)))


def test_blocks_called_by_keyword_are_counted_as_by_position(tmp_path: Path) -> None:
    found = []
    for by_keyword in (False, True):
        family: Any = ToyFamily(by_keyword)
        found.append(count(family, family.model(), recipe(tmp_path), SampleShape.of(h=8, w=8)))
    assert found[0] == found[1]
    assert all(block.forward.flops > 0 for block in found[0].blocks)


class Joined(nn.Module):
    """A block of two streams that computes both as one, and returns two views of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))

    def forward(self, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([text, image], dim=1)
        text, image = (joined + self.net(joined)).split([text.shape[1], image.shape[1]], dim=1)
        return text, image


class ToyOfStreams(ToyFamily):
    """Blocks that take and return two views of one storage."""

    def model(self) -> LoadedModel:
        blocks = nn.Sequential(*(Joined() for _ in range(4))).requires_grad_(False)
        return LoadedModel({"net": blocks.to(META), "first": nn.Linear(64, 64).to(META)}, torch.float32, META)

    def predict(self, model: LoadedModel, batch: dict[str, Tensor], draws: Any) -> Prediction:
        image = model.components["first"](batch["x"])
        text = image[:, : image.shape[1] // 4]
        for block in self.blocks(model):
            text, image = self.run(block, text, image)
        return Prediction(image, torch.zeros_like(image), image.new_ones(len(image)))


class WithText(nn.Module):
    """A block that is given a text state, which all blocks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return x + self.net(x) + text.mean(1, keepdim=True)


class ToyWithText(ToyFamily):
    """The text state is made in the pass. The backward pass of blocks does not need it, but recomputation does."""

    def model(self) -> LoadedModel:
        blocks = nn.Sequential(*(WithText() for _ in range(4))).requires_grad_(False)
        return LoadedModel({"net": blocks.to(META), "first": nn.Linear(64, 64).to(META)}, torch.float32, META)

    def predict(self, model: LoadedModel, batch: dict[str, Tensor], draws: Any) -> Prediction:
        image = model.components["first"](batch["x"])
        text = torch.cat([batch["x"]] * 4, dim=1)
        for block in self.blocks(model):
            image = self.run(block, image, text)
        return Prediction(image, torch.zeros_like(image), image.new_ones(len(image)))


@pytest.mark.parametrize("counts_all", [False, True])  # True: the control
def test_an_input_of_all_blocks_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts_all: bool) -> None:
    if counts_all:
        monkeypatch.setattr(counting, "WeakSet", ForgetsAll)
    family: Any = ToyWithText(False)
    found = count(family, family.model(), recipe(tmp_path), SampleShape.of(h=8, w=8))
    assert found.recomputed_bytes is not None
    apart = activation_bytes(replace(found, recomputed_bytes=None), range(4))
    assert (apart == pytest.approx(found.recomputed_bytes, rel=0.1)) is not counts_all
    assert apart >= 0.9 * found.recomputed_bytes


class ForgetsAll(set[Any]):
    def update(self, *others: Any) -> None:
        pass


@pytest.mark.parametrize("counts_views", [False, True])  # True: the control
def test_two_views_of_one_storage_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts_views: bool
) -> None:
    if counts_views:
        leaves = lambda values: [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]  # noqa: E731
        monkeypatch.setattr(counting, "_by_storage", leaves)
    family: Any = ToyOfStreams(False)
    found = count(family, family.model(), recipe(tmp_path), SampleShape.of(h=8, w=8))
    assert found.recomputed_bytes is not None
    apart = activation_bytes(replace(found, recomputed_bytes=None), range(4))
    assert (apart == pytest.approx(found.recomputed_bytes, rel=0.1)) is not counts_views
    assert apart >= 0.9 * found.recomputed_bytes


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_activations_are_those_of_a_real_pass(both: tuple[Footprint, Real], share: float) -> None:
    found, real = both
    order = by_worth(found, Rates())
    blocks = real.family.blocks(real.model)
    chosen = order[: round(share * len(order))] if share < 1 else list(range(len(blocks)))
    measured = real.activations([blocks[index] for index in chosen])
    apart = replace(found, recomputed_bytes=None)
    assert activation_bytes(apart, chosen) == pytest.approx(measured, rel=0.07)  # of a few blocks, each counts for much


def test_all_that_is_recomputed_is_counted_as_it_is_done(both: tuple[Footprint, Real]) -> None:
    found, real = both
    every = range(len(found.blocks))
    assert activation_bytes(found, every) == found.recomputed_bytes == pytest.approx(real.activations(None), rel=0.05)
    assert activation_bytes(found, every, [0]) == activation_bytes(replace(found, recomputed_bytes=None), every)


def test_activations_grow_with_the_samples(both: tuple[Footprint, Real]) -> None:
    found, real = both
    assert 3 * activation_bytes(found, ()) == pytest.approx(real.activations([], rows=3), rel=0.08)


def test_what_is_counted_for_another_model_does_not_agree(both: tuple[Footprint, Real], tmp_path: Path) -> None:
    """Negative control: with LoRA on the convolutions too more is kept, and the comparison above would show it."""
    found, _ = both
    other = Real(recipe(tmp_path, BASE, targets="attention-mlp-conv"))
    assert activation_bytes(found, ()) != pytest.approx(other.activations([]), rel=0.07)


def test_weights_blocks_and_work(both: tuple[Footprint, Real]) -> None:
    found, real = both
    frozen = [p for p in real.model.components["unet"].parameters() if not p.requires_grad]
    assert found.weight_bytes == sum(p.numel() * p.element_size() for p in frozen)
    assert len(found.blocks) == len(real.family.blocks(real.model))
    assert sum(block.weight_bytes for block in found.blocks) < found.weight_bytes
    again = sum(block.forward.flops for block in found.blocks)
    assert 0.3 * found.work.flops < again < 0.6 * found.work.flops
    trained = [p for p in real.model.components["unet"].parameters() if p.requires_grad]
    assert found.optimizer_bytes == pytest.approx(8 * sum(p.numel() for p in trained), rel=0.01), "AdamW's moments"
    assert all(block.kept_bytes <= block.rise_bytes for block in found.blocks)
    assert found.blocks[0].kept_bytes == 0, "no gradient goes to what lies before the first LoRA"


MODELS: dict[str, dict[str, Any]] = {
    "sdxl": {},
    "z-image": {"model": {"family": "z-image", "name_or_path": "builtin:tiny-z-image", "quantization": "int8"}},
    "causal-lm": {
        "model": {"family": "causal-lm", "name_or_path": "builtin:tiny-llama"},
        "data": {"sources": [{"dataset": "builtin:demo-chats"}], "max_length": 64},
        "lora": {"rank": 4, "targets": "all-linear"},
    },
}


@pytest.mark.parametrize("which", MODELS)
def test_two_processes_count_the_same_as_one(which: str, tmp_path: Path) -> None:
    """To the byte, although they share neither model nor ledger."""
    values = {**recipe(tmp_path, BASE).model_dump(mode="json", exclude_unset=True), **MODELS[which]}
    its = recipe_from(values)
    family, shape = family_for(its), largest_of(its)
    new = lambda: meta_model(family, its, torch.bfloat16)  # noqa: E731
    again = count_recomputed(family, new(), shape)
    assert count(family, new(), its, shape, recomputed=lambda: again) == count(family, new(), its, shape)
    assert again.peak_bytes > 0 and any(again.again_bytes)
    more = replace(again, again_bytes=[each + 512 for each in again.again_bytes])
    found = [count(family, new(), its, shape, recomputed=lambda it=it: it) for it in (again, more)]  # type: ignore[misc]
    assert found[0] != found[1], "the control"


def test_plain_attention_keeps_every_score(small: Footprint) -> None:
    its = recipe(Path("x"))
    family = family_for(its)
    plain = count(family, meta_model(family, its, torch.float32, False), its, SHAPE, True)
    assert activation_bytes(plain, ()) > activation_bytes(small, ())


def test_text_encoders_are_counted_where_they_are_trained(small: Footprint, tmp_path: Path) -> None:
    its = recipe(tmp_path, train_text_encoder=True)
    family = family_for(its)
    model = meta_model(family, its, torch.float32, False)
    assert set(model.components) == {"unet", "text_encoder", "text_encoder_2"}
    found = count(family, model, its, SHAPE)
    assert found.weight_bytes > small.weight_bytes and found.adapter_bytes > small.adapter_bytes


def test_what_the_adapter_takes() -> None:
    plain = recipe(Path("x"))
    assert adapter_bytes(100, 800, plain, torch.float32) == (100 * (4 + 8 + 4), 400, 400)
    assert adapter_bytes(100, 800, plain, torch.bfloat16) == (100 * (4 + 8 + 2 + 2), 400, 200)
    assert adapter_bytes(100, 400, recipe(Path("x"), weight_dtype="bf16"), torch.bfloat16)[0] == 100 * (2 + 4 + 2)
    assert adapter_bytes(100, 800, recipe(Path("x"), use_dora=True), torch.bfloat16) == (100 * (4 + 8 + 4), 400, 400)


@pytest.mark.parametrize("optim", SECTIONS, ids=lambda optim: optim.optimizer)
@pytest.mark.parametrize(("weight_dtype", "master_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize(
    ("leaf_dtype", "ema_decay"),
    [(torch.float32, 0.0), (torch.bfloat16, 0.9), (torch.bfloat16, 0.0), (torch.float16, 0.9)],
)
def test_the_adapter_takes_what_weights_and_optimizer_hold(
    leaf_dtype: torch.dtype, weight_dtype: str, master_dtype: torch.dtype, ema_decay: float, optim: OptimSection
) -> None:
    its = recipe(Path("x"), weight_dtype=weight_dtype)
    train = its.train.model_copy(update={"ema_decay": ema_decay})
    its = its.model_copy(update={"train": train, "optim": optim})
    leaf, size = nn.Parameter(torch.ones(16, 80)), 1280
    weights = FlatWeights({"unet.w": leaf}, leaf_dtype, master_dtype)
    groups = [{"names": ["unet.w"], "lr": 1.0}]
    how = {"max_train_steps": 1, "ema_decay": ema_decay, "use_loss_scale": False}
    optimizer = GatedOptimizer(weights, groups, its.optim, **how)
    leaf.grad = torch.ones_like(leaf)

    def held() -> int:
        holders = [vars(weights).values(), vars(optimizer).values(), [leaf.grad]]
        tensors = [each for holder in holders for each in holder if isinstance(each, Tensor) and each.numel() == size]
        tensors += [*optimizer.rule.buffers.values(), *optimizer.rule.tables.values()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    always, buffer, landing = adapter_bytes(size, state_bytes([leaf.shape], its), its, leaf_dtype)
    assert held() == always
    with Ledger(iter(())) as ledger:  # of the gradients that come meanwhile, only the sum stays
        weights.gather()
    assert landing == size * leaf_dtype.itemsize  # the size of the leaf's gradients, which are freed
    assert held() == always - landing + buffer
    assert buffer + landing == ledger.peak_bytes
    weights.drop_gradients()
    assert held() == always - landing


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that was made in main memory."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor) and each.device.type == "cpu"]
        self.num_bytes = max([self.num_bytes, *(each.nbytes for each in made)])
        return out


@pytest.mark.parametrize("lora", [{}, {"targets": "attention-mlp-conv"}, {"use_dora": True}])
def test_a_model_without_weights_takes_no_memory_whatever_the_rank(lora: dict[str, Any]) -> None:
    largest = []
    for rank in (1, MAX_RANK):
        with Largest() as seen:
            its = recipe(Path("x"), rank=rank, **lora)
            model = meta_model(family_for(its), its, torch.bfloat16)
        largest.append(seen.num_bytes)
    (side,) = {layer.lora_A["default"].weight.shape[0] for layer in model.components["unet"].modules()
               if isinstance(layer, LoraLayer)}  # fmt: skip
    assert side == MAX_RANK and largest[0] == largest[1] < 2**20
    with Largest() as control:
        torch.zeros(2**20)
    assert control.num_bytes == 2**22


def test_layers_that_are_narrower_than_the_rank_are_counted(small: Footprint) -> None:
    its = recipe(Path("x"), rank=MAX_RANK)
    family = family_for(its)
    model = meta_model(family, its, torch.float32)
    layers = sum(isinstance(layer, LoraLayer) for layer in model.components["unet"].modules())
    assert count(family, model, its, SHAPE).narrow_layers == layers > 0 == small.narrow_layers


def test_a_weight_with_two_names_counts_once(tmp_path: Path) -> None:
    """Embedding and head of many language models are one weight."""
    model = {"family": "causal-lm", "name_or_path": str(write_tiny_llm(tmp_path / "base", "smollm"))}
    recipe = recipe_from({"model": model, "data": {"path": str(tmp_path)}, "train": {"max_train_steps": 1}})
    family = family_for(recipe)
    loaded = family.load(torch.float32, torch.device("cpu")).components.values()
    hollow = meta_model(family, recipe, torch.float32, on_gpu=False).components.values()
    whole = sum(weight.numel() for component in loaded for weight in component.parameters())
    assert whole == sum(p.numel() for component in hollow for p in component.parameters() if not p.requires_grad)


def test_a_footprint_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    its = recipe(tmp_path)
    family, memory = family_for(its), tmp_path / "cache" / "footprints.json"
    memory.parent.mkdir()
    made: list[str] = []
    fake = Footprint(str(SHAPE), SHAPE.cost, 1, 2, 3, 4, (), (), counting.SampleCost(3.0, 4.0, 5))
    monkeypatch.setattr(counting, "meta_model", lambda *args: None)
    monkeypatch.setattr(counting, "count", lambda *args: made.append("counted") or fake)

    def ask(which: Recipe = its, dtype: torch.dtype = torch.float32, shape: SampleShape = SHAPE) -> Footprint:
        return counted(which, family, dtype, Settings(), shape)

    assert ask() == fake == ask() and len(made) == 1
    ask(dtype=torch.bfloat16)
    ask(shape=SampleShape.of(h=64, w=96))
    ask(recipe(tmp_path, rank=8))
    assert len(made) == 4
    ask(its.model_copy(update={"optim": ProdigySection()}))
    assert len(made) == 5, "its state is larger"
    made.pop()
    counted(its, family, torch.float32, Settings(triton=False), SHAPE)  # plain PyTorch keeps more
    counted(its, family, torch.float32, Settings(), SHAPE, on_gpu=False)
    assert len(made) == 5, "both are without Triton"
    made.pop()
    ask(recipe(tmp_path, alpha=3.0))  # of no weight here
    assert len(made) == 4
    (tmp_path / "t.safetensors").write_bytes(b"1")
    other = its.model_copy(
        update={"model": its.model.model_copy(update={"training_adapter": f"{tmp_path}/t.safetensors"})}
    )
    ask(other)
    (tmp_path / "t.safetensors").write_bytes(b"23")
    ask(other)
    made.pop()
    ask(its.model_copy(update={"model": its.model.model_copy(update={"compute": "int8"})}))
    ask(its.model_copy(update={"data": its.data.model_copy(update={"control_path": "x"})}))
    assert len(made) == 7, "another adapter takes part, and control images are tokens too"
    del made[4:]
    (tmp_path / "t.safetensors").unlink()
    with pytest.raises(AdapterError, check=saying("memory/there-is-no-such-lora-file")):
        ask(other)
    kept = json.loads(memory.read_text("utf-8"))
    earlier = {key: {name: part for name, part in kept[key].items() if name != "optimizer_bytes"} for key in kept}
    for damaged in ("{", "[]", json.dumps({key: {"height": 1} for key in kept}), json.dumps(earlier)):
        memory.write_text(damaged, encoding="utf-8")
        assert ask() == fake
    assert len(made) == 8


def test_kernels_for_gpus_are_counted_without_one(small: Footprint) -> None:
    """Their group norm keeps its input alone; the plain one also what goes into the SiLU."""
    its = recipe(Path("x"))
    family = family_for(its)
    hollow = meta_model(family, its, torch.float32, False)
    fuse(hollow.components["unet"], "triton", channels_last=True)  # type: ignore[arg-type]
    kernels = count(family, hollow, its, SHAPE)
    assert kernels.work.flops == small.work.flops
    assert 0.6 < activation_bytes(kernels, ()) / activation_bytes(small, ()) < 0.98


@pytest.mark.parametrize(
    ("said", "code"),
    [("HIP out of memory. Tried to allocate 2.00 MiB.", "out-of-memory"), ("HIP error: device lost", "device-fault")],
)
def test_a_gpu_that_fails_while_it_is_measured_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, code: str
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError(said)

    job = write_job(tmp_path, PlanJob(recipe(tmp_path).model_dump(mode="json"), for_card=False, for_gpu=False))
    monkeypatch.setattr(child, "_counted", fails)
    monkeypatch.setattr(sys, "argv", ["plan", str(job)])
    assert child.main() == 3
    assert json.loads(capsys.readouterr().out)["code"] == code
    said = "a fault of ours"
    with pytest.raises(RuntimeError, match="a fault of ours"):  # the control
        child.main()


@pytest.mark.parametrize(("file", "key", "value", "code"), [
    ("scheduler/scheduler_config.json", "prediction_type", "flow_prediction", "prediction-unknown"),
    ("unet/config.json", "quantization_config", {"quant_method": "gptq"}, "weights-quantised"),
    ("unet/config.json", "transformer_layers_per_block", [1, 2, 10_000], "config-absurd"),
])  # fmt: skip
def test_a_base_that_is_not_what_it_claims_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    file: str, key: str, value: object, code: str,
) -> None:  # fmt: skip
    folder = Path(shutil.copytree(builtin_folder("builtin:tiny-sdxl"), tmp_path / "model"))
    config = json.loads((folder / file).read_text(encoding="utf-8"))
    (folder / file).write_text(json.dumps({**config, key: value}), encoding="utf-8")
    asked = recipe(tmp_path).model_dump(mode="json")
    asked["model"]["name_or_path"] = str(folder)
    job = write_job(tmp_path, PlanJob(asked, for_card=True, for_gpu=True))
    monkeypatch.setattr(sys, "argv", ["plan", str(job)])
    assert child.main() == 2
    assert json.loads(capsys.readouterr().out)["code"] == code


@pytest.mark.parametrize("code", ["hub-unreachable", "hub-incomplete", "hub-unknown", "config-damaged"])
def test_a_model_that_is_not_here_is_counted_by_the_published_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    nothing = Footprint("8x8", 64, 0, 0, 0, 0, (), (), SampleCost())

    def counted(recipe: Recipe, family: ModelFamily, *how: Any) -> Footprint:
        if not family.recipe.model.name_or_path.startswith("random:"):
            raise ModelError(code, "It cannot be read.", where="model.name_or_path", fix="Look.")
        return nothing

    monkeypatch.setattr(child, "counted", counted)
    given = recipe(tmp_path)
    wanted = given.model_copy(update={"model": given.model.model_copy(update={"name_or_path": "somebody/a-fine-tune"})})
    if code in ("hub-unknown", "config-damaged"):  # that is reported
        with pytest.raises(ModelError):
            child._counted(wanted, Settings(), True, True)
        return
    found = child._counted(wanted, Settings(), True, True)
    assert not found.model_is_here and found.footprint == nothing.to_json()


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bf16", "fp8"])
def test_flux_costs_what_plans_of_fp8_are_tested_with(tmp_path: Path, compute: str) -> None:
    its = recipe_from(
        {
            "model": {"family": "flux", "name_or_path": "random:flux", "quantization": "fp8", "compute": compute},
            "data": {"path": str(tmp_path)},
            "lora": {"rank": 16, "targets": "attention"},
            "runtime": {"profile": "fast"},
            "train": {"max_train_steps": 1},
        }
    )
    family = family_for(its)
    found = count(family, meta_model(family, its, torch.bfloat16), its, SampleShape.of(h=1024, w=1024))
    blocks = [block.forward for block in found.blocks]
    whole = SampleCost(*map(sum, zip(*map(astuple, blocks), strict=True)))
    for made, wanted in zip((found.work, whole), FLUX[compute], strict=True):
        assert astuple(made) == pytest.approx(astuple(wanted), rel=0.01)
