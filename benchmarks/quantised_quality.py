"""Measures the loss of quality from the formats of a frozen base. Needs no GPU.

usage: python benchmarks/quantised_quality.py [--steps 200] [--recipe recipes/demo.yaml] [--seeds 3] [--only NAME ...]
       python benchmarks/quantised_quality.py --layers-only [--large-inputs 20] [--large-weights 1]
       python benchmarks/quantised_quality.py --model recipes/anima.yaml [--side-px 256] [--device cuda]

First the relative error (as a norm) of one layer with a LoRA: of its weight, of its output, and of the gradients of
its input and the LoRA. The loss is the squared distance to a random target. Weights and inputs are normally
distributed; one input in 100 is 20 times as large, as activations of transformers are. ``--large-weights``: one
column in 100 of the weight is so many times as large. Products in int8 are measured with and without their rotation.

Then a LoRA is trained on the tiny model of a demo's recipe, on each format with the same random numbers. Its loss at
fixed noise is measured on the base of its training, and on the dense base, on which a LoRA is used later. Figures: the
mean of several starts, and the least and the largest relative increase over training on the dense base.

``--model``: a whole model in its full size instead, with random weights, in float32. It measures the relative error of
the prediction, of all gradients of A, and of all gradients of B. B is random too. On a CPU Anima takes 9 GB and some
minutes for each format.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from lora_rocm.adapters.attach import inject  # noqa: E402
from lora_rocm.base_models.random_weights import PREFIX  # noqa: E402
from lora_rocm.dataset.shape import SampleShape  # noqa: E402
from lora_rocm.families.base import ModelFamily, family_for  # noqa: E402
from lora_rocm.families.common.latent_family import LatentFamily  # noqa: E402
from lora_rocm.families.objectives.loss import losses  # noqa: E402
from lora_rocm.kernels.quantised import ScaledRows, quantised  # noqa: E402
from lora_rocm.kernels.weight_format import WeightFormat  # noqa: E402
from lora_rocm.recipe.load import load_recipe  # noqa: E402

NOT_ROTATED = "int8 x int8, not rotated"
FORMATS = {
    "int8": ("int8", "bf16"),
    "fp8": ("fp8", "bf16"),
    "nf4": ("nf4", "bf16"),
    "int8 x int8": ("int8", "int8"),
    NOT_ROTATED: ("int8", "int8"),
    "fp8 x fp8": ("fp8", "fp8"),
}
"""Name -> ``model.quantization`` and ``model.compute``. New runs rotate layers that are multiplied in int8."""
SHAPES = {
    "SDXL 1280 to 10240": (1280, 10240),
    "FLUX 3072 to 12288": (3072, 12288),
    "Z-Image 10240 to 3840": (10240, 3840),
}
ROWS, RANK, SEED = 256, 16, 0
IMAGES, PX, EVALUATIONS = 2, 64, 16
ROLES = ("lora_A", "lora_B")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers-only", action="store_true")
    parser.add_argument("--recipe", default="recipes/demo.yaml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", metavar="RECIPE")
    parser.add_argument("--side-px", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=list(FORMATS), choices=list(FORMATS), metavar="NAME")
    parser.add_argument("--large-inputs", type=float, default=20.0, metavar="TIMES")
    parser.add_argument("--large-weights", type=float, default=1.0, metavar="TIMES")
    options = parser.parse_args()
    if options.model:
        whole_model(options.model, options.side_px, torch.device(options.device), options.only)
        return
    print(f"{'layer':24}{'format':26}{'weight':>9}{'output':>9}{'dx':>9}{'dA':>9}{'dB':>9}")
    for title, (inputs, outputs) in SHAPES.items():
        layer = made_layer(inputs, outputs, options.large_weights)
        exact = passed(layer, options.large_inputs)
        for name in options.only:
            packed = passed(format_of(name, "").packed(layer), options.large_inputs)
            errors = [
                float((found - wanted).norm() / wanted.norm()) for found, wanted in zip(packed, exact, strict=True)
            ]
            print(f"{title:24}{name:26}" + "".join(f"{100 * error:8.2f}%" for error in errors))
    if options.layers_only:
        return
    print(f"{'trained on':26}{'its loss':>12}{'on the dense base':>20}{'above dense by':>20}")
    rows = {name: [trained(options.recipe, name, options.steps, seed) for seed in range(options.seeds)]
            for name in ("none", *options.only)}  # fmt: skip
    for name, found in rows.items():
        own, dense = (sum(losses) / len(found) for losses in zip(*found, strict=True))
        more = [100 * (loss / exact - 1) for (_, loss), (_, exact) in zip(found, rows["none"], strict=True)]
        print(f"{name:26}{own:12.5f}{dense:20.5f}{min(more):10.2f} to {max(more):5.2f}%", flush=True)


def format_of(name: str, layers: str) -> WeightFormat:
    """The format with a name of ``FORMATS``."""
    stored, compute = FORMATS[name]
    return quantised(stored, layers, compute, rotates=name != NOT_ROTATED)


def made_layer(inputs: int, outputs: int, large: float) -> nn.Linear:
    """A dense layer of random weights; one column in 100 is ``large`` times as large."""
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    weight_OI = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(SEED)) * inputs**-0.5
    weight_OI[:, 50::100] *= large
    layer.weight = nn.Parameter(weight_OI.bfloat16(), requires_grad=False)
    return layer


def passed(layer: nn.Module, large: float) -> list[Tensor]:
    """Weight, output, and gradients of the input and of the LoRA's A and B, float32.

    ``large``: one input in 100 is so many times as large.
    """
    from lora_rocm.kernels.weight_format import dense_weight, is_packed

    weight_OI = dense_weight(layer)
    outputs, inputs = weight_OI.shape
    rng = torch.Generator().manual_seed(SEED + 1)
    x, target = torch.randn(ROWS, inputs, generator=rng), torch.randn(ROWS, outputs, generator=rng)
    x[:, ::100] *= large
    a, b = torch.randn(RANK, inputs, generator=rng) * inputs**-0.5, torch.randn(outputs, RANK, generator=rng) * 0.1
    leaves = [leaf.requires_grad_() for leaf in (x, a, b)]
    base = layer(x) if is_packed(layer) else x @ weight_OI.T
    y = base + x @ a.T @ b.T
    return [weight_OI, y.detach(), *torch.autograd.grad((y - target).square().mean(), leaves)]


def whole_model(path: str, side_px: int, device: torch.device, names: Sequence[str]) -> None:
    """Print the errors of a full-size model in each of these formats."""
    recipe = load_recipe(path, ["model.quantization=none", "lora.rank=16", "lora.targets=attention"]).recipe
    base = recipe.model.model_copy(update={"name_or_path": PREFIX + recipe.model.name_or_path})
    family = family_for(recipe.model_copy(update={"model": base}))
    assert isinstance(family, LatentFamily), "its model is quantised by the layers of one component"
    model = family.load(torch.bfloat16, torch.device("cpu"))  # as published; what follows is in float32
    adapter = inject(family, model, recipe.lora, SEED)
    rng = torch.Generator().manual_seed(SEED)
    for name, leaf in adapter.leaves.items():
        if name.endswith("lora_B"):
            leaf.data = torch.randn(leaf.shape, generator=rng) * 0.02
    batch = family.example(SampleShape.of(h=side_px, w=side_px), 1)
    batch = {
        name: torch.randn(tensor.shape, generator=rng).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in batch.items()
    }
    draws = family.objective.draw(batch, [0]).tensors
    batch, draws = ({name: tensor.to(device) for name, tensor in part.items()} for part in (batch, draws))
    component = model.components[family.component].to(device, torch.float32)
    model.device, model.dtype = device, torch.float32

    def passed_whole() -> list[Tensor]:
        """Prediction, and the gradients of all of A and of all of B, float32."""
        with torch.no_grad():
            output = family.predict(model, batch, draws).prediction
        for leaf in adapter.leaves.values():
            leaf.grad = None
        losses(family, model, batch, draws).mean().backward()
        found = [output.flatten()]
        for role in ROLES:
            of_role = [leaf.grad for name, leaf in adapter.leaves.items() if name.endswith(role)]
            found.append(torch.cat([gradient.flatten() for gradient in of_role if gradient is not None]))
        return found

    exact = passed_whole()
    print(f"{path}, {side_px} px\n{'format':26}{'output':>9}{'dA':>9}{'dB':>9}", flush=True)
    for name in names:
        weights = format_of(name, family.packed_layers)
        dense = {at: layer for at, layer in weights.chosen(component).items() if not layer.weight.requires_grad}
        for at, layer in dense.items():
            component.set_submodule(at, weights.packed(layer))
        found = passed_whole()
        errors = (float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True))
        print(f"{name:26}" + "".join(f"{100 * error:8.2f}%" for error in errors), flush=True)
        for at, layer in dense.items():
            component.set_submodule(at, layer)


def trained(recipe: str, stored: str, steps: int, start: int) -> tuple[float, float]:
    """Train a LoRA; its loss at fixed noise on its own base, and on the dense one."""
    own, dense = (family_of(recipe, name) for name in (stored, "none"))
    model, other = (family.load(torch.float32, torch.device("cpu")) for family in (own, dense))
    adapter, on_dense = (
        inject(family, base, family.recipe.lora, start) for family, base in ((own, model), (dense, other))
    )
    optimizer = torch.optim.AdamW(adapter.leaves.values(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(own, model, start, step).backward()
        optimizer.step()
    on_dense.load(adapter.state())
    with torch.no_grad():
        seeds = range(10**6, 10**6 + EVALUATIONS)
        sums = [sum(loss_of(*pair, start, seed).item() for seed in seeds) for pair in ((own, model), (dense, other))]
    return sums[0] / EVALUATIONS, sums[1] / EVALUATIONS


def family_of(recipe: str, name: str) -> ModelFamily:
    """The family of a demo's recipe on a base in a format."""
    stored, compute = FORMATS.get(name, ("none", "bf16"))
    overrides = [f"model.quantization={stored}", f"model.compute={compute}", "runtime.profile=fast"]
    overrides += [f"data.resolution={PX}"]
    family = family_for(load_recipe(recipe, overrides).recipe)
    if name == NOT_ROTATED:
        rotated = family.weight_format
        family.weight_format = lambda component: without_rotation(rotated(component))  # type: ignore[method-assign]
    return family


def without_rotation(weights: WeightFormat) -> WeightFormat:
    """The same format with weights that are not rotated."""
    return replace(weights, rotates=False) if isinstance(weights, ScaledRows) else weights


def loss_of(family: ModelFamily, model: object, start: int, seed: int) -> Tensor:
    """The loss of the random images of a start, with the noise of ``seed``."""
    batch = family.example(SampleShape.of(h=PX, w=PX), IMAGES)
    rng = torch.Generator().manual_seed(start)
    images = {name: torch.randn(tensor.shape, generator=rng) for name, tensor in batch.items() if name == "latent_mean"}
    batch = {**batch, **images}
    draws = family.objective.draw(batch, list(range(seed * IMAGES, (seed + 1) * IMAGES))).tensors
    return losses(family, model, batch, draws).mean()


if __name__ == "__main__":
    main()
