"""TRL's command line, scripts and notebooks as recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.importing.importer import import_files
from tests.importing.imported import CONFIGS, imported, outcome_of, row_of, values_of
from tests.importing.language_rows import STEPS, all_keys, check

FOLDER = CONFIGS / "trl"
SHARED: dict[str, Any] = {
    "model.family": "causal-lm", "optim.weight_decay": 0, "train.seed": 42,
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "example_config.yaml": {
        "model.name_or_path": "Qwen/Qwen2.5-0.5B", "data.sources[0].dataset": "stanfordnlp/imdb",
        "data.max_length": 1024, "lora.rank": 16, "lora.alpha": 32, "lora.dropout": 0.05,
        "lora.targets": r"(?:.*\.)?(?:q_proj|v_proj)",
        "optim.learning_rate": 1e-4, "optim.lr_scheduler": "cosine", "objective.train_on": "all", "train.epochs": 3,
        "train.batch_size": 8,
    },
    "dpo.yaml": {
        "model.name_or_path": "Qwen/Qwen3-1.7B", "model.quantization": "nf4", "data.sources[0].dataset": "my-pairs",
        "data.sources[0].split": "train_prefs", "data.max_length": 1536, "lora.rank": 32, "lora.alpha": 16,
        "lora.dropout": 0.05, "lora.targets": "all-linear", "optim.learning_rate": 5e-7, "optim.lr_scheduler": "linear",
        "optim.lr_warmup_ratio": 0.1, "optim.lr_warmup_from_zero": True,
        "objective.loss": "dpo", "objective.beta": 0.05, "objective.label_smoothing": 0.1,
        "train.epochs": 3, "train.batch_size": 8, "train.gradient_accumulation_steps": 8, "output.name": "my-first-run",
        "output.log_with": ["wandb"],
    },
    "sft.sh": {
        "model.name_or_path": "Qwen/Qwen3-0.6B", "data.sources[0].dataset": "trl-lib/Capybara", "data.max_length": 1024,
        "data.packing": True, "lora.rank": 32, "lora.alpha": 16, "lora.targets": r"(?:.*\.)?(?:q_proj|v_proj|o_proj)",
        "optim.learning_rate": 2e-4, "optim.lr_scheduler": "cosine", "optim.lr_min_ratio": 0.1,
        "optim.lr_warmup_ratio": 0.03, "optim.lr_warmup_from_zero": True,
        "objective.train_on": "answers", "train.epochs": 1, "train.batch_size": 2,
        "train.gradient_accumulation_steps": 8, "output.dir": "Qwen3-0.6B-SFT",
    },
    "script.py": {
        "model.name_or_path": "Qwen/Qwen3-0.6B", "model.quantization": "nf4", "data.sources[0].dataset": "rows.jsonl",
        "lora.rank": 4, "lora.alpha": 8, "lora.targets": r"(?:.*\.)?(?:layers)\.(?:0|1)\.(?:.*\.)?(?:q_proj)",
        "optim.learning_rate": 1e-4, "optim.lr_scheduler": "cosine", "optim.lr_min_ratio": 0.1,
        "optim.betas": [0.9, 0.95], "objective.train_on": "answers", "train.epochs": 1, "train.batch_size": 8,
        "output.dir": "out",
    },
}  # fmt: skip
"""Compared key by key with the trainer's source."""
SCRIPT = """\
from trl import {method}Config, {method}PeerTrainer
from peft import LoraConfig
args = {method}Config({more})
trainer = {method}PeerTrainer(model="a/b", args=args, train_dataset=rows, peft_config=LoraConfig(task_type="CAUSAL_LM"))
"""


def script(folder: Path, more: str = "", method: str = "SFT") -> Any:
    return imported(folder, train_py=SCRIPT.format(method=method, more=more))


@pytest.mark.parametrize("name", WHOLE)
def test_whole_configurations(name: str) -> None:
    assert values_of(check(FOLDER / name)) == SHARED | WHOLE[name]


def test_the_lora_of_a_script_has_pefts_defaults(tmp_path: Path) -> None:
    values = values_of(script(tmp_path))
    assert (values["lora.rank"], values["lora.alpha"], values["optim.learning_rate"]) == (8, 8, 2e-5)
    assert values["objective.train_on"] == "all" and values["data.max_length"] == 1024


def test_pairs(tmp_path: Path) -> None:
    values = values_of(script(tmp_path, "max_prompt_length=9", "DPO"))
    assert (values["objective.loss"], values["objective.beta"], values["optim.learning_rate"]) == ("dpo", 0.1, 1e-6)
    assert "objective.train_on" not in values


@pytest.mark.parametrize(("method", "loss"), [("GRPO", None), ("KTO", None), ("ORPO", "dpo"), ("Reward", None)])
def test_other_methods_are_reported(tmp_path: Path, method: str, loss: str | None) -> None:
    found = script(tmp_path, method=method)
    assert found.loses_something and outcome_of(found, "method") == "unsupported"
    assert values_of(found).get("objective.loss") == loss


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("packing=True", "taken"),
        ("assistant_only_loss=False", "taken"),
        ("dataset_text_field='words'", "unsupported"),
        ("bf16=card()", "not-needed"),
        ("truncation_mode='keep_end'", "unsupported"),
        ("max_steps=-1", "not-needed"),
        ("hub_token='x'", "not-needed"),
        ("load_best_model_at_end=True", "unsupported"),
        ("loss_type='dft'", "unsupported"),
        ("report_to=['comet_ml']", "unsupported"),
        ("save_strategy='epoch'", "taken"),
        ("warmup_ratio=0.0", "not-needed"),
        ("neftune_noise_alpha=5", "unsupported"),
        ("optim='galore_adamw'", "unsupported"),
        ("a_new_key=1", "unsupported"),
        ("lr_scheduler_type='inverse_sqrt'", "unsupported"),
        ("gradient_checkpointing=True", "not-needed"),
        ("padding_free=True", "not-needed"),
        ("eos_token='x'", "unsupported"),
        ("num_train_epochs=1.5", "changed"),
    ],
)
def test_outcomes(tmp_path: Path, text: str, outcome: str) -> None:
    assert outcome_of(script(tmp_path, text), text.partition("=")[0]) == outcome


def test_a_run_without_a_lora_is_reported(tmp_path: Path) -> None:
    text = "from trl import SFTConfig, SFTTrainer\ntrainer = SFTTrainer('a/b', args=SFTConfig(max_steps=5))\n"
    found = imported(tmp_path, train_py=text)
    assert row_of(found, "peft_config").changes_weights
    assert row_of(import_files([FOLDER / "example_config.yaml"]), "use_peft").changes_weights


def test_computed_values_are_listed_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    found = script(tmp_path, f"learning_rate=open({str(mark)!r}, 'w').write('x'), **more")
    assert not mark.exists() and len(found.unread) == 2 and found.loses_something
    assert outcome_of(found, "learning_rate") == "changed"


def test_several_tables(tmp_path: Path) -> None:
    text = """\
model_name_or_path: a/b
use_peft: true
datasets:
  - {path: x/y, split: "train[:5]"}
  - {path: z, name: part}
"""
    found = imported(tmp_path, train_yaml=text)
    values = values_of(found)
    assert values["data.sources[0].split"] == "train[:5]" and values["data.sources[1].dataset"] == "z"
    assert outcome_of(found, "datasets[1].name") == "unsupported"


@pytest.mark.parametrize("step", STEPS)
def test_every_row_has_an_outcome(tmp_path: Path, step: int) -> None:
    base = {"model_name_or_path": "a/b", "dataset_name": "x", "method": "dpo" if step % 2 else "sft", "datasets": []}
    path = tmp_path / "train.json"
    path.write_text(json.dumps(all_keys("trl", step, base)), encoding="utf-8")
    check(path)


@pytest.mark.parametrize(
    "text",
    [
        "from trl import SFTConfig\n(",
        "SFTTrainer(",
        '{"cells": [{"cell_type": "code", "source": "from trl import x; SFTConfig(r=1"}]}',
    ],
)
def test_damaged_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text(text, encoding="utf-8")
    assert import_files([path]).unread
