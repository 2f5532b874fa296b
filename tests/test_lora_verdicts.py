"""``inspect``, ``check`` and ``train`` agree on a LoRA file to start from, before anything is encoded."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_rocm.adapters.lora_files.lora_reader import TensorNumbers, read_lora
from lora_rocm.children.check_base import weigh
from lora_rocm.commands.adapter_verdict import StoredNumbers
from lora_rocm.commands.inspect_file import inspect_text
from lora_rocm.errors import AdapterError, RecipeError
from lora_rocm.families.base import family_for
from lora_rocm.model_files.header import read_header
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.train.usable import require_startable
from tests.judging import inspect
from tests.tiny_flux import write_tiny_flux
from tests.train.runs import start
from tests.wording import mentions, says

MODULE, SIDE, RANK = "transformer.single_transformer_blocks.0.attn.to_q", 32, 2
NAN, INF = float("nan"), float("inf")
Tensors = dict[str, Tensor]
LORA = {"lora_A.weight": torch.full((RANK, SIDE), 0.1), "lora_B.weight": torch.full((SIDE, RANK), 0.1)}
LOKR = {"lokr_w1": torch.full((4, 4), 0.1), "lokr_w2_a": torch.full((8, RANK), 0.1), "lokr_w2_b": torch.ones(RANK, 8)}
LOHA = {
    f"hada_w{n}_{side}": torch.full(shape, 0.1)
    for n in (1, 2)
    for side, shape in (("a", (SIDE, RANK)), ("b", (RANK, SIDE)))
}
KINDS: dict[str, tuple[str, Tensors]] = {
    "lora": ("lora", LORA),
    "dora": ("lora", {**LORA, "dora_scale": torch.ones(SIDE, 1)}),
    "lokr": ("lokr", LOKR),
    "whole lokr": ("lokr", {"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(8, 8)}),
    "loha": ("loha", LOHA),
    "oft": ("oft", {"oft_blocks": torch.full((8, 4, 4), 0.1)}),
    "ia3": ("ia3", {"weight": torch.ones(SIDE), "on_input": torch.tensor(False)}),
}
"""Name -> (lora.type, the parts of one module)."""


@dataclass(frozen=True)
class Shared:
    """A tiny base and its transformer without weights, for all files of this module; a copy is read in no time."""

    folder: Path
    pickled: bytes

    def skeletons(self) -> dict[str, nn.Module]:
        transformer: nn.Module = pickle.loads(self.pickled)
        return {"transformer": transformer}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    folder = tmp_path_factory.mktemp("base") / "flux"
    write_tiny_flux(folder)
    family = family_for(recipe_of(folder, folder / "none", folder, {}))
    return Shared(folder, pickle.dumps(family.skeleton("transformer")))


def recipe_of(base: Path, path: Path, folder: Path, lora: dict[str, Any]) -> Recipe:
    return recipe_from({
        "model": {"family": "flux", "name_or_path": str(base)},
        "lora": {"targets": "attention-mlp", "init_from": str(path), **lora},
        "data": {"path": str(folder / "no images")},
        "cache": {"dir": str(folder / "cache")},
        "train": {"max_train_steps": 1, "mixed_precision": "no"},
        "runtime": {"device": "cpu"},
    })  # fmt: skip


def written(path: Path, kind: str, change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
    """A file with one module of a kind, changed by ``change``, with roles as keys."""
    tensors = {role: tensor.clone() for role, tensor in KINDS[kind][1].items()}
    if kind not in ("ia3", "oft"):
        tensors["alpha"] = torch.tensor(float(RANK))
    change(tensors)
    save_file({f"{MODULE}.{role}": tensor.contiguous() for role, tensor in tensors.items()}, path)
    return path


def agreed(base: Shared, path: Path, kind: str, *, by_all: bool = False) -> AdapterError | None:
    """The common verdict on a file: the refusal, or None.

    ``inspect`` and the verdict that ``check`` and ``train`` share are asked each time. ``by_all``: ``check``, ``train``
    and the readers of a finished file, too, with one case of each kind of fault.
    """
    section: dict[str, Any] = {"type": KINDS[kind][0], **({} if kind == "ia3" else {"rank": 4})}
    if kind == "dora":
        section["use_dora"] = True
    recipe = recipe_of(base.folder, path, path.parent, section)
    found, error = inspect(path), None
    try:
        if by_all:
            weigh(recipe)
        else:
            require_startable(family_for(recipe), recipe, base.skeletons(), torch.float32)
    except AdapterError as refusal:
        error = refusal
    assert ("flux" in found["trainable"]) is (error is None), (found, error)
    if error is None:
        return None
    assert (found["problem"]["code"], found["problem"]["what"]) == (error.code, error.what)
    assert not mentions(inspect_text(found), "commands/can-start-a-run") and path.name in error.where
    if by_all:
        with pytest.raises(AdapterError) as caught:
            start(recipe, path.parent / "run")
        assert (caught.value.code, caught.value.what) == (error.code, error.what)
        assert not list((path.parent / "cache").rglob("*.safetensors")), "refused before anything is encoded"
        if error.code != "init-from-axis":  # which sample and compare can use
            with pytest.raises(AdapterError) as caught:
                read_lora(family_for(recipe), base.skeletons(), path)
            assert caught.value.code == error.code
    return error


def filled(role: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[role].reshape(-1)[-1:].fill_(value)


def put(role: str, value: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({role: value})


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_file_is_taken(base: Shared, tmp_path: Path, kind: str) -> None:
    assert agreed(base, written(tmp_path / "x.safetensors", kind), kind, by_all=kind == "lora") is None


NOT_FINITE = "lora-not-finite"
REFUSED: list[tuple[str, str, Callable[[Tensors], object], str, str]] = [
    ("lora", "alpha nan", filled("alpha", NAN), NOT_FINITE, f"{MODULE}.alpha"),
    ("lora", "alpha inf", filled("alpha", INF), NOT_FINITE, f"{MODULE}.alpha"),
    ("lora", "alpha -inf", filled("alpha", -INF), NOT_FINITE, f"{MODULE}.alpha"),
    ("lora", "alpha absurd", filled("alpha", 1e30), NOT_FINITE, f"{MODULE}.alpha"),
    ("lora", "alpha bool", put("alpha", torch.tensor(True)), "lora-strength", f"{MODULE}.alpha"),
    ("lora", "factor nan", filled("lora_A.weight", NAN), NOT_FINITE, f"{MODULE}: down"),
    ("lora", "factor inf", filled("lora_B.weight", INF), NOT_FINITE, f"{MODULE}: up"),
    ("lora", "factor absurd", filled("lora_B.weight", 1e30), NOT_FINITE, f"{MODULE}: up"),
    ("lora", "factor bf16", put("lora_B.weight", torch.full((SIDE, RANK), NAN).bfloat16()), NOT_FINITE, MODULE),
    ("lora", "factor f64", put("lora_B.weight", 1e300 * torch.ones(SIDE, RANK).double()), NOT_FINITE, MODULE),
    ("dora", "magnitude nan", filled("dora_scale", NAN), NOT_FINITE, "dora_scale"),
    ("dora", "magnitudes few", put("dora_scale", torch.ones(7, 1)), "lora-magnitudes", MODULE),
    ("dora", "magnitudes flat", put("dora_scale", torch.ones(1)), "lora-magnitudes", MODULE),
    ("dora", "magnitudes of inputs", put("dora_scale", torch.ones(1, SIDE)), "init-from-axis", "to_q"),
    ("lokr", "alpha nan", filled("alpha", NAN), NOT_FINITE, f"{MODULE}.alpha"),
    ("lokr", "alpha absurd", filled("alpha", 1e30), NOT_FINITE, f"{MODULE}.alpha"),
    ("lokr", "factor nan", filled("lokr_w1", NAN), NOT_FINITE, f"{MODULE}: lokr_w1"),
    ("lokr", "ranks", put("lokr_w2_b", torch.ones(RANK + 1, 8)), "lora-unreadable", MODULE),
    ("whole lokr", "factor inf", filled("lokr_w2", INF), NOT_FINITE, f"{MODULE}: lokr_w2"),
    ("loha", "alpha nan", filled("alpha", NAN), NOT_FINITE, f"{MODULE}.alpha"),
    ("loha", "sides", put("hada_w1_a", torch.ones(8, RANK)), "lora-unreadable", MODULE),
    ("oft", "block nan", filled("oft_blocks", NAN), NOT_FINITE, f"{MODULE}: oft_blocks"),
    ("oft", "no blocks", put("oft_blocks", torch.ones(8, 4)), "lora-unreadable", MODULE),
    ("oft", "constraint", lambda t: (filled("oft_blocks", 9)(t), t["oft_blocks"][0, 0].fill_(5),
                                     put("alpha", torch.tensor(1e-3))(t)), "lora-constraint", MODULE),
    ("oft", "constraint nan", put("alpha", torch.tensor(NAN)), NOT_FINITE, f"{MODULE}.alpha"),
    ("ia3", "weight inf", filled("weight", INF), NOT_FINITE, f"{MODULE}: weight"),
    ("ia3", "inputs", put("on_input", torch.tensor(True)), "lora-parts", MODULE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "what", "change", "code", "named"), REFUSED, ids=[f"{k}: {w}" for k, w, *_ in REFUSED]
)
def test_a_file_from_which_no_run_can_start_is_refused_alike(
    base: Shared, tmp_path: Path, kind: str, what: str, change: Callable[[Tensors], object], code: str, named: str
) -> None:
    by_all = what == next(first for _, first, _, its, _ in REFUSED if its == code)
    error = agreed(base, written(tmp_path / "x.safetensors", kind, change), kind, by_all=by_all)
    assert error is not None and error.code == code and named in error.what, what


@pytest.mark.parametrize("alpha", [NAN, INF, 1e30])
def test_the_alpha_of_a_whole_lokr_does_not_count(base: Shared, tmp_path: Path, alpha: float) -> None:
    assert agreed(base, written(tmp_path / "x.safetensors", "whole lokr", filled("alpha", alpha)), "whole lokr") is None


@pytest.mark.parametrize("text", ["{", "[]", "1", '"r"', "null", "[" * 100_000])
def test_metadata_that_are_no_object_are_named(base: Shared, tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file({f"{MODULE}.{role}": tensor for role, tensor in LORA.items()}, path, {"lora_adapter_metadata": text})
    error = agreed(base, path, "lora")
    assert error is not None and error.code == "lora-strength" and "lora_adapter_metadata" in error.what


@pytest.mark.parametrize("letters", ["\n", "\r\x1b[2J", "\u2028", "\x00"])
def test_names_from_a_file_cannot_steer_a_terminal(base: Shared, tmp_path: Path, letters: str) -> None:
    path, name = tmp_path / "x.safetensors", f"an{letters}other"
    for more in ({name: torch.ones(1)}, {f"{MODULE}{letters}.lora_A.weight": torch.ones(RANK, SIDE)}):
        save_file({f"{MODULE}.{role}": tensor for role, tensor in LORA.items()} | more, path)
        error = agreed(base, path, "lora")
        assert error is not None
        text = inspect_text(inspect(path))
        for said in (error.what, error.where, error.fix, *text.split("\n")):
            assert not set(letters) - set("[2J") & set(said)
    save_file({f"{MODULE}.{role}": tensor for role, tensor in LORA.items()} | {f"{name}.alpha": torch.ones(())}, path)
    said = list[str]()
    recipe = recipe_of(base.folder, path, tmp_path, {})
    require_startable(family_for(recipe), recipe, base.skeletons(), torch.float32, said.append)
    (notice, _) = said
    assert says(notice, "lora_verdicts/alphas-of-modules-that-have-no-weights") and not set(letters) - set("[2J") & set(
        notice
    )
    assert notice in inspect(path)["notices"] and "note: " in inspect_text(inspect(path))


@pytest.mark.parametrize("alpha", [NAN, INF, 0.0, 1e30])
def test_a_rank_from_the_file_names_the_files_alpha(tmp_path: Path, alpha: float) -> None:
    path = written(tmp_path / "x.safetensors", "lora", filled("alpha", alpha))
    recipe = tmp_path / "r.yaml"
    text = (
        f"model: {{name_or_path: builtin:tiny-llama, family: causal-lm}}\nlora: {{rank: auto, init_from: '{path}'}}\n"
    )
    recipe.write_text(text + "data: {path: .}\ntrain: {max_train_steps: 1}\n", encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    (problem,) = caught.value.problems
    assert "lora.rank" in problem.where and f"{MODULE}.alpha" in problem.what and str(path) in problem.what


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
                                   torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.bool])  # fmt: skip
def test_numbers_are_the_same_with_and_without_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    codes = torch.arange(65536).to(torch.int32).view(torch.uint8).reshape(-1, 16)
    codes = torch.cat([codes, torch.arange(256, dtype=torch.uint8).reshape(-1, 16)])
    tensor = (codes > 99) if dtype is torch.bool else codes.view(dtype)
    save_file({"x": tensor.contiguous(), "empty": torch.zeros(0, dtype=dtype)}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    light, heavy = StoredNumbers(header), TensorNumbers()
    found, wanted = light.array(header.tensors["x"]), heavy.array(tensor)
    assert found.dtype == np.float32 and np.array_equal(found, wanted, equal_nan=True)
    for name, each in (("x", tensor), ("empty", torch.zeros(0, dtype=dtype))):
        largest = light.largest(header.tensors[name])
        assert np.array_equal(largest, heavy.largest(each), equal_nan=True)


CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
PEFT: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"target_modules": r".*\.to_(q|k)"}, ""),
    ({"use_rslora": True}, ""),
    ({"use_rslora": "yes"}, "lora-strength"),
    ({"fan_in_fan_out": True}, ""),
    ({"layers_to_transform": [0], "exclude_modules": "x"}, ""),
    ({"rank_pattern": {"to_q": RANK}, "r": 9}, ""),
    ({"rank_pattern": {"to_q": 9}}, "lora-strength"),
    ({"rank_pattern": [1]}, "lora-strength"),
    ({"rank_pattern": {"(a+)+$": 1}}, "lora-unreadable"),
    ({"alpha_pattern": {"to_q": NAN}}, "lora-strength"),
    ({"alpha_pattern": {"to_q": True}}, "lora-strength"),
    ({"alpha_pattern": "to_q"}, "lora-strength"),
    ({"alpha_pattern": {"to_q": 1e30}}, "lora-not-finite"),
    ({"lora_alpha": 1e30}, "lora-not-finite"),
    ({"lora_alpha": None}, "lora-strength"),
    ({"lora_alpha": True}, "lora-strength"),
    ({"lora_alpha": 0}, "lora-strength"),
    ({"lora_alpha": 0.0, "use_rslora": True}, "lora-strength"),
    ({"lora_alpha": 0, "alpha_pattern": {"to_q": 1}}, ""),
    ({"lora_alpha": -RANK}, ""),
    ({"r": 9}, "lora-strength"),
    ({"r": 0}, "lora-strength"),
    ({"peft_type": "ADALORA"}, "lora-kind"),
    ({"peft_type": ["LORA"]}, "lora-kind"),
    ({"peft_type": 7}, "lora-kind"),
    ({"bias": "all"}, "lora-kind"),
    ({"bias": True}, "lora-kind"),
    ({"modules_to_save": ["norm"]}, "lora-kind"),
    ({"use_dora": True}, "lora-strength"),
    ({"init_lora_weights": "pissa"}, "lora-kind"),
    ({"trainable_token_indices": [1]}, "lora-kind"),
]


@pytest.mark.parametrize(("fields", "code"), PEFT, ids=[json.dumps(fields) for fields, _ in PEFT])
def test_a_peft_folder(base: Shared, tmp_path: Path, fields: dict[str, Any], code: str) -> None:
    folder = tmp_path / "peft"
    folder.mkdir()
    name = f"base_model.model.{MODULE.removeprefix('transformer.')}"
    save_file({f"{name}.{role}": tensor for role, tensor in LORA.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}), encoding="utf-8")
    error = agreed(base, folder, "lora", by_all=fields == {"peft_type": 7})
    assert (error.code if error else "") == code


def peft_folder(folder: Path, fields: dict[str, Any]) -> Path:
    """Two modules, so that one can be of a different strength than the other."""
    folder.mkdir()
    names = [f"base_model.model.{MODULE.removeprefix('transformer.')[:-1]}{letter}" for letter in "qk"]
    tensors = {f"{name}.{role}": tensor.clone() for name in names for role, tensor in LORA.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("fields", "key", "fix"),
    [
        ({"lora_alpha": "4"}, "lora_alpha", "lora_alpha"),
        ({"lora_alpha": NAN}, "lora_alpha", "lora_alpha"),
        ({"r": 9}, "r", "r"),
        ({"rank_pattern": {"to_k": 9}}, "rank_pattern: to_k", "rank_pattern: to_k"),
        ({"alpha_pattern": {"to_k": "x"}}, "alpha_pattern: to_k", "alpha_pattern: to_k"),
        ({"alpha_pattern": {"(((": 3}}, "alpha_pattern: (((", "names of modules"),
        ({"alpha_pattern": 3}, "alpha_pattern", "adapter_config.json"),
        ({"use_rslora": "yes"}, "use_rslora", "use_rslora"),
        ({"use_dora": True}, "use_dora", "use_dora"),
    ],
)
def test_a_refused_config_is_named_with_its_key(
    base: Shared, tmp_path: Path, fields: dict[str, Any], key: str, fix: str
) -> None:
    folder = peft_folder(tmp_path / "peft", fields)
    problem = inspect(folder)["problem"]
    with pytest.raises(AdapterError) as caught:
        weigh(recipe_of(base.folder, folder, tmp_path, {"rank": 4}))
    assert problem["where"] == caught.value.where == f"{folder / 'adapter_config.json'}: {key}"
    assert problem["fix"] == caught.value.fix and fix in problem["fix"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, []),
        ({"alpha_pattern": {"to_q": 1}, "rank_pattern": {r"single_transformer_blocks.*to_k": RANK}}, []),
        ({"alpha_pattern": {"nonexistent": 16}}, ["alpha_pattern", "nonexistent"]),
        ({"rank_pattern": {"to_q": RANK, "o_q": 8, "to_v": 8}}, ["rank_pattern", "o_q"]),
        ({"alpha_pattern": {"to_q": -1}}, ["to_q", "negative", "-0.5"]),
        ({"alpha_pattern": {"to_q": 0}}, ["to_q", "is 0"]),
    ],
)
def test_a_value_that_is_not_used_and_an_odd_strength_are_said(
    base: Shared, tmp_path: Path, fields: dict[str, Any], words: list[str]
) -> None:
    folder = peft_folder(tmp_path / "peft", fields)
    for notices in (inspect(folder)["notices"], weigh(recipe_of(base.folder, folder, tmp_path, {"rank": 4})).notices):
        assert len(notices) == bool(words), notices
        assert all(word in notices[0] for word in words)


@pytest.mark.parametrize(("alpha", "code"), [(0.0, "lora-strength"), (-2.0, ""), (2.0, "")])
def test_a_file_that_changes_nothing_is_refused(base: Shared, tmp_path: Path, alpha: float, code: str) -> None:
    path = written(tmp_path / "x.safetensors", "lora", filled("alpha", alpha))
    error = agreed(base, path, "lora")
    assert (error.code if error else "") == code
    if error is None:
        assert any("negative" in notice for notice in inspect(path)["notices"]) is (alpha < 0)


def test_a_module_of_no_model_is_named_with_its_tensors_and_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    names = ("lora_unet_input_blocks_4_1_proj_in", "lora_unet_nowhere_block", "lora_unet_nowhere_other")
    parts = {"lora_down.weight": torch.ones(2, 640), "lora_up.weight": torch.ones(640, 2), "alpha": torch.ones(())}
    save_file({f"{name}.{role}": tensor.clone() for name in names for role, tensor in parts.items()}, path)
    problem = inspect(path)["problem"]
    assert problem["code"] == "lora-of-another-model" and "lora_unet_nowhere_block" in problem["what"]
    assert "lora_unet_nowhere_block.lora_down.weight" in problem["fix"]
