"""Each architecture: losses and gradients against transformers' own, and a result that PEFT and others read alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lora_rocm.errors import ModelError
from lora_rocm.families.causal_lm.family import CausalLM
from lora_rocm.families.causal_lm.objective import IGNORED, Head, token_distance
from lora_rocm.families.objectives.loss import LOSS_MASK, losses
from lora_rocm.rundir.layout import RunDir
from tests.families.causal_lm.adapted import CLOSE, CPU, TOKENS, Adapted, batch, off, recipe_of, reference
from tests.tiny_llm import MODELS, write_tiny_gpt_oss, write_tiny_llm
from tests.wording import saying

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module", params=[*MODELS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp(request.param), request.param)


def test_losses_and_gradients_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    """The reference masks the padding, loads what was written, and makes all logits at once."""
    adapted, data = Adapted(recipe_of(folder, output={"dtype": "fp32"})), batch()
    loss_B = losses(adapted.family, adapted.model, data, {})
    loss_B.sum().backward()
    theirs = reference(folder, adapted.written(tmp_path))
    attended_BS = torch.ones(2, TOKENS, dtype=torch.int64)
    attended_BS[1, 21:] = 0
    logits_BSV = theirs(input_ids=data["input_ids"], attention_mask=attended_BS, use_cache=False).logits
    each_N = cross_entropy(logits_BSV.flatten(0, 1), data["labels"].flatten(), ignore_index=IGNORED, reduction="none")
    wanted_B = each_N.view(2, -1).sum(1) / data[LOSS_MASK].sum(1)
    wanted_B.sum().backward()
    assert off(loss_B.detach(), wanted_B.detach()) < CLOSE
    close = 1e-3 if "gemma4" in folder.name else CLOSE  # its norms before and after each part magnify rounding
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    for name, leaf in adapted.adapter.leaves.items():
        module, _, role = name.removeprefix("model.").rpartition(".")
        wanted = gradients[f"base_model.model.{module}.{role}.default.weight"]
        assert leaf.grad is not None and wanted is not None and off(leaf.grad, wanted) < close, name
    with torch.no_grad():
        bare_BSV = theirs.get_base_model()(input_ids=data["input_ids"], use_cache=False).logits
    assert torch.isfinite(bare_BSV).all()


def passed(adapted: Adapted, tensors: dict[str, Tensor], shares: Tensor) -> Tensor:
    """The gradients [N] of the sum of the losses of all trained tokens, and that sum as the last."""
    loss = (losses(adapted.family, adapted.model, tensors, {}) * shares).sum()
    gradients = torch.autograd.grad(loss, [*adapted.adapter.leaves.values()])
    return torch.cat([*(each.flatten() for each in gradients), loss.detach()[None]])


def test_samples_in_one_row_have_the_losses_and_gradients_of_separate_ones(folder: Path) -> None:
    adapted, data = Adapted(recipe_of(folder)), batch()
    shares_B = data[LOSS_MASK].sum(1)
    row = {name: tensor_BS.reshape(1, -1) for name, tensor_BS in data.items()}
    places_BS = torch.arange(TOKENS).repeat(2)[None]
    wanted_N, total = passed(adapted, data, shares_B), shares_B.sum()[None]
    found_N = passed(adapted, {**row, "positions": places_BS}, total)
    assert off(found_N, wanted_N) < 1e-4 and off(found_N[-1:], wanted_N[-1:]) < CLOSE
    seeing = passed(adapted, {**row, "positions": torch.arange(2 * TOKENS)[None]}, total)
    assert off(seeing, wanted_N) > 0.01, "the control: as one sample the second sees the first"
    adapted.family.fuse(adapted.model, triton=False)
    assert off(passed(adapted, {**row, "positions": places_BS}, total), wanted_N) < 1e-4


def test_an_architecture_whose_samples_see_each_other_is_refused_with_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not one of those that tests know."""
    recipe = recipe_of(write_tiny_llm(tmp_path, "olmo2"), data={"path": str(tmp_path), "packing": True})
    CausalLM(recipe).load(torch.float32, CPU)
    see_all = "lora_rocm.families.causal_lm.architecture.samples_apart"
    monkeypatch.setattr(see_all, lambda places_BS, dtype: torch.zeros(1, 1, 8, 8).masked_fill_(torch.ones(8, 8).triu(1).bool(), -torch.inf))  # fmt: skip  # noqa: E501
    with pytest.raises(ModelError, check=saying("families/olmo2-samples-in-one-row-see-each")) as caught:
        CausalLM(recipe).load(torch.float32, CPU)
    assert caught.value.code == "packing-unequal"


def test_logits_of_some_tokens_at_a_time_are_those_of_all(folder: Path) -> None:
    if folder.name.startswith("llama"):
        rng = torch.Generator().manual_seed(0)
        states_BSD, weight_VD = torch.randn(2, 9, 4, generator=rng), torch.randn(7, 4, generator=rng)
        labels_BS = torch.randint(0, 7, (2, 9), generator=rng)
        labels_BS[0, 3] = IGNORED
        found = [token_distance(lambda x: x @ weight_VD.T, states_BSD, labels_BS, size) for size in (2, 100)]
        assert off(*found) < CLOSE and found[0][0, 3] == 0


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_embeddings_and_head_stay_dense_on_a_quantised_base(quantization: str, tmp_path: Path) -> None:
    adapted = Adapted(recipe_of(write_tiny_llm(tmp_path, "phi3"), model={"quantization": quantization}))
    stored = {
        name for name, layer in adapted.model.components["model"].named_modules() if "Packed" in type(layer).__name__
    }
    assert len(stored) == 8 and all(".layers." in name for name in stored)
    assert torch.isfinite(losses(adapted.family, adapted.model, batch(), {})).all()


def changed_config(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "custom-code"),
        ({"model_type": "nobody_knows"}, "architecture-unknown"),
        ({"model_type": "bert", "attention_chunk_size": 8}, "architecture-unknown"),
        ({"model_type": "t5"}, "architecture-unknown"),
        ({"attn_logit_softcapping": 50.0}, "architecture-unknown"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_words(values: dict[str, Any], code: str, tmp_path: Path) -> None:
    folder = changed_config(write_tiny_llm(tmp_path), **values)
    with pytest.raises(ModelError) as caught:
        CausalLM(recipe_of(folder)).examine()
    assert caught.value.code == code


def test_a_tokenizer_with_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path)
    (folder / "own.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    path.write_text(json.dumps({**config, **own}), encoding="utf-8")
    with pytest.raises(ModelError, check=saying("families/code-of-its-own")) as caught:
        CausalLM(recipe_of(folder)).texts.prompt_ids([])
    assert caught.value.code == "custom-code" and "tokenizer_config.json" in caught.value.where


def test_an_architecture_that_no_test_knows_is_compared_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = CausalLM(recipe_of(write_tiny_llm(tmp_path, "olmo2")))
    family.load(torch.float32, CPU)
    monkeypatch.setattr(Head, "__call__", lambda self, x: 2 * self.layer(x))
    with pytest.raises(ModelError, match="different results"):
        family.load(torch.float32, CPU)


def test_the_part_that_reads_images_is_left_out(tmp_path: Path) -> None:
    adapted = Adapted(recipe_of(write_tiny_llm(tmp_path, "gemma3")))
    names = [name for name, _ in adapted.model.components["model"].named_parameters()]
    assert not any("vision" in name or "projector" in name for name in names)
    assert {name.split(".layers.")[0] for name in adapted.adapter.modules} == {"model.model.language_model"}


def test_samples_in_one_row_see_no_other_beside_the_sinks_of_gpt_oss(tmp_path: Path) -> None:
    """Losses and gradients equal separate samples, some longer than its sliding window of 16."""
    folder, lengths = write_tiny_gpt_oss(tmp_path), (12, TOKENS, 28)
    adapted = Adapted(recipe_of(folder, data={"path": str(folder), "packing": True}))
    ids_S = torch.randint(4, 260, (sum(lengths),), generator=torch.Generator().manual_seed(4))
    samples = list[dict[str, Tensor]]()
    for ids in ids_S.split(lengths):
        mask_S = torch.arange(len(ids)) < len(ids) - 1
        labels_S = torch.where(mask_S, ids.roll(-1), IGNORED)
        samples.append({"input_ids": ids[None], "labels": labels_S[None], LOSS_MASK: mask_S.float()[None]})
    row = {name: torch.cat([sample[name] for sample in samples], 1) for name in samples[0]}
    places_BS = torch.cat([torch.arange(length) for length in lengths])[None]
    wanted_N = sum(passed(adapted, sample, sample[LOSS_MASK].sum()[None]) for sample in samples)
    assert isinstance(wanted_N, Tensor)
    total = row[LOSS_MASK].sum()[None]
    found_N = passed(adapted, {**row, "positions": places_BS}, total)
    assert off(found_N, wanted_N) < CLOSE and off(found_N[-1:], wanted_N[-1:]) < CLOSE
    seeing_N = passed(adapted, {**row, "positions": torch.arange(sum(lengths))[None]}, total)
    assert off(seeing_N, wanted_N) > 0.01, "the control: as one sample each sees those before"


def test_a_run_directory_is_no_base(tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path, "llama")
    RunDir(folder).events().touch()
    assert CausalLM(recipe_of(folder)).source, "the control: it is a model, whatever else lies there"
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="run directory") as caught:
        _ = CausalLM(recipe_of(folder)).source
    assert caught.value.code == "base-is-run" and "lora.init_from" in caught.value.fix
