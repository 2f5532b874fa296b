"""axolotl's configurations as recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.importing.importer import import_files
from tests.importing.imported import CONFIGS, imported, outcome_of, row_of, values_of
from tests.importing.language_rows import STEPS, all_keys, check

FOLDER = CONFIGS / "axolotl"
SHARED: dict[str, Any] = {
    "model.family": "causal-lm", "optim.optimizer": "adamw_8bit", "optim.weight_decay": 0,
    "optim.lr_scheduler": "cosine", "optim.lr_warmup_ratio": 0.1, "optim.lr_warmup_from_zero": True,
    "train.gradient_accumulation_steps": 4,
    "train.seed": 42, "train.validation_every_n_epochs": 1, "data.validation_split": 0.05,
    "output.save_every_n_epochs": 1, "output.keep_last": 4,
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "llama-3-lora-8b.yml": {
        "model.name_or_path": "NousResearch/Meta-Llama-3-8B", "model.quantization": "int8",
        "data.sources[0].dataset": "mhenrichsen/alpaca_2k_test", "data.max_length": 4096, "data.packing": True,
        "lora.rank": 32, "lora.alpha": 16, "lora.dropout": 0.05, "lora.targets": "all-linear",
        "optim.learning_rate": 2e-4, "train.epochs": 4, "train.batch_size": 2, "output.dir": "./outputs/lora-out",
    },
    "llama-3-qlora-1b.yml": {
        "model.name_or_path": "NousResearch/Llama-3.2-1B", "model.quantization": "nf4",
        "data.sources[0].dataset": "teknium/GPT4-LLM-Cleaned", "data.max_length": 2048, "data.packing": True,
        "data.validation_split": 0.1, "lora.rank": 32, "lora.alpha": 16, "lora.dropout": 0.05,
        "lora.targets": r"(?:.*\.)?(?:gate_proj|down_proj|up_proj|q_proj|v_proj|k_proj|o_proj)",
        "optim.learning_rate": 2e-4, "train.epochs": 1, "train.batch_size": 2, "output.dir": "./outputs/qlora-out",
    },
    "mistral-dpo-qlora.yml": {
        "model.name_or_path": "mistralai/Mistral-7B-Instruct-v0.2", "model.quantization": "nf4",
        "data.sources[0].dataset": "olivermolenschot/alpaca_messages_dpo_test", "data.max_length": 2048,
        "lora.rank": 8, "lora.alpha": 16, "lora.dropout": 0.2, "lora.targets": "all-linear",
        "optim.learning_rate": 1e-4, "objective.loss": "dpo", "objective.beta": 0.1, "train.epochs": 6,
        "train.batch_size": 16, "output.dir": "./outputs/dpo-qlora",
    },
}  # fmt: skip
"""Compared key by key with the trainer's source."""
HEAD = """\
base_model: a/b
adapter: lora
lora_r: 8
learning_rate: 0.0002
micro_batch_size: 1
"""


def read(folder: Path, text: str, *options: str) -> Any:
    return imported(folder, options, train_yml=f"{HEAD}{text}")


@pytest.mark.parametrize("name", WHOLE)
def test_whole_configurations(name: str) -> None:
    assert values_of(import_files([FOLDER / name])) == SHARED | WHOLE[name]


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_published_configurations_are_recipes(path: Path) -> None:
    assert values_of(check(path))["model.family"] == "causal-lm"


def test_absent_keys_have_the_defaults_of_the_trainer(tmp_path: Path) -> None:
    values = values_of(read(tmp_path, ""))
    wanted = {
        "data.max_length": 512, "optim.weight_decay": 0, "optim.lr_scheduler": "cosine", "optim.lr_warmup_ratio": 0.03,
        "optim.lr_warmup_from_zero": True,
        "train.epochs": 1, "output.save_every_n_epochs": 1, "output.keep_last": 4, "train.seed": 42,
    }  # fmt: skip
    assert {key: values[key] for key in wanted} == wanted
    assert "objective.train_on" not in values and "lora.alpha" not in values


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train_on_inputs: true", "objective.train_on", "all"),
        ("warmup_steps: 10", "optim.lr_warmup_steps", 10),
        ("batch_size: 6\nmicro_batch_size: 2", "train.gradient_accumulation_steps", 3),
        ("save_steps: 50", "output.save_every_n_steps", 50),
        ("optimizer: adamw_torch_4bit", "optim.optimizer", "adamw_8bit"),
        ("optimizer: came_pytorch", "optim.optimizer", "came"),
        ("optimizer: muon", "optim.optimizer", "muon"),
        ("lr_scheduler: rex", "optim.lr_scheduler", "rex"),
        ("cosine_min_lr_ratio: 0.2", "optim.lr_min_ratio", 0.2),
        ("cosine_min_lr_ratio: 1.0\nlr_scheduler: cosine", "optim.lr_scheduler", "constant"),
        ("lora_model_dir: C:\\out", "lora.init_from", "C:/out/adapter_model.safetensors"),
        ("wandb_project: mine", "output.log_with", ["wandb"]),
        ("use_mlflow: true", "output.log_with", ["mlflow"]),
        ("peft_use_rslora: true", "lora.use_rslora", True),
        ("peft_init_lora_weights: pissa_niter_4", "lora.init", "pissa"),
        (
            "lora_target_modules: [q_proj]\npeft_layers_to_transform: [0, 3]",
            "lora.targets",
            r"(?:.*\.)?(?:layers)\.(?:0|3)\.(?:.*\.)?(?:q_proj)",
        ),
        (
            r"lora_target_modules: 'model.language_model.layers.[\d]+.(mlp).(up)_proj'",
            "lora.targets",
            r"model\.layers.[\d]+.(mlp).(up)_proj",
        ),
        ("tokenizer_config: ~/tokenizer", "model.tokenizer", "~/tokenizer"),
    ],
)
def test_a_setting_becomes_a_key(tmp_path: Path, text: str, key: str, value: object) -> None:
    head = HEAD if "micro_batch_size" not in text else HEAD.replace("micro_batch_size: 1\n", "")
    found = imported(tmp_path, train_yml=f"{head}{text}\nsequence_len: 64\n")
    values = values_of(found)
    given = values[key] if key in values else [values.get(f"{key}[0]")]
    assert given == value


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("sequence_len: 64", "changed"),
        ("special_tokens:\n  pad_token: x", ""),
        ("quantize_moe_experts: true", "unsupported"),
        ("lora_modules_to_save: [lm_head]", "unsupported"),
        ("lora_modules_to_save: []", "not-needed"),
        ("rl: grpo", "unsupported"),
        ("chat_template: chatml", "unsupported"),
        ("chat_template: tokenizer_default", "not-needed"),
        ("flash_attention: true", "not-needed"),
        ("val_set_size: 100", "unsupported"),
        ("excess_length_strategy: drop", "unsupported"),
        ("excess_length_strategy: truncate", "not-needed"),
        ("full_finetune: true", "unsupported"),
        ("one_more: 3", "unsupported"),
        ("neftune_noise_alpha: 5", "unsupported"),
        ("evals_per_epoch: 4", "not-needed"),
        ("reward_model: true", "unsupported"),
    ],
)
def test_outcomes(tmp_path: Path, text: str, outcome: str) -> None:
    more = "" if "sequence_len" in text else "\nsequence_len: 64"
    found = read(tmp_path, f"{text}{more}\n")
    key = text.partition(":")[0]
    assert not outcome or outcome_of(found, key) == outcome
    assert outcome or outcome_of(found, "special_tokens.pad_token") == "not-needed"


def test_a_file_without_an_adapter_is_reported(tmp_path: Path) -> None:
    found = imported(tmp_path, train_yml="base_model: a/b\nsequence_len: 64\nlearning_rate: 1e-4\n")
    assert found.loses_something and row_of(found, "adapter").ours == "lora.type"


def test_tables(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """\
datasets:
  - {path: json, data_files: [a.jsonl, b.jsonl], type: chat_template, field_messages: messages, ds_type: json}
  - {path: x/y, type: alpaca, split: "train[:10]"}
  - {path: z, type: chat_template, field_messages: turns, name: part}
  - path: own.csv
    type: {field_instruction: ask, field_output: output}
""",
    )
    values = values_of(found)
    tables = [value for key, value in values.items() if key.endswith(".dataset")]
    assert tables == ["a.jsonl", "b.jsonl", "x/y", "z", "own.csv"] and values["data.sources[2].split"] == "train[:10]"
    assert {key: outcome_of(found, f"datasets[{key}") for key in (
        "0].type", "0].field_messages", "0].data_files", "1].path", "2].field_messages", "2].name",
        "3].type.field_instruction", "3].type.field_output",
    )} == {
        "0].type": "not-needed", "0].field_messages": "not-needed", "0].data_files": "taken", "1].path": "changed",
        "2].field_messages": "unsupported", "2].name": "unsupported", "3].type.field_instruction": "unsupported",
        "3].type.field_output": "not-needed",
    }  # fmt: skip


def test_constant_rates_have_no_warm_up(tmp_path: Path) -> None:
    assert "optim.lr_warmup_ratio" not in values_of(read(tmp_path, "lr_scheduler: constant\nsequence_len: 64\n"))


def test_secrets_stay_out(tmp_path: Path) -> None:
    found = read(tmp_path, "wandb_api_key: topsecret\nsequence_len: 64\n")
    assert "topsecret" not in found.text and row_of(found, "wandb_api_key").setting.shown == "***"


def test_half_a_file(tmp_path: Path) -> None:
    found = read(tmp_path, "sequence_len: 64\nnum_epochs: 2\ndatasets: [{path: \n")
    assert values_of(found)["train.epochs"] == 2 and found.unread


@pytest.mark.parametrize("step", STEPS)
def test_every_row_has_an_outcome(tmp_path: Path, step: int) -> None:
    base = {
        "base_model": "a/b",
        "sequence_len": 64,
        "datasets": [{"path": "x", "type": "alpaca", "a": step}],
        "rl": "dpo",
    }
    path = tmp_path / "train.json"
    path.write_text(json.dumps(all_keys("axolotl", step, base)), encoding="utf-8")
    check(path)
