"""Unsloth's YAML, command lines, scripts and notebooks as recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.importing.importer import import_files
from tests.importing.imported import CONFIGS, imported, outcome_of, row_of, values_of
from tests.importing.language_rows import STEPS, all_keys, check

FOLDER = CONFIGS / "unsloth"
SEVEN = r"(?:.*\.)?(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
SHARED: dict[str, Any] = {
    "model.family": "causal-lm", "model.quantization": "nf4", "optim.optimizer": "adamw_8bit",
    "optim.lr_scheduler": "linear", "optim.lr_warmup_steps": 5, "optim.lr_warmup_from_zero": True, "train.seed": 3407,
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "train.yaml": {
        "model.name_or_path": "unsloth/Llama-3.2-1B-Instruct", "data.sources[0].dataset": "my-name/my-chats",
        "data.max_length": 4096, "data.packing": True, "lora.rank": 64, "lora.alpha": 32,
        "lora.targets": r"(?:.*\.)?(?:q_proj|v_proj)", "lora.use_rslora": True, "optim.learning_rate": 2e-4,
        "optim.weight_decay": 0.01, "objective.train_on": "answers", "train.epochs": 2, "train.batch_size": 2,
        "train.gradient_accumulation_steps": 4, "output.save_every_n_steps": 100, "output.log_with": ["wandb"],
        "output.log_project": "my-project",
    },
    "defaults.yaml": {
        "model.name_or_path": "unsloth/Llama-3.2-1B-Instruct", "data.sources[0].dataset": "rows/a.jsonl",
        "data.sources[1].dataset": "rows/b.jsonl", "data.max_length": 2048, "lora.rank": 64, "lora.alpha": 16,
        "lora.targets": SEVEN, "optim.learning_rate": 2e-4, "optim.weight_decay": 0.01, "objective.train_on": "all",
        "train.epochs": 3, "train.batch_size": 2, "train.gradient_accumulation_steps": 4,
    },
    "cli.sh": {
        "model.name_or_path": "unsloth/llama-3-8b", "data.sources[0].dataset": "yahma/alpaca-cleaned",
        "data.max_length": 8192, "lora.rank": 64, "lora.alpha": 32, "lora.dropout": 0.1, "lora.targets": SEVEN,
        "lora.use_rslora": True, "optim.learning_rate": 2e-6, "optim.weight_decay": 0.005, "objective.train_on": "all",
        "train.max_train_steps": 400, "train.batch_size": 4, "train.gradient_accumulation_steps": 8,
        "output.dir": "outputs",
    },
}  # fmt: skip
"""Compared key by key with the trainer's source."""
LOAD = """\
!pip install unsloth
from unsloth import FastLanguageModel
max_seq_length = 1024
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Qwen3-4B", max_seq_length=max_seq_length)
model = FastLanguageModel.get_peft_model(
    model,
    r=32,
    lora_alpha=64,
    loftq_config=None,
)
"""
TRAIN = """\
from trl import SFTTrainer, SFTConfig
dataset = load_dataset("mlabonne/FineTome-100k", split="train[:500]")
tokenizer = get_chat_template(tokenizer, chat_template="qwen3")
dataset = standardize_sharegpt(dataset)
trainer = SFTTrainer(
    model=model,
    train_dataset=dataset,
    args=SFTConfig(
        max_steps=30,
        bf16=is_bfloat16_supported(),
        per_device_train_batch_size=len(dataset) // 100,
    ),
)
"""
ANSWERS = "trainer = train_on_responses_only(trainer)\n"
AFTER = """\
if False:
    model, tokenizer = FastLanguageModel.from_pretrained(model_name="lora_model", token="hf_abcdefghijklmnopqrstuvwx")
model.save_pretrained_gguf("model", tokenizer, quantization_method="q4_k_m")
FastLanguageModel.from_pretrained("later")
"""


def notebook(folder: Path, *cells: str) -> Path:
    path = folder / "chat.ipynb"
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True), "outputs": []} for cell in cells]
    text = {"cell_type": "markdown", "source": ["r = 99\n", "FastLanguageModel.get_peft_model(model, r=99)"]}
    path.write_text(json.dumps({"cells": [text, *code], "nbformat": 4}, indent=1), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", WHOLE)
def test_whole_configurations(name: str) -> None:
    assert values_of(check(FOLDER / name)) == SHARED | WHOLE[name]


def test_a_notebook(tmp_path: Path) -> None:
    path = notebook(tmp_path, "%%bash\nif true; then echo; fi", LOAD, TRAIN, "this is (no Python", ANSWERS, AFTER)
    found = check(path)
    assert values_of(found) == {
        "model.family": "causal-lm", "model.name_or_path": "unsloth/Qwen3-4B", "model.quantization": "nf4",
        "data.sources[0].dataset": "mlabonne/FineTome-100k", "data.sources[0].split": "train[:500]",
        "data.max_length": 1024, "lora.rank": 32, "lora.alpha": 64, "lora.targets": SEVEN,
        "optim.optimizer": "adamw_8bit", "optim.learning_rate": 5e-5, "optim.weight_decay": 0.001,
        "optim.lr_scheduler": "linear", "objective.train_on": "answers", "train.max_train_steps": 30,
        "train.batch_size": 4, "train.gradient_accumulation_steps": 2, "train.seed": 3407,
    }  # fmt: skip
    lines = path.read_text(encoding="utf-8").splitlines()
    rank = row_of(found, "r").setting
    assert "r=32" in lines[rank.line - 1] and "hf_" not in found.text
    assert sorted("Python" in lines[part.line - 1] for part in found.unread) == [False, True]
    assert outcome_of(found, "later.from_pretrained[0]") == "not-needed"


def test_all_words_are_trained_on_unless_a_call_says_otherwise(tmp_path: Path) -> None:
    assert values_of(import_files([notebook(tmp_path, LOAD, TRAIN)]))["objective.train_on"] == "all"


@pytest.mark.parametrize(
    ("text", "quantization"),
    [
        ("load_in_8bit=True", "int8"),
        ("load_in_16bit=True", None),
        ("load_in_fp8=True", "fp8"),
        ("load_in_4bit=False", None),
    ],
)
def test_the_format_of_the_base(tmp_path: Path, text: str, quantization: str | None) -> None:
    code = (
        f"from unsloth import FastModel\nFastModel.from_pretrained('a/b', {text})\nFastModel.get_peft_model(m, r=4)\n"
    )
    assert values_of(imported(tmp_path, train_py=code)).get("model.quantization") == quantization


def test_the_base_of_the_command_line_has_all_bits_by_default(tmp_path: Path) -> None:
    values = values_of(imported(tmp_path, train_sh="python unsloth-cli.py --dataset rows.jsonl\n"))
    assert "model.quantization" not in values and values["train.max_train_steps"] == 400
    assert values["model.name_or_path"] == "unsloth/llama-3-8b" and values["lora.rank"] == 16


@pytest.mark.parametrize(
    ("text", "outcome"),
    [("embed_tokens", "changed"), ("q_proj", "taken"), ("lm_head", "unsupported")],
)
def test_modules_outside_the_blocks(tmp_path: Path, text: str, outcome: str) -> None:
    names = ["k_proj", text] if outcome != "unsupported" else [text]
    code = f"from unsloth import FastModel\nFastModel.get_peft_model(m, target_modules={names})\n"
    assert outcome_of(imported(tmp_path, train_py=code), "target_modules") == outcome


def test_secrets_stay_out() -> None:
    for name in ("train.yaml", "cli.sh"):
        found = import_files([FOLDER / name])
        assert "0123456789abcdef" not in found.text and "my_token" not in found.text


@pytest.mark.parametrize("step", STEPS)
def test_every_row_has_an_outcome(tmp_path: Path, step: int) -> None:
    base = {"model": "a/b", "training": {"training_type": "lora"}, "method": "dpo" if step % 2 else "sft"}
    path = tmp_path / "train.json"
    path.write_text(json.dumps(all_keys("unsloth", step, base)), encoding="utf-8")
    check(path)
