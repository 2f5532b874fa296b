"""The loss of each image in the part Images: the order, the choice of images that are never learned, and the editor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lora_rocm.page_parts.texts import t
from lora_rocm.recipe.load import load_recipe
from lora_rocm.report.image_losses import LEAST_VISITS
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.sample_losses import LossWriter, SampleLosses
from lora_rocm.ui.image_set.folder_losses import named_in
from tests.supervisor.fake_run import RECIPE
from tests.ui.site import Site

NAMES = [f"{number:02d}.png" for number in range(12)]
BAD = "03.png"


def write_images(folder: Path) -> Path:
    """Twelve images; the last one is never trained."""
    folder.mkdir(parents=True)
    for number, name in enumerate(NAMES):
        Image.new("RGB", (32, 32), (number * 20, 0, 0)).save(folder / name)
        (folder / name).with_suffix(".txt").write_text("" if name == BAD else "a caption", encoding="utf-8")
    return folder


def trained(run_dir: RunDir, folder: Path, visits: int = 60, bad: str = BAD) -> RunDir:
    """Let a run record losses for all images of the folder but the last one."""
    run_dir.recipe.write_text(RECIPE.replace('"builtin:demo"', f"'{folder}'"), encoding="utf-8")
    writer = LossWriter(run_dir.losses(0), 0, pytest.fail)
    writer.begin()
    random = np.random.default_rng(0)
    for updates in range(1, visits + 1):
        losses = [(5.0 if name == bad else 1.0) * float(random.uniform(0.9, 1.1)) for name in NAMES[:-1]]
        writer.record(updates, NAMES[:-1], [float(random.uniform()) for _ in losses], losses)
    writer.close()
    return run_dir


def names(site: Site, **query: object) -> list[str]:
    answer = site.client.get("/images/items", params={"dir": "pictures", **query})
    assert answer.status_code == 200, answer.text
    return [row[0] for row in answer.json()["rows"]]


def test_the_grid_is_ordered_by_loss_and_shows_what_is_never_learned(site: Site) -> None:
    trained(site.run(), write_images(site.folder / "pictures"))
    assert names(site, only="never") == [BAD]
    by_loss = names(site, sort="loss")
    assert by_loss[0] == BAD and by_loss[-1] == NAMES[-1] and sorted(by_loss) == NAMES
    assert names(site, only="never", text="caption") == []


def test_the_editor_shows_the_curve_and_the_causes(site: Site) -> None:
    trained(site.run(), write_images(site.folder / "pictures"))
    text = site.get("/images/loss", dir="pictures", name=BAD)
    assert "<still-chart" in text and t("images_losses.is_outlier") in text and t("images_losses.no_hint") not in text
    assert "60 visits" in text and "a-run" in text
    other = site.get("/images/loss", dir="pictures", name=NAMES[0])
    assert "<still-chart" in other and t("images_losses.is_outlier") not in other
    untrained = site.get("/images/loss", dir="pictures", name=NAMES[-1])
    assert "<still-chart" not in untrained and t("images_losses.few_visits", visits=0, least=LEAST_VISITS) in untrained


def test_nothing_is_judged_by_few_visits(site: Site) -> None:
    trained(site.run(), write_images(site.folder / "pictures"), visits=LEAST_VISITS - 1)
    assert names(site, only="never") == [] and names(site, sort="loss") == NAMES
    text = site.get("/images/loss", dir="pictures", name=BAD)
    assert t("images_losses.few_visits", visits=LEAST_VISITS - 1, least=LEAST_VISITS) in text


def test_without_a_run_the_page_says_so(site: Site) -> None:
    write_images(site.folder / "pictures")
    site.run()  # it trained another folder
    answer = site.client.get("/images/items", params={"dir": "pictures", "only": "never"}).json()
    assert answer["rows"] == [] and answer["note"] == t("images_losses.no_run")
    assert site.get("/images/loss-runs", dir="pictures").strip() == ""
    assert site.get("/images/loss", dir="pictures", name=BAD).strip() == ""
    assert "note" not in site.client.get("/images/items", params={"dir": "pictures"}).json()


def test_another_run_is_chosen_and_new_losses_are_seen(site: Site) -> None:
    folder = write_images(site.folder / "pictures")
    first = trained(site.run("first"), folder)
    second = trained(site.run("second"), folder, bad="05.png")
    listed = site.get("/images/loss-runs", dir="pictures")
    assert listed.count("<option") == 2
    assert names(site, only="never", run="runs/first") == [BAD]
    assert names(site, only="never", run="runs/second") == ["05.png"]
    assert names(site, only="never", run="runs/none") == names(site, only="never", run="../../etc") == []
    trained(first, folder, bad="06.png")
    assert names(site, only="never", run="runs/first") == ["06.png"]
    second.losses(0).unlink()
    assert site.get("/images/loss-runs", dir="pictures").count("<option") == 1


def test_a_change_applies_to_the_images_that_are_never_learned(site: Site) -> None:
    folder = write_images(site.folder / "pictures")
    trained(site.run(), folder)
    given = {"kind": "append", "find": "new", "scope": "shown", "only": "never"}
    text = site.client.post("/images/preview", params={"dir": "pictures"}, data=given).text
    assert BAD in text and not [name for name in NAMES if name != BAD and name in text]


def test_names_of_runs_with_several_sources_and_resolutions(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    sources = f"data: {{sources: [{{path: '{tmp_path}/a'}}, {{path: '{tmp_path}/b', resolution: [512, 768]}}]}}"
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace('data: {path: "builtin:demo", trigger_word: zibu}', sources), encoding="utf-8")
    of_b = "sources[1]/"
    recorded = ("sources[0]/1.png", f"{of_b}512 px/1.png", f"{of_b}768 px/1.png", f"{of_b}512 px/512 px/2.png")
    column = np.arange(4)
    losses = SampleLosses(recorded, column, column, column / 4, column + 1.0)
    found = named_in(load_recipe(path).recipe, (tmp_path / "b").resolve(), losses)
    assert found.names == ("sources[0]/1.png", "1.png", "512 px/2.png") and found.sample.tolist() == [0, 1, 1, 2]
