"""Previews drawn from fixed seeds, and an image that compares them before and after training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor

from lora_rocm.families.base import Drawn, LoadedModel, Previewer, PreviewRequest
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import is_folder, remove, write_atomic, write_json
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import OF_PREVIEWS, RunDir

MARGIN_PX = 6
LABEL_PX = 16
GRID_TILE_PX = 320
ENDINGS = {"image": "png", "video": "png", "text": "txt"}  # by FamilySpec.preview
REQUESTS_FILE = "requests.json"  # next to the previews of a round: the requests that they were drawn from
MAX_REQUESTS_BYTES = 1 << 24
FRAME_MS = 62  # 16 frames per second


def requests_of(recipe: Recipe) -> list[PreviewRequest]:
    """Requests for the recipe's prompts, then for its control prompts. The seed increases by 1 with each image.

    A prompt with its own seed counts up from that seed instead.
    """
    sample, requests = recipe.sample, []
    for number, (_, _, preview) in enumerate(sample.numbered()):
        first = sample.seed + number * sample.images_per_prompt if preview.seed is None else preview.seed
        requests += [PreviewRequest.of(recipe, preview, first + image) for image in range(sample.images_per_prompt)]
    return requests


def draw(
    run_dir: RunDir,
    updates: int,
    family: Previewer,
    model: LoadedModel,
    recipe: Recipe,
    text: Callable[[str], dict[str, Tensor]],
    in_tiles: bool = False,
    scaled: Callable[[float], AbstractContextManager[None]] = lambda scale: nullcontext(),
) -> list[Path]:
    """Draw all previews with the model's current weights, save one per file (atomically), and return their paths.

    ``scaled(strength)`` returns a context in which the LoRA has this strength.

    Previews of an older round are deleted. The requests are written last, so that an interrupted round does not look
    complete.
    """
    requests, folder = requests_of(recipe), run_dir.samples_at(updates)
    drawn: dict[int, Drawn] = {}
    for scale in dict.fromkeys(request.lora_scale for request in requests):
        numbers = [number for number, request in enumerate(requests) if request.lora_scale == scale]
        with scaled(scale):
            found = family.preview(model, [requests[number] for number in numbers], text, in_tiles)
        drawn |= zip(numbers, found, strict=True)
    previews = [drawn[number] for number in range(len(requests))]
    for old in sorted(folder.iterdir(), reverse=True) if is_folder(folder) else ():
        if OF_PREVIEWS.fullmatch(old.name):
            remove(old)
    paths = _paths(folder, requests, recipe)
    for path, preview in zip(paths, previews, strict=True):
        write_atomic(path, content_of(preview), run_dir.path)
    write_json(folder / REQUESTS_FILE, [request.to_json() for request in requests], run_dir.path)
    return paths


def existing(run_dir: RunDir, updates: int, recipe: Recipe) -> list[Path] | None:
    """Paths of a round's previews; None if any is missing, or was drawn with other prompts or settings."""
    requests, folder = requests_of(recipe), run_dir.samples_at(updates)
    try:
        drawn = parse_json(read_plain(folder / REQUESTS_FILE, MAX_REQUESTS_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    paths = _paths(folder, requests, recipe)
    same = drawn == [request.to_json() for request in requests]
    return paths if same and all(path.exists() for path in paths) else None


def _paths(folder: Path, requests: Sequence[PreviewRequest], recipe: Recipe) -> list[Path]:
    return [folder / f"{number:02d}.{ENDINGS[recipe.spec.preview]}" for number in range(len(requests))]


def before_after(run_dir: RunDir, before: list[Path], after: list[Path], recipe: Recipe) -> Path:
    """Write the before/after image and return its path.

    It has one row per preview, without the LoRA on the left, with it on the right.
    """
    rows = [(_tile(left), _tile(right)) for left, right in zip(before, after, strict=True)]
    prompts = [request.prompt for request in requests_of(recipe)]
    width = max(left.width + right.width for left, right in rows) + 3 * MARGIN_PX
    height = sum(max(left.height, right.height) + LABEL_PX + MARGIN_PX for left, right in rows) + LABEL_PX
    grid = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(grid)
    pen.text((MARGIN_PX, 2), "before", fill="black")
    pen.text((width // 2 + MARGIN_PX, 2), "after", fill="black")
    top = LABEL_PX
    for (left, right), prompt in zip(rows, prompts, strict=True):
        pen.text((MARGIN_PX, top + 2), _shorten(prompt, width), fill="dimgray")
        top += LABEL_PX
        grid.paste(left, (MARGIN_PX, top))
        grid.paste(right, (width // 2 + MARGIN_PX // 2, top))
        top += max(left.height, right.height) + MARGIN_PX
    write_atomic(run_dir.before_after, png(grid), run_dir.path)
    return run_dir.before_after


def content_of(preview: Drawn) -> bytes:
    """The content of a preview's file: UTF-8 text, a PNG, or an animated PNG for a video."""
    if isinstance(preview, str):
        return preview.encode("utf-8", "replace")
    first, *more = preview if isinstance(preview, tuple) else (preview,)
    return png(first, more)


def png(image: Image.Image, more: Sequence[Image.Image] = ()) -> bytes:
    """Encode an image as PNG. ``more``: further frames of an animation, which some viewers do not show."""
    buffer = BytesIO()
    how = {"save_all": True, "append_images": more, "duration": FRAME_MS, "loop": 0} if more else {}
    image.save(buffer, format="PNG", **how)
    return buffer.getvalue()


def _tile(path: Path) -> Image.Image:
    """Load an image for the before/after image: small ones are enlarged by a whole factor, large ones reduced."""
    with Image.open(path) as file:
        image = file.convert("RGB")
    factor = GRID_TILE_PX // max(image.size)
    if factor > 1:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((GRID_TILE_PX, GRID_TILE_PX))
    return image


def _shorten(prompt: str, width_px: int) -> str:
    """Cut a prompt to fit the width. Pillow's default font draws Latin letters about 6 px wide."""
    limit = width_px // 6
    text = prompt.encode("latin-1", "replace").decode("latin-1")
    return text if len(text) <= limit else text[: limit - 3] + "..."
