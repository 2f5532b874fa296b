"""Tokenizers that ship with the package, for single-file checkpoints without a tokenizer.

They are compressed (``tokenizer_data``). A byte-pair encoding is stored as its merges, because the vocabulary
follows from them. Transformers reads folders, so each tokenizer is unpacked once into the program's own folder. The
name of its sub-folder contains a digest of the content.
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
"""Patterns for the file names of a tokenizer."""
DATA = Path(__file__).with_name("tokenizer_data")


@dataclass(frozen=True)
class Packed:
    """A compressed tokenizer. Its config is in a JSON file named after the tokenizer.

    file: the compressed file, with the merges of a byte-pair encoding or a whole ``tokenizer.json``.
    word_end: suffix of tokens that end a word; "" if the encoding has none.
    special: tokens that follow the merged tokens in the vocabulary. Further special tokens are in the config.
    """

    file: str
    word_end: str = ""
    special: tuple[str, ...] = ()


CLIP = Packed("clip.merges.xz", "</w>", ("<|startoftext|>", "<|endoftext|>"))
PACKED = {"clip_l": CLIP, "clip_g": CLIP, "t5": Packed("t5.tokenizer.xz"), "qwen3": Packed("qwen.merges.xz")}
"""The packaged tokenizers, keyed by name: CLIP-L, OpenCLIP's CLIP (which pads with "!"), T5 (32,100 pieces), and Qwen
2 and 3 with the chat template of Qwen 3.
"""


def require_tokenizer(folder: Path, where: str) -> None:
    """Refuse a folder without tokenizer files. ``where``: the recipe key that names the folder, for the message.

    Raises:
        ModelError: tokenizer-unreadable.
    """
    if not any(file for pattern in FILES for file in folder.glob(pattern)):
        fix = "Use the folder with tokenizer.json, or remove the key."
        raise ModelError("tokenizer-unreadable", "This folder contains no tokenizer.", where=where, fix=fix)


@cache
def packaged(name: str) -> Path:
    """Return the unpacked folder of a tokenizer in ``PACKED``, for ``from_pretrained``. Damaged files are replaced.

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
    """Return the files of a byte-pair encoding, keyed by file name.

    The vocabulary consists of all letters, the merged tokens and ``special``, in this order.
    """
    letters = sorted(ByteLevel.alphabet())
    ending = [letter + packed.word_end for letter in letters] if packed.word_end else []
    tokens = [*letters, *ending, *merges.replace(" ", "").split("\n"), *packed.special]
    vocabulary = json.dumps({token: number for number, token in enumerate(tokens)}, ensure_ascii=False)
    return {"vocab.json": vocabulary, "merges.txt": f"#version: 0.2\n{merges}\n"}
