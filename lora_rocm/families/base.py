"""The protocol of a model family. No family subclasses the trainer, and the loop never names a family.

Tensor names carry their dimensions: B batch, C channels, H W height and width (of latents unless noted otherwise), S
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
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.families.common.objectives.base import Objective, Prediction
from lora_rocm.families.lora_names import FileNames

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.base_models.loading import BaseSource
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
        """Identity of weights and settings. It is part of every cache key, and does not require loading the weights."""

    def load(self, placement: Placement) -> Encode:
        """Load the weights and return ``encode``, which maps one sample's inputs to CPU tensors.

        Dropping ``encode``, the encoder and ``placement`` frees the memory. Weights are placed with ``placement``; its
        transfer sends the inputs and receives the outputs. The encoder chooses the dtype of its weights.
        A caption encoder may be loaded on the CPU if the GPU is full.
        """

    def in_tiles(self) -> Encoder | None:
        """The same encoder with tiled encoding, or None if it has no tiled mode.

        Tiling takes less memory and rounds differently, so the fingerprint differs.
        """


@runtime_checkable
class ComparesWithStart(Protocol):
    """A family with objectives that may compare the model with its state before the first step."""

    @property
    def start_entry(self) -> EntrySpec | None:
        """The entry that ``at_start`` fills. None: the recipe's objective does not compare."""

    def at_start(self, model: Callable[[], LoadedModel], inputs: Inputs, placement: Placement) -> Tensors:
        """The model's results for one sample before the first step: the tensors of ``start_entry``, on the CPU.

        ``model`` returns the model on the placement's device, and loads it at the first call.
        """


@runtime_checkable
class EncodesWithComponents(Protocol):
    """A family with components other than the trained ones in its base, which encode and decode."""

    @property
    def encoders_identity(self) -> str:
        """Identity of these components that covers every byte. Before they are loaded, it has to read their files."""


class TextReader(Protocol):
    """Reads texts that are samples, as records (``dataset.rows.records``)."""

    @property
    def notices(self) -> Sequence[str]:
        """Messages about all texts passed to ``parts`` so far."""

    def parts(self, text: str) -> Sequence[str | None]:
        """The samples that a text is cut into; None: a skipped sample, which is counted in the notices.

        Raises:
            UnusableText: the text cannot be trained on.
            DataError: no text of this kind can be trained on.
        """

    def num_tokens(self, text: str) -> int:
        """The length of a sample after it is cut to the longest allowed length."""

    def shown(self, text: str) -> str:
        """A sample as the model reads it, with marks around the trained parts."""


@dataclass
class LoadedModel:
    """The frozen base: components by diffusers name ("unet", "text_encoder", ...), in ``dtype`` on ``device``.

    placement: knows where the weights are, and their values when they were sent; None: they are as loaded.
    """

    components: dict[str, nn.Module]
    dtype: torch.dtype
    device: torch.device
    placement: Placement | None = None

    def place(self, placement: Placement) -> None:
        """Send all components to the devices that the placement assigns.

        Raises:
            TransferError: a weight did not arrive by any method.
        """
        for name, component in self.components.items():
            placement.place(component, name)
        self.device, self.placement = placement.transfer.device, placement


@dataclass(frozen=True)
class PreviewRequest:
    """One preview to make. Texts ignore the sides, and their ``steps`` is the maximum number of new tokens."""

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
        """The request for a prompt of a recipe. Missing values are taken from ``sample``."""
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
        """JSON for run directories and names of class images; two inputs are present even if none is given."""
        files = {name: str(path) for name, path in self.inputs.items()}
        fields: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name == "frames" and not value:
                continue
            fields |= {"control": files.pop("control_image", "")} if name == "inputs" else {name: value}
        return {**fields, "mask": files.pop("mask", ""), **files}


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the tokens of an answer.

    Attributes:
        temperature: divisor of the logits; 0: always the likeliest token.
        top_p: tokens are drawn from the likeliest ones with this total probability (arXiv 1904.09751).
        max_tokens: maximum number of tokens in an answer.
        seed: of the draws.
    """

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class OwnFiles:
    """A base as its library saved it.

    source: finds its files. component: the component in them. ``beside``: the config, first, and the other small files
    that belong to the model.
    """

    source: BaseSource
    component: str
    beside: Sequence[Path]


@runtime_checkable
class WritesWholeModels(Protocol):
    """A family that derives its ``FamilySpec.conversions`` from the base's own files."""

    def own_files(self) -> OwnFiles:
        """The files of the base.

        Raises:
            ModelError: there are none, for example because the weights are random.
        """


class HasBase(Protocol):
    """The interface for commands and checks: existence and identity of the base.

    all_components: names of all components that a run loads at any time.
    notices: messages about the base that the user has to see, but that do not prevent training.
    """

    all_components: tuple[str, ...]

    @property
    def notices(self) -> Sequence[str]: ...

    def examine(self) -> Sequence[Path]:
        """Check the base without loading it, and return all its files.

        Raises:
            ModelError: it cannot be trained on.
        """

    def base_facts(self) -> Mapping[str, str]:
        """Facts of the base: "hash" (short, of a one-file checkpoint), "prediction_type" and "identity".

        The identity covers every byte of the trained components. Before they are loaded, it has to read their files.
        """


class EncodesSamples(Protocol):
    """The interface for data preparation, caches and loader: encoding samples as tensors.

    embedding_keys: as in ``FamilySpec``, in the order of ``token_limits``.
    encoder_dtypes: component -> dtype of the dense weights of an encoder that is not loaded in float32.
    inpaints: whether the model's inputs include ``objectives.base.HIDDEN_MASK`` and ``SEEN_LATENTS``.
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
    """The interface for training steps and validation."""

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
    """The interface for the memory plan, first on a model without weights, then on the real one."""

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        """The repeated blocks in forward order, never nested, for recomputation, compilation and offloading."""

    def recompute_activations(self, model: LoadedModel, run: Callable[..., Any] | None = None) -> None:
        """Recompute activations in the backward pass instead of keeping them (arXiv 1604.06174).

        ``run(block, *args, **kwargs)`` calls one of ``blocks`` and decides whether to recompute it; None: all are
        recomputed. The block is called as a module, because its hooks fetch offloaded weights.
        """

    def example(self, shape: SampleShape, rows: int) -> Tensors:
        """A batch of zeros on the CPU with the shapes and dtypes of a cached batch of ``shape``."""


class LoadsModels(Protocol):
    """The interface for the start of a run: modules to adapt, and the model itself.

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
        """A component built from its config: zero weights with the shapes of the real ones, without memory."""

    def weight_format(self, component: str) -> WeightFormat:
        """The storage format of a component's frozen layers."""

    def fuse(self, model: LoadedModel, triton: bool = True) -> None:
        """Replace modules by fused ones with less memory traffic. Names and parameters stay; results agree to rounding.

        Call it after LoRA is injected and the weights are on the device. ``triton=False`` uses plain PyTorch only.
        """


class Previewer(Protocol):
    """The interface for previews, ``sample`` and ``compare``."""

    def preview(
        self,
        model: LoadedModel,
        requests: Sequence[PreviewRequest],
        text: Callable[[str], Tensors],
        in_tiles: bool = False,
    ) -> Sequence[Drawn]:
        """Make previews with the current model (including its adapter), which is left unchanged.

        They are images, videos or texts, see ``FamilySpec.preview``.

        Args:
            model: the live model.
            requests: the images to sample.
            text: maps a prompt to its cached tensors (no batch dimension, CPU); text encoders may already be freed.
            in_tiles: decode images of any size in tiles, which takes less memory.
        """


class ModelFamily(HasBase, EncodesSamples, LoadsModels, PlansMemory, Previewer, Protocol):
    """The interface of a model family: one part per kind of caller.

    name: the recipe's ``model.family``.
    files: the names of its modules in files of other programs.
    """

    name: str

    def __init__(self, recipe: Recipe) -> None: ...

    @property
    def files(self) -> FileNames: ...


@runtime_checkable
class Answering(Protocol):
    """A family with models that answer in a conversation."""

    def answer(
        self, model: LoadedModel, messages: Sequence[Mapping[str, Any]], sampling: Sampling
    ) -> Generator[str, None, str]:
        """Yield the current model's answer to a conversation in pieces; "" while a character is incomplete.

        The generator returns the reason for the end: "end", or "limit" of tokens.

        Args:
            model: in eval mode.
            messages: role and content of each.
            sampling: settings for choosing tokens.

        Raises:
            UnusableText: at the first piece: the conversation cannot be answered.
        """


def family_for(recipe: Recipe) -> ModelFamily:
    """The family object of a recipe. Its module is imported on demand."""
    import importlib

    module, _, attribute = recipe.spec.implementation.partition(":")
    family: ModelFamily = getattr(importlib.import_module(module), attribute)(recipe)
    return family
