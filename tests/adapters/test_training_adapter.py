"""The training adapter: the loss equals the merged base's loss, the pair is not trained, and removing it leaves
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_rocm.adapters import new_tokens
from lora_rocm.adapters.attach import inject
from lora_rocm.adapters.training_adapter import NAME, attach_training_adapter
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, family_for
from lora_rocm.families.objectives.loss import losses
from lora_rocm.memory.footprint import meta_model
from lora_rocm.train.base_seal import seals_of
from tests.families.flux.test_family import CHANNELS, CPU, base, family_of, random_text
from tests.lora_files import write_random_lora
from tests.tiny_models import SHALLOW, tiny_recipe, write_tiny_sdxl
from tests.wording import saying, says

__all__ = ["base"]
CHANGED = r"(single_)?transformer_blocks\.\d+\.(attn\.(to_[qv]|to_out\.0)|norm1\.linear|proj_out|ff\.net\.2)"


@pytest.fixture(scope="module")
def file(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of layers that are trained here, and of some that are not."""
    root = family_of(base).skeleton("transformer")
    return write_random_lora(tmp_path_factory.mktemp("file") / "t.safetensors", "transformer", root, CHANGED)


class Made:
    """A model with an adapter that has moved from its start, and one pass."""

    def __init__(
        self,
        base: Path,
        lora: dict[str, Any],
        path: Path | None = None,
        merged: Path | None = None,
        quantization: str = "none",
    ) -> None:
        self.family = family_of(base, {"quantization": quantization}, lora=lora)
        self.model: LoadedModel = self.family.load(torch.float32, CPU)
        self.root = self.model.components["transformer"]
        if merged is not None:
            tensors = load_file(merged)
            for name, down in tensors.items():
                if name.endswith("lora_A.weight"):
                    up = tensors[name.replace("lora_A", "lora_B")]
                    layer = self.root.get_submodule(name.removeprefix("transformer.").removesuffix(".lora_A.weight"))
                    layer.get_parameter("weight").data.add_(up @ down)
        self.adapter = inject(self.family, self.model, self.family.recipe.lora, 0)
        self.training_adapter = attach_training_adapter(self.family, self.model, path and str(path))
        self.placement = Resident(DeviceTransfer(CPU, pin=False))
        self.placement.place(self.root, "transformer")
        rng = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for leaf in self.adapter.leaves.values():
                leaf.add_(0.1 * torch.randn(leaf.shape, generator=rng))
        self.family.fuse(self.model, triton=False)

    def losses(self) -> Tensor:
        mean = torch.randn(2, CHANNELS, 8, 4, generator=torch.Generator().manual_seed(1))
        batch = {"latent_mean": mean, "latent_std": 0.1 * mean.abs(), **random_text(2)}
        return losses(self.family, self.model, batch, self.family.objective.draw(batch, [4, 5]).tensors)

    def gradients(self) -> dict[str, Tensor]:
        self.losses().sum().backward()
        return {name: leaf.grad for name, leaf in self.adapter.leaves.items() if leaf.grad is not None}


KINDS: tuple[dict[str, Any], ...] = (
    {"rank": 2, "alpha": 1},
    {"rank": 2, "targets": "attention", "dropout": 0.0, "use_rslora": True},
    {"type": "lokr", "factor": 4, "rank": 2},
)


@pytest.mark.parametrize("lora", KINDS, ids=["lora", "rslora", "lokr"])
def test_loss_and_gradients_are_those_of_the_merged_base(base: Path, file: Path, lora: dict[str, Any]) -> None:
    found, merged, plain = Made(base, lora, file), Made(base, lora, merged=file), Made(base, lora)
    torch.testing.assert_close(found.losses(), merged.losses(), rtol=1e-5, atol=0)
    assert not torch.allclose(plain.losses(), merged.losses(), rtol=1e-2), "the control"
    if "type" not in lora:
        plain_pair = found.root.get_submodule("transformer_blocks.0.attn.to_q").plain(torch.zeros(1, 32))  # type: ignore[operator]
        assert plain_pair is not None and plain_pair[0].shape == (2 + 3, 32), "one product for both"
    gradients, wanted = found.gradients(), merged.gradients()
    assert gradients.keys() == wanted.keys() == found.adapter.leaves.keys()
    for name, gradient in gradients.items():
        assert float((gradient - wanted[name]).norm() / wanted[name].norm()) < 1e-4, name


@pytest.mark.parametrize("lora", [*KINDS, {"rank": 2, "use_dora": True}], ids=["lora", "rslora", "lokr", "dora"])
def test_absent_it_leaves_nothing(base: Path, file: Path, lora: dict[str, Any]) -> None:
    """This holds in any order with the trained adapter, and the trained adapter's leaves are trainable again
    afterwards.
    """
    found, plain = Made(base, lora, file), Made(base, lora)
    present = found.losses()
    with found.training_adapter.absent():
        # only to rounding: an unadapted layer may be fused with the sum after it, an adapted one is not
        torch.testing.assert_close(found.losses(), plain.losses(), rtol=1e-6, atol=0)
        assert not torch.allclose(present, plain.losses(), rtol=1e-2)
        with found.adapter.disabled():
            without = found.losses()
    with plain.adapter.disabled():
        torch.testing.assert_close(without, plain.losses(), rtol=1e-6, atol=0)
    with found.adapter.disabled(), found.training_adapter.absent():
        assert torch.equal(without, found.losses())
    assert torch.equal(found.losses(), present)
    trained = {id(parameter) for parameter in found.root.parameters() if parameter.requires_grad}
    assert trained == {id(leaf) for leaf in found.adapter.leaves.values()}
    assert found.adapter.leaves.keys() == plain.adapter.leaves.keys()


def test_a_dora_is_that_of_the_base_without_it(base: Path, file: Path) -> None:
    """A DoRA is used without the training adapter, so its norms are the base's norms; the pair is added in parallel."""
    lora = {"rank": 2, "use_dora": True, "targets": "attention"}
    made, plain = Made(base, lora, file), Made(base, lora)
    path, x = "transformer_blocks.0.attn.to_q", torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    tensors = load_file(file)
    down, up = (tensors[f"transformer.{path}.lora_{letter}.weight"] for letter in "AB")
    found, wanted = made.root.get_submodule(path)(x), plain.root.get_submodule(path)(x)
    torch.testing.assert_close(found, wanted + x @ down.T @ up.T)


def test_a_quantised_base_keeps_its_bytes_and_a_change_has_a_seal_of_its_own(
    base: Path, file: Path, tmp_path: Path
) -> None:
    dense = Made(base, KINDS[0], file).losses()
    made, plain = Made(base, KINDS[0], file, quantization="int8"), Made(base, KINDS[0], quantization="int8")
    torch.testing.assert_close(made.losses(), dense, rtol=0.05, atol=0)
    with made.training_adapter.absent():
        torch.testing.assert_close(made.losses(), plain.losses(), rtol=1e-6, atol=0)
    seals, without = seals_of(made.placement.fingerprints()), seals_of(plain.placement.fingerprints())
    assert without.items() <= seals.items() and seals.keys() - without.keys() == {f"{NAME} float32"}
    other = {name: tensor + 1e-3 * name.endswith("to_v.lora_A.weight") for name, tensor in load_file(file).items()}
    save_file(other, tmp_path / "other.safetensors")
    another = Made(base, KINDS[0], tmp_path / "other.safetensors", quantization="int8")
    changed = seals_of(another.placement.fingerprints())
    assert {key for key in seals if seals[key] != changed[key]} == {f"{NAME} float32"}


@pytest.mark.parametrize("lora", [KINDS[0], KINDS[2]], ids=["lora", "lokr"])
def test_what_is_counted_before_training_is_what_is_there(base: Path, file: Path, lora: dict[str, Any]) -> None:
    """Its tensors are not quantised, so the model without weights has the tensors of the real one."""
    family = family_of(base, {"quantization": "int8", "training_adapter": str(file)}, lora=lora)
    hollow = meta_model(family, family.recipe, torch.float32, False).components["transformer"]
    real = Made(base, lora, file, quantization="int8").root
    found, wanted = (
        {name: (tensor.shape, tensor.dtype) for name, tensor in [*root.named_parameters(), *root.named_buffers()]}
        for root in (hollow, real)
    )
    assert found == wanted and any(NAME in name for name in found)


def test_a_pair_that_changes_on_the_device_is_found(base: Path, file: Path) -> None:
    made = Made(base, KINDS[0], file)
    assert not made.placement.changed(), "the control"
    made.root.get_buffer(f"transformer_blocks.0.attn.to_q.lora_A.{NAME}.weight").view(-1)[5] += 1e-3
    assert [NAME in name for name in made.placement.changed()] == [True]


def refused(base: Path, tensors: dict[str, Tensor], path: Path) -> AdapterError:
    save_file(tensors, path)
    with pytest.raises(AdapterError) as caught:
        Made(base, KINDS[0], path)
    assert str(path) in caught.value.where and caught.value.fix
    return caught.value


def test_other_files_are_refused(base: Path, file: Path, tmp_path: Path) -> None:
    whole, path = load_file(file), tmp_path / "bad.safetensors"
    name = "transformer.transformer_blocks.0.attn.to_q"
    dora = refused(base, {**whole, f"{name}.lora_magnitude_vector": torch.ones(32)}, path)
    assert dora.code == "training-adapter-kind" and says(dora.what, "adapters/is-a-dora")
    key = "lora_unet_transformer_blocks_0_attn_to_q"
    lokr = refused(base, {f"{key}.lokr_w1": torch.ones(4, 8), f"{key}.lokr_w2": torch.ones(8, 4)}, path)
    assert lokr.code == "training-adapter-kind" and "is a LoKr" in lokr.what
    nowhere = {f"transformer.nowhere.lora_{letter}.weight": torch.ones(3, 3) for letter in "AB"}
    half = refused(base, whole | nowhere, path)
    assert half.code == "lora-of-another-model" and "nowhere" in half.what
    module = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    sdxl = {f"{module}.lora_{letter}.weight": torch.ones(3, 3) for letter in "AB"}
    assert refused(base, sdxl, path).code == "lora-of-another-model"


def test_text_encoders_have_to_be_part_of_training(tmp_path: Path) -> None:
    tiny_sdxl = write_tiny_sdxl(tmp_path / "model", **SHALLOW)
    family = family_for(tiny_recipe(tiny_sdxl, lora={"rank": 2}))
    root = family.skeleton("text_encoder")
    path = write_random_lora(tmp_path / "t.safetensors", "text_encoder", root, r".*q_proj")
    model = family.load(torch.float32, CPU)
    with pytest.raises(AdapterError, check=saying("adapters/adapts-the-text-encoders")) as caught:
        attach_training_adapter(family, model, str(path))
    assert caught.value.code == "training-adapter-text" and "train_text_encoder" in caught.value.fix
    tokens = [{"token": "<toy>", "init": "cat"}]
    both = family_for(tiny_recipe(tiny_sdxl, lora={"rank": 2, "train_text_encoder": True, "new_tokens": tokens}))
    model = both.load(torch.float32, CPU)
    inject(both, model, both.recipe.lora, 0)
    attach_training_adapter(both, model, str(path))
    assert any(NAME in name for name, _ in model.components["text_encoder"].named_buffers()), "the control"
    assert new_tokens.layers_of(model)["text_encoder"].rows_ND.requires_grad, "PEFT freezes what is not its own"
