"""An imported configuration of ai-toolkit trains with the numbers of the original (ai-toolkit 27a03a91).

The expected numbers follow ``jobs/process/BaseSDTrainProcess.py`` and, in ``toolkit``, ``scheduler.py``,
``lora_special.py`` and ``samplers/custom_flowmatch_sampler.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.optimization import get_constant_schedule_with_warmup
from safetensors.torch import load_file
from torch import Tensor

from lora_rocm.importing.importer import import_files
from lora_rocm.optim.schedule import learning_rate_factor
from lora_rocm.recipe.load import load_text
from tests.importing.trained_import import TrainedImport, drawn_levels, follows, trained_import
from tests.program import images
from tests.tiny_z_image import write_tiny_z_image

STEPS, BATCH, ACCUMULATION = 6, 2, 2
RATE, LEAST, RANK, ALPHA = 2e-3, 1e-4, 4, 2
SHIFT = 3.0
"""Of ``scheduler_config`` in z_image.py; the base's own scheduler has another shift and is not read."""
CONFIG = """\
job: extension
config:
  name: zibu
  process:
    - type: diffusion_trainer
      training_folder: output
      trigger_word: zibu
      network: {{type: lora, linear: {rank}, linear_alpha: {alpha}}}
      save: {{dtype: float32, save_every: 250, max_step_saves_to_keep: 4}}
      datasets:
        - {{folder_path: pics, caption_ext: txt, resolution: [64], cache_latents_to_disk: true}}
      train:
        batch_size: {batch}
        steps: {steps}
        gradient_accumulation: {accumulation}
        noise_scheduler: flowmatch
        optimizer: adamw
        timestep_type: {kind}
        content_or_style: balanced
        lr: {rate}
        {schedule}
        dtype: bf16
      model: {{name_or_path: model, arch: zimage}}
"""
COSINE = f"lr_scheduler: cosine\n        lr_scheduler_params: {{eta_min: {LEAST}}}"
WARMUP = "lr_scheduler: constant_with_warmup\n        lr_scheduler_params: {num_warmup_steps: 3}"


def config(folder: Path, kind: str = "shift", schedule: str = COSINE) -> Path:
    path = folder / f"{kind}.yaml"
    values = {"rank": RANK, "alpha": ALPHA, "batch": BATCH, "steps": STEPS, "accumulation": ACCUMULATION, "rate": RATE}
    path.write_text(CONFIG.format(kind=kind, schedule=schedule, **values), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedImport:
    folder = tmp_path_factory.mktemp("ai-toolkit")
    write_tiny_z_image(folder / "model")
    images(folder / "pics", count=7)
    with pytest.MonkeyPatch.context() as patch:
        return trained_import(patch, folder, config(folder).name)


def rates_of(schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]) -> list[float]:
    """The rate of each update: the scheduler is stepped to 0 before the first one, then once after each."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    there, found = schedule(optimizer), []
    for _ in range(STEPS):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        there.step()
    return found


def test_the_steps_and_the_effective_batch(trained: TrainedImport) -> None:
    """Each step takes ``gradient_accumulation`` batches; the loader gives a smaller last batch of each epoch."""
    assert len(trained.rates) == STEPS
    possible = {tuple(cut(list(order))) for order in permutations([2, 2, 2, 1])}  # the order is random in both
    assert {tuple(trained.batches[first : first + 2]) for first in range(0, STEPS, 2)} <= possible == {(4, 3), (3, 4)}


def cut(batches: list[int]) -> list[int]:
    return [sum(batches[first : first + ACCUMULATION]) for first in range(0, len(batches), ACCUMULATION)]


def test_the_learning_rate_of_each_update(trained: TrainedImport) -> None:
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    assert trained.rates == pytest.approx(rates_of(lambda optimizer: cosine(optimizer, T_max=STEPS, eta_min=LEAST)))
    assert trained.rates != pytest.approx(rates_of(lambda optimizer: cosine(optimizer, T_max=STEPS))), "the control"


def test_the_scale_of_the_lora(trained: TrainedImport) -> None:
    """``LoRASpecialNetwork`` sets alpha to the rank for models of this kind (``peft_format``)."""
    assert trained.scales == {1.0} != {ALPHA / RANK}
    (file,) = trained.run.path.glob("zibu*.safetensors")
    tensors = load_file(file)
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name or "lora_down" in name}
    alphas = {float(tensor) for name, tensor in tensors.items() if name.endswith(".alpha")}
    assert ranks == {RANK} and alphas <= {RANK}


def shifted_levels(x: Tensor) -> Tensor:
    """Levels up to x: the range of ``FlowMatchEulerDiscreteScheduler``, already shifted, is shifted again."""
    sigmas = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT).sigmas
    least = sigmas[sigmas > 0].min()
    return ((x / (SHIFT - (SHIFT - 1) * x) - least) / (1 - least)).clamp(0, 1)


LEVELS: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": shifted_levels,
    "sigmoid": lambda x: torch.special.ndtr(torch.logit(x.clamp(0, 1))),  # torch.sigmoid(torch.randn(...))
    "linear": lambda x: x.clamp(0, 1),  # torch.linspace(1000, 1, 1000)
}


def test_the_density_of_the_levels_of_the_run(trained: TrainedImport) -> None:
    levels = drawn_levels(trained.run.recipe)
    assert [kind for kind, distribution in LEVELS.items() if follows(levels, distribution)] == ["shift"]


@pytest.mark.parametrize("kind", LEVELS)
def test_the_density_of_the_levels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_z_image(tmp_path / "model")
    recipe = tmp_path / "imported.yaml"
    recipe.write_text(import_files([config(tmp_path, kind)]).text, encoding="utf-8")
    levels = drawn_levels(recipe)
    assert [each for each, distribution in LEVELS.items() if follows(levels, distribution)] == [kind]


def test_the_warm_up(tmp_path: Path) -> None:
    optim = load_text(import_files([config(tmp_path, schedule=WARMUP)]).text, tmp_path / "r.yaml").recipe.optim
    found = [RATE * learning_rate_factor(optim, updates, STEPS) for updates in range(STEPS)]
    expected = rates_of(lambda optimizer: get_constant_schedule_with_warmup(optimizer, num_warmup_steps=3))
    assert found == pytest.approx(expected) and expected[0] == 0.0
