"""The heavy child of ``sample``: sizes that the family takes, and which family a base is of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_rocm.children import model_child
from lora_rocm.children.model_child import export_run, recipe_for, require_inputs_read, require_mask_read, sides_of
from lora_rocm.errors import AdapterError, UserError
from lora_rocm.foundation.files import write_json
from lora_rocm.processes.jobs import ExportJob, SampleJob
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import dump_recipe
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train.checkpoint import save_checkpoint
from tests.families.toy_families import TOYS
from tests.supervisor.fake_run import write_whole_run
from tests.wording import Saying, saying, says

LORA = Path("lora.safetensors")


def recipe(family: str, **model: str) -> Any:
    sections = {
        "model": {"family": family, "name_or_path": "x", **model},
        "data": {"path": "p"},
        "train": {"epochs": 1},
    }
    return recipe_from(sections, TOYS)


def job(**options: Any) -> SampleJob:
    return SampleJob(**{"source": LORA, "output": Path("out"), "prompt": "", "spare_cache": Path("spare"), **options})


def test_sizes_are_as_asked_or_as_in_training() -> None:
    assert sides_of(job(), recipe("sdxl")) == (1024, 1024)
    assert sides_of(job(width=72), recipe("sdxl")) == (72, 1024)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        (
            "sdxl",
            {"width": 65},
            saying("children/multiples-of-8-pixels", "children/width-65", "children/take-64-or-72"),
        ),
        (
            "toy-video",
            {"height": 72},
            saying("children/multiples-of-32-pixels", "children/height-72", "children/take-64-or-96"),
        ),
        ("toy-text", {"height": 64}, saying("children/no-images-are-drawn-by-toy-text", "children/height-64")),
    ],
)
def test_sizes_that_the_family_does_not_take(family: str, options: dict[str, Any], words: Saying) -> None:
    with pytest.raises(UserError) as caught:
        sides_of(job(**options), recipe(family))
    assert words(caught.value)


def test_a_negative_prompt_is_refused_where_none_is_read() -> None:
    require_inputs_read(job(negative_prompt="blue"), recipe("sdxl"))
    require_inputs_read(job(), recipe("flux"))
    with pytest.raises(UserError, check=saying("children/flux-1-reads-no-negative-prompt")):
        require_inputs_read(job(negative_prompt="blue"), recipe("flux"))


def test_a_control_image_is_refused_where_none_is_taken() -> None:
    """Files do not state whether the base takes a control image; outside a run, the variant that takes one is used."""
    asked = job(inputs={"control_image": Path("c.png")}, base="x", family="flux")
    require_inputs_read(asked, recipe("flux", variant="kontext"))
    require_inputs_read(asked, recipe_for(asked, LORA, TOYS))
    for family, words in (
        ("sdxl", "only with --mask, of a base for inp"),
        ("flux", "only with model.variant: kontext"),
    ):
        with pytest.raises(UserError, match=words):
            require_inputs_read(asked, recipe(family))
    asked = job(inputs={"control_image": Path("c.png"), "mask": Path("m.png")})
    require_inputs_read(asked, recipe("sdxl"))
    with pytest.raises(UserError, check=saying("children/flux-1-takes-no-masks")):
        require_inputs_read(asked, recipe("flux", variant="kontext"))
    families: list[Any] = [SimpleNamespace(inpaints=inpaints) for inpaints in (True, False)]
    require_mask_read(asked, families[0])
    require_mask_read(job(), families[1])
    with pytest.raises(UserError, check=saying("children/none-for-inpainting")):
        require_mask_read(asked, families[1])


def test_outside_of_a_run_the_family_is_named_or_recognised(tmp_path: Path) -> None:
    lora = tmp_path / LORA
    assert recipe_for(job(base="builtin:tiny-sdxl"), lora, TOYS).spec.name == "sdxl"
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}', encoding="utf-8")
    assert recipe_for(job(base=str(tmp_path)), lora, TOYS).spec.name == "sdxl"
    asked = recipe_for(job(base=str(tmp_path), family="toy-video"), lora, TOYS)
    assert (asked.spec.name, asked.model.name_or_path) == ("toy-video", str(tmp_path))
    with pytest.raises(UserError, match="not recognised"):
        recipe_for(job(base=str(tmp_path / "nowhere.safetensors")), lora, TOYS)
    with pytest.raises(UserError, check=saying("children/takes-no-folder-of-configs")):
        recipe_for(job(base=str(tmp_path), config="c", family="toy-text"), lora, TOYS)


def test_in_a_run_its_family_counts(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe("toy-video")), encoding="utf-8")
    lora = tmp_path / LORA
    assert recipe_for(job(), lora, TOYS).spec.name == "toy-video"
    assert recipe_for(job(base="other", family="toy-video"), lora, TOYS).model.name_or_path == "other"
    with pytest.raises(AdapterError, match="Toy video"):
        recipe_for(job(base="other", family="sdxl"), lora, TOYS)


def test_a_damaged_file_of_a_run_is_said_with_the_remedy_of_its_run(tmp_path: Path) -> None:
    write_whole_run(run_dir := RunDir(tmp_path / "run"))
    run_dir.lora.write_bytes(b"cut")
    with pytest.raises(AdapterError, match="damaged") as caught:
        model_child.sample(job(source=run_dir.lora))
    assert "lora-rocm export" in caught.value.fix and "Download" not in caught.value.fix


def test_a_sampler_that_the_family_does_not_take_is_refused() -> None:
    require_inputs_read(job(sampler="dpmpp_2m"), recipe("sdxl"))
    for family, words in (("sdxl", "Take euler or "), ("toy-text", "no samplers for Toy text")):
        with pytest.raises(UserError, match=f"(?s){words}"):
            require_inputs_read(job(sampler="magic"), recipe(family))


def test_an_error_that_nobody_foresaw_becomes_an_event(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*types: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(model_child, "job_of", fails)
    assert model_child.main() == 3
    said = capsys.readouterr()
    assert '"internal"' in said.out and says(said.out, "program/error-that-it-does-not-know")
    assert "Traceback" in said.err and "Traceback" not in said.out


def test_an_earlier_step_is_not_exported_among_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last checkpoint of a finished run is gone. Elsewhere, or before the end, the newest one is exported."""

    class Loads(Exception):
        pass

    def load(found: object) -> None:
        raise Loads

    monkeypatch.setattr(model_child, "family_for", load)
    run_dir = RunDir(tmp_path / "run").create()
    run_dir.recipe.write_text(dump_recipe(recipe(TOYS.names[0])), encoding="utf-8")
    save_checkpoint(run_dir, Position(updates=3), {"adapter": {}}, {"metadata": {}})
    asked = ExportJob(source=run_dir.path, format="kohya", spare_cache=tmp_path / "spare")
    with pytest.raises(Loads):
        export_run(asked, TOYS)
    for ended, output, error in ((3, None, Loads), (4, None, UserError), (4, tmp_path / "x.safetensors", Loads)):
        write_json(run_dir.result, {"updates": ended})
        with pytest.raises(error) as caught:
            export_run(replace(asked, output=output), TOYS)
        assert error is Loads or (caught.value.code, caught.value.where[-8:]) == ("result-older", "00000003")
