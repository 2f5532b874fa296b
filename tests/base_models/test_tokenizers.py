"""Packaged tokenizers: known ids, templates, and an unpacked folder that heals and is made once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lora_rocm.base_models.tokenizers import PACKED, packaged
from lora_rocm.errors import StorageError
from lora_rocm.families.common.clip import load_tokenizer

DESCRIBE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
EDIT = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where "
    "appropriate.<|im_end|>\n<|im_start|>user\n"
)
"""Qwen-Image's prefixes; its pipelines drop a known number of their tokens."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "hömé 家"
    monkeypatch.setenv("LORA_ROCM_HOME", str(folder))
    packaged.cache_clear()
    yield folder
    packaged.cache_clear()


def loaded(name: str) -> Any:
    return AutoTokenizer.from_pretrained(str(packaged(name)), local_files_only=True)


@pytest.mark.parametrize(("name", "kind", "size", "ids", "empty"), [
    ("clip_l", "CLIPTokenizer", 49408, [49406, 320, 1125, 539, 320, 2368, 49407], [49406, 49407]),
    ("clip_g", "CLIPTokenizer", 49408, [49406, 320, 1125, 539, 320, 2368, 49407], [49406, 49407]),
    ("t5", "T5Tokenizer", 32100, [3, 9, 1202, 13, 3, 9, 1712, 1], [1]),
    ("qwen3", "Qwen2Tokenizer", 151_669, [64, 6548, 315, 264, 8251], []),
])  # fmt: skip
def test_known_ids(name: str, kind: str, size: int, ids: list[int], empty: list[int]) -> None:
    tokenizer = loaded(name)
    assert (type(tokenizer).__name__, len(tokenizer), tokenizer.padding_side) == (kind, size, "right")
    assert tokenizer("a photo of a cat").input_ids == ids and tokenizer("").input_ids == empty
    assert len(PACKED) == 4


def test_the_two_clip_tokenizers_pad_differently() -> None:
    first, second = load_tokenizer(packaged("clip_l")), load_tokenizer(packaged("clip_g"))
    assert first("a!", padding="max_length").input_ids == [49406, 320, 256, *[49407] * 74]
    assert second("a!", padding="max_length").input_ids == [49406, 320, 0, 49407, *[0] * 73]


def test_qwen_s_prefixes_and_template() -> None:
    tokenizer = loaded("qwen3")
    assert [len(tokenizer(text).input_ids) for text in (DESCRIBE, EDIT)] == [34, 64]
    assert tokenizer("<|im_end|>\n<|im_start|>assistant\n").input_ids == [151645, 198, 151644, 77091, 198]
    asked, answer = "<|im_start|>user\na cat<|im_end|>\n", "<|im_start|>assistant\n"
    for thinking, more in ((True, ""), (False, "<think>\n\n</think>\n\n")):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a cat"}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        assert text == asked + answer + more


def test_a_damaged_folder_is_replaced(home: Path) -> None:
    folder = packaged("clip_l")
    vocabulary = folder / "vocab.json"
    assert folder.is_relative_to(home)
    assert sorted(path.name for path in folder.iterdir()) == ["merges.txt", "tokenizer_config.json", "vocab.json"]
    whole, made_ns = vocabulary.read_bytes(), (folder / "merges.txt").stat().st_mtime_ns
    vocabulary.write_bytes(whole[:-1])
    packaged.cache_clear()
    assert packaged("clip_l") == folder and vocabulary.read_bytes() == whole
    assert (folder / "merges.txt").stat().st_mtime_ns == made_ns  # only differences are written
    shutil.rmtree(folder)
    packaged.cache_clear()
    with ThreadPoolExecutor(4) as pool:  # several starts at once
        assert set(pool.map(lambda _: packaged.__wrapped__("clip_l"), range(4))) == {folder}
    assert vocabulary.read_bytes() == whole and len(list(folder.iterdir())) == 3


def test_a_place_that_cannot_be_written_is_named(home: Path) -> None:
    home.write_text("no folder", encoding="utf-8")
    with pytest.raises(StorageError) as caught:
        packaged("clip_l")
    assert str(home) in caught.value.where
