"""Train CLIP's kind of tokenizer (byte-level BPE, lower case, `</w>`) on the captions of the tiny world."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import CLIPTokenizer
from words import nonsense

START, END, SUFFIX = "<|startoftext|>", "<|endoftext|>", "</w>"
MAX_LENGTH = 77


def byte_alphabet() -> list[str]:
    """Printable characters for the 256 bytes, in CLIP's order. "!" is first: SDXL's second tokenizer pads with 0."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(rest))]


def learn_merges(texts: list[str], merges: int) -> list[tuple[str, str]]:
    """The BPE merges of the texts, most useful first."""
    tokenizer = Tokenizer(BPE(end_of_word_suffix=SUFFIX))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    alphabet = byte_alphabet()
    # The trainer counts the alphabet and the word-end variants that it meets; 400 leaves room for both.
    trainer = BpeTrainer(
        vocab_size=400 + merges, initial_alphabet=alphabet, end_of_word_suffix=SUFFIX, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(str(a), str(b)) for a, b in found][:merges]


def train_tokenizers(captions: list[str], seed: int, merges: int, folder: Path) -> None:
    """Write tokenizer/ and tokenizer_2/: the same words, but as in SDXL the second one pads with "!"."""
    rng = np.random.default_rng((seed, 5))
    # Made-up words in the corpus give common syllables their own tokens, so trigger words stay short.
    texts = captions + [nonsense(rng) for _ in range(max(200, len(captions) // 3))]
    learned = learn_merges(texts, merges)
    alphabet = byte_alphabet()
    entries = [*alphabet, *(c + SUFFIX for c in alphabet), *(a + b for a, b in learned), START, END]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(entries))}
    for name, pad in (("tokenizer", END), ("tokenizer_2", "!")):
        tokenizer = CLIPTokenizer(vocab=vocab, merges=learned, pad_token=pad, model_max_length=MAX_LENGTH)
        target = folder / name
        tokenizer.save_pretrained(target)
        # Older versions of transformers read these two files instead of tokenizer.json.
        (target / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
        lines = ["#version: 0.2", *(f"{a} {b}" for a, b in learned)]
        (target / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def encode(tokenizer: CLIPTokenizer, texts: list[str]) -> np.ndarray:
    """Ids (n, 77), padded as the pipeline pads them."""
    ids = tokenizer(texts, padding="max_length", max_length=MAX_LENGTH, truncation=True)["input_ids"]
    return np.asarray(ids, dtype=np.int16)
