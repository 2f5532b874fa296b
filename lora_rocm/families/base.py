"""The protocol of a model family. No family subclasses the trainer, and the loop never names a family.

Tensor names carry their dimensions: B batch, C channels, H W height and width (of latents unless said otherwise), S
tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.dataset.entry_spec import EntrySpec
from lora_rocm.dataset.shape import Shape
from lora_rocm.families.common.objectives.base import Objective, Prediction
from lora_rocm.families.file_names import FileNames

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.base_models.loading import Source
    from lora_rocm.device.placement.base import Placement
    from lora_rocm.kernels.weight_format import WeightFormat
    from lora_rocm.recipe.sample_section import PreviewPrompt
    from lora_rocm.recipe.schema import Recipe

Tensors = dict[str, Tensor]
Drawn: TypeAlias = "Image.Image | tuple[Image.Image, ...] | str"
"""A preview: an image, the frames of a video, or a text."""


Inputs = Mapping[str, Tensor | str]
"""The inputs of one sample that an encoder reads, by name (``EntrySpec.inputs``). "image" is pixels_CHW, float32 in
[-1,
1].
"""
Encode = Callable[[Inputs], Tensors]


class Encoder(Protocol):
    """Encodes images, captions, or both into the tensors of one cache entry.

    Encoders are loaded one at a time, in the order of ``ModelFamily.encoders``.
    """

    @property
    def entry(self) -> EntrySpec:
        """The inputs and outputs of ``encode``."""

    @property
    def fingerprint(self) -> str:
        """Identity of weights and settings. It is part of every cache key, and known without loading the weights."""

    def load(self, door: Placement) -> Encode:
        """Load the weights and return ``encode``, which maps one sample's inputs to CPU tensors.

        Dropping ``encode``, the encoder and ``door`` frees the memory. Weights are placed with ``door``; its transfer
        sends the inputs and receives the outputs. The encoder chooses the dtype of its weights. A caption encoder may
        be loaded on the CPU if the GPU is full.
        """

    def in_tiles(self) -> Encoder | None:
        """The same encoder with tiled encoding, or None if it has no tiled mode.

        Tiling takes less memory and rounds differently, so the fingerprint differs.
        """


@runtime_checkable
class ComparesWithStart(Protocol):
    """A family whose objective may compare the model with what it was before the first step."""

    @property
    def start_entry(self) -> EntrySpec | None:
        """The entry that ``at_start`` fills. None: the recipe's objective compares nothing."""

    def at_start(self, model: Callable[[], LoadedModel], inputs: Inputs, door: Placement) -> Tensors:
        """What the model says of one sample before the first step: the tensors of ``start_entry``, on the CPU.

        ``model`` gives the model on the door's device; it is loaded when it is first asked for.
        """


@runtime_checkable
class EncodesWithComponents(Protocol):
    """A family whose base has components beside the trained ones, which encode and decode."""

    @property
    def encoders_identity(self) -> str:
        """Covers every byte of these components. Before they are loaded, it has to read their files."""


class TextReader(Protocol):
    """Reads texts that are samples, as records (``dataset.rows.records``)."""

    @property
    def notices(self) -> Sequence[str]:
        """Messages about all texts that ``parts`` has seen."""

    def parts(self, text: str) -> Sequence[str | None]:
        """The samples that a text is cut into; None: one that is left out, and counted in the notices.

        Raises:
            UnusableText: it cannot be trained on.
            DataError: no text of this kind can.
        """

    def num_tokens(self, text: str) -> int:
        """The length of a sample, cut to the longest."""

    def shown(self, text: str) -> str:
        """A sample as the model reads it, with marks around what is trained on."""


@dataclass
class LoadedModel:
    """The frozen base: components by diffusers name ("unet", "text_encoder", ...), in ``dtype`` on ``device``.

    placement: knows where the weights are, and what they were when they were sent; None: they are as they were loaded.
    """

    components: dict[str, nn.Module]
    dtype: torch.dtype
    device: torch.device
    placement: Placement | None = None

    def place(self, placement: Placement) -> None:
        """Send all components to where the placement has them.

        Raises:
            TransferError: a weight did not arrive by any method.
        """
        for name, component in self.components.items():
            placement.place(component, name)
        self.device, self.placement = placement.transfer.device, placement


@dataclass(frozen=True)
class PreviewRequest:
    """One preview to make; of a text the sides mean nothing, and ``steps`` is how many tokens are written at most."""

    prompt: str
    negative_prompt: str  # "" is encoded as an empty caption, as in ComfyUI and A1111
    width: int
    height: int
    steps: int
    guidance_scale: float
    seed: int
    inputs: Mapping[str, Path] = field(default_factory=dict)  # files by name, of ``sample_section.PREVIEW_INPUTS``
    sampler: str = "euler"
    lora_scale: float = 1.0
    frames: int = 0  # of a video; 0: an image

    @classmethod
    def of(cls, recipe: Recipe, preview: PreviewPrompt, seed: int) -> PreviewRequest:
        """The request for a prompt of a recipe. What the prompt does not say is as in ``sample``."""
        sample, (width, height) = recipe.sample, recipe.preview_size
        return cls(
            prompt=preview.prompt,
            negative_prompt=preview.negative_prompt or "",
            width=preview.width or width,
            height=preview.height or height,
            steps=preview.steps or sample.steps,
            guidance_scale=preview.guidance_scale or recipe.spec.guidance,
            seed=seed,
            inputs=preview.inputs,
            sampler=preview.sampler or sample.sampler,
            lora_scale=sample.lora_scale if preview.lora_scale is None else preview.lora_scale,
            frames=recipe.data.most_frames if recipe.spec.preview == "video" else 0,
        )

    def to_json(self) -> dict[str, Any]:
        """As run directories and the names of class images have it: two inputs are there also where none is given."""
        files = {name: str(path) for name, path in self.inputs.items()}
        fields: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name == "frames" and not value:
                continue
            fields |= {"control": files.pop("control_image", "")} if name == "inputs" else {name: value}
        return {**fields, "mask": files.pop("mask", ""), **files}


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen.

    Attributes:
        temperature: divisor of the logits; 0: the likeliest token each time.
        top_p: a token is drawn from the likeliest ones that have this share together (arXiv 1904.09751).
        max_tokens: most tokens of an answer.
        seed: of the draws.
    """

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class OwnFiles:
    """A base as its library saved it.

    source: finds its files. component: the one that they hold. beside: its config, first, and the other small files
    that belong to the model.
    """

    source: Source
    component: str
    beside: Sequence[Path]


@runtime_checkable
class WritesWholeModels(Protocol):
    """A family whose ``FamilySpec.conversions`` are made of the base's own files."""

    def own_files(self) -> OwnFiles:
        """The files of the base.

        Raises:
            ModelError: it has none, for example because its weights are random.
        """


class HasBase(Protocol):
    """What commands and checks ask of a family: is its base there, and what is it?

    all_components: names of all components that a run loads at any time.
    notices: messages about the base that the user has to see, but that do not prevent training.
    """

    all_components: tuple[str, ...]

    @property
    def notices(self) -> Sequence[str]: ...

    def examine(self) -> Sequence[Path]:
        """Check the base without loading it, and return all files that it consists of.

        Raises:
            ModelError: it cannot be trained on.
        """

    def base_facts(self) -> Mapping[str, str]:
        """Facts of the base: "hash" (short, of a one-file checkpoint), "prediction_type" and "identity".

        The identity covers every byte of the trained components. Before they are loaded, it has to read their files.
        """


class EncodesSamples(Protocol):
    """What data preparation, caches and loader ask of a family: how does a sample become tensors?

    embedding_keys: as in ``FamilySpec``, in the order of ``token_limits``.
    encoder_dtypes: component -> dtype of the dense weights of an encoder that is not loaded in float32.
    inpaints: whether the model is given what ``objectives.base.HIDDEN_MASK`` and ``SEEN_LATENTS`` name.
    texts: reads texts that are samples; None: a plain text is one sample.
    """

    embedding_keys: Mapping[str, str]

    @property
    def encoder_dtypes(self) -> Mapping[str, torch.dtype]: ...
    @property
    def inpaints(self) -> bool: ...
    @property
    def texts(self) -> TextReader | None: ...

    def encoders(self) -> Sequence[Encoder]:
        """The encoders, one per cache entry. Captions are only tokenised if text encoders run in each step."""

    def token_limits(self) -> Sequence[TokenLimit]:
        """The tokenizer and the token limit of each text encoder.

        Raises:
            ModelError: a tokenizer is missing or cannot be read.
        """

    def sample_meta(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Tensors:
        """Conditioning tensors computed from the geometry of one sample. All arguments are in pixels."""


class ComputesLosses(Protocol):
    """What the steps of training ask of a family; validation asks no more."""

    @property
    def objective(self) -> Objective:
        """Draws noise and timesteps for a batch, and defines the target."""

    def predict(self, model: LoadedModel, batch: Tensors, draws: Tensors) -> Prediction:
        """The model's prediction for one micro-batch on the device.

        It draws no random numbers, does not synchronise, and copies nothing between host and device.

        Args:
            model: the loaded model, with or without an adapter.
            batch: cached tensors with a batch dimension.
            draws: the tensors that ``objective`` drew for the batch.
        """


class PlansMemory(ComputesLosses, Protocol):
    """What the plan of memory asks of a family, beforehand on a model without weights, and then on the real one."""

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        """The repeated blocks in forward order, never nested, for recomputation, compilation and offloading."""

    def recompute_activations(self, model: LoadedModel, run: Callable[..., Any] | None = None) -> None:
        """Recompute activations in the backward pass instead of keeping them (arXiv 1604.06174).

        ``run(block, *args, **kwargs)`` calls a block (one of ``blocks``) and decides for it; None: each is computed
        again. The block is called as a module, for offloaded weights are fetched by its hooks.
        """

    def example(self, shape: Shape, rows: int) -> Tensors:
        """A batch of zeros on the CPU with the shapes and dtypes of a cached batch of ``shape``."""


class LoadsModels(Protocol):
    """What the start of a run asks of a family: which modules are adapted, and the model itself.

    lora_targets: preset name -> component name -> regular expression (fullmatch) of the module names to adapt.
    text_components: names of the components that ``lora.train_text_encoder`` adapts.
    structure: identifies the shapes of the trained components, computed from configs alone.
    """

    lora_targets: Mapping[str, Mapping[str, str]]
    text_components: tuple[str, ...]

    @property
    def structure(self) -> str: ...

    def load(self, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        """Load the components that training needs, frozen and checked against the family."""

    def skeleton(self, component: str) -> nn.Module:
        """A component built from its config: zero weights of the right shapes that take no memory."""

    def weight_format(self, component: str) -> WeightFormat:
        """The storage format of a component's frozen layers."""

    def fuse(self, model: LoadedModel, triton: bool = True) -> None:
        """Replace modules by fused ones with less memory traffic. Names and parameters stay; results agree to rounding.

        Call it after LoRA is injected and the weights are on the device. ``triton=False`` uses plain PyTorch only.
        """


class Previewer(Protocol):
    """What previews, ``sample`` and ``compare`` ask of a family."""

    def preview(
        self,
        model: LoadedModel,
        requests: Sequence[PreviewRequest],
        text: Callable[[str], Tensors],
        in_tiles: bool = False,
    ) -> Sequence[Drawn]:
        """Make previews with the model as it is (adapter included); leaves the model as it was.

        They are images, videos or texts, as ``FamilySpec.preview`` says.

        Args:
            model: the live model.
            requests: the images to sample.
            text: maps a prompt to its cached tensors (no batch dimension, CPU), because the text encoders may be freed.
            in_tiles: decode images of any size in tiles, which takes less memory.
        """


class ModelFamily(HasBase, EncodesSamples, LoadsModels, PlansMemory, Previewer, Protocol):
    """The interface of a model family: one part for each who asks.

    name: the recipe's ``model.family``.
    files: the names of its modules in files of other programs.
    """

    name: str

    def __init__(self, recipe: Recipe) -> None: ...

    @property
    def files(self) -> FileNames: ...


@runtime_checkable
class Answering(Protocol):
    """What a family has whose models answer in a conversation."""

    def answer(
        self, model: LoadedModel, messages: Sequence[Mapping[str, Any]], sampling: Sampling
    ) -> Generator[str, None, str]:
        """The answer to a conversation, piece by piece, of the model as it is; "" where a token makes no whole letter.

        Its value is why it ended: "end", or "limit" of tokens.

        Args:
            model: in eval mode.
            messages: role and content of each.
            sampling: how tokens are chosen.

        Raises:
            UnusableText: from the first piece: the conversation cannot be answered.
        """


def family_for(recipe: Recipe) -> ModelFamily:
    """The family object of a recipe. Its module is imported on demand."""
    import importlib

    module, _, attribute = recipe.spec.implementation.partition(":")
    family: ModelFamily = getattr(importlib.import_module(module), attribute)(recipe)
    return family
