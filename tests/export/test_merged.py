"""A base with an adapter merged into it: transformers loads the folder, and its logits equal base and adapter
together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForConditionalGeneration

from lora_rocm.errors import AdapterError, ExportError, ModelError, StorageError
from lora_rocm.export.merged import Rounding, write_merged
from tests.base_models.test_stored_weights import as_bytes
from tests.families.causal_lm.adapted import CLOSE, Adapted, batch, off, recipe_of
from tests.tiny_llm import write_tiny_llm
from tests.wording import saying

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def merged(adapted: Adapted, folder: Path) -> Rounding:
    return write_merged(folder, adapted.family.own_files(), adapted.adapter)


def logits_of(folder: Path, ids_BS: Tensor, cls: Any = AutoModelForCausalLM) -> Tensor:
    with torch.no_grad():
        found: Tensor = cls.from_pretrained(folder, dtype=torch.float32)(input_ids=ids_BS, use_cache=False).logits
    return found


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def in_bf16(folder: Path) -> Path:
    path = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("smollm3", {}),  # in shards
        pytest.param("qwen3", {"use_dora": True}, marks=pytest.mark.slow),  # tied embeddings
        pytest.param("gemma3", {"use_rslora": True}, marks=pytest.mark.slow),  # with a part for images
        pytest.param("phi3", {"type": "lokr"}, marks=pytest.mark.slow),
        pytest.param("mistral", {"type": "loha"}, marks=pytest.mark.slow),
        pytest.param("qwen2", {}, marks=pytest.mark.slow),  # with biases
    ],
)
def test_logits_are_those_of_the_base_with_the_adapter(name: str, lora: dict[str, Any], tmp_path: Path) -> None:
    base = write_tiny_llm(tmp_path / "base", name)
    adapted, ids_BS = Adapted(recipe_of(base, lora=lora)), batch()["input_ids"]
    assert merged(adapted, tmp_path / "out").lost < 1e-3
    cls = Gemma3ForConditionalGeneration if name == "gemma3" else AutoModelForCausalLM
    wanted = adapted.logits(ids_BS)
    assert off(logits_of(tmp_path / "out", ids_BS, cls), wanted) < CLOSE
    assert off(logits_of(base, ids_BS, cls), wanted) > 1000 * CLOSE
    before, after = tensors_of(base), tensors_of(tmp_path / "out")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert before.keys() == after.keys() and len(changed) == len(adapted.adapter.modules)
    assert all(name.endswith("proj.weight") for name in changed)
    assert {path.name for path in base.iterdir()} == {path.name for path in (tmp_path / "out").iterdir()}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


@pytest.mark.slow
def test_weights_keep_the_dtype_of_the_base_and_are_rounded_once(tmp_path: Path) -> None:
    base = in_bf16(write_tiny_llm(tmp_path / "base", dtype="bfloat16"))
    adapted = Adapted(recipe_of(base))
    found = merged(adapted, tmp_path / "out")
    before, after = tensors_of(base), tensors_of(tmp_path / "out")
    for module, (_, path, _) in adapted.adapter.modules.items():
        exact = before[f"{path}.weight"].double() + adapted.adapter.entries()[module].update().double()
        error = (after[f"{path}.weight"].double() - exact).abs()
        assert after[f"{path}.weight"].dtype == torch.bfloat16 and (error <= 1.01 * 2**-8 * exact.abs() + 1e-7).all()
    assert 0 < found.lost < 0.1 and found.largest > 0
    ids_BS = batch()["input_ids"]
    assert off(logits_of(tmp_path / "out", ids_BS), adapted.logits(ids_BS)) < 0.05


def in_int8(folder: Path) -> Path:
    """The layers as int8 with a scale for each row."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".layers." in name and tensors[name].ndim == 2]:
        scale_O1 = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale_O1).round().to(torch.int8)
        tensors[name.removesuffix("weight") + "weight_scale"] = scale_O1
        tensors[name.removesuffix("weight") + "comfy_quant"] = as_bytes({"format": "int8_tensorwise"})
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_base_stored_in_few_bits_becomes_dense(tmp_path: Path) -> None:
    """All of it, also the layers that are not adapted; transformers knows no such file otherwise."""
    base = in_int8(write_tiny_llm(tmp_path / "base", dtype="float32"))
    adapted = Adapted(recipe_of(base, lora={"targets": "attention"}))
    merged(adapted, tmp_path / "out")
    assert all(tensor.dtype == torch.float32 for tensor in tensors_of(tmp_path / "out").values())
    ids_BS = batch()["input_ids"]
    assert off(logits_of(tmp_path / "out", ids_BS), adapted.logits(ids_BS)) < CLOSE


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    base = write_tiny_llm(tmp_path / "base", "qwen3")
    with pytest.warns(UserWarning, match="tied layer"):
        adapted = Adapted(recipe_of(base, lora={"targets": r"(.*q_proj|lm_head)"}))
    with pytest.raises(AdapterError, check=saying("export/weight-of-another-layer")):
        merged(adapted, tmp_path / "out")
    adapted = Adapted(recipe_of(base))
    with torch.no_grad():
        next(iter(adapted.adapter.leaves.values())).mul_(float("inf"))
    with pytest.raises(ExportError, check=saying("export/larger-than-any-float32")):
        merged(adapted, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x", encoding="utf-8")
    with pytest.raises(StorageError):
        merged(Adapted(recipe_of(base)), tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "full"]
    with pytest.raises(ModelError, match="random"):
        Adapted(recipe_of(base, model={"name_or_path": f"random:{base}"})).family.own_files()


@pytest.mark.parametrize("module", ["q_proj", pytest.param("norm", marks=pytest.mark.slow)])
def test_a_damaged_folder_is_noticed(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit flips while the file is written, in an adapted weight and in another one."""
    from lora_rocm.export import merged as room

    def spoilt(path: Path, pieces: Any) -> None:
        content = bytearray(b"".join(pieces))
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        name = next(name for name in sorted(header) if module in name)
        content[start + header[name]["data_offsets"][0] + 3] ^= 0x40
        path.write_bytes(content)

    adapted = Adapted(recipe_of(write_tiny_llm(tmp_path / "base")))
    monkeypatch.setattr(room, "write_pieces", spoilt)
    with pytest.raises(ExportError, check=saying("export/read-back-as-something-else")):
        merged(adapted, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_memory_holds_one_weight_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tensors that were read, only one weight's tensors live at once."""
    import weakref

    from lora_rocm.export import merged as room

    adapted, alive, most = Adapted(recipe_of(write_tiny_llm(tmp_path / "base"))), weakref.WeakSet[Tensor](), 0
    read = room.read_tensors

    def counted(*arguments: Any) -> dict[str, Tensor]:
        nonlocal most
        found = read(*arguments)
        for tensor in found.values():
            alive.add(tensor)
        most = max(most, len(alive))
        return found

    monkeypatch.setattr(room, "read_tensors", counted)
    merged(adapted, tmp_path / "out")
    assert 0 < most <= 2


@pytest.mark.parametrize("name", ["LICENSE", "vocab.txt", "config.json", "tokenizer.json", "of a folder"])
def test_a_link_that_leads_out_of_the_base_is_not_copied(name: str, tmp_path: Path) -> None:
    base, private = write_tiny_llm(tmp_path / "base"), tmp_path / "private"
    adapted = Adapted(recipe_of(base))
    try:
        if name == "of a folder":
            (tmp_path / "elsewhere").mkdir()
            (tmp_path / "elsewhere" / "LICENSE").write_bytes(b"secret")
            (base / "LICENSE").symlink_to(tmp_path / "elsewhere" / ".." / "elsewhere" / "LICENSE")
        else:
            private.write_bytes((base / name).read_bytes() if (base / name).exists() else b"secret")
            (base / name).unlink(missing_ok=True)
            (base / name).symlink_to(private)
    except OSError:
        pytest.skip("no links may be made here")
    with pytest.raises(AdapterError) as caught:
        merged(adapted, tmp_path / "out")
    assert caught.value.code == "export-link" and str(base) in caught.value.where
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["inside the folder", "cache of the hub", "linked folder"])
def test_links_inside_a_base_are_followed(kind: str, tmp_path: Path) -> None:
    base = write_tiny_llm(tmp_path / "base")
    (base / "LICENSE").write_bytes(b"free")
    try:
        if kind == "inside the folder":
            (base / "LICENSE").rename(base / "COPYING")
            (base / "LICENSE").symlink_to("COPYING")
        elif kind == "linked folder":
            (tmp_path / "link").symlink_to(base, target_is_directory=True)
            base = tmp_path / "link"
        else:
            snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0f", tmp_path / "models--a--b" / "blobs"
            snapshot.mkdir(parents=True)
            blobs.mkdir()
            for number, path in enumerate(sorted(base.iterdir())):
                path.rename(blobs / f"{number:064}")
                (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number:064}"))
            base = snapshot
    except OSError:
        pytest.skip("no links may be made here")
    merged(Adapted(recipe_of(base)), tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_bytes() == b"free" and not (tmp_path / "out" / "LICENSE").is_symlink()
