"""The protocol of a model family. No family subclasses the trainer, and the training loop never names a family.

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
from lora_rocm.families.lora_file_names import LoraFileNames
from lora_rocm.families.objectives.base import Objective, Prediction

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.base_models.loading import BaseSource
    from lora_rocm.device.placement.base import Placement
    from lora_rocm.device.placement.embedding_rows import TokenTable
    from lora_rocm.kernels.weight_format import WeightFormat
    from lora_rocm.recipe.sample_section import PreviewPrompt
    from lora_rocm.recipe.schema import Recipe

Tensors = dict[str, Tensor]
Drawn: TypeAlias = "Image.Image | tuple[Image.Image, ...] | str"
"""A preview: an image, a video as a tuple of frames, or a text."""


Inputs = Mapping[str, Tensor | str]
"""The inputs of one sample that an encoder reads, by their names in ``EntrySpec.inputs``. "image" has shape [C, H, W]
in pixels and is float32 in [-1, 1].
"""
Encode = Callable[[Inputs], Tensors]


class Encoder(Protocol):
    """Encodes images, captions, or both into the tensors of one cache entry.

    Encoders are loaded one at a time, in the order of ``ModelFamily.encoders``.
    """

    @property
    def entry(self) -> EntrySpec:
        """Specification of the cache entry: the inputs and outputs of ``encode``."""

    @property
    def fingerprint(self) -> str:
        """Identity of the weights and settings, as part of every cache key. Computing it does not load the weights."""

    def load(self, placement: Placement) -> Encode:
        """Load the weights and return ``encode``, which maps one sample's inputs to CPU tensors.

        The weights are placed with ``placement``, and inputs and outputs are copied with its transfer. The memory is
        freed when ``encode``, the encoder and ``placement`` are dropped. The encoder chooses the dtype of its weights.
        A caption encoder may be loaded on the CPU if the GPU is full.
        """

    def in_tiles(self) -> Encoder | None:
        """Return the same encoder with tiled encoding, or None if it has no tiled mode.

        Tiling takes less memory but rounds differently, so the tiled encoder has a different fingerprint.
        """


@runtime_checkable
class ComparesWithStart(Protocol):
    """A family with an objective that may compare the model with its state before the first step."""

    @property
    def start_entry(self) -> EntrySpec | None:
        """The cache entry that ``at_start`` fills, or None if the recipe's objective does not compare."""

    def at_start(self, model: Callable[[], LoadedModel], inputs: Inputs, placement: Placement) -> Tensors:
        """Compute one sample's tensors of ``start_entry`` before the first step, and return them on the CPU.

        Args:
            model: returns the model on the placement's device; its first call loads the model.
            inputs: the sample's inputs.
            placement: where the model is placed.
        """


@runtime_checkable
class EncodesWithComponents(Protocol):
    """A family with a base that also has components for encoding and decoding, which are not trained."""

    @property
    def encoders_identity(self) -> str:
        """Identity of the encoding components, computed from every byte of their weights.

        Unless the components are loaded, computing it reads their files.
        """


class TextReader(Protocol):
    """Reads texts that are training samples (and not captions), in the format of ``dataset.rows.records``."""

    @property
    def notices(self) -> Sequence[str]:
        """Messages about the texts passed to ``parts`` so far."""

    @property
    def warnings(self) -> Sequence[str]:
        """Messages about the texts passed to ``parts`` so far that probably call for a change of the data."""

    def parts(self, text: str) -> Sequence[str | None]:
        """Split a text into samples. A None stands for a skipped sample, which is counted in the notices.

        Raises:
            UnusableText: this text cannot be trained on.
            DataError: no text of this kind can be trained on.
        """

    def num_tokens(self, text: str) -> int:
        """Number of tokens of a sample, after truncation to the maximum length."""

    def shown(self, text: str) -> str:
        """Return a sample as the model reads it, with marks around the parts that are trained on."""


@dataclass
class LoadedModel:
    """The frozen base model: components by their diffusers names ("unet", "text_encoder", ...).

    dtype, device: dtype and device of the components.
    placement: records where the weights are and what values were sent, or None if the weights are as loaded.
    """

    components: dict[str, nn.Module]
    dtype: torch.dtype
    device: torch.device
    placement: Placement | None = None

    def place(self, placement: Placement) -> None:
        """Send all components to the devices that the placement assigns.

        Raises:
            TransferError: no transfer method sent a weight intact.
        """
        for name, component in self.components.items():
            placement.place(component, name)
        self.device, self.placement = placement.transfer.device, placement


@runtime_checkable
class EmbedsTokens(Protocol):
    """A family with a token embedding that may stay in main memory."""

    def token_table(self, model: LoadedModel) -> TokenTable | None:
        """Return the token embedding, or None if more than the rows of a batch's tokens is needed."""


def token_table(family: object, model: LoadedModel) -> TokenTable | None:
    """Return the token embedding that may stay in main memory, or None if there is none."""
    return family.token_table(model) if isinstance(family, EmbedsTokens) else None


@dataclass(frozen=True)
class PreviewRequest:
    """Parameters of one preview.

    For a text preview, width and height are ignored, and ``steps`` is the maximum number of new tokens.
    """

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
        """Return the request for one of the recipe's prompts. Missing values are taken from section ``sample``."""
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
        """Return the fields as JSON, for run directories and for names of class images.

        The keys "control" and "mask" are always present; they are empty if no such file is set.
        """
        files = {name: str(path) for name, path in self.inputs.items()}
        fields: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name == "frames" and not value:
                continue
            fields |= {"control": files.pop("control_image", "")} if name == "inputs" else {name: value}
        return {**fields, "mask": files.pop("mask", ""), **files}


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling the tokens of an answer.

    Attributes:
        temperature: divisor of the logits; at 0 the most likely token is always chosen.
        top_p: total probability of the most likely tokens that are sampled from (arXiv 1904.09751).
        max_tokens: maximum number of tokens in an answer.
        seed: random seed of the sampling.
    """

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class OwnFiles:
    """The files of a base model in its library's original format.

    Attributes:
        source: locates the files.
        component: name of the component stored in them.
        ``beside``: the config, followed by the other small files of the model.
    """

    source: BaseSource
    component: str
    beside: Sequence[Path]


@runtime_checkable
class WritesWholeModels(Protocol):
    """A family that builds the formats in ``FamilySpec.conversions`` from the base's own files."""

    def own_files(self) -> OwnFiles:
        """Return the files of the base.

        Raises:
            ModelError: the base has no files, for example because its weights are random.
        """


class HasBase(Protocol):
    """The interface for commands and checks: whether the base exists, and its identity.

    all_components: names of all components that a run may load.
    notices: messages about the base for the user that do not prevent training.
    """

    all_components: tuple[str, ...]

    @property
    def notices(self) -> Sequence[str]: ...

    def examine(self) -> Sequence[Path]:
        """Check the base without loading it, and return the paths of all its files.

        Raises:
            ModelError: the base cannot be trained on.
        """

    def base_facts(self) -> Mapping[str, str]:
        """Return facts of the base: "hash" (short hash of a one-file checkpoint), "prediction_type" and "identity".

        The identity covers every byte of the trained components. Their files are read if they are not loaded yet.
        """


class EncodesSamples(Protocol):
    """The interface for data preparation, caches and the loader: encodes samples as tensors.

    embedding_keys: as in ``FamilySpec``, in the order of ``token_limits``.
    encoder_dtypes: dtype of the dense weights, by component, for encoders that are not loaded in float32.
    inpaints: whether the model's inputs include ``objectives.base.HIDDEN_MASK`` and ``SEEN_LATENTS``.
    texts: reader of texts that are samples, or None if each plain text is one sample.
    """

    embedding_keys: Mapping[str, str]

    @property
    def encoder_dtypes(self) -> Mapping[str, torch.dtype]: ...
    @property
    def inpaints(self) -> bool: ...
    @property
    def texts(self) -> TextReader | None: ...

    def encoders(self) -> Sequence[Encoder]:
        """Return one encoder per cache entry. If text encoders run in each step, captions are only tokenised."""

    def token_limits(self) -> Sequence[TokenLimit]:
        """Return the tokenizer and the token limit of each text encoder.

        Raises:
            ModelError: a tokenizer is missing or cannot be read.
        """

    def sample_meta(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Tensors:
        """Return the conditioning tensors computed from one sample's geometry. All arguments are in pixels."""


class ComputesLosses(Protocol):
    """The interface for training steps and validation."""

    @property
    def objective(self) -> Objective:
        """The objective, which draws noise and timesteps for a batch and defines the target."""

    def predict(self, model: LoadedModel, batch: Tensors, draws: Tensors) -> Prediction:
        """Return the model's prediction for one micro-batch on the device.

        It draws no random numbers, does not synchronise, and copies nothing between host and device.

        Args:
            model: the loaded model, with or without an adapter.
            batch: cached tensors with a batch dimension.
            draws: the tensors that ``objective`` drew for the batch.
        """


class PlansMemory(ComputesLosses, Protocol):
    """The interface for the memory planner, which uses a model without weights first and the real model later."""

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        """Return the repeated blocks in forward order, for recomputation, compilation and offloading.

        No block contains another.
        """

    def recompute_activations(self, model: LoadedModel, run: Callable[..., Any] | None = None) -> None:
        """Recompute activations in the backward pass instead of keeping them (arXiv 1604.06174).

        Args:
            model: the loaded model.
            run: function that is called as ``run(block, *args, **kwargs)`` for each of ``blocks`` and decides whether
                to recompute it, or None to recompute all blocks. It has to call the block as a module, because the
                block's hooks fetch offloaded weights.
        """

    def example(self, shape: SampleShape, rows: int) -> Tensors:
        """Return a batch of zeros on the CPU, with the shapes and dtypes of a cached batch of ``shape``."""


class LoadsModels(Protocol):
    """The interface for starting a run: loads the model and selects the modules to adapt.

    lora_targets: regular expressions that fully match the names of the modules to adapt, by preset and component name.
    text_components: names of the components that ``lora.train_text_encoder`` adapts.
    structure: identity of the shapes of the trained components, computed from configs alone.
    """

    lora_targets: Mapping[str, Mapping[str, str]]
    text_components: tuple[str, ...]

    @property
    def structure(self) -> str: ...

    def load(self, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        """Return the components that training needs, with frozen weights, after checking that they fit the family."""

    def skeleton(self, component: str) -> nn.Module:
        """Return a component built from its config, on the meta device: real shapes, but no memory for weights."""

    def weight_format(self, component: str) -> WeightFormat:
        """Return the storage format of a component's frozen layers."""

    def fuse(self, model: LoadedModel, triton: bool = True) -> None:
        """Replace modules by fused ones that need less memory traffic.

        Names and parameters stay the same, and results agree up to rounding. Call it after LoRA is injected and the
        weights are on the device. ``triton=False`` uses plain PyTorch only.
        """


class Previewer(Protocol):
    """The interface for previews and for the commands ``sample`` and ``compare``."""

    def preview(
        self,
        model: LoadedModel,
        requests: Sequence[PreviewRequest],
        text: Callable[[str], Tensors],
        in_tiles: bool = False,
    ) -> Sequence[Drawn]:
        """Generate previews with the current model and its adapter, without changing them.

        Args:
            model: the live model.
            requests: the previews to generate.
            text: maps a prompt to its cached tensors (no batch dimension, CPU); text encoders may already be freed.
            in_tiles: decode images of any size in tiles, which takes less memory.

        Returns:
            One image, video or text per request; ``FamilySpec.preview`` specifies which.
        """


class ModelFamily(HasBase, EncodesSamples, LoadsModels, PlansMemory, Previewer, Protocol):
    """The interface of a model family, composed of one interface per kind of caller.

    name: the value of ``model.family`` in the recipe.
    files: names of the family's modules in files of other programs.
    """

    name: str

    def __init__(self, recipe: Recipe) -> None: ...

    @property
    def lora_file_names(self) -> LoraFileNames: ...


def prompt_notices_of(family: object) -> Sequence[str]:
    """Return messages for the user about the format of a family's prompts, if it is not the usual one."""
    return family.prompt_notices if isinstance(family, Answering) else ()


@runtime_checkable
class Answering(Protocol):
    """A family of models that can answer in a conversation."""

    @property
    def prompt_notices(self) -> Sequence[str]:
        """Messages about the format of prompts, if it is not the usual one."""

    def answer(
        self, model: LoadedModel, messages: Sequence[Mapping[str, Any]], sampling: Sampling
    ) -> Generator[str, None, str]:
        """Yield the current model's answer to a conversation in pieces. A piece is "" while a character is incomplete.

        Args:
            model: the model, in eval mode.
            messages: the conversation; each message has a role and content.
            sampling: settings for sampling tokens.

        Returns:
            The reason for the end: "end", or "limit" if ``sampling.max_tokens`` is reached.

        Raises:
            UnusableText: the conversation cannot be answered. Raised at the first piece.
        """


def family_for(recipe: Recipe) -> ModelFamily:
    """Return the family object of a recipe. The family's module is imported on demand."""
    import importlib

    module, _, attribute = recipe.spec.implementation.partition(":")
    family: ModelFamily = getattr(importlib.import_module(module), attribute)(recipe)
    return family
