"""Class images: regularisation images that the base draws before training (DreamBooth, arXiv 2208.12242, 3.2).

They are stored in the cache. The folder's name is a hash of everything that determines them: the base, its encoders,
the prompt, the size and the settings of the sampler. An image's number is its seed and its file name, and files are
written atomically. So a stopped run continues with the missing images, and a run that needs more images draws only the
missing ones.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from lora_rocm.dataset.order.regularisation import class_image
from lora_rocm.dataset.progress import Progress, Report
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.allocator import empty_pools
from lora_rocm.device.torch_errors import out_of_memory
from lora_rocm.encoded_cache.encode import Caches
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.errors import StoppedError, resume_advice
from lora_rocm.families.base import Drawn, LoadedModel, ModelFamily, PreviewRequest, Tensors
from lora_rocm.foundation.files import write_atomic
from lora_rocm.recipe.sample_section import PreviewPrompt
from lora_rocm.recipe.schema import Recipe, ResolvedSource
from lora_rocm.rundir.event_types import CacheEvent
from lora_rocm.train.context import StartContext, transfer_of
from lora_rocm.train.load_model import choose_memory, load_model
from lora_rocm.train.preview import png

FOLDER, PHASE = "class-images", "class-images"
DRAWN_TOGETHER = 8  # images per save, so that a stop loses few of them
VERSION = 1  # increase it if the same settings would give other images


@dataclass(frozen=True)
class _Wanted:
    """The class images that one source needs.

    folder: the folder with the images. requests: one request per image, by number.
    """

    folder: Path
    requests: Sequence[PreviewRequest]

    @property
    def missing(self) -> list[PreviewRequest]:
        return [request for request in self.requests if not self.path_of(request).is_file()]

    def path_of(self, request: PreviewRequest) -> Path:
        return self.folder / class_image(request.seed)


def with_class_images(start: StartContext, family: ModelFamily, encoding: Encoding) -> Recipe:
    """Draw the class images that are not in the cache yet.

    Returns:
        The recipe. In each source with a ``class_prompt``, ``path`` is set to the folder of its class images.

    Raises:
        StoppedError: the run was asked to stop; the images drawn so far are kept.
        RestartError: "out-of-memory", an image does not fit into memory, not even decoded in tiles.
    """
    recipe, sources = start.recipe, list(start.recipe.data.sources)
    wanted = dict[int, _Wanted]()
    for source in sorted(recipe.data.resolved_sources(), key=lambda each: each.resolution):  # the largest one counts
        if source.class_prompt is not None:
            wanted[source.index] = _wanted(recipe, source, family)
    for index, each in wanted.items():
        sources[index] = sources[index].model_copy(update={"path": str(each.folder)})
    if not wanted:
        return recipe
    if any(each.missing for each in wanted.values()):
        with start.session.phase(PHASE):
            _draw(start, family, list(wanted.values()), encoding)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"sources": tuple(sources)})})


def _wanted(recipe: Recipe, source: ResolvedSource, family: ModelFamily) -> _Wanted:
    sample, step = recipe.sample, recipe.spec.axes.multiple_px
    side_px = max(source.resolution // step, 1) * step
    of_source = {"prompt": source.class_prompt or "", "width": side_px, "height": side_px, "lora_scale": 1.0}
    of_sample = {"negative_prompt": sample.negative_prompt, "guidance_scale": sample.guidance_scale}
    preview = PreviewPrompt.model_validate({**of_source, **of_sample})
    requests = [PreviewRequest.of(recipe, preview, number) for number in range(source.num_class_images)]
    encoders = [encoder.fingerprint for encoder in family.encoders()]
    base = [family.base_facts()["identity"], recipe.model.quantization, *encoders]
    request = {name: value for name, value in requests[0].to_json().items() if name != "mask"}  # there is none
    about = json.dumps([VERSION, base, request], sort_keys=True)
    return _Wanted(Path(recipe.cache.dir) / FOLDER / hashlib.sha256(about.encode()).hexdigest()[:40], requests)


def _draw(start: StartContext, family: ModelFamily, wanted: Sequence[_Wanted], encoding: Encoding) -> None:
    """Load the base as for training, and draw the missing images with the adapter disabled."""
    missing = [(each, request) for each in wanted for request in each.missing]
    # Encode the prompts
    encoders = [encoder for encoder in family.encoders() if encoder.entry.has_captions]
    caches = Caches(encoding, [encoder for encoder in encoders if not encoder.entry.has_views])
    texts = {text for _, request in missing for text in (request.prompt, request.negative_prompt)}
    caches.fill_texts(("", *sorted(texts)))
    # Load the base
    shapes = {SampleShape.of(h=request.height, w=request.width) for _, request in missing}
    memory = choose_memory(start, family, shapes)
    model, adapter, training_adapter, _ = load_model(start, family, transfer_of(start), memory)
    # Draw and save
    progress, tiles = Progress("class images", len(missing), _reporting(start)), start.settings.preview_tiling
    with adapter.disabled(), adapter.casting_inputs(), training_adapter.absent():
        for first in range(0, len(missing), DRAWN_TOGETHER):
            some = missing[first : first + DRAWN_TOGETHER]
            requests = [request for _, request in some]
            images, tiles = _previews(family, model, requests, caches.text_lookup, tiles)
            for (each, request), image in zip(some, images, strict=True):
                assert isinstance(image, Image.Image), "texts have no class_prompt"
                write_atomic(each.path_of(request), png(image))
            progress.step(len(some))
    del model, adapter, training_adapter, memory
    gc.collect()  # modules and hooks refer to each other
    empty_pools()


def _previews(
    family: ModelFamily,
    model: LoadedModel,
    requests: Sequence[PreviewRequest],
    text: Callable[[str], Tensors],
    tiles: bool,
) -> tuple[Sequence[Drawn], bool]:
    """Draw images, decoded in tiles if memory runs out. Returns the images and whether tiles were used."""
    try:
        return family.preview(model, requests, text, tiles), tiles
    except (RuntimeError, MemoryError) as error:
        if tiles or out_of_memory(error) is None:
            raise
    empty_pools()
    return family.preview(model, requests, text, in_tiles=True), True


def _reporting(start: StartContext) -> Report:
    context = start.context

    def report(what: str, done: int, total: int, per_second: float) -> None:
        context.emit(CacheEvent(what=what, done=done, total=total, per_second=round(per_second, 4)))
        context.beat(PHASE)
        if context.should_stop():
            what = "Stopped while drawing class images; the images drawn so far are kept."
            raise StoppedError("stopped", what, **resume_advice("Run again with --resume latest to continue."))

    return report
