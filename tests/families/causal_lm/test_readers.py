"""The PEFT folder of a language model, read by the rules of each program that reads it: the logits are PEFT's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lora_rocm.export.writers import verify
from tests.families.causal_lm.adapted import CLOSE, Adapted, batch, off, recipe_of, reference
from tests.tiny_llm import write_tiny_llm

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
PREFIX = "base_model.model."
OVERRIDES = [{"match": r".*q_proj", "rank": 2, "alpha": 6}, {"match": r".*up_proj", "rank": 7}]
Changes = dict[str, Tensor]


def vllm(folder: Path, max_lora_rank: int = 16) -> Changes:
    """The rules of vLLM's vllm/lora: one factor for all modules, from the config alone, which reads no patterns."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if (
        "lora_alpha" not in config
        or config.get("use_dora")
        or config.get("modules_to_save")
        or config.get("bias", "none") != "none"
    ):
        raise ValueError("vLLM refuses it")
    if config["r"] > max_lora_rank:
        raise ValueError("LoRA rank is greater than max_lora_rank")
    factor = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    downs, ups = Changes(), Changes()
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        if not name.startswith(PREFIX):
            raise ValueError("unsupported LoRA weight")
        module, role, ending = name.removeprefix(PREFIX).rsplit(".", 2)
        if ending != "weight" or role not in ("lora_A", "lora_B"):
            raise ValueError("unsupported LoRA weight")
        if min(tensor.shape) > max_lora_rank:
            raise ValueError("does not fit the buffers of a server")
        (downs if role == "lora_A" else ups)[module] = tensor
    return {module: factor * ups[module] @ downs[module] for module in downs}


def llama_cpp(folder: Path) -> Changes:
    """The rules of convert_lora_to_gguf.py, and of llama.cpp for its file: alpha over the rank of each tensor."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        role = next((role for role in ("lora_A", "lora_B") if f".{role}.weight" in name), None)
        if role is None:
            raise ValueError("Unexpected name: Not a lora_A or lora_B tensor")
        pairs.setdefault(name.replace(PREFIX, "").replace(f".{role}.weight", ""), {})[role] = tensor
    return {
        module: float(config["lora_alpha"]) / pair["lora_B"].shape[-1] * pair["lora_B"] @ pair["lora_A"]
        for module, pair in pairs.items()
    }


def logits_with(base: Path, changes: Changes, ids_BS: Tensor) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with torch.no_grad():
        for module, change_OI in changes.items():
            model.get_submodule(module).weight += change_OI
        found: Tensor = model(input_ids=ids_BS, use_cache=False).logits
    return found


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param({"alpha": 8}, marks=pytest.mark.slow),
        pytest.param({"alpha": 8, "overrides": OVERRIDES}, marks=pytest.mark.slow),
        {"use_rslora": True, "alpha": 8, "overrides": OVERRIDES},
    ],
    ids=["plain", "ranks", "rslora and ranks"],
)
def test_logits_are_those_of_peft(lora: dict[str, Any], tmp_path: Path) -> None:
    base, ids_BS = write_tiny_llm(tmp_path / "base", "qwen3"), batch()["input_ids"]
    adapted = Adapted(recipe_of(base, lora={"rank": 4, **lora}, output={"dtype": "fp32"}))
    folder = adapted.written(tmp_path / "out")
    with torch.no_grad():
        theirs = reference(base, folder)(input_ids=ids_BS, use_cache=False).logits
    for reader in (vllm, llama_cpp):
        changes = reader(folder)
        assert len(changes) == len(adapted.adapter.modules) == 14
        assert off(logits_with(base, changes, ids_BS), theirs) < CLOSE
    assert off(adapted.logits(ids_BS), theirs) < CLOSE
    assert off(logits_with(base, {}, ids_BS), theirs) > 1000 * CLOSE


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        pytest.param({}, (), marks=pytest.mark.slow),
        ({"use_dora": True}, ("vLLM (refuses a DoRA)", "llama.cpp's convert_lora_to_gguf.py (refuses a DoRA)")),
        pytest.param(
            {"type": "loha"},
            ("vLLM (knows LoRA only)", "llama.cpp's convert_lora_to_gguf.py (knows LoRA only)"),
            marks=pytest.mark.slow,
        ),
        pytest.param({"rank": 24}, ("vLLM (only if it is started with --max-lora-rank 32)",), marks=pytest.mark.slow),
    ],
    ids=["lora", "dora", "loha", "rank"],
)
def test_who_cannot_read_it_is_said(lora: dict[str, Any], told: tuple[str, ...], tmp_path: Path) -> None:
    base = write_tiny_llm(tmp_path / "base")
    adapted = Adapted(recipe_of(base, lora={"targets": "attention", **lora}, output={"dtype": "fp32"}))
    folder = adapted.written(tmp_path / "out")
    found = verify("peft", tmp_path / "out", adapted.family, adapted.model, adapted.adapter).cannot_read
    assert found == told
    for reader, name in ((vllm, "vLLM"), (llama_cpp, "llama.cpp")):
        try:
            changes = reader(folder)
        except ValueError:
            changes = {}
        assert (len(changes) == len(adapted.adapter.modules)) is not any(name in text for text in found), name
