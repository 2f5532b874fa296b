"""Base class of families with a diffusion transformer that is trained by flow matching.

Dimensions: B batch, C channels, H W latent height and width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.families.base import LoadedModel, PreviewRequest, Tensors
from lora_rocm.families.common.caption_lm import DTYPE
from lora_rocm.families.common.dit import detect
from lora_rocm.families.common.dit.sampling import sample_images
from lora_rocm.families.common.latent_family import LatentFamily
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.families.lora_file_names import LoraFileNames
from lora_rocm.families.objectives import schedulers
from lora_rocm.families.objectives.base import Prediction
from lora_rocm.families.objectives.flow import FlowObjective
from lora_rocm.families.spec import TransformerSection
from lora_rocm.kernels.backend import Implementation, implementation_for
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import WeightFormat
from lora_rocm.model_files.header import TensorFileHeader
from lora_rocm.recipe.sections import FlowSection

if TYPE_CHECKING:
    from PIL import Image


class TransformerFamily(LatentFamily):
    """Implements the part of ``ModelFamily`` that families with a diffusion transformer share.

    Attributes:
        pipeline: diffusers class that loads LoRA files.
        prefixes: see ``LoraFileNames``.
        reader_options: additional arguments of the pipeline's ``load_lora_into_transformer``.
        block_lists: lengths of the first recomputed segments (found by counting memory) by the path of a block list in
            the transformer, in forward order. They apply if all blocks are recomputed; see ``Recomputing.segments``.
        num_streams: see ``Segments``.
        targets: regular expressions of module names by preset, as in ``ModelFamily.lora_targets``.
        patch: side of the square of latents that is one token.
        fuse_blocks: function that replaces blocks by fused ones (see ``families.common.dit.blocks``).
        language_model: name of the text encoder that ``model.text_encoder_quantization`` quantises.
        language_layers: regular expression of the text encoder's quantised layers, as in ``quantised``.
        told_guidance: whether the guidance scale is an input of ``velocity``, so that previews need no negative prompt.
    """

    component = "transformer"
    prefixes: Mapping[str, str]
    pipeline: type[Any]
    reader_options: Mapping[str, Any] = MappingProxyType({})
    block_lists: Mapping[str, Sequence[int]]
    num_streams: int = 1
    targets: Mapping[str, str]
    patch: int = 2
    fuse_blocks: Callable[[nn.Module, Implementation], None]
    language_model: str = "text_encoder"
    language_layers: str = r"(^|\.)layers\.\d+\."
    told_guidance: bool = False

    @abstractmethod
    def velocity(self, model: LoadedModel, latents_BCHW: Tensor, sigma_B: Tensor, batch: Tensors) -> Tensor:
        """Return the velocity ``noise - image`` that the model predicts for noisy latents: [B, C, H, W] in any dtype.

        Args:
            model: the loaded model.
            latents_BCHW: normalised noisy latents, float32.
            sigma_B: the noise levels, float32.
            batch: the cached text tensors, with a batch dimension, on the model's device.
        """

    @property
    def lora_targets(self) -> Mapping[str, Mapping[str, str]]:
        return {preset: {self.component: pattern} for preset, pattern in self.targets.items()}

    @property
    def encoder_dtypes(self) -> Mapping[str, torch.dtype]:
        return {self.language_model: DTYPE}

    def weight_format(self, component: str) -> WeightFormat:
        if component != self.language_model:
            return super().weight_format(component)
        assert isinstance(self.recipe.model, TransformerSection), "by the family's spec"
        return quantised(self.recipe.model.text_encoder_quantization, self.language_layers)

    @cached_property
    def lora_file_names(self) -> LoraFileNames:
        """Names in LoRA files: a prefix followed by the module's name in diffusers, as ComfyUI reads them."""

        def comfyui_key(component: str, module: str) -> str:
            return self.prefixes[component] + module

        return LoraFileNames(self.prefixes, "folded", comfyui_key, self.load_in_diffusers)

    def check_file(self, header: TensorFileHeader) -> None:
        detect.check_file(header, self.recipe.model.name_or_path, self.recipe.spec, self.recipe.registry)

    def check(self, source: BaseSource) -> tuple[str, ...]:
        return (*detect.check(source, self.recipe.spec, self.recipe.registry), *schedulers.check_flow(source))

    @cached_property
    def scheduler_config(self) -> Mapping[str, Any]:
        """The scheduler config of the base."""
        return self.source.config("scheduler").values

    @cached_property
    def objective(self) -> FlowObjective:
        settings = self.recipe.objective
        assert isinstance(settings, FlowSection), "by the family's spec"
        return FlowObjective(self.scheduler_config, self.latents, settings, self.patch)

    def predict(self, model: LoadedModel, batch: Tensors, draws: Tensors) -> Prediction:
        noisy_BCHW, target_BCHW = self.objective.noised(batch, draws)
        predicted_BCHW = self.velocity(model, noisy_BCHW, draws["sigma"], batch)
        return self.objective.prediction(predicted_BCHW, target_BCHW, draws)

    def preview(
        self,
        model: LoadedModel,
        requests: Sequence[PreviewRequest],
        text: Callable[[str], Tensors],
        in_tiles: bool = False,
    ) -> list[Image.Image]:
        return sample_images(self, model, requests, text, in_tiles)

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        transformer = model.components[self.component]
        return [block for name in self.block_lists for block in transformer.get_submodule(name).children()]

    def recompute_activations(self, model: LoadedModel, run: Callable[..., Any] | None = None) -> None:
        transformer: Any = model.components[self.component]
        run = run or Recomputing(model, together=True)
        if isinstance(run, Recomputing):
            loops = [(list(transformer.get_submodule(name).children()), its) for name, its in self.block_lists.items()]
            run = Segments(run, loops, self.num_streams)
        transformer.enable_gradient_checkpointing(run)

    def fuse(self, model: LoadedModel, triton: bool = True) -> None:
        self.fuse_blocks(model.components[self.component], implementation_for(model.device, triton))

    def load_in_diffusers(self, path: Path, components: Sequence[str]) -> dict[str, nn.Module]:
        transformer = self.skeleton(self.component)
        state, metadata = self.pipeline.lora_state_dict(str(path), return_lora_metadata=True)
        how = {"transformer": transformer, "adapter_name": "default", "metadata": metadata, "low_cpu_mem_usage": True}
        self.pipeline.load_lora_into_transformer(state, **how, **self.reader_options)
        return {self.component: transformer}


Output = Tensor | tuple[Tensor, ...]


class Segments:
    """Runs blocks in segments, called from diffusers' loop, which passes each block the output of the previous one.

    The call of a segment's first block runs the whole segment. The calls of its other blocks return their input.

    Args:
        run: recomputes blocks.
        loops: for each of diffusers' loops, the blocks in forward order and the lengths of its first segments.
        num_streams: number of a block's arguments that are outputs of the previous block, in reverse order (FLUX.1's
            blocks take image and text, and return text and image).
    """

    def __init__(
        self, run: Recomputing, loops: Sequence[tuple[Sequence[nn.Module], Sequence[int]]], num_streams: int = 1
    ) -> None:
        self._run, self._num_streams = run, num_streams
        self._segments: dict[nn.Module, Sequence[nn.Module]] = {}  # first block of a segment -> the segment
        for blocks, lengths in loops:
            self._segments |= dict.fromkeys(blocks, ())
            self._segments |= {several[0]: several for several in run.segments(lengths, blocks)}

    def __call__(self, block: nn.Module, *args: Any) -> Output:
        """Return the streams [B, S, D] after the segment that begins with ``block``.

        If no segment begins with the block, the streams are returned unchanged.

        Raises:
            KeyError: the model's blocks were replaced after this object was created.
        """
        several = self._segments[block]
        if len(several) > 1:
            output: Output = self._run.whole(partial(self._in_turn, several), *args)
        elif several:
            output = self._run(block, *args)
        else:
            output = self._as_output(args[: self._num_streams])
        return output

    def _in_turn(self, blocks: Sequence[nn.Module], *args: Any) -> Output:
        output, others = self._as_output(args[: self._num_streams]), args[self._num_streams :]
        for block in blocks:
            streams = (output,) if isinstance(output, Tensor) else output[::-1]
            output = block(*streams, *others)
        return output

    def _as_output(self, streams: tuple[Tensor, ...]) -> Output:
        return streams[0] if self._num_streams == 1 else streams[::-1]
