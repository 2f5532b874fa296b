"""Forks of a run in the page, and images that are never learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lora_rocm.page_parts.texts import t
from lora_rocm.recipe.comparison import fingerprint
from lora_rocm.recipe.fork_keys import why_fixed
from lora_rocm.recipe.fork_values import fork_values
from lora_rocm.recipe.load import dump_recipe, load_recipe
from lora_rocm.rundir.fork_origin import fork_origin
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.sample_losses import LossWriter
from lora_rocm.supervisor.fork import ForkRequest, create_fork
from lora_rocm.ui.launch import Launches
from tests.supervisor.fake_run import RECIPE, write_checkpoint
from tests.ui.site import Site, code_of

ASKED = {"dir": "runs/my-20260101-000000"}


@pytest.fixture
def parent(site: Site) -> RunDir:
    """A run with two checkpoints."""
    run_dir = site.run_dir("my-20260101-000000").create()
    run_dir.recipe.write_text(RECIPE, encoding="utf-8")
    run_dir.recipe.write_text(dump_recipe(load_recipe(run_dir.recipe).recipe), encoding="utf-8")
    for updates in (20, 30):
        write_checkpoint(run_dir, updates, recipe=fingerprint(load_recipe(run_dir.recipe).recipe))
    return run_dir


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[RunDir]:
    """The runs that were to be trained; none is."""
    found: list[RunDir] = []
    monkeypatch.setattr(Launches, "resume", lambda self, run_dir, working: found.append(run_dir))
    return found


def test_every_key_that_may_change_is_there_and_no_other(parent: RunDir) -> None:
    values = fork_values(load_recipe(parent.recipe).recipe)
    assert "optim.learning_rate" in values.fields and "timeouts.step" in values.fields
    assert not [key for key in values.fields if why_fixed(key)] and "lora.rank" not in values.fields
    assert values.overrides({}) == [] and values.overrides({key: f.value for key, f in values.fields.items()}) == []
    asked = {"optim.learning_rate": "5e-5", "sample.prompts": "one\r\ntwo: 3", "lora.rank": "7", "output.author": ""}
    overrides = values.overrides(asked)
    made = load_recipe(parent.recipe, overrides).recipe
    assert len(overrides) == 3 and made.optim.learning_rate == 5e-5 and made.sample.prompts == ("one", "two: 3")


def test_a_fork_continues_from_the_chosen_step_with_the_changed_value(
    site: Site, parent: RunDir, resumed: list[RunDir]
) -> None:
    text = site.get("/runs/fork", **ASKED)
    assert text.index("<option>30") < text.index("<option>20") and 'name="optim.learning_rate"' in text
    assert "<code>model</code>" in text
    data = {"step": "20", "optim.learning_rate": "5e-5"}
    answer = site.client.post("/runs/forks", params=ASKED, data=data, headers={"hx-request": "true"})
    assert answer.status_code == 200 and len(resumed) == 1
    fork, origin = resumed[0], fork_origin(resumed[0])
    assert fork.path.name in answer.headers["hx-redirect"] and origin is not None
    assert origin.step == 20 and [each.key for each in origin.differences] == ["optim.learning_rate"]
    name = f"runs/{fork.path.name}"
    page = site.get("/runs/view", dir=name)
    assert 'data-fork-step="20"' in page and f'data-parent="{ASKED["dir"]}"' in page
    family = site.get("/runs/family", dir=name)
    assert t("fork.gloss") in family and t("fork.gloss") in site.get("/runs/family", **ASKED)
    assert "optim.learning_rate" in family and "5e-05" in family and ASKED["dir"].split("/")[1] in family
    assert fork.path.name in site.get("/runs/family", **ASKED) and 'data-checkpoints="20,30"' in site.get(
        "/runs/view", **ASKED
    )


def test_a_fork_that_cannot_be_is_refused_and_creates_nothing(
    site: Site, parent: RunDir, resumed: list[RunDir]
) -> None:
    before = sorted(parent.path.parent.iterdir())
    for data, code in (
        ({"step": "20", "set": "lora.rank=7"}, "fork-keys-fixed"),
        ({"step": "25"}, "fork-no-checkpoint"),
        ({"step": "x"}, "field-missing"),
        ({}, "field-missing"),
        ({"step": "20", "optim.learning_rate": "much"}, ""),
    ):
        answer = site.client.post("/runs/forks", params=ASKED, data=data, headers={"hx-request": "true"})
        assert answer.status_code >= 400 and (not code or code_of(answer.text) == code), data
    refusal = site.client.post("/runs/forks", params=ASKED, data={"step": "20", "set": "lora.rank=7"})
    assert why_fixed("lora.rank") in refusal.text
    assert sorted(parent.path.parent.iterdir()) == before and not resumed


def test_a_fork_of_a_parent_that_is_gone_or_elsewhere_has_no_link(site: Site, parent: RunDir, tmp_path: Path) -> None:
    made = create_fork(ForkRequest(parent.path)).run_dir
    parent.path.rename(tmp_path / "moved")
    text = site.get("/runs/family", dir=f"runs/{made.path.name}")
    assert "href" not in text and parent.path.name in text
    assert "data-parent" not in site.get("/runs/view", dir=f"runs/{made.path.name}")
    made.fork.write_text('{"run": "../../../../../etc", "step": 1, "differences": {}}', encoding="utf-8")
    assert "href" not in site.get("/runs/family", dir=f"runs/{made.path.name}")


def test_a_curve_ends_at_the_fork(site: Site) -> None:
    site.run()
    asked = {"dir": "runs/a-run", "field": "loss"}
    whole = site.client.get("/runs/curve", params=asked).content
    cut = site.client.get("/runs/curve", params=asked | {"until": "20"}).content
    assert 0 < len(cut) < len(whole)
    assert np.frombuffer(cut, "<f4")[: len(cut) // 8].max() <= 20
    assert site.client.get("/runs/curve", params=asked | {"until": ""}).content == whole


def with_losses(run_dir: RunDir, names: list[str], bad: str) -> None:
    writer = LossWriter(run_dir.losses(0), 0, lambda text: None)
    writer.begin()
    random = np.random.default_rng(0)
    for updates in range(1, 61):
        losses = [(5.0 if name == bad else 1.0) * float(random.uniform(0.9, 1.1)) for name in names]
        writer.record(updates, names, [float(random.uniform()) for _ in names], losses)
    writer.close()


def test_images_that_are_never_learned_have_thumbnails_and_hints(site: Site, tmp_path: Path) -> None:
    pictures = site.folder / "pictures"
    pictures.mkdir()
    names = [f"{number}.png" for number in range(12)]
    for number, name in enumerate(names):
        Image.new("RGB", (32, 32), (number * 20, 0, 0)).save(pictures / name)
        (pictures / name).with_suffix(".txt").write_text("" if number == 3 else "a caption", encoding="utf-8")
    run_dir = site.run()
    assert t("images_losses.too_few") in site.get("/runs/images", dir="runs/a-run")
    text = RECIPE.replace('"builtin:demo"', f"'{pictures}'")
    run_dir.recipe.write_text(text, encoding="utf-8")
    with_losses(run_dir, names, "3.png")
    text = site.get("/runs/images", dir="runs/a-run")
    assert "3.png" in text and "4.png" not in text and t("images_losses.no_hint") not in text
    answer = site.client.get("/runs/image", params={"dir": "runs/a-run", "file": "3.png"})
    assert answer.headers["content-type"] == "image/jpeg"
    for file in ("../r.png", "/etc/passwd", "3.txt", "none.png"):
        assert site.client.get("/runs/image", params={"dir": "runs/a-run", "file": file}).status_code >= 400, file
    # a run from elsewhere names a folder that the user did not name: no image of it is shown
    outside = tmp_path / "outside"
    pictures.rename(outside)
    run_dir.recipe.write_text(RECIPE.replace('"builtin:demo"', f"'{outside}'"), encoding="utf-8")
    text = site.get("/runs/images", dir="runs/a-run")
    assert "3.png" in text and "<img" not in text
    answer = site.client.get("/runs/image", params={"dir": "runs/a-run", "file": "3.png"})
    assert code_of(answer.text) == "outside-folders"
