"""An imported configuration of kohya's scripts trains with the numbers of the original (sd-scripts 48d368fa).

The expected numbers follow ``train_network.py`` and ``library/train_util.py``, with the schedules of transformers that
they call.
"""

from __future__ import annotations

import math
import random
from itertools import permutations

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType

from tests.importing.trained_import import TrainedImport, drawn_levels, follows, trained_import
from tests.tiny_models import SHALLOW, write_tiny_sdxl

EPOCHS, BATCH, ACCUMULATION, REPEATS = 3, 4, 2, 2
RATE, WARMUP, CYCLES = 2e-3, 2, 2
RANK, ALPHA = 4, 2
FIRST, END = 100, 900
SIZES = {(64, 64): 3, (128, 32): 2}
"""Width and height -> number of images. Each size is a bucket."""
COMMAND = "accelerate launch --num_processes 1 sdxl_train_network.py --config_file train.toml\n"
TRAIN = f"""\
[model]
pretrained_model_name_or_path = "model"
[network]
network_module = "networks.lora"
network_dim = {RANK}
network_alpha = {ALPHA}
network_train_unet_only = true
[optimizer]
optimizer_type = "AdamW"
unet_lr = {RATE}
lr_scheduler = "cosine_with_restarts"
lr_scheduler_num_cycles = {CYCLES}
lr_warmup_steps = {WARMUP}
[training]
max_train_epochs = {EPOCHS}
gradient_accumulation_steps = {ACCUMULATION}
min_timestep = {FIRST}
max_timestep = {END}
dataset_config = "dataset.toml"
output_name = "zibu"
save_precision = "float"
seed = 7
"""
DATASET = f"""\
[general]
enable_bucket = true
bucket_reso_steps = 32
min_bucket_reso = 32
caption_extension = ".txt"
[[datasets]]
resolution = 64
batch_size = {BATCH}
[[datasets.subsets]]
image_dir = "sets"
num_repeats = {REPEATS}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedImport:
    folder = tmp_path_factory.mktemp("kohya")
    write_tiny_sdxl(folder / "model", **SHALLOW)
    (folder / "sets").mkdir()
    generator = random.Random(3)
    for (width, height), count in SIZES.items():
        for number in range(count):
            path = folder / "sets" / f"{width}-{number}.png"
            Image.frombytes("RGB", (width, height), generator.randbytes(3 * width * height)).save(path)
            path.with_suffix(".txt").write_text("zibu, cat", encoding="utf-8")
    (folder / "train.sh").write_text(COMMAND, encoding="utf-8")
    (folder / "train.toml").write_text(TRAIN, encoding="utf-8")
    (folder / "dataset.toml").write_text(DATASET, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        return trained_import(patch, folder, "train.sh")


def batches_of_an_epoch() -> list[int]:
    """Sizes of the batches that the data loader gives: each bucket is cut into batches (``BucketManager``)."""
    found = []
    for count in SIZES.values():
        images = count * REPEATS
        found += [min(BATCH, images - start) for start in range(0, images, BATCH)]
    return found


def cut(batches: list[int]) -> list[int]:
    """Samples of each update: accelerate makes one after ``gradient_accumulation_steps``, and at the loader's end."""
    return [sum(batches[start : start + ACCUMULATION]) for start in range(0, len(batches), ACCUMULATION)]


def test_the_steps_and_the_effective_batch(trained: TrainedImport) -> None:
    steps = EPOCHS * math.ceil(len(batches_of_an_epoch()) / ACCUMULATION)  # train_network.py
    assert len(trained.rates) == steps
    possible = {tuple(cut(list(order))) for order in permutations(batches_of_an_epoch())}  # the order is random in both
    each = steps // EPOCHS
    for epoch in range(EPOCHS):
        assert tuple(trained.batches[epoch * each : (epoch + 1) * each]) in possible
    assert possible == {(8, 2), (6, 4)}


def test_the_learning_rate_of_each_update(trained: TrainedImport) -> None:
    steps = EPOCHS * math.ceil(len(batches_of_an_epoch()) / ACCUMULATION)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    function = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType.COSINE_WITH_RESTARTS]
    schedule = function(optimizer, num_warmup_steps=WARMUP, num_training_steps=steps, num_cycles=CYCLES)
    expected = []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert trained.rates == pytest.approx(expected, rel=1e-9)
    assert expected[0] == 0.0 and len({*expected}) > 2


def test_the_scale_of_the_lora(trained: TrainedImport) -> None:
    assert trained.scales == {ALPHA / RANK}  # lora.py: self.scale = alpha / self.lora_dim
    (file,) = trained.run.path.glob("zibu*.safetensors")
    tensors = load_file(file)
    alphas = {float(tensor) for name, tensor in tensors.items() if name.endswith(".alpha")}
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith("lora_down.weight")}
    assert (alphas, ranks) == ({ALPHA}, {RANK})


def test_the_density_of_the_timesteps(trained: TrainedImport) -> None:
    levels = drawn_levels(trained.run.recipe)
    assert follows(levels, lambda x: ((x.floor() - FIRST + 1) / (END - FIRST)).clamp(0, 1))  # torch.randint
    assert not follows(levels, lambda x: ((x.floor() + 1) / 1000).clamp(0, 1)), "the control: all timesteps"
    nearly = 0.9  # the power of another density between the same ends
    assert not follows(levels, lambda x: ((x.floor() - FIRST + 1) / (END - FIRST)).clamp(0, 1) ** nearly)
