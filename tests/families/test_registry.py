"""Facts about families in the light half: shapes, recognition, recipes of families that the program does not have."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from lora_rocm.errors import ModelError, RecipeError
from lora_rocm.families.registry import FAMILIES, RESERVED, FamilyRegistry
from lora_rocm.families.spec import Evidence
from lora_rocm.recipe.comparison import fingerprint, resume_differences
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import dump_recipe, load_recipe
from tests.families.toy_families import TOY_TEXT, TOY_VIDEO, TOYS
from tests.wording import Worded, saying, worded

MINIMAL = "model: {{family: {}, name_or_path: some/model}}\ndata: {{path: pics}}\ntrain: {{max_train_steps: 10}}\n"


def written(family: str, more: str = "") -> Path:
    path = Path(f"{family}.yaml")
    path.write_text(MINIMAL.format(family) + more, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_program_s_families_and_no_reserved_name() -> None:
    assert FAMILIES.names == ("sdxl", "sd15", "sd2", "z-image", "flux", "anima", "causal-lm") and not set(
        FAMILIES.names
    ) & set(RESERVED)
    with pytest.raises(ValueError, match="distinct"):
        FamilyRegistry([TOY_TEXT, TOY_TEXT])
    with pytest.raises(ValueError, check=saying("families/at-least-one")):
        FamilyRegistry([])


def test_shapes_of_sdxl() -> None:
    shapes = FAMILIES["sdxl"].axes
    assert shapes.multiple_px == 8
    assert shapes["w"].fits(1024) and not shapes["w"].fits(1020) and shapes["w"].nearest(1020) == (1016, 1024)
    assert shapes["w"].latents(1024) == 128 and shapes["w"].nearest(5) == (8,)
    assert shapes.tokens((1024, 512)) == 64 * 32


def test_shapes_of_videos_and_texts() -> None:
    video, text = TOY_VIDEO.axes, TOY_TEXT.axes
    frames = video["frames"]
    assert [n for n in range(12) if frames.fits(n)] == [1, 5, 9] and frames.nearest(7) == (5, 9)
    assert (frames.latents(9), frames.tokens(9)) == (3, 3) and video.multiple_px == 32
    assert video.tokens((9, 64, 96)) == 3 * 2 * 3
    assert (text.multiple_px, text.tokens((77,))) == (1, 77) and "h" not in text and "h" in video


@pytest.mark.parametrize(
    ("seen", "family"),
    [
        (Evidence(("sdxl",)), "sdxl"),
        (Evidence((), ("sdxl",)), "sdxl"),
        (Evidence(("chroma",), ("sdxl",)), "sdxl"),
        (Evidence(("z-image",)), "z-image"),
        (Evidence(("toy-video",), ("sdxl",)), "toy-video"),
        (Evidence(("sd15", "sd2"), ("sd2",)), "sd2"),
    ],
)
def test_a_family_is_recognised(seen: Evidence, family: str) -> None:
    assert TOYS.detect(seen, "some/model").name == family


def test_a_family_that_is_not_recognised_is_asked_for() -> None:
    for seen in (Evidence(), Evidence(("chroma",)), Evidence((), ("wan", "other"))):
        with pytest.raises(ModelError, match="not recognised") as caught:
            TOYS.detect(seen, "some/model")
        assert caught.value.where == "some/model" and "--family toy-video" in caught.value.fix
    with pytest.raises(ModelError, match="could be SDXL or Toy video"):
        TOYS.detect(Evidence(("toy-video", "sdxl")), "x")


def test_what_files_show(tmp_path: Path) -> None:
    from lora_rocm.families.common.detect import evidence

    def written(name: str, tensor: str, metadata: dict[str, str]) -> Path:
        entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        text = json.dumps({"__metadata__": metadata, tensor: entry}).encode()
        (tmp_path / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
        return tmp_path / name

    lora = written("lora.safetensors", "a.lora_A.weight", {"ss_base_model_version": "sd_v2_v"})
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}', encoding="utf-8")
    assert evidence(str(tmp_path / "base"), lora) == Evidence(("flux",), ("sd2",))
    (tmp_path / "modular").mkdir()
    index = '{"_class_name": "AnimaModularPipeline"}'
    (tmp_path / "modular" / "modular_model_index.json").write_text(index, encoding="utf-8")
    assert evidence(str(tmp_path / "modular"), tmp_path) == Evidence(("anima",))
    base = written("base.safetensors", "conditioner.embedders.1.model.x", {})
    assert evidence(str(base), tmp_path) == Evidence(("sdxl",)) and evidence(str(lora), tmp_path) == Evidence()
    assert evidence("builtin:tiny-sdxl", tmp_path) == Evidence(("sdxl",))
    assert evidence(str(tmp_path / "nowhere.safetensors"), tmp_path) == Evidence()


def test_recipes_of_other_families_have_their_own_keys() -> None:
    more = "objective: {label_smoothing: 0.1}\n"
    recipe = load_recipe(written("toy-text", more), registry=TOYS).recipe
    assert recipe.spec is TOY_TEXT and recipe.objective.model_dump() == {"label_smoothing": 0.1}
    video = load_recipe(written("toy-video"), ["objective.shift=3"], TOYS).recipe
    assert video.spec is TOY_VIDEO and video.preview_size == (1024, 1024)
    assert load_recipe(written("toy-video"), ["data.resolution=500"], TOYS).recipe.preview_size == (480, 480)
    with pytest.raises(RecipeError, check=saying("families/no-such-model-family")):
        load_recipe(written("toy-text", more))


@pytest.mark.parametrize(
    ("family", "override", "words"),
    [
        ("toy-text", "data.resolution=512", worded("families/this-key-is-not-read-by-toy")),
        (
            "toy-text",
            "data.sources=[{path: a, flip_aug: true}]",
            worded("families/data-sources-0-flip-aug-this-key"),
        ),
        ("toy-text", "lora.train_text_encoder=true", worded("families/no-text-encoder-of-toy-text-can")),
        ("toy-text", "model.vae=x", worded("families/no-such-key")),
        ("toy-text", "objective.shift=2", worded("families/no-such-key")),
        ("toy-text", "train.min_snr_gamma=5", worded("families/set-train-min-snr-gamma-there-is")),
        ("z-image", "train.mixed_precision=fp16", worded("families/too-large-for-fp16")),
        ("z-image", "objective.min_snr_gamma=5", worded("families/no-such-key")),
        ("toy-video", "data.bucket_step=16", worded("families/has-to-be-a-multiple-of-32")),
        ("toy-video", "sample.width=1000", worded("families/take-992-or-1024")),
        ("sdxl", "sample.height=100", worded("families/has-to-be-a-multiple-of-8")),
    ],
)
def test_keys_and_sizes_that_are_not_the_familys_are_refused(family: str, override: str, words: Worded) -> None:
    with pytest.raises(RecipeError, check=saying(words)):
        load_recipe(written(family), [override], TOYS)


@pytest.mark.parametrize(
    ("family", "override"),
    [
        ("toy-text", "lora.train_text_encoder=false"),
        ("toy-text", "data.repeats=2"),
        ("sdxl", "lora.train_text_encoder=true"),
        ("toy-video", "data.bucket_step=64"),
        ("z-image", "train.mixed_precision=bf16"),
        ("z-image", "objective.shift=resolution"),
        ("sdxl", "train.mixed_precision=fp16"),
        ("flux", "train.mixed_precision=fp16"),
        ("anima", "train.mixed_precision=fp16"),
        ("sdxl", "sample.width=1000"),
    ],
)
def test_keys_and_sizes_of_the_family_are_taken(family: str, override: str) -> None:
    assert load_recipe(written(family), [override], TOYS)


@pytest.mark.parametrize("family", TOYS.names)
def test_a_written_recipe_is_read_back_and_goes_to_children(family: str) -> None:
    first = load_recipe(written(family), registry=TOYS).recipe
    Path("out.yaml").write_text(dump_recipe(first), encoding="utf-8")
    back = load_recipe("out.yaml", registry=TOYS).recipe
    assert back == first and fingerprint(back) == fingerprint(first)
    assert recipe_from(json.loads(first.model_dump_json()), TOYS) == first
    assert type(back) is type(first)


def test_a_run_of_another_family_is_not_gone_on_with() -> None:
    old, new = (load_recipe(written(name), registry=TOYS).recipe for name in ("sdxl", "toy-video"))
    assert [problem.where for problem in resume_differences(old, new)] == ["model.family"]
    assert fingerprint(old) != fingerprint(new)


def test_paths_of_a_section_are_known_by_its_fields(tmp_path: Path) -> None:
    loaded = load_recipe(written("toy-text"), ["model.tokenizer=words"], TOYS)
    assert loaded.recipe.model.model_dump()["tokenizer"] == str(tmp_path / "words")
    (tmp_path / "pics").mkdir()
    with pytest.raises(RecipeError, check=saying("families/there-is-no-folder", "families/words")):
        loaded.require_files()
    (tmp_path / "words").mkdir()
    loaded.require_files()
