"""GGUF adapters in llama.cpp itself: it loads base and adapter, and the adapter has the trained effect on the logits.

It needs llama-cpp-python, and llama.cpp's folder with its converters in ``LLAMA_CPP``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lora_rocm.export.gguf import write_gguf
from tests.families.causal_lm.adapted import Adapted, off, recipe_of
from tests.tiny_llm import write_tiny_llm

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
SCRIPTS = Path(os.environ.get("LLAMA_CPP", "missing"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.skipif(
        not (SCRIPTS / "convert_lora_to_gguf.py").is_file(), reason="LLAMA_CPP does not name llama.cpp's folder"
    ),
]
CONVERT_BASE = """
import runpy, sys
scripts = sys.argv.pop(1)
sys.path[:0] = [scripts, scripts + "/gguf-py"]
from conversion.base import TextModel
start = TextModel.__init__
def started(self, *args, **options):
    start(self, *args, **options)
    self.get_vocab_base_pre = lambda tokenizer: "gpt-2"
    self.set_vocab = lambda: (self._set_vocab_gpt2(), self.gguf_writer.add_token_merges(["a b"]))
TextModel.__init__ = started
sys.argv[0] = scripts + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""llama.cpp's converter of models. It does not know the tiny tokenizers, without merges; the tests give tokens."""
FLOAT32 = {"type_k": 0, "type_v": 0}
"""Formats of the keys and values of attention: ggml's number of float32."""
TOKENS = torch.randint(4, 260, (12,), generator=torch.Generator().manual_seed(3))
GEMMA = {"vocab_size": 264, "final_logit_softcapping": None, "layer_types": ["sliding_attention"] * 2}
"""A Gemma as llama.cpp reads it: rows with a token only, no cap of logits, the global layers at every sixth place."""
CLOSE = 1e-5  # as a share of the effect: sums of float32 in another order


def converted_base(folder: Path) -> Path:
    """Convert a model's folder to float32 GGUF."""
    path = folder.with_suffix(".gguf")
    words = [str(SCRIPTS), str(folder), "--outtype", "f32", "--outfile", str(path)]
    done = subprocess.run([sys.executable, "-c", CONVERT_BASE, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


def logits_of(base: Path, **options: Any) -> Tensor:
    """Return llama.cpp's logits after each token, [tokens, vocabulary]."""
    model = llama_cpp.Llama(str(base), n_ctx=64, n_threads=1, logits_all=True, verbose=False, **FLOAT32, **options)
    try:
        model.eval(TOKENS.tolist())
        return torch.from_numpy(model.scores[: len(TOKENS)].copy()).float()
    finally:
        model.close()


@dataclass
class Sides:
    """An adapter in this program and in llama.cpp, on the same tokens.

    base, lora: the base and the adapter as GGUF. start: transformers' logits of the base, [tokens, vocabulary].
    """

    adapted: Adapted
    base: Path
    lora: Path
    start: Tensor

    @classmethod
    def of(cls, folder: Path, kind: str, targets: str = "all-linear", **changed: Any) -> Sides:
        """Write both, with an alpha that is not the rank."""
        model, lora = write_tiny_llm(folder / "base", kind, **changed), folder / "lora.gguf"
        settings = {"rank": 4, "alpha": 6, "targets": targets}
        adapted = Adapted(recipe_of(model, lora=settings, output={"dtype": "fp32"}))
        script, num_modules = SCRIPTS / "convert_lora_to_gguf.py", len(adapted.adapter.modules)
        write_gguf(lora, adapted.written(folder / "peft"), model, script, "fp32", num_modules)
        start = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = start(input_ids=TOKENS[None], use_cache=False).logits[0]
        return cls(adapted, converted_base(model), lora, logits)


@pytest.mark.parametrize(
    ("kind", "changed", "close"),
    [
        *((kind, {}, CLOSE) for kind in ("llama", "smollm", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "mixtral")),
        ("gemma3_text", GEMMA, 1e-3),  # ggml reads GELU from a table of float16
        ("smollm3", {"no_rope_layer_interval": 4}, CLOSE),  # llama.cpp has this number in its code
        ("qwen3_moe", {"norm_topk_prob": True}, CLOSE),  # likewise
    ],
)
def test_llama_cpp_applies_the_trained_adapter(
    kind: str, changed: dict[str, Any], close: float, tmp_path: Path
) -> None:
    """Negative control: half of the strength has another effect."""
    sides = Sides.of(tmp_path, kind, **changed)
    wanted = sides.adapted.logits(TOKENS[None])[0] - sides.start
    base = logits_of(sides.base)
    effect = logits_of(sides.base, lora_path=str(sides.lora)) - base
    half = logits_of(sides.base, lora_path=str(sides.lora), lora_scale=0.5) - base
    assert off(base, sides.start) < close
    assert off(effect, wanted) < close
    assert off(half, wanted) > 0.1


@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying.*:UserWarning")
def test_llama_cpp_refuses_a_lora_of_a_tied_head(tmp_path: Path) -> None:
    """This is why ``require_convertible`` refuses it."""
    for kind in ("llama", "smollm"):
        sides = Sides.of(tmp_path / kind, kind, r".*(lm_head|q_proj)")
        if kind == "llama":  # its head is a weight of its own
            wanted = sides.adapted.logits(TOKENS[None])[0] - sides.start
            assert off(logits_of(sides.base, lora_path=str(sides.lora)) - logits_of(sides.base), wanted) < CLOSE
            continue
        loaded = llama_cpp.llama_model_load_from_file(str(sides.base).encode(), llama_cpp.llama_model_default_params())
        assert loaded and not llama_cpp.llama_adapter_lora_init(loaded, str(sides.lora).encode())
        llama_cpp.llama_model_free(loaded)
