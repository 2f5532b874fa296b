"""``lora-rocm export`` to the formats that are built from the base's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lora_rocm.children import conversions, model_child
from lora_rocm.errors import AdapterError
from lora_rocm.processes.jobs import ExportJob
from lora_rocm.recipe.load import dump_recipe
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train.checkpoint import save_checkpoint
from tests.export.test_gguf import script_of
from tests.families.causal_lm.adapted import CLOSE, Adapted, batch, off, recipe_of
from tests.tiny_llm import write_tiny_llm
from tests.wording import saying, says, worded

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
FACTS: dict[str, Any] = dict(
    steps=1, epochs=1, num_epochs=1, num_images=1, tag_frequency={}, buckets={}, dataset_dirs={}
)


class Run:
    """A run directory with one checkpoint, and the events of exports."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
        self.base, self.dir = write_tiny_llm(folder / "base"), RunDir(folder / "run").create()
        self.recipe = recipe_of(self.base, **sections)
        self.adapted = Adapted(self.recipe)
        self.dir.recipe.write_text(dump_recipe(self.recipe), encoding="utf-8")
        facts = {"base": self.adapted.family.base_facts()["identity"], "base_seals": {}, "metadata": FACTS}
        save_checkpoint(self.dir, Position(updates=3), {"adapter": self.adapted.adapter.state()}, facts)
        self.events: list[Any] = []
        for module in (conversions, model_child):
            monkeypatch.setattr(module, "emit", self.events.append)

    def export(self, form: str, **options: Any) -> None:
        spare = self.dir.path.with_name("spare")
        model_child.export_run(ExportJob(source=self.dir.path, format=form, spare_cache=spare, **options))


def test_a_merged_model_is_exported_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is stored as nf4 in training; merged is into the weights of its files. A damaged checkpoint is named."""
    run = Run(tmp_path, monkeypatch, model={"quantization": "nf4"})
    run.dir.checkpoint(4).mkdir()
    run.export("merged")
    ids_BS = batch()["input_ids"]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(run.dir.path / "merged")(input_ids=ids_BS, use_cache=False).logits
    dense = Adapted(recipe_of(run.base))
    dense.adapter.load(run.adapted.adapter.state())
    assert off(found, dense.logits(ids_BS)) < CLOSE < off(found, run.adapted.logits(ids_BS))
    damaged, notice, export = run.events
    assert damaged.text == worded("children/step-00000004-is-damaged-the-export-is")
    assert (
        says(notice.text, "children/trained-on-the-nf4-form")
        and export.path.endswith("merged")
        and export.cannot_read == []
    )


@pytest.mark.slow
def test_a_gguf_adapter_is_exported_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, lora={"targets": r".*[qk]_proj"})
    run.export("gguf", converter=script_of(tmp_path / "llama", 8), dtype="fp32")
    content = (run.dir.path / "lora.gguf").read_bytes()
    assert content.startswith(b"GGUF") and b'"type": "f32", "names": 8' in content
    (export,) = run.events
    assert export.max_difference is None and says(export.cannot_read[0], "children/gguf-adapter-is-for-llama-cpp")


@pytest.mark.slow
def test_what_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, lora={"targets": "attention"})
    other = write_tiny_llm(tmp_path / "other", "smollm")
    (other / "model.safetensors").replace(run.base / "model.safetensors")
    (other / "config.json").replace(run.base / "config.json")
    with pytest.raises(AdapterError, check=saying("children/not-those-that-this-adapter-was-trained")):
        run.export("merged")
    assert run.events == [] and not (run.dir.path / "merged").exists()
