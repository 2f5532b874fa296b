"""Images on disk, and a family with encoders of a few lines that count their calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.dataset.entry_spec import CAPTION, IMAGE, EntrySpec, TensorSpec
from lora_rocm.families.base import Encode, Inputs, Tensors
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import DataSection, Recipe


@dataclass
class FakeEncoder:
    """Remembers every load and every item; the tensors depend on the item and on nothing else."""

    entry: EntrySpec
    fingerprint: str
    tensors_of: Callable[[Any], Tensors]
    loads: int = 0
    encoded: list[Any] = field(default_factory=list)
    tiled: FakeEncoder | None = None

    def in_tiles(self) -> FakeEncoder | None:
        return self.tiled

    def load(self, door: Any) -> Encode:
        self.loads += 1

        def encode(inputs: Inputs) -> Tensors:
            (item,) = inputs.values() if len(inputs) == 1 else (dict(inputs),)
            self.encoded.append(item)
            return self.tensors_of(item)

        return encode


def latents_of(pixels_CHW: Tensor) -> Tensors:
    small_CHW = torch.nn.functional.avg_pool2d(pixels_CHW[None], 8)[0]
    return {"latent_mean": small_CHW, "latent_std": small_CHW.abs() + 0.25}


def words_of(caption: str) -> Tensors:
    numbers = torch.tensor(list(hashlib.sha256(caption.encode()).digest()), dtype=torch.float32)
    return {"embeds": (numbers / 255).reshape(8, 4), "token_ids": numbers.to(torch.int64)}


def letter_limit(max_tokens: int) -> TokenLimit:
    """A tokenizer with bytes as tokens."""
    alphabet = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(alphabet, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return TokenLimit(tokenizer.to_str(), max_tokens)


class FakeFamily:
    """The part of a family that prepare and loader use."""

    texts = None
    inpaints = False

    def __init__(self, recipe: Recipe | None = None) -> None:
        latents = {"latent_mean": TensorSpec("float32", "CHW"), "latent_std": TensorSpec("float32", "CHW")}
        words = {"embeds": TensorSpec("float32", "SD"), "token_ids": TensorSpec("int64", "S")}
        self.image_encoder = FakeEncoder(EntrySpec("image", (IMAGE,), latents, True), "fake-vae-1", latents_of)
        self.text_encoder = FakeEncoder(EntrySpec("text", (CAPTION,), words), "fake-text-1", words_of)

    def encoders(self) -> list[FakeEncoder]:
        return [self.image_encoder, self.text_encoder]

    def token_limits(self) -> list[TokenLimit]:
        return [letter_limit(200)]

    def sample_meta(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Tensors:
        return {"time_ids": torch.tensor([*original_hw, *crop_top_left, *target_hw], dtype=torch.int64)}


@pytest.fixture
def family() -> FakeFamily:
    return FakeFamily()


@pytest.fixture
def new_family() -> Callable[[], FakeFamily]:
    return FakeFamily


def image(path: Path, width: int = 96, height: int = 64, seed: int = 0, caption: str | None = None) -> Path:
    """Write an image of coloured noise, and its caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels_HWC = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels_HWC).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def spoil_image(path: Path) -> None:
    """Spoil the pixels of an image, which is then found when it is decoded: its header and its end stay whole."""
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] + bytes(len(content) - half - 100) + content[-100:])


@pytest.fixture
def make() -> SimpleNamespace:
    """Functions that make images, data sections and recipes."""

    def data(**keys: Any) -> DataSection:
        return DataSection(**{"resolution": 64, "bucket_step": 16, **keys})

    def recipe(data: DataSection, **keys: Any) -> Recipe:
        sections = {"model": {"name_or_path": "builtin:tiny-sdxl"}, "train": {"max_train_steps": 4}, **keys}
        return recipe_from({"data": data, **sections})

    return SimpleNamespace(image=image, spoil=spoil_image, data=data, recipe=recipe)
