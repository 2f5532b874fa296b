"""Weights are weighed without being loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lora_rocm.errors import MachineError
from lora_rocm.families import weight_sizes
from lora_rocm.families.weight_sizes import weigh as weighed
from tests.tiny_models import tiny_recipe, write_hollow_sdxl


def real_bytes(folder: Path) -> dict[str, int]:
    """What the files of a float32 model hold."""
    files = {path.parent.name: load_file(path) for path in folder.glob("*/*.safetensors")}
    return {name: sum(t.numel() * t.element_size() for t in tensors.values()) for name, tensors in files.items()}


def test_a_folder(tiny_sdxl: Path) -> None:
    assert weighed(tiny_recipe(tiny_sdxl)).num_bytes == real_bytes(tiny_sdxl)


def test_half_precision_is_for_what_is_trained(tiny_sdxl: Path) -> None:
    real = real_bytes(tiny_sdxl)
    halved = weighed(tiny_recipe(tiny_sdxl, train={"mixed_precision": "bf16"})).num_bytes
    assert halved == real | {"unet": real["unet"] // 2}
    lora = {"train_text_encoder": True}
    both = weighed(tiny_recipe(tiny_sdxl, train={"mixed_precision": "bf16"}, lora=lora)).num_bytes
    assert both == {name: size if name == "vae" else size // 2 for name, size in real.items()}


def test_a_one_file_checkpoint_by_its_published_config(tmp_path: Path) -> None:
    file = write_hollow_sdxl(tmp_path / "x.safetensors")
    sizes = weighed(tiny_recipe(file, train={"mixed_precision": "fp16"})).num_bytes
    assert sizes["unet"] == 2 * 2_567_463_684


@pytest.mark.parametrize("there", [True, False])
def test_as_a_program(
    tiny_sdxl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: bool,
) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(tiny_recipe(tiny_sdxl if there else tmp_path / "no").model_dump_json(), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["weigh", str(recipe)])
    code = weight_sizes.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    if there:
        assert (code, found["num_bytes"], found["notices"]) == (0, real_bytes(tiny_sdxl), [])
        assert {Path(path).name for path, *_ in found["files"]} >= {
            "config.json",
            "tokenizer.json",
            "model.safetensors",
        }
        assert [limit["max_tokens"] for limit in found["tokenizers"]] == [77, 77]
    else:
        assert (code, found["type"], found["code"]) == (2, "error", "model-missing")


def test_damaged_settings_are_told(tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_ROCM_SETTINGS", "{")
    with pytest.raises(MachineError, match="LORA_ROCM_SETTINGS"):
        weighed(tiny_recipe(tiny_sdxl))
