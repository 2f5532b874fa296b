"""Compare updates with TRL's SFTTrainer, on chats of different lengths with accumulated gradients.

    pip install --target FOLDER --no-deps trl
    PYTHONPATH=FOLDER python benchmarks/trl_updates.py [--chats 8] [--batch-size 1] [--accumulation 8]

The packaged tiny Llama in float32 on the CPU, Adam with a large epsilon, which amplifies
rounding less, the same
first adapter. With as many chats as the effective batch has samples, the same samples meet in every update. It prints
the loss of each update of both, and the difference of the adapters relative to their change.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

UPDATES, RATE, EPSILON = 5, 1e-2, 1e-1
WORDS = "the red fox hides in a field near two old barns and sings of birds running over boats".split()
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main(argv: list[str]) -> int:
    """Print losses and the relative difference; return 0 if it is below 5e-6."""
    parser = argparse.ArgumentParser(prog="trl_updates.py", description=__doc__)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=8)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="trl ") as name:
        folder = Path(name)
        chats = write_chats(folder / "chats.jsonl", options.chats)
        start = write_start(folder / "start")
        first = load_file(start / "adapter_model.safetensors")
        own, own_losses = ours(folder, start, options)
        other, other_losses = theirs(folder, start, chats, options)
    change, apart = distance(first, own), distance(own, other)
    for number, (one, two) in enumerate(zip(own_losses, other_losses, strict=False), 1):
        print(f"update {number}: loss {one:.7f} and {two:.7f}")
    print(f"difference of the adapters: {apart / change:.2e} of their change")
    return 0 if apart < 5e-6 * change else 1


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of two adapters."""
    return math.sqrt(sum(float((one[key] - other[key]).norm()) ** 2 for key in one))


def base() -> Path:
    """The packaged tiny Llama."""
    from lora_rocm import builtin

    return Path(str(builtin.__file__)).parent / "tiny_llama"


def write_chats(file: Path, count: int) -> list[list[dict[str, str]]]:
    """Write conversations with answers of 2 to 160 words."""
    generator = random.Random(1)
    chats = []
    for number in range(count):
        answer = " ".join(generator.choices(WORDS, k=2 + (number * 23) % 160))
        chats.append([{"role": "user", "content": f"Tale {number}"}, {"role": "assistant", "content": answer}])
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    return chats


def write_start(folder: Path) -> Path:
    """Write a PEFT adapter of random values, from which both begin."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base(), dtype=torch.float32), config).save_pretrained(folder)
    return folder


def ours(folder: Path, start: Path, options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train with ``lora-rocm train``; return the last adapter and the losses."""
    settings = {
        "model.family": "causal-lm",
        "model.name_or_path": str(base()),
        "data.sources": json.dumps([{"dataset": str(folder / "chats.jsonl")}]),
        "data.max_length": 2048,
        "lora.rank": 4,
        "lora.alpha": 4,
        "lora.targets": "all-linear",
        "lora.init_from": str(start),
        "objective.train_on": "all",
        "optim.learning_rate": RATE,
        "optim.epsilon": EPSILON,
        "optim.weight_decay": 0,
        "optim.max_grad_norm": 0,
        "optim.lr_scheduler": "constant",
        "train.max_train_steps": UPDATES,
        "train.batch_size": options.batch_size,
        "train.gradient_accumulation_steps": options.accumulation,
        "train.mixed_precision": "no",
        "sample.prompts": "[]",
        "output.dtype": "fp32",
        "runtime.device": "cpu",
        "runtime.threads": 1,
        "cache.dir": str(folder / "cache"),
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text("{}\n", encoding="utf-8")
    command = [sys.executable, "-m", "lora_rocm", "train", str(recipe), "--run-dir", str(folder / "run")]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [event["loss"] for event in events if event.get("type") == "step"]
    return load_file(next((folder / "run" / "peft").rglob("adapter_model.safetensors"))), losses


def theirs(folder: Path, start: Path, chats: list[Any], options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train with TRL's SFTTrainer; return the last adapter and the losses."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(base(), dtype=torch.float32)
    model = PeftModel.from_pretrained(model, start, is_trainable=True)
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=UPDATES,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_epsilon=EPSILON,
        weight_decay=0.0,
        max_grad_norm=0.0,
        max_length=2048,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model,
        args=config,
        train_dataset=Dataset.from_dict({"messages": chats}),
        processing_class=AutoTokenizer.from_pretrained(base()),
    )
    trainer.train()
    trainer.save_model(str(folder / "trl"))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return load_file(folder / "trl" / "adapter_model.safetensors"), losses


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
