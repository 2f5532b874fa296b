"""An imported configuration of TRL trains with the numbers of the original (TRL f2cd57710, transformers 5.23).

SFTTrainer takes steps, batches and schedule from transformers' Trainer, which runs here with the original's arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from lora_rocm.base_models.loading import builtin_folder
from tests.importing.trained_import import TrainedImport, trained_import

ROWS, RANK, ALPHA = 11, 4, 8
ARGUMENTS: dict[str, Any] = {
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.3,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}
OTHERS = {
    "dataset_name": "rows.jsonl", "use_peft": "", "lora_r": RANK, "lora_alpha": ALPHA, "output_dir": "out",
    "lora_target_modules": "q_proj v_proj",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedImport:
    folder = tmp_path_factory.mktemp("trl")
    base = builtin_folder("builtin:tiny-llama")
    options = [f"--{name} {value}".rstrip() for name, value in {**OTHERS, **ARGUMENTS}.items()]
    command = " \\\n  ".join(["trl sft", f"--model_name_or_path '{base}'", *options])
    (folder / "sft.sh").write_text(f"{command}\n", encoding="utf-8")
    rows = [{"prompt": f"What is {number} and one?", "completion": f"It is {number + 1}."} for number in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        return trained_import(patch, folder, "sft.sh")


class Weight(nn.Module):
    """A model of one weight that counts the samples of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.samples = 0

    def forward(self, x: Tensor, **others: object) -> Mapping[str, Tensor]:
        self.samples += len(x)
        return {"loss": (x * self.weight).mean()}


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes the rate and the samples of each update."""

    def __init__(self) -> None:
        self.rates, self.batches = list[float](), list[int]()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.rates.append(float(given["optimizer"].param_groups[0]["lr"]))
        self.batches.append(given["model"].samples)
        given["model"].samples = 0


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    watch, fixed = Watch(), {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    known = {name: value for name, value in ARGUMENTS.items() if name != "warmup_ratio"}
    # transformers 5 has one key for both: a number below 1 is the share of the run
    arguments = TrainingArguments(str(tmp_path_factory.mktemp("original")), warmup_steps=ARGUMENTS["warmup_ratio"],
                                  **known, **fixed)  # fmt: skip
    rows: list[dict[str, Tensor]] = [{"x": torch.ones(1)} for _ in range(ROWS)]
    Trainer(model=Weight(), args=arguments, train_dataset=rows, callbacks=[watch]).train()
    return watch


def test_the_steps_and_the_effective_batch(trained: TrainedImport, original: Watch) -> None:
    """The smaller batch is the last of an epoch there, and at a random place here."""
    epochs = [sorted(trained.batches[first : first + 3]) for first in range(0, len(trained.batches), 3)]
    assert epochs == [sorted(original.batches[first : first + 3]) for first in (0, 3, 6)] == [[3, 4, 4]] * 3


def test_the_learning_rate_of_each_update(trained: TrainedImport, original: Watch) -> None:
    assert trained.rates == pytest.approx(original.rates, rel=1e-9)
    assert original.rates[0] == 0.0 and max(original.rates) == ARGUMENTS["learning_rate"]


def test_the_scale_of_the_lora(trained: TrainedImport) -> None:
    assert trained.scales == {ALPHA / RANK}  # peft: self.scaling = lora_alpha / r
    (config,) = trained.run.path.rglob("adapter_config.json")
    found = json.loads(config.read_text(encoding="utf-8"))
    assert (found["r"], found["lora_alpha"]) == (RANK, ALPHA)
    assert {name.rpartition(".")[2] for name in found["target_modules"]} == {"q_proj", "v_proj"}
    tensors = load_file(config.with_name("adapter_model.safetensors"))
    assert {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name} == {RANK}
