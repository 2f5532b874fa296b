"""Images that are never learned: found among others at their noise levels, and nothing by chance."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from lora_rocm.report import image_losses
from lora_rocm.report.image_hints import with_hints
from lora_rocm.report.image_losses import LEAST_VISITS, ImageLoss, RelativeLosses, images_section
from lora_rocm.report.report import write_report
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.sample_losses import LossWriter, SampleLosses
from tests.supervisor.fake_run import write_whole_run

IMAGES = 30


def simulated(visits: int = 40, factors: dict[int, tuple[float, float]] | None = None, seed: int = 5) -> SampleLosses:
    """A run in which the loss falls by two decades with the noise level. factors: (early, late) of an image."""
    rng = np.random.default_rng(seed)
    sample = np.concatenate([rng.permutation(IMAGES) for _ in range(visits)])
    updates = np.arange(len(sample)) + 1
    position = rng.random(len(sample))
    own = np.exp(rng.normal(0, 0.1, IMAGES))
    loss = np.exp(-4.6 * position) * own[sample] * np.exp(rng.normal(0, 0.3, len(sample)))
    for image, (early, late) in (factors or {}).items():
        is_late = updates > len(updates) // 2
        loss[sample == image] *= np.where(is_late, late, early)[sample == image]
    return SampleLosses(tuple(f"{number}.png" for number in range(IMAGES)), updates, sample, position, loss)


def judged(losses: SampleLosses) -> list[ImageLoss]:
    return image_losses.judged(RelativeLosses.of(losses))


def only(losses: SampleLosses, rows: NDArray[np.bool_]) -> SampleLosses:
    """The losses in these rows."""
    columns = (losses.updates[rows], losses.sample[rows], losses.position[rows], losses.loss[rows])
    return SampleLosses(losses.names, *columns)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_stands_out_in_a_healthy_run(seed: int) -> None:
    found = judged(simulated(seed=seed))
    assert len(found) == IMAGES and not any(each.is_outlier for each in found)
    assert all(0.6 < each.ratio < 1.6 for each in found)


@pytest.mark.parametrize("seed", range(4))
def test_an_image_that_is_never_learned_is_found(seed: int) -> None:
    first, *others = judged(simulated(factors={7: (3.5, 3.5)}, seed=seed))
    assert (first.name, first.is_outlier) == ("7.png", True) and first.z > 4 and 2.0 < first.late_ratio < 4.5
    assert not any(each.is_outlier for each in others)


def test_an_image_that_is_learned_late_is_not_listed() -> None:
    found = judged(simulated(factors={7: (4.0, 1.0)}))
    assert not any(each.is_outlier for each in found)
    assert next(each for each in found if each.name == "7.png").late_ratio < 1.6


def test_an_image_that_drew_only_low_noise_levels_is_compared_with_these() -> None:
    """Its mean loss is many times the others', because losses are high there."""
    losses = simulated(visits=90)
    low = (losses.sample != 7) | (losses.position < 0.3)
    fewer = only(losses, low)
    kept = fewer.sample == 7
    assert fewer.loss[kept].mean() > 2 * fewer.loss[~kept].mean() and kept.sum() < 40
    (own,) = (
        (each for each in judged(replace(fewer)) if each.name == "7.png") if kept.sum() >= LEAST_VISITS else (None,)
    )
    assert own is None or (not own.is_outlier and own.ratio < 1.6)


def test_nothing_is_reported_of_few_visits_or_few_images() -> None:
    assert judged(simulated(visits=LEAST_VISITS - 1)) == []
    losses = simulated(factors={7: (9.0, 9.0)})
    rare = (losses.sample != 7) | (losses.updates % 3 == 0)
    some = SampleLosses(
        losses.names, losses.updates[rare], losses.sample[rare], losses.position[rare], losses.loss[rare]
    )
    names = [each.name for each in judged(some)]
    assert "7.png" not in names and len(names) == IMAGES - 1
    few = losses.sample < 5
    fewer = only(losses, few)
    assert judged(fewer) == []
    empty = np.empty(0)
    assert judged(SampleLosses((), empty.astype(int), empty.astype(int), empty, empty)) == []


def test_equal_images_and_losses_of_zero_make_no_outlier() -> None:
    losses = simulated()
    same = replace(losses, loss=np.where(losses.updates % 5 == 0, 0.0, np.exp(-losses.position)))
    assert not any(each.is_outlier for each in judged(same))


def outlier(name: str) -> ImageLoss:
    return ImageLoss(name, 40, 3.0, 3.0, 9.0, True)


def test_hints_come_from_the_files(tmp_path: Path) -> None:
    for name, content in (("a.png", b"one"), ("b.png", b"one"), ("c.png", b"two"), ("d.png", b"four")):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "c.caption").write_text(" \n", encoding="utf-8")
    (tmp_path / "d.txt").write_text("a cat", encoding="utf-8")
    usual = replace(outlier("b.png"), is_outlier=False)
    images = [outlier("a.png"), usual, outlier("c.png"), outlier("d.png"), outlier("gone.png"), outlier("../x.png")]
    (tmp_path.parent / "x.png").write_bytes(b"one")
    found = {each.name: each.hints for each in with_hints(images, tmp_path, (".txt", ".caption"))}
    assert "b.png" in found["a.png"][0] and len(found["c.png"]) == 1 and found["c.png"] != found["a.png"]
    assert all(found[name] == () for name in ("b.png", "d.png", "gone.png", "../x.png"))


def test_a_blurred_image_is_less_sharp_than_the_others(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    images = [replace(outlier(f"{number}.png"), is_outlier=number in (0, 1)) for number in range(8)]
    for number, each in enumerate(images):
        noise = Image.fromarray(rng.integers(0, 256, (96, 128, 3), np.uint8))
        (noise.filter(ImageFilter.GaussianBlur(4)) if number == 0 else noise).save(tmp_path / each.name)
    hints = [each.hints for each in with_hints(images, tmp_path, (".txt",))]
    assert len(hints[0]) == 1 and all(each == () for each in hints[1:])


def test_hostile_places_of_images_are_not_read(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("no pipes")
    os.mkfifo(tmp_path / "pipe.png")
    os.symlink("/etc/passwd", tmp_path / "link.png")
    names = ("pipe.png", "link.png", "a\0b", "/etc/passwd")
    assert all(each.hints == () for each in with_hints([outlier(name) for name in names], tmp_path, (".txt",)))


def test_the_report_lists_them(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    assert "never learned" not in write_report(run_dir).read_text(encoding="utf-8")
    losses = simulated(factors={7: (3.0, 3.0)})
    writer = LossWriter(run_dir.losses(), 0, lambda text: None)
    writer.begin()
    names = [name.replace("7", "<b>7</b>") for name in losses.names]
    for row in range(len(losses.loss)):
        writer.record(row + 1, [names[losses.sample[row]]], [losses.position[row]], [losses.loss[row]])
    writer.close()
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "&lt;b&gt;7&lt;/b&gt;.png" in page and "<b>7</b>" not in page and ">3.png" not in page
    assert images_section([]) is None and images_section([replace(outlier("a"), is_outlier=False)]) is not None


@pytest.mark.parametrize("is_damaged", [True, False])
def test_the_report_names_damaged_losses(tmp_path: Path, is_damaged: bool) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    writer = LossWriter(run_dir.losses(0), 0, pytest.fail)
    writer.begin()
    for updates in range(1, 41):
        writer.record(updates, ["a.png"], [0.5], [1.0])
    writer.close()
    if is_damaged:
        content = bytearray(run_dir.losses(0).read_bytes())
        content[len(content) // 2] ^= 1
        run_dir.losses(0).write_bytes(content)
    html = write_report(run_dir).read_text(encoding="utf-8")
    assert ("losses.rank0.bin" in html) == is_damaged
