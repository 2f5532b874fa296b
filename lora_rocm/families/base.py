"""What a model family is. One file a family, no Trainer subclass; the loop never names a family.

Tensor names carry their dimensions: B batch, C channels, H W height and width (latents unless said), S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from lora_rocm.dataset.caption_length import TokenLimit
from lora_rocm.dataset.entry_spec import EntrySpec, TensorSpec
from lora_rocm.dataset.shape import Shape
from lora_rocm.families.objectives.base import Objective, Prediction

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.device.transfer import DeviceTransfer
    from lora_rocm.kernels.weight_format import WeightFormat
    from lora_rocm.recipe.schema import Recipe

Tensors = dict[str, Tensor]


Inputs = Mapping[str, Tensor | str]
"""What an encoder reads of one sample, by ``EntrySpec.inputs``: "image" is pixels_CHW (float32 in [-1, 1])."""
Encode = Callable[[Inputs], Tensors]


class Encoder(Protocol):
    """Turns images, captions, or both into the tensors of one cached entry.

    Encoders are loaded one at a time, in the order in which the family names them.
    """

    @property
    def entry(self) -> EntrySpec:
        """What ``encode`` takes, and what it returns."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identity of weights and settings; part of every cache key, known without loading the weights."""
        ...

    def load(self, door: DeviceTransfer) -> Encode:
        """Load the weights and return ``encode``: one sample's inputs in, CPU tensors out. Dropping both frees memory.

        Weights and inputs go to the device through the door, and what was made comes back through it. The precision of
        the weights is the encoder's own choice. An encoder of captions may be loaded on the CPU if the GPU is full.
        """
        ...

    def in_tiles(self) -> Encoder | None:
        """The same, but cutting each picture into tiles: less memory and other rounding, so another fingerprint.

        None where there is no such way.
        """
        ...


@dataclass
class LoadedModel:
    """The frozen base: components by their diffusers name ("unet", "text_encoder", ...), in ``dtype`` on ``device``."""

    components: dict[str, nn.Module]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class PreviewRequest:
    """One preview to make; of a text the sides mean nothing, and ``steps`` is how many tokens are written at most."""

    prompt: str
    negative_prompt: str  # "" is the empty caption's encoding, as ComfyUI and A1111 do it
    width: int
    height: int
    steps: int
    guidance_scale: float
    seed: int


class ModelFamily(Protocol):
    """The few members that the rest of the program uses.

    name: the recipe's ``model.family``.
    cache_spec: tensors of one sample that come from the caches (union of the encoders' outputs).
    lora_targets: preset name -> component name -> regular expression (fullmatch) of module names to adapt.
    text_components: names of the components that ``lora.train_text_encoder`` adapts.
    all_components: names of all components that a run loads at one time or another.
    notices: sentences about the base that a user has to know, and that are no reason to refuse it.
    structure: changes with the shapes of what is trained; from configs alone.
    objective: what is drawn for a batch.
    kohya_prefixes: component -> what the kohya names of its modules begin with ("lora_unet").
    """

    name: str
    lora_targets: Mapping[str, Mapping[str, str]]
    text_components: tuple[str, ...]
    all_components: tuple[str, ...]
    kohya_prefixes: Mapping[str, str]

    def __init__(self, recipe: Recipe) -> None: ...

    @property
    def cache_spec(self) -> Mapping[str, TensorSpec]: ...
    @property
    def notices(self) -> Sequence[str]: ...
    @property
    def structure(self) -> str: ...
    @property
    def objective(self) -> Objective: ...

    def encoders(self) -> Sequence[Encoder]:
        """The encoders, one for each cached entry; with ``train_text_encoder`` captions become token ids only."""
        ...

    def examine(self) -> Sequence[Path]:
        """Look at the base without loading it; return all files that it consists of.

        Raises:
            ModelError: it cannot be trained on.
        """
        ...

    def token_limits(self) -> Sequence[TokenLimit]:
        """The tokenizer of each text encoder, and how many tokens it reads.

        Raises:
            ModelError: a tokenizer is missing or cannot be read.
        """
        ...

    def sample_meta(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Tensors:
        """Conditioning computed from the geometry of one sample (pixels)."""
        ...

    def load(self, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        """Load what training needs (frozen, eval-independent of dropout), checked against the family."""
        ...

    def weight_format(self, component: str) -> WeightFormat:
        """In which the frozen layers of a trained component are stored; its encoders are dense while they encode."""
        ...

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        """The repeated blocks, in forward order, none inside another: for recomputing, compiling and offloading."""
        ...

    def recompute_activations(self, model: LoadedModel, run: Callable[..., Any] | None = None) -> None:
        """From now on compute activations again in the backward pass instead of keeping them (arXiv 1604.06174).

        ``run(block, *args, **kwargs)`` calls a block (one of ``blocks``) and decides for it; None: each is computed
        again. The block is called as a module, for offloaded weights are fetched by its hooks.
        """
        ...

    def example(self, shape: Shape, rows: int) -> Tensors:
        """A batch of a bucket as the caches would give it, all zero, on the CPU: for the sizes of its tensors."""
        ...

    def fuse(self, model: LoadedModel, triton: bool = True) -> None:
        """Exchange modules for ones with less memory traffic; names and parameters stay, results to rounding.

        To be called once LoRA is injected and the weights lie on the device. ``triton=False``: plain PyTorch only.
        """
        ...

    def predict(self, model: LoadedModel, batch: Tensors, draws: Tensors) -> Prediction:
        """The model's prediction for one micro-batch on the device: draws nothing, waits for nothing, moves nothing.

        Args:
            model: as loaded, with or without an adapter.
            batch: cached tensors, the batch first.
            draws: what ``objective`` drew for it.
        """
        ...

    def preview(
        self,
        model: LoadedModel,
        requests: Sequence[PreviewRequest],
        text: Callable[[str], Tensors],
        in_tiles: bool = False,
    ) -> Sequence[Image.Image | str]:
        """Make previews with the model as it is (adapter included); leaves the model as it was.

        They are images, or texts, as ``FamilySpec.preview`` says.

        ``text`` maps a prompt to its cached tensors (no batch dimension, CPU): the text encoders may be gone.
        ``in_tiles``: decode pictures of any size in tiles, which takes less memory.
        """
        ...

    def base_facts(self) -> Mapping[str, str]:
        """Of the base: "hash" (short, of a one-file checkpoint), "prediction_type", "identity".

        The identity is of what is trained on, every byte of it; before it is loaded, it is read for this alone.
        """
        ...

    def skeleton(self, component: str) -> nn.Module:
        """A component's structure from its config: weights have their shapes, are zero, and take no memory."""
        ...

    def load_in_diffusers(self, path: Path, components: Sequence[str]) -> dict[str, nn.Module]:
        """Load a LoRA file as a user of diffusers does, by diffusers' own code, into skeletons of ``components``."""
        ...

    def export_key(self, component: str, module: str) -> str:
        """The kohya name of a module ("lora_unet_input_blocks_4_1_..."), without the ``.lora_down.weight``."""
        ...

    def export_rows(self, component: str, module: str, rows: int) -> Sequence[tuple[str, int, int]]:
        """Where each of a module's rows (outputs) stands in a kohya file, in their order.

        Each is (kohya name, first row there, number of rows): one of a module that has a weight of its own there,
        several of one that is cut there; modules that are one weight there name the same, with other first rows.
        """
        ...


def family_for(recipe: Recipe) -> ModelFamily:
    """The family object of a recipe, imported on demand."""
    import importlib

    module, _, attribute = recipe.spec.implementation.partition(":")
    family: ModelFamily = getattr(importlib.import_module(module), attribute)(recipe)
    return family
