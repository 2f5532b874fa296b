"""Language models that fit into cards of some sizes, and their tokens per second: steps under a memory cap.

    python -m benchmarks.text_card_sizes [--only REGEX] [--limit-s 400] [--json FILE]
    python -m benchmarks.text_card_sizes --toy      # on the CPU: the same models with two small blocks

Random weights in the published shapes, one text at a time, rank 16 on all seven projections (gpt-oss: attention). For
each model and length the first row has no cap and recomputes all activations. A row of a card follows the plan for its
size less 0.75 GiB for desktop and runtime, and is compared with the first row. Memory is the limit of the
allocator. Weights are offloaded further from row to row, so the largest card comes first.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.card_sizes import DESKTOP_BYTES, GIB
from benchmarks.language_model import LLAMA_8B
from benchmarks.memory_plan import Setup, limited_steps
from lora_rocm.base_models.random_weights import PREFIX
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.allocator import empty_pools
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device
from lora_rocm.hardware.settings import settings_from
from lora_rocm.memory.footprint import measured_rates
from lora_rocm.planning.step_choice import choose
from lora_rocm.planning.step_plan import Rates, StepRequirements
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe

LLAMA_1B: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {**LLAMA_8B["rope_parameters"], "factor": 32.0},
}
"""The config of meta-llama/Llama-3.2-1B."""
QWEN3_14B: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
"""The config of Qwen/Qwen3-14B."""
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
"""The config of openai/gpt-oss-20b; missing keys have the default of its class."""
TOY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "head_dim": 16}
TOY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TOY_TOKENS = {2048: 64, 8192: 128}


@dataclass(frozen=True)
class Case:
    """A model at one length. ``cards_gib``: the largest first."""

    name: str
    config: dict[str, Any]
    quantization: str
    tokens: int
    cards_gib: tuple[float, ...]
    targets: str = "attention-mlp"


CASES = (
    Case("Llama 3.2 1B", LLAMA_1B, "none", 2048, (6,)),
    Case("Llama 3.1 8B", LLAMA_8B, "nf4", 2048, (12, 8)),
    Case("Llama 3.1 8B", LLAMA_8B, "nf4", 8192, (16,)),
    Case("Qwen3 14B", QWEN3_14B, "nf4", 2048, (16,)),
    Case("gpt-oss 20B", GPT_OSS_20B, "none", 2048, (16,), "attention"),
)


class Texts(Setup):
    """A language model; the size of a sample is its number of tokens."""

    def __init__(self, case: Case, toy: bool, folder: Path, device: torch.device) -> None:
        self.case = case
        model = {"family": "causal-lm", "name_or_path": f"{PREFIX}{folder}", "quantization": case.quantization}
        super().__init__(model, toy, folder, 16, device)

    def recipe_at(self, side_px: int) -> Recipe:
        return recipe_from(
            {
                "model": self.section,
                "data": {"path": str(self.root), "max_length": self.case.tokens},
                "train": {"max_train_steps": 1000, "batch_size": 1},
                "lora": {"rank": self.rank, "targets": self.case.targets},
            }
        )

    def shape_at(self, side_px: int) -> SampleShape:
        return SampleShape.of(tokens=side_px)


def rows_of(case: Case, toy: bool, device: torch.device, rates: Rates) -> Iterator[dict[str, Any]]:
    """The row without a cap, then the rows of the cards."""
    tokens = TOY_TOKENS[case.tokens] if toy else case.tokens
    whole_bytes = 1 << 62 if toy else torch.cuda.get_device_properties(device).total_memory
    job = StepRequirements(graphs=not toy and "num_local_experts" not in case.config)
    with tempfile.TemporaryDirectory(prefix="lora-rocm-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        config = {**case.config, **(TOY if toy else {})}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        setup, reference_s = Texts(case, toy, folder, device), None
        for card_gib in (0.0, *case.cards_gib):
            cap_bytes = int(card_gib * GIB) - DESKTOP_BYTES if card_gib else whole_bytes
            wanted = job if card_gib else replace(job, modes=("recompute",))
            plan = choose(cap_bytes, setup.footprint(tokens), wanted, rates)
            row: dict[str, Any] = {"model": case.name, "quantization": case.quantization, "tokens": tokens}
            row |= {"card_GiB": card_gib}
            if plan is None:
                yield row | {"problem": "no plan fits"}
                continue
            row |= limited_steps(setup, cap_bytes, plan, tokens, anew=False)
            setup.optimizer.drop_gradients()
            empty_pools()
            if "step_s" in row:
                reference_s = reference_s or row["step_s"]
                row |= {"ratio": row["step_s"] / reference_s, "tokens_per_s": tokens / row["step_s"]}
            yield row


def line_of(row: dict[str, Any]) -> str:
    """A row as a line of a table."""
    card = f"{row['card_GiB']:g} GB" if row["card_GiB"] else "no cap, recomputed"
    start = f"| {row['model']}, {row['quantization']}, {row['tokens']} tokens | {card} | {row.get('plan', '-')} |"
    if "problem" in row:
        return f"{start} {row['problem']} |"
    sizes = f"{row['peak_bytes'] / GIB:.2f} / {row['reserved_bytes'] / GIB:.2f}"
    return f"{start} {1e3 * row['step_s']:.0f} | {row['ratio']:.2f} | {row['tokens_per_s']:.0f} | {sizes} |"


def main() -> int:
    """Measure; return 0 if all rows fitted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--limit-s", type=float, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = settings_from(os.environ)
    device = choose_device("cpu" if options.toy else "auto", settings)
    apply(settings, device)
    rates = Rates() if options.toy else measured_rates(device, torch.bfloat16)
    ends_at, rows = time.perf_counter() + options.limit_s, list[dict[str, Any]]()
    print("| model | card | plan | ms per step | vs no cap | tokens/s | peak / held, GiB |", flush=True)
    for case in CASES:
        if not re.search(options.only, f"{case.name} {case.tokens}") or time.perf_counter() > ends_at:
            continue
        for row in rows_of(case, options.toy, device, rates):
            rows.append(row)
            print(line_of(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        gc.collect()
        empty_pools()
    return int(any("problem" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
