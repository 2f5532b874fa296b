"""torchtune's recipes and PEFT's files of a LoRA as recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import UserError
from lora_rocm.importing.importer import import_files
from tests.importing.imported import CONFIGS, imported, outcome_of, values_of
from tests.importing.language_rows import STEPS, all_keys, check

WHOLE: dict[str, dict[str, Any]] = {
    "torchtune/lora.yaml": {
        "model.family": "causal-lm", "model.name_or_path": "C:/models/Llama-3.2-1B-Instruct",
        "data.sources[0].dataset": "yahma/alpaca-cleaned", "lora.rank": 64, "lora.alpha": 128,
        "lora.targets": r"(?:.*\.)?(?:q_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)", "optim.optimizer": "adamw",
        "optim.learning_rate": 3e-4, "optim.weight_decay": 0.01, "optim.lr_scheduler": "cosine",
        "optim.lr_warmup_steps": 100, "optim.lr_warmup_from_zero": True,
        "optim.max_grad_norm": 0, "objective.train_on": "all",
        "train.max_train_steps": 100, "train.batch_size": 4, "train.gradient_accumulation_steps": 8,
        "train.mixed_precision": "bf16", "output.dir": "/tmp/out", "output.log_with": ["wandb"],
    },
    "torchtune/qlora_dpo.yaml": {
        "model.family": "causal-lm", "model.name_or_path": "~/models/Llama-3.1-8B", "model.quantization": "nf4",
        "data.sources[0].dataset": "pairs.jsonl", "data.max_length": 1024, "lora.rank": 8, "lora.alpha": 16,
        "lora.targets": r"(?:.*\.)?(?:q_proj|k_proj|v_proj)", "optim.optimizer": "adamw_8bit",
        "optim.learning_rate": 5e-6, "optim.max_grad_norm": 1, "objective.loss": "dpo", "objective.beta": 0.2,
        "train.epochs": 1, "train.batch_size": 2,
    },
}  # fmt: skip
"""Compared key by key with the trainer's source."""


@pytest.mark.parametrize("name", WHOLE)
def test_whole_configurations(name: str) -> None:
    assert values_of(check(CONFIGS / name)) == WHOLE[name]


@pytest.mark.parametrize(
    ("text", "key", "outcome"),
    [
        ("model: {_component_: torchtune.models.qwen3.qwen3_4b}", "model._component_", "unsupported"),
        ("model: {_component_: x.llama3_2_vision.lora_llama3_2_vision_11b}", "model._component_", "unsupported"),
        ("model: {_component_: x.lora_a}\nloss: {_component_: x.GRPOSimpleLoss}", "loss._component_", "unsupported"),
        ("model: {_component_: x.lora_a}\nshuffle: false", "shuffle", "unsupported"),
        ("model: {_component_: x.lora_a}\nprofiler: {cpu: true}", "profiler.cpu", "not-needed"),
        ("dataset: {_component_: x.samsum_dataset}", "dataset._component_", "unsupported"),
        ("dataset: {_component_: x.chat_dataset, source: a/b, packed: true}", "dataset.packed", "taken"),
    ],
)
def test_outcomes(tmp_path: Path, text: str, key: str, outcome: str) -> None:
    assert outcome_of(imported(tmp_path, train_yaml=f"{text}\n"), key) == outcome


def test_an_adapter_config(tmp_path: Path) -> None:
    found = check(CONFIGS / "peft" / "adapter_config.json")
    values = values_of(found)
    start = values.pop("lora.init_from")
    assert start.endswith("peft/adapter_model.safetensors")
    assert values == {
        "model.family": "causal-lm", "model.name_or_path": "Qwen/Qwen3-4B",
        "model.revision": "step-100", "data.sources[0].dataset": "FILL-THIS-IN",
        "lora.rank": 16, "lora.alpha": 32, "lora.dropout": 0.05, "lora.use_dora": True,
        "lora.targets": r"(?:.*\.)?(?:q_proj|v_proj|down_proj)",
        "lora.overrides[0].match": r"(?:.*\.)?(?:mlp.down_proj)", "lora.overrides[0].alpha": 4,
        "lora.overrides[0].rank": 8, "lora.overrides[1].match": r"(?:.*\.)?(?:model.layers.0.self_attn.q_proj)",
        "lora.overrides[1].rank": 2, "train.epochs": 1,
    }  # fmt: skip
    assert outcome_of(found, "loftq_config") == "not-needed" and not found.loses_something


def test_doras_base_is_not_quantised(tmp_path: Path) -> None:
    text = json.dumps({"peft_type": "LORA", "use_dora": True, "load_in_4bit": True})
    found = imported(tmp_path, adapter_json=text)
    assert outcome_of(found, "use_dora") == "unsupported" and values_of(found)["model.quantization"] == "nf4"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"task_type": "SEQ_CLS"}, "import-family"),
        ({"auto_mapping": {"parent_library": "diffusers.models.unets"}}, "import-main"),
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, more: dict[str, Any], code: str) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", **more}), encoding="utf-8")
    with pytest.raises(UserError) as error:
        import_files([path])
    assert error.value.code == code


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("trainer", "base"), [("torchtune", {"model._component_": "x.lora_y"}), ("peft", {"peft_type": "LORA"})]
)
def test_every_row_has_an_outcome(tmp_path: Path, trainer: str, base: dict[str, Any], step: int) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps(all_keys(trainer, step, base)), encoding="utf-8")
    check(path)
