"""Models in their published layout, which differs from the layout of transformers' modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from lora_rocm.base_models.assembly import Assembly
from lora_rocm.children.check_base import weigh
from lora_rocm.errors import ModelError
from lora_rocm.export.merged import write_merged
from lora_rocm.families.causal_lm import architecture
from lora_rocm.families.causal_lm.architecture import published
from lora_rocm.families.causal_lm.family import CausalLM
from lora_rocm.recipe.kinds import recipe_from
from tests.families.causal_lm.adapted import CLOSE, CPU, Adapted, batch, off, recipe_of
from tests.program import Program
from tests.tiny_llm import write_chats, write_tiny_llm

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def changed_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return folder


def published_e2b(folder: Path) -> Path:
    """A Gemma 4 as the small ones are published: the layers that share keys and values have weights for their own."""

    def add(tensors: dict[str, Tensor]) -> None:
        for layer in (2, 3):
            for name in ("k_proj", "v_proj", "k_norm"):
                key = f"model.language_model.layers.{{}}.self_attn.{name}.weight"
                tensors[key.format(layer)] = tensors[key.format(layer - 2)].clone()

    return changed_tensors(write_tiny_llm(folder, "gemma4_per_layer"), add)


def published_qwen3_moe(folder: Path) -> Path:
    return write_tiny_llm(folder, "qwen3_moe")


@pytest.mark.parametrize("write", [published_qwen3_moe, published_e2b])
def test_a_run_is_loaded_by_the_highest_call_of_its_readers(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked, trained and merged; PEFT finds the base by the adapter's config, and every tensor has a place."""
    base = write(tmp_path / "base")
    rows = [[("user", f"{number} and one?"), ("assistant", str(number + 1))] for number in range(4)]
    recipe = {
        "model": {"family": "causal-lm", "name_or_path": "base"},
        "data": {"sources": [{"dataset": str(write_chats(tmp_path / "chats.jsonl", *rows))}]},
        "lora": {"rank": 2},
        "optim": {"learning_rate": 0.01},
        "train": {"max_train_steps": 2, "mixed_precision": "no"},
        "runtime": {"device": "cpu"},
        "output": {"dtype": "fp32"},
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert weigh(recipe_from(recipe)).num_bytes["model"] > 0
    (tmp_path / "r.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    program = Program(monkeypatch)
    trained = program.train(tmp_path / "run", recipe=tmp_path / "r.yaml")
    assert trained.code == 0, trained.text
    exported = program("export", tmp_path / "run", "--format", "merged")
    assert exported.code == 0, exported.text
    ids_BS, config = batch()["input_ids"], json.loads((base / "config.json").read_text(encoding="utf-8"))

    def logits(model: Any) -> Tensor:
        found: Tensor = model.eval()(input_ids=ids_BS, use_cache=False).logits
        return found

    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(base)
        bare, merged = logits(whole), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged"))
        model = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "run" / "peft" / "model"))
        adapted = logits(model)
    assert type(model.get_base_model()).__name__ == config["architectures"][0]
    written = load_file(tmp_path / "run" / "peft" / "model" / "adapter_model.safetensors")
    read = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
    assert read.keys() == written.keys() and all(torch.equal(read[name], written[name]) for name in read)
    assert off(adapted, bare) > 0.1 and off(merged, adapted) < 1e-3


def test_all_conversions_of_a_model_are_merged_back(tmp_path: Path) -> None:
    """Experts of the published layout stay as they are in the files; attention has the adapter."""
    base = write_tiny_llm(tmp_path / "base", "mixtral")
    adapted = Adapted(recipe_of(base))
    write_merged(tmp_path / "out", adapted.family.own_files(), adapted.adapter)
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and any(".block_sparse_moe.experts.3.w2." in name for name in after)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found = whole(input_ids=batch()["input_ids"], use_cache=False).logits
    assert off(found, adapted.logits(batch()["input_ids"])) < CLOSE


def test_experts_are_put_together_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two layers' separate experts are in memory at a time."""
    base, most = write_tiny_llm(tmp_path, "qwen3_moe", num_hidden_layers=6), 0
    take = Assembly.take

    def counted(self: Assembly, name: str, tensor: Tensor) -> None:
        nonlocal most
        take(self, name, tensor)
        most = max(most, sum(".experts." in held for held in self._read))

    monkeypatch.setattr(Assembly, "take", counted)
    CausalLM(recipe_of(base)).load(torch.float32, CPU)
    assert 0 < most <= 2 * 3 * 4


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda tensors: tensors.pop("model.layers.0.mlp.experts.2.up_proj.weight"), "weights-unfit"),
        (lambda tensors: tensors.update({"model.layers.0.mlp.experts.0.x.weight": torch.ones(1)}), "weights-unknown"),
        (lambda tensors: tensors.update({"model.vision_tower.x.weight": torch.ones(1)}), "weights-unknown"),
    ],
    ids=["missing expert", "unknown tensor", "no part for images"],
)
def test_what_the_layout_does_not_explain_is_refused(
    change: Callable[[dict[str, Tensor]], None], code: str, tmp_path: Path
) -> None:
    folder = changed_tensors(write_tiny_llm(tmp_path, "qwen3_moe"), change)
    with pytest.raises(ModelError) as caught:
        CausalLM(recipe_of(folder)).examine()
    assert caught.value.code == code


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_published_layout_of_every_architecture_is_read() -> None:
    """The file that transformers would save is converted back to the model's own tensors."""
    checked, converted = set[str](), set[str]()
    for kind, config_class in CONFIG_MAPPING.items():
        try:
            model = small(kind, config_class())
        except Exception:  # no default config, or one that cannot be made small like this
            continue
        if model is None:
            continue
        own = model.state_dict()
        saved = revert_weight_conversion(model, dict(own))
        found = published(dict(saved), model)
        tied = set(getattr(model, "_tied_weights_keys", None) or {})
        wrong = [
            name for name in own if name not in tied and (name not in found or found[name].shape != own[name].shape)
        ]
        assert not wrong, (kind, wrong[:3])
        checked.add(kind)
        converted |= {kind} if saved.keys() != own.keys() else set()
    assert {"llama", "gemma3", "gemma4", "gpt_oss"} <= checked
    assert {"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "glm4_moe", "granitemoe", "mistral3"} <= converted


def small(kind: str, config: Any) -> nn.Module | None:
    """A model of two layers without data, if its architecture is trained here."""
    inside = config.get_text_config()
    text = None if inside is config else inside.model_type
    cls = architecture._class_of(kind, text)
    if cls is None or not cls._supports_attention_backend or config.is_encoder_decoder:
        return None
    inside.num_hidden_layers = 2
    if getattr(inside, "layer_types", None):
        inside.layer_types = inside.layer_types[:2]
    with torch.device("meta"):
        model: nn.Module = cls(inside if cls.config_class is type(inside) else config)
    if text is not None and cls.config_class is type(config):
        architecture.only_text(model)
    return model
