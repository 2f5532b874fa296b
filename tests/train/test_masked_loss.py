"""Whole runs with masks: pixels outside teach nothing, and a resume gives the bytes of the undisturbed run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from PIL import Image
from torch import Tensor

from lora_rocm.errors import ResumeError
from lora_rocm.families.objectives.ddpm import DdpmObjective
from lora_rocm.recipe.schema import Recipe
from tests.train.runs import bytes_of, make_recipe, material, rewound, start

__all__ = ["material"]


@pytest.fixture(scope="module")
def masks(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each image the upper half counts."""
    folder = tmp_path_factory.mktemp("masks")
    for path in sorted((material / "images").glob("*.png")):
        with Image.open(path) as image:
            mask = Image.new("L", image.size)
        mask.paste(255, (0, 0, mask.width, mask.height // 2))
        mask.save(folder / path.name)
    return folder


def masked_recipe(material: Path, masks: Path) -> Recipe:
    data = {"mask_path": str(masks), "flip_aug": True}
    train = {"max_train_steps": 2, "gradient_accumulation_steps": 1}
    return make_recipe(material, data=data, train=train, output={"save_every_n_steps": 1})


@pytest.fixture(scope="module")
def straight(material: Path, masks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    assert start(masked_recipe(material, masks), run_dir)
    return run_dir


@pytest.mark.parametrize("half", ["outside", "inside"])
def test_what_lies_outside_the_mask_teaches_nothing(
    material: Path, masks: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: str
) -> None:
    """Another target outside gives the same bytes; inside, the negative control, it gives others."""
    noised = DdpmObjective.noised

    def elsewhere(
        self: DdpmObjective, batch: Mapping[str, Tensor], draws: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        noisy_BCHW, target_BCHW = noised(self, batch, draws)
        middle, moved_BCHW = target_BCHW.shape[2] // 2, target_BCHW.clone()
        moved_BCHW[:, :, slice(middle, None) if half == "outside" else slice(middle)] += 3.0
        return noisy_BCHW, moved_BCHW

    monkeypatch.setattr(DdpmObjective, "noised", elsewhere)
    assert start(masked_recipe(material, masks), tmp_path / "run")
    assert (bytes_of(tmp_path / "run") == bytes_of(straight)) is (half == "outside")


def test_a_run_with_masks_resumes_to_the_byte_and_not_with_other_masks(
    material: Path, masks: Path, straight: Path, tmp_path: Path
) -> None:
    rewound(straight, tmp_path / "run", 1)
    mask = masks / "bild 1.png"
    before = mask.read_bytes()
    Image.new("L", (96, 48), 255).save(mask)
    with pytest.raises(ResumeError) as caught:
        start(masked_recipe(material, masks), tmp_path / "run")
    assert caught.value.code == "resume-data-changed"
    mask.write_bytes(before)
    assert start(masked_recipe(material, masks), tmp_path / "run")
    assert bytes_of(tmp_path / "run") == bytes_of(straight)
