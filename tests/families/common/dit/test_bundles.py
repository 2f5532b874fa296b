"""Single files that hold several components, as ComfyUI saves them: "all in one" checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.commands.inspect_file import inspect_text
from lora_rocm.errors import ModelError
from lora_rocm.export.safetensors_writer import header_of
from lora_rocm.families.flux import family as flux
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.fake_encoders import image
from tests.families.common.dit.cases import CPU, Anima, Case, Flux, ZImage, with_configs
from tests.judging import inspect
from tests.train.runs import start

CLIP, T5 = "text_encoders.clip_l.", "text_encoders.t5xxl."
QWEN_4B, QWEN_06B = "text_encoders.qwen3_4b.", "text_encoders.qwen3_06b."
TEXT: dict[type[Case], dict[str, str]] = {
    ZImage: {"text_encoder": QWEN_4B},
    Flux: {"text_encoder": CLIP, "text_encoder_2": T5},
    Anima: {"text_encoder": QWEN_06B},
}
"""Family -> key of ``model`` -> what ComfyUI writes before the tensors of a text encoder."""
Files = dict[str, dict[str, Tensor]]
"""Key of ``model`` -> the tensors of its file."""


def of(*quick: type[Case]) -> pytest.MarkDecorator:
    """All families; the given ones are quick."""
    marks = {kind: () if kind in quick else pytest.mark.slow for kind in TEXT}
    kinds = [pytest.param(kind, marks=mark, id=kind.__name__) for kind, mark in marks.items()]
    return pytest.mark.parametrize("case", kinds, indirect=True)


def prefixes(case: Case) -> dict[str, str]:
    """Key of ``model`` -> the prefix of its tensors in a bundle."""
    text = {key: f"{start}transformer." for key, start in TEXT[type(case)].items()}
    return {"name_or_path": "model.diffusion_model.", "vae": "vae.", **text}


def files_of(case: Case) -> Files:
    return {key: {name: t.contiguous() for name, t in tensors.items()} for key, tensors in case.files().items()}


def split(files: Mapping[str, Mapping[str, Tensor]], folder: Path) -> dict[str, str]:
    """Write a file for each key of ``model``."""
    for key, tensors in files.items():
        save_file(dict(tensors), folder / f"{key}.safetensors")
    return {key: str(folder / f"{key}.safetensors") for key in files}


def bundle(case: Case, files: Mapping[str, Mapping[str, Tensor]], path: Path) -> str:
    """Write all in one file, with ComfyUI's number that is next to each text encoder."""
    together = {prefixes(case)[key] + name: t.clone() for key, found in files.items() for name, t in found.items()}
    for encoder in TEXT[type(case)].values():
        together[f"{encoder}logit_scale"] = torch.ones(())
    save_file(together, path)
    return str(path)


def family_of(case: Case, model: Mapping[str, str], **sections: Any) -> Any:
    tokenizers = {name: str(case.folder / name) for name in case.tokenizers}
    family = case.family({**model, **tokenizers}, **sections)
    family.layout = with_configs(family.layout, case.folder)
    return family


def require_same(found: Any, wanted: Any, names: Iterable[str]) -> None:
    for name in names:
        tensors, others = (family.source.load(name, torch.float32, CPU).state_dict() for family in (found, wanted))
        assert tensors.keys() == others.keys() and all(torch.equal(t, others[key]) for key, t in tensors.items()), name


def refused(family: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _ = family.source
    return caught.value


@of(Flux)
def test_a_bundle_is_read_as_its_files_are(case: Case, tmp_path: Path) -> None:
    """Alone, or as the file of any of its components."""
    files = files_of(case)
    paths, path = split(files, tmp_path), bundle(case, files, tmp_path / "bundle.safetensors")
    wanted, found = family_of(case, paths), family_of(case, {"name_or_path": path})
    require_same(found, wanted, case.layout.parts)
    assert found.notices == () and Path(path) in found.examine()
    others = {key: path for key in paths if key != "name_or_path"}
    mixed = family_of(case, {**paths, **others})
    assert mixed.notices == ()
    for name in case.layout.parts:
        (header,), prefix = mixed.source.weights(name)
        assert (header.path == Path(path)) is (name in others)
        assert name not in others or prefix == prefixes(case)[name]


@of(ZImage)
def test_only_what_belongs_to_a_component_is_its_identity(case: Case, tmp_path: Path) -> None:
    """Otherwise each edition of a bundle would have its own caches."""
    files = files_of(case)
    other = {**files, "vae": {name: tensor + 1 for name, tensor in files["vae"].items()}}
    paths = [bundle(case, each, tmp_path / f"{number}.safetensors") for number, each in enumerate((files, other))]
    one, two = (family_of(case, {"name_or_path": path}).source for path in paths)
    changed = {name for name in one.layout.parts if one.fingerprint(name) != two.fingerprint(name)}
    assert changed == {"vae"}


@of(Flux)
def test_what_a_bundle_lacks_is_asked_for_by_its_key(case: Case, tmp_path: Path) -> None:
    """And ``inspect`` does not name it either."""
    files = files_of(case)
    paths, path = split(files, tmp_path), tmp_path / "bundle.safetensors"
    for missing in files.keys() - {"name_or_path"}:
        bundle(case, {key: tensors for key, tensors in files.items() if key != missing}, path)
        error = refused(family_of(case, {"name_or_path": str(path)}))
        assert error.code == "incomplete-model" and error.fix.startswith(f"Set model.{missing} too")
        assert prefixes(case)[missing] not in inspect(path)["components"]
        family = family_of(case, {"name_or_path": str(path), missing: paths[missing]})
        assert family.notices == () and Path(paths[missing]) in family.examine()
    bundle(case, files, path)
    found = inspect(path)
    assert found["families"] == [case.name] and set(prefixes(case).values()) <= set(found["components"])


@of()
def test_a_vae_with_the_names_of_diffusers_is_read_in_a_bundle(case: Case, tmp_path: Path) -> None:
    files = files_of(case)
    vae = {name: tensor.contiguous() for name, tensor in case.pipeline.vae.state_dict().items()}
    path = bundle(case, {**files, "vae": vae}, tmp_path / "bundle.safetensors")
    require_same(family_of(case, {"name_or_path": path}), family_of(case, split(files, tmp_path)), ["vae"])


def scaled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """ComfyUI's scaled fp8."""
    found = {**tensors, "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.ndim == 2 and "embed" not in name and "shared" not in name:
            factor = tensor.abs().max().clamp(min=1e-6) / 448
            found[name] = (tensor / factor).to(torch.float8_e4m3fn)
            found[f"{name.removesuffix('weight')}scale_weight"] = factor
    return found


@of(ZImage)
def test_scaled_text_encoders_are_read_in_a_bundle_as_alone(case: Case, tmp_path: Path) -> None:
    """The dense ones have other numbers: the control."""
    dense = files_of(case)
    files = {key: scaled(tensors) if key in TEXT[type(case)] else tensors for key, tensors in dense.items()}
    found = family_of(case, {"name_or_path": bundle(case, files, tmp_path / "bundle.safetensors")})
    require_same(found, family_of(case, split(files, tmp_path)), TEXT[type(case)])
    (notice, *_) = found.notices
    assert "scaled fp8" in notice
    with pytest.raises(AssertionError, match="text_encoder"):
        require_same(found, family_of(case, split(dense, tmp_path)), TEXT[type(case)])


@of(ZImage)
def test_a_bundle_trains_as_its_files_do(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit."""
    owner, name = (flux, "LAYOUT") if isinstance(case, Flux) else (case.cls, "layout")
    monkeypatch.setattr(owner, name, with_configs(case.layout, case.folder))
    for number, caption in enumerate(("a cat", "a dog")):
        image(tmp_path / "data" / f"{number}.png", 64, 64, seed=number, caption=caption)

    def trained(name: str, model: Mapping[str, str]) -> tuple[list[float], dict[str, Tensor]]:
        family = family_of(
            case,
            model,
            data={"path": str(tmp_path / "data")},
            lora={"rank": 2, "targets": "attention"},
            train={"max_train_steps": 2, "batch_size": 2},
            runtime={"deterministic": True},
        )
        run_dir = RunDir(tmp_path / name)
        assert start(family.recipe, run_dir.path)
        return [event["loss"] for event in read_events(run_dir.events(), "step")], load_file(run_dir.lora)

    files = files_of(case)
    losses, lora = trained("files", split(files, tmp_path))
    found, same = trained("bundle", {"name_or_path": bundle(case, files, tmp_path / "bundle.safetensors")})
    assert found == losses and len(set(losses)) == 2 and lora.keys() == same.keys()
    assert all(torch.equal(tensor, same[name]) for name, tensor in lora.items())


def test_a_file_that_lacks_components_is_promised_with_the_keys_that_it_needs(tmp_path: Path) -> None:
    """Of the size of its published config, which takes no disk: its header alone is read."""
    published = ZImage.layout
    skeleton = BaseSource("published", published, published.configs, None).skeleton("transformer")
    tensors = {name: tensor.to("meta", torch.bfloat16) for name, tensor in skeleton.state_dict().items()}
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(header_of(tensors, {}))
        file.truncate(file.tell() + sum(2 * tensor.numel() for tensor in tensors.values()))
    found = inspect(path)
    assert found["trainable"] == ["z-image"] and found["needed"] == ["model.vae", "model.text_encoder"]
    assert "and with model.vae, model.text_encoder set" in inspect_text(found)
