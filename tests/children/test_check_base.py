"""The child of `check`: weights are measured without being loaded, and the adapter is inspected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_rocm.children import check_base
from lora_rocm.children.check_base import weigh as weighed
from lora_rocm.errors import AdapterError, MachineError
from lora_rocm.processes.jobs import CheckBaseJob
from lora_rocm.processes.tool import write_job
from tests.tiny_models import SHALLOW, tiny_recipe, write_hollow_sdxl, write_tiny_sdxl
from tests.wording import saying, says

MODULE = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def tiny_sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder of random weights."""
    return write_tiny_sdxl(tmp_path_factory.mktemp("models") / "tiny sdxl", **SHALLOW)


def lora_file(path: Path, folder: Path, rank: int = 2, module: str = MODULE) -> Path:
    """A LoRA of one module with diffusers' names."""
    weight = load_file(next((folder / "unet").glob("*.safetensors")))[f"{MODULE.removeprefix('unet.')}.weight"]
    rows, columns = weight.shape
    factors = {"lora_A": torch.ones(rank, columns), "lora_B": torch.ones(rows, rank)}
    save_file({f"{module}.{name}.weight": tensor for name, tensor in factors.items()}, path)
    return path


def real_bytes(folder: Path) -> dict[str, int]:
    """Bytes in the files of a float32 model."""
    files = {path.parent.name: load_file(path) for path in folder.glob("*/*.safetensors")}
    return {name: sum(t.numel() * t.element_size() for t in tensors.values()) for name, tensors in files.items()}


def test_a_folder(tiny_sdxl: Path) -> None:
    assert weighed(tiny_recipe(tiny_sdxl)).num_bytes == real_bytes(tiny_sdxl)


def test_a_start_with_fewer_numbers_than_ranks_is_said(tiny_sdxl: Path) -> None:
    said = {
        (init, rank): weighed(tiny_recipe(tiny_sdxl, lora={"rank": rank, "init": init})).notices
        for init, rank in (("pissa", 256), ("pissa", 1), ("default", 256))
    }
    (notice,) = said.pop(("pissa", 256))
    assert says(notice, "children/lora-init-pissa-fills-only-a-part") and not any(said.values())


@pytest.mark.parametrize(("factor", "is_said"), [(2, False), (-1, False), (32, True)])
def test_a_lokr_that_lycoris_refuses_is_said(tiny_sdxl: Path, factor: int, is_said: bool) -> None:
    """The sides of the tiny model are at most 256, so their roots are below 32."""
    notices = weighed(tiny_recipe(tiny_sdxl, lora={"type": "lokr", "rank": 2, "factor": factor})).notices
    assert any("LyCORIS" in notice and "lora.factor" in notice for notice in notices) is is_said


def test_half_precision_is_for_what_is_trained(tiny_sdxl: Path) -> None:
    real = real_bytes(tiny_sdxl)
    halved = weighed(tiny_recipe(tiny_sdxl, train={"mixed_precision": "bf16"})).num_bytes
    assert halved == real | {"unet": real["unet"] // 2}
    lora = {"train_text_encoder": True}
    both = weighed(tiny_recipe(tiny_sdxl, train={"mixed_precision": "bf16"}, lora=lora)).num_bytes
    assert both == {name: size if name == "vae" else size // 2 for name, size in real.items()}


def test_a_one_file_checkpoint_by_its_published_config(tmp_path: Path) -> None:
    file = write_hollow_sdxl(tmp_path / "x.safetensors")
    few = {"targets": ".*mid_block.*to_q"}
    sizes = weighed(tiny_recipe(file, train={"mixed_precision": "fp16"}, lora=few)).num_bytes
    assert sizes["unet"] == 2 * 2_567_463_684


@pytest.mark.parametrize("there", [True, False])
def test_as_a_program(
    tiny_sdxl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: bool,
) -> None:
    recipe = tiny_recipe(tiny_sdxl if there else tmp_path / "no")
    job = write_job(tmp_path, CheckBaseJob(recipe.model_dump(mode="json")))
    monkeypatch.setattr("sys.argv", ["weigh", str(job)])
    code = check_base.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    if there:
        assert (code, found["num_bytes"], found["notices"]) == (0, real_bytes(tiny_sdxl), [])
        assert {Path(path).name for path, *_ in found["files"]} >= {
            "config.json",
            "tokenizer.json",
            "model.safetensors",
        }
        assert [limit["max_tokens"] for limit in found["tokenizers"]] == [227, 227]
    else:
        assert (code, found["type"], found["code"]) == (2, "error", "model-missing")


def test_damaged_settings_are_told(tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_ROCM_SETTINGS", "{")
    with pytest.raises(MachineError, match="LORA_ROCM_SETTINGS"):
        weighed(tiny_recipe(tiny_sdxl))


def test_targets_that_match_nothing_are_refused(tiny_sdxl: Path) -> None:
    with pytest.raises(
        AdapterError, check=saying("children/lora-targets", "children/no-such-layer", "children/module-names-look-like")
    ):
        weighed(tiny_recipe(tiny_sdxl, lora={"targets": ".*no_such_layer"}))
    assert weighed(tiny_recipe(tiny_sdxl, lora={"targets": ".*to_q"})).num_bytes == real_bytes(tiny_sdxl)


def test_the_training_adapter_is_looked_at(tiny_sdxl: Path, tmp_path: Path) -> None:
    path = lora_file(tmp_path / "t.safetensors", tiny_sdxl, rank=8)
    found = weighed(tiny_recipe(tiny_sdxl, model={"name_or_path": str(tiny_sdxl), "training_adapter": str(path)}))
    assert str(path) in {file[0] for file in found.files} and found.num_bytes == real_bytes(tiny_sdxl)
    other = lora_file(tmp_path / "other.safetensors", tiny_sdxl, module="unet.of.another.model")
    with pytest.raises(AdapterError, match=r"other\.safetensors"):
        weighed(tiny_recipe(tiny_sdxl, model={"name_or_path": str(tiny_sdxl), "training_adapter": str(other)}))


def test_the_file_that_a_lora_starts_from_is_looked_at(tiny_sdxl: Path, tmp_path: Path) -> None:
    path = lora_file(tmp_path / "start.safetensors", tiny_sdxl)
    found = weighed(tiny_recipe(tiny_sdxl, lora={"init_from": str(path), "rank": 2}))
    assert str(path) in {file[0] for file in found.files} and found.num_bytes == real_bytes(tiny_sdxl)
    kohya = {
        f"lora_unet_{module.replace('.', '_')}.{'lora_down' if factor.endswith('A') else 'lora_up'}.weight": tensor
        for name, tensor in load_file(path).items()
        for module, _, factor in [name.removeprefix("unet.").removesuffix(".weight").rpartition(".")]
    }
    save_file(kohya, tmp_path / "kohya.safetensors")
    weighed(tiny_recipe(tiny_sdxl, lora={"init_from": str(tmp_path / "kohya.safetensors"), "rank": 2}))
    high = lora_file(tmp_path / "high.safetensors", tiny_sdxl, rank=8)
    with pytest.raises(AdapterError, match="Set lora.rank to 8"):
        weighed(tiny_recipe(tiny_sdxl, lora={"init_from": str(high), "rank": 2}))
    other = lora_file(tmp_path / "other.safetensors", tiny_sdxl, module="unet.of.another.model")
    with pytest.raises(AdapterError, match=r"other\.safetensors"):
        weighed(tiny_recipe(tiny_sdxl, lora={"init_from": str(other), "rank": 2}))
    with pytest.raises(AdapterError, match=r"gone\.safetensors"):
        weighed(tiny_recipe(tiny_sdxl, lora={"init_from": str(tmp_path / "gone.safetensors"), "rank": 2}))
