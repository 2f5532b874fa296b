"""Requests from the recipe, whole rounds, and the before/after grid."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from lora_rocm.dataset.images.preview_images import CONTROL_UNUSABLE
from lora_rocm.errors import DataError
from lora_rocm.families.base import PreviewRequest
from lora_rocm.foundation.files import write_atomic, write_json
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import preview
from lora_rocm.train.artifacts import Artifacts
from tests.supervisor.fake_run import listening
from tests.wording import Worded, saying, worded


def make_recipe(**sample: object) -> Recipe:
    sections = {
        "model": {"name_or_path": "x"},
        "data": {"path": "y", "resolution": 512},
        "train": {"max_train_steps": 1},
        "sample": {"prompts": ["a cat", "ein Hündchen 🐕"], "control_prompts": ["a dog"], "seed": 7, **sample},
    }
    return recipe_from(sections)


def draw_round(run_dir: RunDir, updates: int, colours: list[str], size: tuple[int, int] = (64, 48)) -> list[Path]:
    paths = [run_dir.samples_at(updates) / f"{number:02d}.png" for number in range(len(colours))]
    for path, colour in zip(paths, colours, strict=True):
        write_atomic(path, preview.png(Image.new("RGB", size, colour)))
    return paths


def test_requests_take_size_from_the_data_and_count_the_seed_up() -> None:
    requests = preview.requests_of(make_recipe(height=256))
    assert [request.prompt for request in requests] == ["a cat", "ein Hündchen 🐕", "a dog"]
    assert [request.seed for request in requests] == [7, 8, 9]
    assert {(request.width, request.height) for request in requests} == {(512, 256)}


def test_a_guidance_that_is_not_set_is_the_family_s_usual_one() -> None:
    sections = {"data": {"path": "p"}, "train": {"epochs": 1}, "sample": {"prompts": ["a cat"]}}
    for family, usual in (("sdxl", 6.0), ("flux", 3.5)):
        model = {"model": {"family": family, "name_or_path": "x"}}
        assert preview.requests_of(recipe_from({**sections, **model}))[0].guidance_scale == usual
    assert preview.requests_of(make_recipe(guidance_scale=2.0))[0].guidance_scale == 2.0


def test_a_round_counts_only_when_it_is_whole(tmp_path: Path) -> None:
    run_dir, recipe = RunDir(tmp_path), make_recipe()
    paths = draw_round(run_dir, 0, ["red", "green", "blue"])
    assert preview.existing(run_dir, 0, recipe) is None  # the request is written last
    asked = [request.to_json() for request in preview.requests_of(recipe)]
    write_json(run_dir.samples_at(0) / preview.REQUESTS_FILE, asked)
    assert preview.existing(run_dir, 0, recipe) == paths
    assert preview.existing(run_dir, 0, make_recipe(seed=8)) is None
    paths[1].unlink()
    assert preview.existing(run_dir, 0, recipe) is None


def test_a_round_of_an_earlier_version_counts(tmp_path: Path) -> None:
    """Its requests as that version wrote them."""
    prompts = [{"prompt": "a", "control_image": "c.png", "mask": "m.png"}, "b --n c"]
    sample = {"prompts": prompts, "seed": 7, "width": 64, "height": 96, "steps": 2, "guidance_scale": 3.0}
    recipe = make_recipe(**{"control_prompts": [], **sample})
    run_dir, common = RunDir(tmp_path), {"width": 64, "height": 96, "steps": 2, "guidance_scale": 3.0}
    paths, more = draw_round(run_dir, 0, ["red", "green"]), {"sampler": "euler", "lora_scale": 1.0}
    written = [
        {"prompt": "a", "negative_prompt": "", **common, "seed": 7, "control": "c.png", **more, "mask": "m.png"},
        {"prompt": "b", "negative_prompt": "c", **common, "seed": 8, "control": "", **more, "mask": ""},
    ]
    write_json(run_dir.samples_at(0) / preview.REQUESTS_FILE, written)
    assert preview.existing(run_dir, 0, recipe) == paths
    assert [list(request.to_json()) for request in preview.requests_of(recipe)] == [list(each) for each in written]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "too large", "too deep", "whole"])
def test_what_a_round_was_drawn_from_is_read_from_a_plain_file_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run_dir, recipe = RunDir(tmp_path), make_recipe()
    paths, file = draw_round(run_dir, 0, ["red", "green", "blue"]), run_dir.samples_at(0) / preview.REQUESTS_FILE
    write_json(file, [request.to_json() for request in preview.requests_of(recipe)])
    if kind == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("this system has no pipes with names")
        file.unlink()
        os.mkfifo(file)
    elif kind == "too deep":
        file.write_bytes(b"[" * 10**6)
    else:
        room = 0 if kind == "whole" else -1
        monkeypatch.setattr(preview, "MAX_REQUESTS_BYTES", file.stat().st_size + room)
    assert preview.existing(run_dir, 0, recipe) == (paths if kind == "whole" else None)


def test_the_grid_has_before_on_the_left_and_after_on_the_right(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    before = draw_round(run_dir, 0, ["red", "green", "blue"])
    after = draw_round(run_dir, 5, ["cyan", "magenta", "yellow"])
    with Image.open(preview.before_after(run_dir, before, after, make_recipe())) as grid:
        pixels = grid.convert("RGB")
    tile_height = 48 * (preview.GRID_TILE_PX // 64)
    for row, (left, right) in enumerate(zip(["red", "green", "blue"], ["cyan", "magenta", "yellow"], strict=True)):
        y = preview.LABEL_PX * (row + 2) + row * (tile_height + preview.MARGIN_PX) + tile_height // 2
        assert pixels.getpixel((pixels.width // 4, y)) == Image.new("RGB", (1, 1), left).getpixel((0, 0))
        assert pixels.getpixel((3 * pixels.width // 4, y)) == Image.new("RGB", (1, 1), right).getpixel((0, 0))


def test_large_images_are_reduced(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    before = draw_round(run_dir, 0, ["red"] * 3, size=(1024, 768))
    after = draw_round(run_dir, 5, ["blue"] * 3, size=(1024, 768))
    with Image.open(preview.before_after(run_dir, before, after, make_recipe())) as grid:
        assert grid.width <= 2 * preview.GRID_TILE_PX + 3 * preview.MARGIN_PX


@pytest.mark.parametrize("code", [CONTROL_UNUSABLE, "prompt-not-cached"])
def test_a_control_image_that_is_gone_costs_the_previews_and_not_the_run(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another error of data, the control, is not passed over."""
    said: list[str] = []
    without: Any = lambda: nullcontext()  # noqa: E731
    run: Any = SimpleNamespace(
        **dict.fromkeys(("family", "model"), None),
        run_dir=SimpleNamespace(require=lambda: None),
        drawn_at=None,
        recipe=SimpleNamespace(spec=SimpleNamespace(preview="image")),
        prepared=SimpleNamespace(text_lookup=None),
        tiles=False,
        adapter=SimpleNamespace(casting_inputs=without, scaled=None),
        training_adapter=SimpleNamespace(absent=without),
        session=SimpleNamespace(context=listening(said)),
        _drawn=lambda updates: Artifacts._drawn(run, updates),
    )

    def draw(*args: Any) -> Any:
        raise DataError(code, "It cannot be read.", where="test.png", fix="Put it back.")

    monkeypatch.setattr(preview, "draw", draw)
    if code != CONTROL_UNUSABLE:
        with pytest.raises(DataError):
            Artifacts._draw(run, 3)
        return
    Artifacts._draw(run, 3)
    assert said == [worded("train/no-previews-after-step-3-it-cannot")]


@pytest.mark.parametrize("notices", [["a notice"], []])
def test_the_format_of_prompts_is_named_once_before_the_previews(notices: list[str]) -> None:
    said = list[str]()
    context = SimpleNamespace(notice=said.append, emit=lambda event: said.append(event.type))
    run: Any = SimpleNamespace(
        family=SimpleNamespace(prompt_notices=notices, answer=print),
        run_dir=SimpleNamespace(require=lambda: None),
        drawn_at=None,
        recipe=SimpleNamespace(spec=SimpleNamespace(preview="text")),
        session=SimpleNamespace(context=context),
        _drawn=lambda updates: [],
    )
    for updates in (0, 3):
        Artifacts._draw(run, updates)
    assert said == [*notices, "preview", "preview"]


def test_prompts_have_options_of_their_own() -> None:
    prompts = [
        "a cat --n a dog --w 256 --h 320 --d 9 --s 30 --l 5.5 --ss k_euler_a --am 0.8",
        {"prompt": "a cat", "seed": 4, "lora_scale": 0.5, "sampler": "ddim"},
        "a cat -- cat",
    ]
    recipe = make_recipe(prompts=prompts, negative_prompt="blurry", images_per_prompt=2, guidance_scale=3.0)
    first, again, second, *_, fifth, sixth, control, last = preview.requests_of(recipe)
    assert (first.prompt, first.negative_prompt, first.width, first.height) == ("a cat", "a dog", 256, 320)
    assert (first.steps, first.guidance_scale, first.sampler, first.lora_scale) == (30, 5.5, "euler_a", 0.8)
    assert [each.seed for each in (first, again, second)] == [9, 10, 4]
    assert (second.negative_prompt, second.guidance_scale, second.lora_scale) == ("blurry", 3.0, 0.5)
    upper, other = (preview.requests_of(make_recipe(prompts=[f"a cat --{n} dog --{w} 64"]))[0] for n, w in ("NW", "nw"))
    assert upper == other, "sd-scripts reads options in capitals too"
    assert (fifth.prompt, fifth.sampler, fifth.lora_scale) == ("a cat -- cat", "euler", 1.0)
    assert [each.seed for each in (fifth, sixth, control, last)] == [11, 12, 13, 14]  # the section's prompts, by place
    assert set(recipe.sample.texts) == {"a cat", "a cat -- cat", "a dog", "blurry"}
    assert recipe.sample.num_images == len(preview.requests_of(recipe))


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"prompts": ["a cat --x 3"]}, worded("train/there-is-no-option-x")),
        ({"prompts": ["a cat --cn pose.png"]}, worded("train/there-is-no-option-cn")),
        ({"prompts": ["a cat --w 64 --h 64 --w 128"]}, worded("train/w-gives-this-prompt-a-second-width")),
        ({"prompts": ["a cat --l 5 --g 3.5"]}, worded("train/g-gives-this-prompt-a-second-guidance")),
        ({"prompts": ["a cat --s 28.5"]}, worded("train/s-cannot-be-28-5")),
        ({"prompts": ["a cat --am 0.8,0.5"]}, worded("train/am-cannot-be-0-8-0-5")),
        ({"prompts": ["a cat --ss dpmsolver"]}, worded("train/ss-cannot-be-dpmsolver")),
        ({"prompts": ["a cat --w wide"]}, worded("train/w-cannot-be-wide")),
        ({"prompts": ["a cat --w"]}, worded("train/w-cannot-be")),
        ({"prompts": [{"prompt": "a cat", "width": 100}]}, worded("train/multiples-of-8-pixels")),
        ({"prompts": [{"prompt": "a cat", "with": 100}]}, worded("train/with")),
        ({"prompts": ["a cat --ss plms"]}, worded("train/ss-cannot-be-plms")),
    ],
)
def test_options_of_a_prompt_that_cannot_be_are_refused(sample: dict[str, Any], words: Worded) -> None:
    with pytest.raises(ValidationError, check=saying(words)):
        make_recipe(**sample)


def test_a_sampler_is_refused_where_the_family_has_none() -> None:
    sections = {"data": {"path": "p"}, "train": {"epochs": 1}, "model": {"family": "flux", "name_or_path": "x"}}
    with pytest.raises(ValidationError, check=saying("train/not-drawn-with-the-sampler-ddim")):
        recipe_from({**sections, "sample": {"prompts": ["a cat"], "sampler": "ddim"}})
    with pytest.raises(ValidationError, check=saying("train/no-negative-prompt")):
        recipe_from({**sections, "sample": {"prompts": ["a cat --n dog"]}})


def test_each_strength_is_drawn_at_its_strength_and_in_the_order_of_the_requests(tmp_path: Path) -> None:
    recipe = make_recipe(prompts=["a cat --am 0.5", "a dog", "a cow --am 0.5"], control_prompts=[])
    now, drawn = [1.0], list[tuple[str, float]]()

    @contextmanager
    def scaled(strength: float) -> Iterator[None]:
        now.append(strength)
        yield
        now.pop()

    def draw(model: Any, requests: list[PreviewRequest], *rest: Any) -> list[str]:
        drawn.extend((request.prompt, now[-1]) for request in requests)
        return [request.prompt for request in requests]

    family: Any = SimpleNamespace(preview=draw)
    paths = preview.draw(RunDir(tmp_path), 1, family, None, recipe, dict, scaled=scaled)  # type: ignore[arg-type]
    assert drawn == [("a cat", 0.5), ("a cow", 0.5), ("a dog", 1.0)]
    assert [path.read_text(encoding="utf-8") for path in paths] == ["a cat", "a dog", "a cow"]
