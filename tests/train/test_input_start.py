"""A start from the inputs: read from the base alone, the same at each start and on all ranks, the file a plain LoRA."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.kinds.lora import LoraAdapter
from lora_rocm.device.process_group import World
from lora_rocm.errors import AdapterError, LoraRocmError, ModelError
from lora_rocm.recipe.adapter_sections import LoraSection
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import input_start
from lora_rocm.train.held_out import VALIDATION_POSITIONS
from tests.event_lines import read_events
from tests.train.runs import losses_of, make_recipe, start, write_material
from tests.wording import mentions, saying
from tests.worlds import in_threads

PROJECTIONS = [r"mid_block.*attn1\.to_[qkv]", r"mid_block.*attn1\.to_out\.0", r"mid_block\.resnets\.0\.conv1"]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_material(tmp_path_factory.mktemp("inputs"))


def downs_of(run: Path) -> dict[str, Tensor]:
    tensors = load_file(RunDir(run).lora)
    return {name: tensor for name, tensor in tensors.items() if name.endswith("lora_down.weight")}


@pytest.mark.slow
def test_a_holds_the_directions_of_what_the_layers_are_given(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[Tensor]] = {}
    sketched = input_start._sketched

    def listening(adapter: LoraAdapter, *args: Any) -> Any:
        """The inputs of the base layers themselves, which are called even if something else reads them."""
        handles = [
            layer.get_base_layer().register_forward_pre_hook(
                lambda module, args, name=name: seen.setdefault(name, []).append(args[0].detach().flatten(0, -2))
            )
            for name, (_, _, layer) in adapter.modules.items()
            if layer.lora_A[PEFT_NAME].weight.ndim == 2
        ]
        found = sketched(adapter, *args)
        for handle in handles:
            handle.remove()
        return found

    monkeypatch.setattr(input_start, "_sketched", listening)
    lora = {"init": "eva", "rank": 2, "targets": PROJECTIONS}
    short = {"max_train_steps": 1, "gradient_accumulation_steps": 1}
    how: dict[str, Any] = {"train": short, "optim": {"learning_rate": 1e-12}, "output": {"dtype": "fp32"}}
    eva, plain = tmp_path / "eva", tmp_path / "plain"
    assert start(make_recipe(material, lora=lora, **how), eva)
    assert start(make_recipe(material, lora={**lora, "init": "default"}, **how), plain)
    assert losses_of(eva) == losses_of(plain), "B is zero: the first step sees the base unchanged"
    found, others = downs_of(eva), downs_of(plain)
    linear = {name: down for name, down in found.items() if down.ndim == 2}
    assert len(linear) == 4 and len(found) == 5
    for name, down in found.items():
        assert torch.equal(down, others[name]) is (name not in linear), "convolutions start as by default"
    for key, parts in seen.items():
        inputs_ND = torch.cat(parts)
        assert len(parts) % (input_start.PASSES * len(VALIDATION_POSITIONS)) == 0
        centred_ND = inputs_ND - inputs_ND.mean(dim=0)
        best = torch.linalg.svdvals(centred_ND)[:2].square().sum()
        down = next(
            its
            for name, its in linear.items()
            if name.split(".")[0].endswith(key.partition("attn1.")[2].replace(".", "_"))
        )
        held = (centred_ND @ down.T).square().sum()
        torch.testing.assert_close(down @ down.T, torch.eye(2), atol=1e-4, rtol=0)
        assert held > 0.99 * best
        plain_KD = torch.linalg.qr(others[next(name for name in linear if linear[name] is down)].T).Q.T
        assert (centred_ND @ plain_KD.T).square().sum() < 0.9 * best, "control: the default's are others"
    texts = [event["text"] for event in read_events(RunDir(eva).events()) if event["type"] == "notice"]
    assert any(
        mentions(text, "train/init-eva-read-3-batches") and mentions(text, "train/1-convolution-has-the-default-init")
        for text in texts
    ), texts


def test_layers_that_do_not_read_vectors_are_refused() -> None:
    convolutions = Mock(spec=LoraAdapter)
    convolutions.linear_downs.return_value = {}
    lora = LoraSection(init="eva")
    how: Any = SimpleNamespace(recipe=SimpleNamespace(lora=lora, train=None), checkpoint=None)
    others = [cast("Any", None)] * 3
    with pytest.raises(AdapterError, check=saying("train/none-of-these-is-adapted")) as caught:
        input_start.start_from_inputs(how, *others[:2], convolutions, *others)
    assert caught.value.where == "lora.init: eva"


def test_inputs_that_are_not_finite_are_refused_by_the_name_of_the_layer() -> None:
    sketch = input_start.new_sketch(8, 2, 0, torch.device("cpu"))
    sketch.add(torch.full((3, 8), torch.nan))
    with pytest.raises(ModelError, match="to_q"):
        input_start._fill({"unet.to_q": torch.zeros(2, 8)}, {"unet.to_q": sketch})


def shared(size: int, spoils: bool = False) -> list[Any]:
    def work(world: World) -> list[Tensor]:
        weights = [torch.full((2, 3), world.me.rank + 0.1), torch.full((4,), world.me.rank - 7.3)]
        input_start._share(cast("Any", SimpleNamespace(world=world)), weights)
        return weights

    def spoil(rank: int, number: int, flat_N: Tensor) -> None:
        if spoils and rank == 1 and number == 1:
            flat_N[0] = 5.0

    return in_threads(size, work, spoil)


def test_all_ranks_have_the_bits_of_the_first() -> None:
    first, *others = shared(3)
    assert torch.equal(first[0], torch.full((2, 3), 0.1)) and torch.equal(first[1], torch.full((4,), -7.3))
    assert all(torch.equal(mine, its) for other in others for mine, its in zip(first, other, strict=True))


def test_values_that_arrive_changed_are_not_trained_on() -> None:
    found = shared(2, spoils=True)
    assert all(isinstance(each, LoraRocmError) for each in found), "no rank goes on"
    codes = {each.code for each in found}  # one that fails takes the other with it
    assert "sum-wrong" in codes <= {"sum-wrong", "rank-lost"}
