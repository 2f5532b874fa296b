"""A GGUF adapter by a converter that replaces llama.cpp's: its arguments, and faults of its output that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_rocm.errors import AdapterError, ExportError
from lora_rocm.export.gguf import require_convertible, write_gguf
from tests.families.causal_lm.adapted import Adapted, recipe_of
from tests.tiny_llm import write_tiny_llm
from tests.wording import Saying, saying

STAND_IN = """
import argparse, json, struct, sys
from pathlib import Path
from beside import TENSORS
parser = argparse.ArgumentParser()
for name in ("--base", "--outfile"):
    parser.add_argument(name, type=Path)
parser.add_argument("--outtype", choices=["f32", "f16", "bf16", "q8_0", "auto"])
parser.add_argument("lora_path", type=Path)
asked = parser.parse_args()
hidden = json.loads((asked.base / "config.json").read_text())["hidden_size"]
config = json.loads((asked.lora_path / "adapter_config.json").read_text())
raw = (asked.lora_path / "adapter_model.safetensors").read_bytes()
names = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
told = {"hidden": hidden, "alpha": config["lora_alpha"], "type": asked.outtype, "names": len(names) - 1}
FAULT
asked.outfile.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, TENSORS, 0) + json.dumps(told).encode())
"""


def script_of(folder: Path, tensors: int, fault: str = "") -> Path:
    """A converter that needs a module next to it, as llama.cpp's does."""
    folder.mkdir()
    (folder / "beside.py").write_text(f"TENSORS = {tensors}\n", encoding="utf-8")
    path = folder / "convert_lora_to_gguf.py"
    path.write_text(STAND_IN.replace("FAULT", fault), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and the PEFT folder of an adapter of 4 modules."""
    folder = tmp_path_factory.mktemp("gguf")
    base = write_tiny_llm(folder / "base")
    adapted = Adapted(recipe_of(base, lora={"targets": r".*[qk]_proj", "rank": 4, "alpha": 6}))
    return base, adapted.written(folder / "peft")


def test_the_converter_gets_folder_base_and_dtype(
    written: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of the current folder are not imported, and an older file is replaced."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "beside.py").write_text("TENSORS = 0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    out = tmp_path / "out" / "lora.gguf"
    for dtype, kind in (("fp16", "f16"), ("bf16", "bf16")):
        write_gguf(out, written[1], written[0], script_of(tmp_path / f"llama {dtype}", 8), dtype, 4)
        found = out.read_bytes()
        assert found[:4] == b"GGUF"
        assert json.loads(found[24:]) == {"hidden": 32, "alpha": 6, "type": kind, "names": 8}
    assert [path.name for path in out.parent.iterdir()] == ["lora.gguf"]


@pytest.mark.parametrize(
    ("tensors", "fault", "words"),
    [
        (7, "", saying("export/7-tensors-of-8", "export/requirements-txt")),
        (
            8,
            "sys.exit('Model Toy is not supported')",
            saying("export/exit-status-1-model-toy-is-not", "export/requirements-txt"),
        ),
        (8, "sys.exit(0)", saying("export/wrote-no-file", "export/requirements-txt")),
    ],
)
def test_a_converter_that_fails_leaves_nothing(
    written: tuple[Path, Path], tmp_path: Path, tensors: int, fault: str, words: Saying
) -> None:
    script, out = script_of(tmp_path / "llama", tensors, fault), tmp_path / "out" / "lora.gguf"
    with pytest.raises(ExportError) as caught:
        write_gguf(out, written[1], written[0], script, "fp16", 4)
    assert words(caught.value) and list(out.parent.iterdir()) == []


@pytest.mark.slow
def test_adapters_that_llama_cpp_does_not_know_are_refused(tmp_path: Path) -> None:
    base = write_tiny_llm(tmp_path)
    plain = Adapted(recipe_of(base))
    require_convertible(plain.adapter, plain.family.own_files())
    for lora in ({"use_dora": True}, {"type": "lokr"}):
        with pytest.raises(AdapterError, check=saying("export/plain-loras-only", "export/merged-format")):
            require_convertible(Adapted(recipe_of(base, lora=lora)).adapter, plain.family.own_files())


@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying.*:UserWarning")
def test_the_tied_head_is_refused(tmp_path: Path) -> None:
    """llama.cpp has no weight of this name then. The head of a base with two weights is accepted."""
    heads = {"targets": r".*(lm_head|q_proj)"}
    for name in ("llama", "smollm"):
        adapted = Adapted(recipe_of(write_tiny_llm(tmp_path / name, name), lora=heads))
        if name == "llama":
            require_convertible(adapted.adapter, adapted.family.own_files())
            continue
        with pytest.raises(AdapterError) as caught:
            require_convertible(adapted.adapter, adapted.family.own_files())
        assert caught.value.code == "export-form" and caught.value.where == "lora.targets: model.lm_head"
