"""One other trainer's steps, in a separate process that ``benchmarks.language_peers`` starts.

    python -m benchmarks.peer_steps ROOT TRAINER OUT --modes "everything kept" recomputed [--steps N] [--toy]

Each mode is one line of JSON at the end of the file OUT, written as soon as it is measured. The process ends with the
first error. Nothing heavy is imported at the top: Unsloth asks to be imported before transformers.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP = 4
TOKENIZER = Path(__file__).parents[1] / "lora_rocm" / "builtin" / "tiny_llama"


@dataclass
class Asked:
    """One mode to measure. ``root`` holds ``base`` and takes all that a trainer writes."""

    root: Path
    mode: str
    steps: int
    toy: bool

    @property
    def recomputes(self) -> bool:
        return self.mode.startswith("recomputed")

    @property
    def liger(self) -> bool:
        return self.mode.endswith("Liger")

    @property
    def tokens(self) -> int:
        from benchmarks.llama_8b import TOKENS

        return 64 if self.toy else TOKENS

    @property
    def config(self) -> dict[str, Any]:
        from benchmarks.llama_8b import LLAMA_8B, TOY

        return {**LLAMA_8B, **TOY, "vocab_size": 640} if self.toy else LLAMA_8B  # as many as the tokenizer has

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu" if self.toy else "cuda")

    @property
    def out(self) -> Path:
        return self.root / "out"


def write_base(asked: Asked) -> None:
    """Write the base with random weights, and our tokenizer of 640 tokens next to it."""
    import torch

    from benchmarks.llama_8b import random_model

    unfinished, finished = asked.root / "base.unfinished", asked.root / "base"
    shutil.rmtree(unfinished, ignore_errors=True)
    torch.manual_seed(0)
    model = random_model(asked.config, asked.device)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(unfinished, max_shard_size="4GB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, unfinished / name)
    unfinished.rename(finished)


def texts(asked: Asked, rows: int) -> Any:
    """Return a data set of ``rows`` texts of token ids, all of the same length, all of which count in the loss."""
    import numpy
    from datasets import Dataset

    ids_NS = numpy.random.default_rng(0).integers(3, 500, (rows, asked.tokens)).tolist()
    mask_NS = [[1] * asked.tokens] * rows
    return Dataset.from_dict({"input_ids": ids_NS, "attention_mask": mask_NS, "labels": ids_NS})


def training_arguments(asked: Asked, total_steps: int) -> dict[str, Any]:
    """Arguments of transformers' ``TrainingArguments`` that all trainers get."""
    from benchmarks.llama_8b import ROWS

    return {
        "output_dir": str(asked.out),
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "max_steps": total_steps,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "logging_steps": total_steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def trl_row(asked: Asked) -> dict[str, Any]:
    """TRL: a model in bf16 with an adapter in bf16 (its default is float32 with autocast, which is slower)."""
    import torch
    from peft import LoraConfig, get_peft_model
    from trl import SFTConfig, SFTTrainer

    from benchmarks.llama_8b import LAYERS, RANK, random_model
    from benchmarks.peer_timer import Timer

    timer = Timer(WARM_UP, asked.steps, asked.device, asked.root)
    lora = LoraConfig(r=RANK, lora_alpha=RANK, lora_dropout=0.0, target_modules=LAYERS, task_type="CAUSAL_LM")
    model = get_peft_model(random_model(asked.config, asked.device), lora, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    settings = SFTConfig(
        **training_arguments(asked, timer.total_steps),
        bf16=False,
        use_cpu=asked.toy,
        gradient_checkpointing=asked.recomputes,
        use_liger_kernel=asked.liger,
        max_length=asked.tokens,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    data = texts(asked, 2 * timer.total_steps)
    trainer = SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer(), callbacks=[timer])
    trainer.train()
    return timer.measured()


def llamafactory_row(asked: Asked) -> dict[str, Any]:
    """LLaMA-Factory: the function behind its command ``train``, with ``pure_bf16`` (default: float32 with autocast)."""
    from llamafactory.train.tuner import run_exp

    from benchmarks.llama_8b import PROJECTIONS, RANK
    from benchmarks.peer_timer import Timer

    timer = Timer(WARM_UP, asked.steps, asked.device, asked.root)
    tokenized = asked.root / "tokenized"
    texts(asked, 2 * timer.total_steps).save_to_disk(tokenized)
    settings = training_arguments(asked, timer.total_steps) | {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(asked.root / "base"),
        "finetuning_type": "lora",
        "lora_target": ",".join(PROJECTIONS),
        "lora_rank": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "template": "empty",
        "dataset": "tokenized",  # a name is demanded, and not looked up where tokens are given
        "tokenized_path": str(tokenized),
        "cutoff_len": asked.tokens,
        "pure_bf16": not asked.toy,
        "flash_attn": "sdpa",
        "enable_liger_kernel": asked.liger,
        "disable_gradient_checkpointing": not asked.recomputes,
    }
    run_exp(settings, callbacks=[timer])
    return timer.measured()


def unsloth_row(asked: Asked) -> dict[str, Any]:
    """Unsloth: its model and its own recomputation, which offloads activations, with TRL's trainer as it patches it."""
    from unsloth import FastLanguageModel

    # isort: split
    import torch
    from trl import SFTConfig, SFTTrainer

    from benchmarks.llama_8b import PROJECTIONS, RANK
    from benchmarks.peer_timer import Timer

    timer = Timer(WARM_UP, asked.steps, asked.device, asked.root)
    model, words = FastLanguageModel.from_pretrained(
        model_name=str(asked.root / "base"),
        max_seq_length=asked.tokens,
        dtype=None if asked.toy else torch.bfloat16,
        load_in_4bit=False,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=RANK,
        lora_dropout=0,
        bias="none",
        target_modules=list(PROJECTIONS),
        use_gradient_checkpointing="unsloth" if asked.recomputes else False,
    )
    settings = SFTConfig(
        **training_arguments(asked, timer.total_steps),
        bf16=not asked.toy,
        max_length=asked.tokens,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    data = texts(asked, 2 * timer.total_steps)
    trainer = SFTTrainer(model, args=settings, train_dataset=data, processing_class=words, callbacks=[timer])
    trainer.train()
    return timer.measured()


def tokenizer() -> Any:
    """Our tokenizer of 640 tokens."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER)


ROW_OF: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "trl": trl_row,
    "llamafactory": llamafactory_row,
    "unsloth": unsloth_row,
}


def main() -> int:
    """Write the base, or measure the modes of one trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("trainer", choices=["base", *ROW_OF])
    parser.add_argument("out", type=Path)
    parser.add_argument("--modes", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.trainer == "base":
        write_base(Asked(options.root, "", 0, options.toy))
    for mode in options.modes:
        asked = Asked(options.root, mode, options.steps, options.toy)
        shutil.rmtree(asked.out, ignore_errors=True)
        row = ROW_OF[options.trainer](asked)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"trainer": options.trainer, "mode": mode, **row}) + "\n")
        gc.collect()
        sys.modules["torch"].cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
