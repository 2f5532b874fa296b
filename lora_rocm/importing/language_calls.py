"""Reads scripts and notebooks for TRL and Unsloth: converts the relevant calls to settings with flat names."""

from __future__ import annotations

import re
from dataclasses import replace

from lora_rocm.importing.config_files import ConfigFile
from lora_rocm.importing.formats.python_calls import call_settings
from lora_rocm.importing.setting import FileContent, Setting

CONFIGS = (
    "SFTConfig", "DPOConfig", "KTOConfig", "ORPOConfig", "CPOConfig", "GRPOConfig", "RLOOConfig", "RewardConfig",
    "PPOConfig", "BCOConfig", "GKDConfig", "OnlineDPOConfig", "NashMDConfig", "XPOConfig", "PRMConfig",
    "TrainingArguments", "UnslothTrainingArguments", "ModelConfig", "ScriptArguments",
)  # fmt: skip
TRAINERS = (
    "SFTTrainer", "DPOTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer", "GRPOTrainer", "RLOOTrainer",
    "RewardTrainer", "PPOTrainer", "BCOTrainer", "GKDTrainer", "OnlineDPOTrainer", "NashMDTrainer", "XPOTrainer",
    "PRMTrainer", "PeerTrainer", "UnslothTrainer",
)  # fmt: skip
PARTS = ("LoraConfig", "BitsAndBytesConfig", "get_peft_model", "from_pretrained")
"""Calls with keywords that are also used as flat names."""
OTHERS = (
    "load_dataset", "get_chat_template", "train_on_responses_only", "DataCollatorForCompletionOnlyLM",
    "save_pretrained_merged", "save_pretrained_gguf", "push_to_hub_merged", "push_to_hub_gguf",
    "standardize_sharegpt",
)  # fmt: skip
OBJECTS = (
    "model", "tokenizer", "processing_class", "train_dataset", "eval_dataset", "args", "peft_config", "data_collator",
    "compute_metrics", "preprocess_logits_for_metrics", "callbacks", "ref_model", "reward_funcs", "reward_model",
    "optimizers", "formatting_func", "bf16", "fp16", "dtype", "torch_dtype", "device_map", "quantization_config",
    "bnb_4bit_compute_dtype", "attn_implementation", "token", "use_gradient_checkpointing", "report_to", "output_dir",
    "logging_dir", "run_name", "trust_remote_code", "quantization_method", "num_proc", "dataset_num_proc",
    "loftq_config", "init_lora_weights", "task_type", "max_memory", "gradient_checkpointing_kwargs",
)  # fmt: skip
"""Keywords that pass an object, or that do not change the weights."""
OTHER_CLASSES = ("AutoTokenizer", "AutoProcessor", "AutoConfig", "AutoImageProcessor", "GenerationConfig")
METHOD = re.compile(r"^(\w+?)(?:Config|PeerTrainer)$")
AS_TRAINER = "trainer."
"""Prefix of the names of trainer keywords, such as ``model``, that are not settings of the run."""


def calls_of(file: ConfigFile) -> FileContent:
    """Return the settings of the calls.

    The relevant keywords have flat names. Other calls and repeated calls have dotted names.
    """
    functions = (*CONFIGS, *TRAINERS, *PARTS, *OTHERS)
    named = ("load_dataset", "from_pretrained")
    found = call_settings(file.text, file.file, functions, OBJECTS, named, OTHER_CLASSES)
    methods = [each for each in found.settings if not each.key.startswith("later.")]
    empty = {*CONFIGS, *TRAINERS, *PARTS}
    kept = [_flat(each) for each in found.settings if each.key.removeprefix("later.") not in empty]
    if (method := _method(methods)) is not None:
        kept.append(method)
    return found.with_settings(kept)


def _flat(setting: Setting) -> Setting:
    """Return a setting with its flat name.

    Later calls of the same function load the tokenizer or a trained LoRA.
    """
    call, _, name = setting.key.partition(".")
    if setting.key == "from_pretrained[0]":
        return replace(setting, key="model_name")
    if call in TRAINERS and name in (
        "model",
        "ref_model",
        "args",
        "eval_dataset",
        "train_dataset",
        "peft_config",
        "tokenizer",
        "data_collator",
    ):
        return replace(setting, key=f"{AS_TRAINER}{name}")
    return replace(setting, key=name) if call in (*CONFIGS, *TRAINERS, *PARTS) else setting


def _method(settings: list[Setting]) -> Setting | None:
    """Return the training method, from the name of the configuration or trainer class.

    If there are several methods, SFT is preferred, then DPO.
    """
    names: dict[str, Setting] = {}
    for each in settings:
        found = METHOD.match(each.key.partition(".")[0])
        if found is not None and found[1] not in ("Lora", "BitsAndBytes", "Model", "", "Unsloth"):
            names.setdefault(found[1].lower(), each)
    first = next((name for name in ("sft", "dpo", *names) if name in names), None)
    return None if first is None else Setting("method", first, names[first].file, names[first].line)
