"""``lora-rocm inspect`` of a language model's folder agrees with ``check`` of a recipe with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.children.check_base import weigh
from lora_rocm.commands import inspect_file
from lora_rocm.commands.inspect_file import inspect_text
from lora_rocm.errors import LoraRocmError, WorkerDiedError
from tests.families.causal_lm.adapted import recipe_of
from tests.families.causal_lm.test_published import changed_tensors
from tests.families.test_tokenizer_rows import BEYOND, edited, piece
from tests.judging import inspect
from tests.tiny_llm import MODELS, write_tiny_llm
from tests.wording import mentions, says


def with_config(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")
    return folder


def without(folder: Path, pattern: str) -> Path:
    for path in folder.glob(pattern):
        path.unlink()
    return folder


CHANGES: dict[str, Callable[[Path], Path]] = {
    "custom code": lambda folder: with_config(folder, auto_map={"AutoModelForCausalLM": "own.Model"}),
    "unknown": lambda folder: with_config(folder, model_type="nobody_knows"),
    "no decoder": lambda folder: with_config(folder, model_type="t5"),
    "soft cap": lambda folder: with_config(folder, attn_logit_softcapping=50.0),
    "type": lambda folder: with_config(folder, model_type=["llama"]),
    "size": lambda folder: with_config(folder, hidden_size=1 << 24),
    "missing": lambda folder: changed_tensors(folder, lambda found: (found.pop("model.norm.weight"), None)[1]),
    "tokenizer": lambda folder: edited(folder, piece(BEYOND)),
    "no tokenizer": lambda folder: without(folder, "tokenizer*"),
}


def checked(folder: Path) -> str:
    """The result of check for a folder; "" if nothing."""
    try:
        weigh(recipe_of(folder, lora={"targets": "attention-mlp"}, runtime={"device": "cpu"}))
    except LoraRocmError as error:
        return error.what
    return ""


@pytest.mark.parametrize("name", [*MODELS])
def test_every_published_layout_is_promised(name: str, tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path, name)
    found = inspect(folder)
    assert not checked(folder) and found["trainable"] == ["causal-lm"] and "unusable" not in found
    assert says(inspect_text(found), "commands/can-be-trained-on-with-model-family")
    assert says(inspect_text(found), "commands/can-be-trained")


@pytest.mark.parametrize("change", [*CHANGES])
def test_what_check_refuses_is_not_promised(change: str, tmp_path: Path) -> None:
    folder = CHANGES[change](write_tiny_llm(tmp_path))
    found, said = inspect(folder), checked(folder)
    assert said and found["trainable"] == [] and said in found["unusable"]
    assert not mentions(inspect_text(found), "commands/can-be-trained")


def test_a_child_that_fails_is_no_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> dict[str, Any]:
        raise WorkerDiedError("died", "The process ended.", fix="x")

    monkeypatch.setattr("lora_rocm.processes.tool.run_for_json", failing)
    with pytest.raises(WorkerDiedError):
        inspect_file.inspect(write_tiny_llm(tmp_path))
