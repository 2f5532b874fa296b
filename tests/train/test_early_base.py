"""The base is read while samples are encoded where there is a GPU, and main memory for both."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_rocm.base_models import loading
from lora_rocm.families.base import family_for
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.train import early_base
from lora_rocm.train.dry_run import MetaPlacement
from lora_rocm.train.usable import component_bytes, trained_components
from tests.tiny_flux import write_tiny_flux
from tests.tiny_models import SHALLOW, write_tiny_sdxl

ROOM, CUDA, SHARED, CPU = 64 * 2**30, torch.device("cuda"), torch.device("cuda:1"), torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sdxl(tmp_path_factory.mktemp("model"), **SHALLOW)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with a GPU, on which every component that is read is listed: by its folder, in order."""
    found, read_hashed, digest = list[str](), loading.read_hashed, loading.digest

    def reading(headers: Any, *arguments: Any) -> str:
        found.append(headers[0].path.parent.name)
        return read_hashed(headers, *arguments)

    def hashing(headers: Any, *arguments: Any) -> str:
        found.append(f"{headers[0].path.parent.name} alone")
        return digest(headers, *arguments)

    monkeypatch.setattr(loading, "read_hashed", reading)
    monkeypatch.setattr(loading, "digest", hashing)
    properties = {CUDA: SimpleNamespace(is_integrated=False), SHARED: SimpleNamespace(is_integrated=True)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device])
    monkeypatch.setattr(early_base, "free_main_bytes", lambda: ROOM)
    monkeypatch.setattr(early_base, "core_count", lambda: 8)
    return found


def start_of(recipe: Recipe, device: torch.device = CUDA, rank: int = 0) -> Any:
    session, world = SimpleNamespace(at_close=ExitStack()), SimpleNamespace(size=1 + rank, is_first=not rank)
    return SimpleNamespace(recipe=recipe, device=device, dtype=torch.bfloat16, session=session, world=world)


def recipe_of(family: str, name: str, cache: Path) -> Recipe:
    model, cached = {"family": family, "name_or_path": name}, {"dir": str(cache)}
    return recipe_from({"model": model, "data": {"path": "."}, "train": {"max_train_steps": 1}, "cache": cached})


@pytest.mark.parametrize(
    ("device", "room", "cores", "read"),
    [(CUDA, ROOM, 8, 1), (CPU, ROOM, 8, 0), (SHARED, ROOM, 8, 0), (CUDA, 2**30, 8, 0), (CUDA, ROOM, 2, 0)],
    ids=["all", "no GPU", "shared memory", "no memory", "few cores"],
)
def test_the_base_is_read_early_where_that_helps(
    model: Path,
    tmp_path: Path,
    reads: list[str],
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    room: int,
    cores: int,
    read: int,
) -> None:
    monkeypatch.setattr(early_base, "free_main_bytes", lambda: room)
    monkeypatch.setattr(early_base, "core_count", lambda: cores)
    recipe = recipe_of("sdxl", str(model), tmp_path)
    start, family = start_of(recipe, device), family_for(recipe)
    early_base.read_base_early(start, family)()
    loaded = family.load(torch.bfloat16, CPU)
    start.session.at_close.close()
    assert reads.count("unet") == 1
    family.load(torch.bfloat16, CPU)  # the control: it was taken once
    assert (reads.count("unet"), list(loaded.components)) == (2, ["unet"])
    reads.clear()
    early_base.read_base_early(start, again := family_for(recipe))()
    assert again.base_facts()["identity"]
    start.session.at_close.close()
    assert any(name.endswith("alone") for name in reads) is not bool(read)


@pytest.mark.parametrize(
    ("family", "name"), [("sdxl", "builtin:tiny-sdxl"), ("z-image", "builtin:tiny-z-image"), ("flux", "")]
)
def test_a_first_start_reads_each_component_once(family: str, name: str, reads: list[str], tmp_path: Path) -> None:
    """Those that encode come first. The control asks for the digests without them, and reads them twice."""
    base, found = name or str(write_tiny_flux(tmp_path / "model")), list[Counter[str]]()
    for reads_early in (False, True):
        recipe = recipe_of(family, base, tmp_path / f"cache {reads_early}")
        start, used = start_of(recipe), family_for(recipe)
        reads.clear()
        if reads_early:
            early_base.read_base_early(start, used)()
        for encoder in used.encoders():
            assert encoder.fingerprint
        for encoder in used.encoders():
            encoder.load(MetaPlacement())
        early_base.keep_trained(start, used)
        used.load(torch.bfloat16, CPU)
        found.append(Counter(reads))
        start.session.at_close.close()
    plain, early = found
    trained = trained_components(used, recipe)
    assert early == Counter(used.all_components) and reads[-1] in trained
    assert plain - early == Counter(f"{name} alone" for name in used.all_components if name not in trained)


def test_what_encodes_is_read_where_there_is_no_room_for_all(
    model: Path, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_for(recipe_of("sdxl", str(model), tmp_path / "no cache"))
    skeletons = {name: family.skeleton(name) for name in family.all_components}
    num_bytes = component_bytes(family, family.recipe, skeletons, torch.bfloat16)
    all_bytes, alone = early_base.SPARE_BYTES + sum(num_bytes.values()), list[set[str]]()
    for room in (all_bytes, all_bytes - 1, all_bytes - num_bytes["unet"] - 1):
        monkeypatch.setattr(early_base, "free_main_bytes", lambda room=room: room)
        recipe = recipe_of("sdxl", str(model), tmp_path / str(room))
        start, used = start_of(recipe), family_for(recipe)
        reads.clear()
        early_base.read_base_early(start, used)()
        assert all(used.source.fingerprint(name) for name in num_bytes)
        alone.append({name.partition(" ")[0] for name in reads if name.endswith("alone")})
        start.session.at_close.close()
    assert alone == [set(), {"unet"}, {*num_bytes}]


def test_trained_components_are_read_after_the_base_s_check(model: Path, tmp_path: Path, reads: list[str]) -> None:
    """Threads that pack them would take Python's lock from it."""
    recipe = recipe_of("sdxl", str(model), tmp_path)
    start, family = start_of(recipe), family_for(recipe)
    go_on = early_base.read_base_early(start, family)
    for encoder in family.encoders():
        encoder.load(MetaPlacement())
    assert reads and "unet" not in reads
    go_on()
    family.load(torch.bfloat16, CPU)
    assert reads.count("unet") == 1
    start.session.at_close.close()


def test_only_the_first_rank_reads_what_encodes(model: Path, tmp_path: Path, reads: list[str]) -> None:
    recipe = recipe_of("sdxl", str(model), tmp_path)
    second = start_of(recipe, rank=1)
    early_base.read_base_early(second, family_for(recipe))()
    second.session.at_close.close()
    assert {*reads} <= {"unet"}


def test_what_encodes_is_dropped_where_nobody_loads_it(model: Path, tmp_path: Path, reads: list[str]) -> None:
    recipe = recipe_of("sdxl", str(model), tmp_path)
    start, family = start_of(recipe), family_for(recipe)
    early_base.read_base_early(start, family)()
    early_base.keep_trained(start, family)
    reads.clear()
    family.load(torch.bfloat16, CPU)
    assert reads in ([], ["unet"])  # it was under way, or had not begun
    assert family.encoders()[0].load(MetaPlacement()) is not None and "vae" in reads
    start.session.at_close.close()
