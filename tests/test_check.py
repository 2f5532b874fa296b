"""``lora-rocm check``."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_rocm.commands import check as module
from lora_rocm.commands.check import CheckResult
from lora_rocm.commands.output import Output
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.commands.start_run import prepare_run
from lora_rocm.dataset.order.batch_plan import BatchPlan, Item
from lora_rocm.dataset.sources.scan import geometries, scan
from lora_rocm.errors import ModelError, RecipeError, storage_error
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.planning.data_plan import plan_data
from lora_rocm.recipe.load import load_recipe
from lora_rocm.supervisor import trackers
from tests.fake_encoders import letter_limit
from tests.wording import mentions, says, worded

RECIPE = """\
model: {name_or_path: model}
data: {path: pics, resolution: 128, bucket_step: 32, flip_aug: true, shuffle_caption: true, caption_variants: 3}
train: {epochs: 3, batch_size: 2, gradient_accumulation_steps: 2}
sample: {prompts: [a cat]}
"""


def check(*arguments: Any, **options: Any) -> CheckResult:
    """``lora-rocm check``, and its output."""
    output = Output()
    found = module.check(*arguments, **options, notify=output.notify)
    output.show(found, module.render(found))
    return found


class Weigh:
    """Replaces the child that measures the model."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.tokenizers: list[dict[str, Any]] = []

    def __call__(self, name: str, arguments: Sequence[str], env: dict[str, str], *follow: object) -> dict[str, Any]:
        self.calls += 1
        assert Path(arguments[0]).exists()
        if self.error is not None:
            raise self.error
        files = [list(astuple(FileVersion.of(Path("model") / "config.json")))]
        facts = {"num_bytes": {"unet": 3 * 2**30, "vae": 2**20}, "notices": ["The base is rounded."], "files": files}
        return {**facts, "tokenizers": self.tokenizers}


@pytest.fixture
def weigh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Weigh:
    monkeypatch.chdir(tmp_path)
    images = tmp_path / "pics" / "sub dir ü"
    images.mkdir(parents=True)
    for number, size in enumerate([(128, 128), (128, 128), (256, 128), (128, 256), (300, 300)]):
        Image.new("RGB", size, (number, 0, 0)).save(images / f"cat {number}.png")
        (images / f"cat {number}.txt").write_text("a, b, c, d" if number else "cat", encoding="utf-8")
    (images / "broken.png").write_bytes(b"no image")
    whole = io.BytesIO()
    Image.effect_noise((128, 128), 90).save(whole, "JPEG")
    (images / "half.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "my.yaml").write_text(RECIPE, encoding="utf-8")
    stand_in = Weigh()
    monkeypatch.setattr("lora_rocm.processes.tool.run_for_json", stand_in)
    return stand_in


@pytest.mark.parametrize("error", [ValueError("odd"), KeyError("x"), UnicodeEncodeError("utf-8", "\udce9", 0, 1, "no")])
def test_an_unforeseen_error_of_the_thread_that_weighs_is_the_error_of_check(weigh: Weigh, error: Exception) -> None:
    weigh.error = error
    with pytest.raises(type(error)) as caught:
        check("my.yaml")
    assert caught.value is error


def test_what_would_happen(weigh: Weigh, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check("my.yaml")
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert says(lines, "check/images-5-usable-2-set-aside")
    assert "broken.png" in text and "half.jpg" in text and says(text, "check/no-pixels-were-decoded")
    assert "  128x128: 3" in lines
    (of_batch,) = (line for line in lines if line.startswith("effective batch: 4 (2 x 2), steps per epoch: 2 of 2.5 "))
    assert says(of_batch, "check/last-batch-of-a-bucket") and says(of_batch, "check/last-update-of-an-epoch")
    assert says(lines, "check/steps-6-epochs-3-00")
    assert says(text, "check/made-3-updates-per-epoch-of-this") and "train.epochs: 5" in text
    assert says(lines, "check/caches-in-path-a-run-needs-10", path=tmp_path / "cache")
    assert "  unet: 3.0 GiB" in lines and any(line.startswith("  together: 3.0 GiB") for line in lines)
    assert says(text, "check/run-directory-path", path=tmp_path / "runs")


def test_several_captions_of_an_image_are_counted(weigh: Weigh, capsys: pytest.CaptureFixture[str]) -> None:
    folder = next(Path("pics").iterdir())
    check("my.yaml")
    assert "several captions" not in capsys.readouterr().out
    (folder / "cat 1.tags.txt").write_text("e", encoding="utf-8")
    (folder / "cat 2.txt").write_text("f\ng\n\nh", encoding="utf-8")
    of_files = ["data.caption_extension=[.txt, .tags.txt]", "data.resolution=[128, 256]"]
    check("my.yaml", of_files)
    assert says(capsys.readouterr().out, "check/1-image-has-several-captions-2-in"), "lines are one caption"
    check("my.yaml", [*of_files, "data.enable_wildcard=true"])
    assert says(capsys.readouterr().out, "check/2-images-have-several-captions-5-in")


def test_the_plan_is_that_of_training(weigh: Weigh) -> None:
    recipe = load_recipe("my.yaml", ["data.repeats=3"]).recipe
    samples = scan(recipe.data).samples
    cuts, *_ = geometries(samples, recipe.data)
    plan = plan_data(recipe, samples, {key: cut.shape for key, cut in cuts.items()})
    items = [Item(s.key, cuts[s.key].shape, {}, repeats=s.repeats) for s in samples]
    assert plan.steps_per_epoch == BatchPlan(items, 2, 2, seed=0).steps_per_epoch
    assert plan.max_train_steps == plan.steps_per_epoch * 3


def test_a_source_with_smaller_batches_has_more_steps(weigh: Weigh, capsys: pytest.CaptureFixture[str]) -> None:
    sources = "data.sources=[{path: pics, max_batch_size: 1}, {path: pics}]"
    check("my.yaml", ["data.path=null", sources])
    assert says(
        capsys.readouterr().out, "check/steps-per-epoch-5"
    )  # 3, 1 and 1 images: 5 micro-batches of one, 4 of two


def test_held_out_images_are_said(weigh: Weigh, capsys: pytest.CaptureFixture[str]) -> None:
    check("my.yaml", ["data.validation_split=0.2"])
    text = capsys.readouterr().out
    assert says(text, "check/about-20-of-the-images") and says(text, "check/steps-per-epoch-at-most-2")


def test_weights_are_remembered_until_a_file_changes(weigh: Weigh, tmp_path: Path) -> None:
    check("my.yaml")
    check("my.yaml", ["data.repeats=2"])
    assert weigh.calls == 1
    check("my.yaml", ["model.vae=other"])
    assert weigh.calls == 2
    (tmp_path / "model" / "config.json").write_text("{ }", encoding="utf-8")
    check("my.yaml")
    assert weigh.calls == 3
    (tmp_path / "cache" / "weights.json").write_bytes(b"\xfftorn")
    check("my.yaml")
    assert weigh.calls == 4
    for number, samplers in enumerate(("[]", "[{prompt: b, sampler: heun}]")):  # ``check`` of the family refuses some
        check("my.yaml", [f"sample.prompts={samplers}", f"sample.sampler={('ddim', 'euler')[number]}"])
        assert weigh.calls == 5 + number


def test_schema_only_looks_at_nothing_else(weigh: Weigh, capsys: pytest.CaptureFixture[str]) -> None:
    check("my.yaml", ["data.path=nowhere"], schema_only=True)
    assert capsys.readouterr().out == worded("check/my-yaml-keys-and-values-are-valid") and weigh.calls == 0
    with pytest.raises(RecipeError):
        check("my.yaml", ["lora.rank=x"], schema_only=True)


def test_missing_folder_has_its_line(weigh: Weigh) -> None:
    with pytest.raises(RecipeError) as caught:
        check("my.yaml", ["data.path=nowhere"])
    assert caught.value.problems[0].where == "--set data.path"


def test_resolutions_and_versions_of_images_are_counted(weigh: Weigh, capsys: pytest.CaptureFixture[str]) -> None:
    check("my.yaml", ["data.resolution=[64, 128]", "data.random_crop=3", "data.color_aug=1"])
    text = capsys.readouterr().out
    assert "images: 10 usable" in text and "resolution 64, " in text and "resolution 128, " in text
    assert says(text, "check/12-versions-of-each-image-are-encoded") and says(text, "check/versions-of-each-image")
    assert says(text, "check/120-images-and")
    check("my.yaml", [])
    assert says(capsys.readouterr().out, "check/2-times-the-time-and-disk-2")
    check("my.yaml", ["data.flip_aug=false"])
    assert not mentions(capsys.readouterr().out, "check/versions-of-each-image"), "the control"


@pytest.mark.parametrize("both", [False, True])
def test_errors_of_data_and_model(weigh: Weigh, tmp_path: Path, both: bool) -> None:
    for path in (tmp_path / "pics").rglob("*.*"):
        path.unlink()
    if both:
        where = "model.name_or_path: model"
        weigh.error = ModelError("not-sdxl", "This is no SDXL model.", where=where, fix="Another one.")
    found = check("my.yaml")
    assert found.data is None and found.error is not None and found.error.exit_code == 2
    assert (found.error.code == "recipe-invalid") == both == (len(found.error.problems) == 2)
    if both:
        assert "no SDXL model" in str(found.error)
        assert found.error.problems[1].where == "my.yaml:1 model.name_or_path: model"


def test_an_error_of_the_model_alone_leaves_what_was_found_of_the_data(weigh: Weigh, capsys: Any) -> None:
    weigh.error = ModelError("not-sdxl", "This is no SDXL model.", where="model.vae: x")
    found = check("my.yaml")
    assert found.error is not None and (found.error.code, found.error.where) == ("not-sdxl", "my.yaml:1 model.vae: x")
    assert found.data is not None and found.data.usable == 5 and found.weight_bytes is None
    said = capsys.readouterr()
    assert "images: 5 usable" in said.out and "together" not in said.out and "valid" not in said.out
    assert said.err == worded("check/this-is-no-sdxl-model-where-my")


def test_a_cache_that_cannot_be_written_stops_nothing(weigh: Weigh, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: object) -> None:
        raise storage_error(OSError(28, "No space left on device"), path)

    monkeypatch.setattr("lora_rocm.foundation.files.write_json", full)
    check("my.yaml")
    check("my.yaml")
    assert weigh.calls == 2


def test_captions_that_will_be_cut_are_said_and_the_tokenizers_remembered(
    weigh: Weigh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weigh.tokenizers = [asdict(letter_limit(9))]
    check("my.yaml")
    said = (
        "  note: 4 captions are longer than the text encoders read, for example sub dir ü/cat 1.png, which loses 'd'."
    )
    assert said in capsys.readouterr().out.splitlines()
    (tmp_path / "pics" / "sub dir ü" / "cat 1.txt").write_text("short", encoding="utf-8")
    check("my.yaml")
    assert "note: 3 captions are longer" in capsys.readouterr().out and weigh.calls == 1
    check("my.yaml", ["data.trigger_word=a long trigger"])
    assert "note: 5 captions are longer" in capsys.readouterr().out and weigh.calls == 1
    for file in (tmp_path / "cache" / "tokenizers").iterdir():
        file.write_text("{}", encoding="utf-8")
    check("my.yaml")
    assert weigh.calls == 2, "a tokenizer that is damaged is asked for again"
    assert "longer than" in capsys.readouterr().out
    weigh.tokenizers = []
    (tmp_path / "model" / "config.json").write_text("{  }", encoding="utf-8")
    check("my.yaml")
    assert "longer than" not in capsys.readouterr().out


def test_crops_and_files_that_are_left_out_are_said(
    weigh: Weigh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (640, 128), (9, 0, 0)).save(tmp_path / "pics" / "wide.png")
    (tmp_path / "pics" / "wide.txt").write_text("x", encoding="utf-8")
    (tmp_path / "pics" / "raw.nef").touch()
    Image.new("RGB", (128, 128), (8, 0, 0)).save(tmp_path / "pics" / "wide-masklabel.png")
    check("my.yaml")
    text = capsys.readouterr().out
    assert says(text, "check/note-1-image-loses-more-than-25")
    assert says(text, "check/note-1-file-is-left-out-raw")
    assert says(text, "check/note-1-mask-is-not-used") and "images: 6 usable" in text


def test_regularisation_images_are_as_many_as_the_others(weigh: Weigh, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(7):
        Path("reg").mkdir(exist_ok=True)
        Image.new("RGB", (128, 128), (0, number, 0)).save(f"reg/{number}.png")
    sources = "data.sources=[{path: pics}, {path: reg, is_reg: true}]"
    check("my.yaml", ["data.path=null", sources])
    said = capsys.readouterr().out
    assert "images: 12 usable" in said and says(said, "check/reg-5-images-resolution-128-for-regularisation")
    assert says(said, "check/2-of-the-regularisation-images-are-not")
    check("my.yaml", ["data.path=null", sources.replace("pics}", "pics, repeats: 3}")])
    assert says(capsys.readouterr().out, "check/for-regularisation-15-in-an-epoch")


def test_all_that_a_recipe_names_and_that_is_missing_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, an image of a preview that does not exist, one that cannot be read, and two packages."""
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "r.yaml").write_text(
        "model: {family: sdxl, name_or_path: 'builtin:tiny-sdxl'}\ntrain: {epochs: 1}\n"
        f"data: {{path: '{(tmp_path / 'none').as_posix()}'}}\n"
        "sample:\n  prompts: [a]\n"
        f"  control_images: ['{(tmp_path / 'gone.png').as_posix()}']\n"
        f"  masks: ['{(tmp_path / 'broken.png').as_posix()}']\n"
        "output: {log_with: [wandb, mlflow]}\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for refused in (lambda: check(str(tmp_path / "r.yaml")), lambda: prepare_run(RunRequest(str(tmp_path / "r.yaml")))):
        with pytest.raises(RecipeError) as caught:
            refused()
        places = [re.sub(r".*r.yaml:\d+ ", "", problem.where).partition(":")[0] for problem in caught.value.problems]
        assert sorted(places) == ["data.path", *["output.log_with"] * 2, "sample.control_images[0]", "sample.masks[0]"]
