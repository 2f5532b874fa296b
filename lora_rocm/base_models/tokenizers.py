"""Tokenizers that ship with the package, for weights in a single file without a tokenizer.

The package contains them compressed (``tokenizer_data``). For a byte-pair encoding it has only the merges, because the
vocabulary follows from them. Transformers reads folders, so each tokenizer is unpacked once, below the program's own
folder; the folder's name holds a digest of the content.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

from lora_rocm.errors import ModelError
from lora_rocm.foundation.files import holds, write_atomic
from lora_rocm.hardware.app_dir import own_app_dir

FILES = ("tokenizer*.json", "vocab.*", "*.model")
"""Names of the files of a tokenizer."""
DATA = Path(__file__).with_name("tokenizer_data")


@dataclass(frozen=True)
class Packed:
    """A packed tokenizer. Its config is the JSON file with the tokenizer's name.

    file: the compressed file. It holds the merges of a byte-pair encoding, or a whole ``tokenizer.json``.
    word_end: mark of a letter that ends a word, in an encoding that has one.
    special: tokens after the tokens of the merges. Others are in the config.
    """

    file: str
    word_end: str = ""
    special: tuple[str, ...] = ()


CLIP = Packed("clip.merges.xz", "</w>", ("<|startoftext|>", "<|endoftext|>"))
PACKED = {"clip_l": CLIP, "clip_g": CLIP, "t5": Packed("t5.tokenizer.xz"), "qwen3": Packed("qwen.merges.xz")}
"""The tokenizers: CLIP-L, CLIP of OpenCLIP (it pads with "!"), T5 (32,100 pieces), and Qwen 2 and 3 with the chat
template of Qwen 3.
"""


def require_tokenizer(folder: Path, where: str) -> None:
    """Refuse a folder without any file of a tokenizer. ``where``: the recipe key that gives it.

    Raises:
        ModelError: tokenizer-unreadable.
    """
    if not any(file for pattern in FILES for file in folder.glob(pattern)):
        fix = "Give the folder with tokenizer.json, or remove the key."
        raise ModelError("tokenizer-unreadable", "This folder holds no tokenizer.", where=where, fix=fix)


@cache
def packaged(name: str) -> Path:
    """Return the folder of a tokenizer in ``PACKED``, for ``from_pretrained``. Damaged files are replaced.

    Raises:
        StorageError: the program's own folder cannot be written.
    """
    packed = PACKED[name]
    data, config = (DATA / packed.file).read_bytes(), (DATA / f"{name}.json").read_bytes()
    folder = own_app_dir() / "tokenizers" / f"{name}-{hashlib.sha256(data + config).hexdigest()[:16]}"
    text = lzma.decompress(data).decode("utf-8")
    files = {"tokenizer.json": text} if packed.file.endswith(".tokenizer.xz") else _byte_pairs(packed, text)
    for file, content in {**files, "tokenizer_config.json": config.decode("utf-8")}.items():
        if not holds(folder / file, content.encode("utf-8")):
            write_atomic(folder / file, content.encode("utf-8"))
    return folder


def _byte_pairs(packed: Packed, merges: str) -> Mapping[str, str]:
    """Return the files of a byte-pair encoding: the tokens are the letters, the joined merges and ``special``."""
    letters = sorted(ByteLevel.alphabet())
    ending = [letter + packed.word_end for letter in letters] if packed.word_end else []
    tokens = [*letters, *ending, *merges.replace(" ", "").split("\n"), *packed.special]
    vocabulary = json.dumps({token: number for number, token in enumerate(tokens)}, ensure_ascii=False)
    return {"vocab.json": vocabulary, "merges.txt": f"#version: 0.2\n{merges}\n"}
