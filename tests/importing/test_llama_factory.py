"""LLaMA-Factory's configurations as recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import UserError
from lora_rocm.importing.importer import import_files
from tests.importing.imported import CONFIGS, imported, outcome_of, values_of
from tests.importing.language_rows import STEPS, all_keys, check

FOLDER = CONFIGS / "llama-factory"
DEFAULTS: dict[str, Any] = {
    "model.family": "causal-lm", "model.name_or_path": "a/b", "lora.rank": 8, "lora.alpha": 16,
    "lora.targets": "all-linear", "optim.learning_rate": 5e-5, "optim.weight_decay": 0, "optim.lr_scheduler": "linear",
    "train.epochs": 3, "train.batch_size": 8, "train.seed": 42, "data.max_length": 2048,
}  # fmt: skip
"""Of src/llamafactory/hparams and transformers' TrainingArguments."""
SHARED: dict[str, Any] = {
    "model.family": "causal-lm", "model.name_or_path": "Qwen/Qwen3-4B-Instruct-2507", "data.max_length": 2048,
    "lora.rank": 8, "lora.alpha": 16, "lora.targets": "all-linear", "optim.weight_decay": 0,
    "optim.lr_scheduler": "cosine", "optim.lr_warmup_ratio": 0.1, "optim.lr_warmup_from_zero": True,
    "train.epochs": 3, "train.batch_size": 1,
    "train.gradient_accumulation_steps": 8, "train.seed": 42, "train.mixed_precision": "bf16",
    "output.save_every_n_steps": 500,
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "qwen3_lora_sft.yaml": {
        "data.sources[0].dataset": "data/identity.json", "data.sources[1].dataset": "data/alpaca_en_demo.json",
        "optim.learning_rate": 1e-4, "output.dir": "saves/qwen3-4b/lora/sft",
    },
    "qwen3_lora_dpo.yaml": {
        "data.sources[0].dataset": "data/dpo_en_demo.json", "optim.learning_rate": 5e-6, "objective.loss": "dpo",
        "objective.beta": 0.1, "output.dir": "saves/qwen3-4b/lora/dpo",
    },
    "qwen3_lora_pretrain.yaml": {
        "data.sources[0].dataset": "data/c4_demo.jsonl", "data.packing": True, "objective.train_on": "all",
        "optim.learning_rate": 1e-4, "output.dir": "saves/qwen3-4b/lora/pretrain",
    },
}  # fmt: skip
"""Compared key by key with the trainer's source."""


def read(folder: Path, text: str, *options: str) -> Any:
    return imported(folder, options, train_yaml=f"stage: sft\nmodel_name_or_path: a/b\n{text}")


@pytest.mark.parametrize("name", WHOLE)
def test_whole_configurations(name: str) -> None:
    assert values_of(import_files([FOLDER / name])) == SHARED | WHOLE[name]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.*")), ids=lambda path: path.name)
def test_published_configurations_are_recipes(path: Path) -> None:
    assert values_of(check(path))["lora.alpha"] == 16


def test_absent_keys_have_the_defaults_of_the_trainer(tmp_path: Path) -> None:
    values = values_of(read(tmp_path, ""))
    assert {key: values[key] for key in DEFAULTS} == DEFAULTS
    assert "objective.train_on" not in values and "data.packing" not in values


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("lora_rank: 32", "lora.alpha", 64),
        ("lora_rank: 32\nlora_alpha: 8", "lora.alpha", 8),
        ("train_on_prompt: true", "objective.train_on", "all"),
        ("mask_history: true", "objective.train_on", "last-turn"),
        ("quantization_bit: 4", "model.quantization", "nf4"),
        ("quantization_bit: 8", "model.quantization", "int8"),
        ("neat_packing: true", "data.packing", True),
        ("pissa_init: true", "lora.init", "pissa"),
        ("use_muon: true", "optim.optimizer", "muon"),
        ("pure_bf16: true", "lora.weight_dtype", "bf16"),
        ("max_steps: 10", "train.max_train_steps", 10),
        ("warmup_steps: 0.1", "optim.lr_warmup_ratio", 0.1),
        ("warmup_steps: 9", "optim.lr_warmup_steps", 9),
        ("optim: paged_adamw_8bit", "optim.optimizer", "adamw_8bit"),
        ("optim: adamw_torch_fused", "optim.optimizer", "adamw"),
        ("lora_target: q_proj,v_proj", "lora.targets", r"(?:.*\.)?(?:q_proj|v_proj)"),
        ("val_size: 0.1\neval_steps: 7", "train.validation_every_n_steps", 7),
        ("adapter_name_or_path: saves\\lora", "lora.init_from", "saves/lora/adapter_model.safetensors"),
    ],
)
def test_a_setting_becomes_a_key(tmp_path: Path, text: str, key: str, value: object) -> None:
    assert values_of(read(tmp_path, text))[key] == value


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("max_samples: 5", "unsupported"),
        ("template: alpaca", "unsupported"),
        ("template: qwen", "unsupported"),
        ("finetuning_type: full", "unsupported"),
        ("additional_target: embed_tokens", "unsupported"),
        ("quantization_bit: 2", "unsupported"),
        ("val_size: 100", "unsupported"),
        ("packing: true", "changed"),
        ("val_size: 0", "not-needed"),
        ("use_galore: false", "not-needed"),
        ("kt_weight_path: x", "not-needed"),
        ("adapter_name_or_path: a,b", "unsupported"),
        ("a_new_key: 5", "unsupported"),
        ("flash_attn: fa2", "not-needed"),
        ("enable_thinking: true", "not-needed"),
        ("enable_thinking: false", "unsupported"),
        ("fp16: true", "unsupported"),
    ],
)
def test_outcomes(tmp_path: Path, text: str, outcome: str) -> None:
    assert outcome_of(read(tmp_path, text), text.partition(":")[0]) == outcome


def test_pretraining_packs_unless_it_is_off(tmp_path: Path) -> None:
    text = "model_name_or_path: a/b\nfinetuning_type: lora\nstage: pt\n"
    assert values_of(imported(tmp_path, train_yaml=text))["data.packing"] is True
    assert "data.packing" not in values_of(imported(tmp_path, train_yaml=f"{text}packing: false\n"))


def test_the_template_of_the_base_is_the_tokenizers(tmp_path: Path) -> None:
    text = "model_name_or_path: Qwen/Qwen3-4B\nfinetuning_type: lora\ntemplate: qwen3\n"
    assert outcome_of(imported(tmp_path, train_yaml=text), "template") == "not-needed"


@pytest.mark.parametrize(
    ("stage", "loss", "outcome"), [("dpo\npref_loss: orpo", "dpo", "taken"), ("kto", None, "unsupported")]
)
def test_other_methods(tmp_path: Path, stage: str, loss: str | None, outcome: str) -> None:
    found = imported(tmp_path, train_yaml=f"model_name_or_path: a/b\nfinetuning_type: lora\nstage: {stage}\n")
    assert values_of(found).get("objective.loss") == loss and outcome_of(found, "stage") == outcome
    assert found.loses_something


def test_tables_are_looked_up(tmp_path: Path) -> None:
    info = {
        "mine": {"file_name": "mine.jsonl", "columns": {"prompt": "question", "response": "output"}},
        "hub": {"hf_hub_url": "x/y", "ms_hub_url": "z/y", "split": "full", "formatting": "sharegpt", "num_samples": 5},
        "other": {"file_name": "other.json"},
    }
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "dataset_info.json").write_text(json.dumps(info, indent=1), encoding="utf-8")
    found = read(tmp_path, "dataset: mine, hub, missing\ndataset_dir: rows\n")
    values = values_of(found)
    tables = [value for key, value in values.items() if key.endswith(".dataset")]
    assert tables == ["rows/mine.jsonl", "x/y", "missing"] and values["data.sources[1].split"] == "full"
    outcomes = {row.setting.key: row.outcome for row in found.outcomes}
    assert outcomes["datasets:mine.columns.prompt"] == "unsupported"
    assert outcomes["datasets:mine.columns.response"] == "not-needed"
    assert outcomes["datasets:hub.num_samples"] == "unsupported" and "datasets:other.file_name" not in outcomes


def test_a_missing_list_of_tables_is_reported(tmp_path: Path) -> None:
    found = read(tmp_path, "dataset: identity\n")
    assert values_of(found)["data.sources[0].dataset"] == "identity" and len(found.unread) == 1


def test_a_merge_configuration_trains_nothing(tmp_path: Path) -> None:
    text = "model_name_or_path: a/b\nadapter_name_or_path: saves/lora\nexport_dir: out\nexport_legacy_format: false\n"
    with pytest.raises(UserError) as error:
        imported(tmp_path, merge_yaml=text)
    assert error.value.code == "import-export"


def test_the_next_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        imported(tmp_path, train_yaml="model: a/b\ntrain_dataset: rows.yaml\nmicro_batch_size: 1\ncutoff_len: 9\n")
    assert error.value.code == "import-main"


def test_a_list_of_tables_alone(tmp_path: Path) -> None:
    values = values_of(import_files([FOLDER / "data" / "dataset_info.json"]))
    assert values["data.sources[0].dataset"] == "data/identity.json" and values["model.name_or_path"] == "FILL-THIS-IN"


@pytest.mark.parametrize("step", STEPS)
def test_every_row_has_an_outcome(tmp_path: Path, step: int) -> None:
    base = {
        "model_name_or_path": "a/b",
        "finetuning_type": "lora",
        "stage": "dpo" if step % 2 else "sft",
        "dataset": "a,b",
    }
    path = tmp_path / "train.json"
    path.write_text(json.dumps(all_keys("llama-factory", step, base)), encoding="utf-8")
    check(path)
