"""Preferences: loss and gradients against transformers' own calls, the model at the start, and whole runs."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid

from lora_rocm.adapters.attach import inject
from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.dataset.rows.records import Pair, pair_of, written
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import RecipeError
from lora_rocm.families.base import ComparesWithStart, LoadedModel, Tensors
from lora_rocm.families.causal_lm.family import CausalLM
from lora_rocm.families.objectives.loss import losses, measured
from lora_rocm.loader.cached_dataset import together
from lora_rocm.recipe.load import dump_recipe, load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train.start_encoder import start_encoders
from tests.event_lines import read_events
from tests.families.causal_lm.test_family import CLOSE, CPU, Adapted, off, recipe_of, reference
from tests.program import Program
from tests.tiny_llm import write_tiny_llm
from tests.train.runs import start
from tests.wording import saying

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
LN2 = 0.6931471805599453
ROWS: list[dict[str, Any]] = [
    {"prompt": "2+2=", "chosen": "4, of course", "rejected": "5"},
    {"prompt": [{"role": "user", "content": "Name a colour."}], "chosen": "Red.", "rejected": "A colour? " * 9},
]


def dpo(folder: Path, **sections: Any) -> Recipe:
    objective = {"loss": "dpo", **sections.pop("objective", {})}
    return recipe_of(folder, objective=objective, **{"output": {"dtype": "fp32"}, **sections})


def pairs() -> list[Pair]:
    return [pair_of(row) for row in ROWS]


def start_of(recipe: Recipe) -> Tensor:
    """The log-probabilities of ``pairs`` at the start, float32 [B, P], from the encoder of a run."""
    (encoder,) = start_encoders(recipe, CausalLM(recipe), torch.float32)
    encode = encoder.load(Resident(DeviceTransfer(CPU, pin=False)))
    return torch.stack([encode({CAPTION: written(pair)})["start_log_probs"] for pair in pairs()])


def batch_of(recipe: Recipe, start_BP: Tensor) -> Tensors:
    """``pairs`` as a run batches them: the tokens of shorter ones are padded."""
    (encoder,) = CausalLM(recipe).encoders()
    encode = encoder.load(Resident(DeviceTransfer(CPU, pin=False)))
    rows, batch = [encode({CAPTION: written(pair)}) for pair in pairs()], {"start_log_probs": start_BP}
    for name, spec in encoder.entry.tensors.items():
        stacked = together([row[name] for row in rows], [torch.zeros((), dtype=torch.int64)] * len(rows), spec)
        assert stacked is not None
        batch[name] = stacked[0]
    return batch


def log_probs(model: Any, family: CausalLM) -> Tensor:
    """As ``start_of``, by transformers: one answer at a time, unpadded, from all logits."""
    found = []
    for pair in pairs():
        for answer in (pair.chosen, pair.rejected):
            tokens = family.texts.tokens(answer)
            ids_BS = torch.tensor([tokens.ids])
            each_SV = model(input_ids=ids_BS, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            each_S = each_SV.gather(1, ids_BS[0, 1:, None])[:, 0]
            found.append((each_S * torch.tensor(tokens.trained[1:])).sum())
    return torch.stack(found).view(-1, 2)


def by_hand(log_probs_BP: Tensor, start_BP: Tensor, beta: float, smoothing: float) -> Tensor:
    margin_B = beta * ((log_probs_BP[:, 0] - start_BP[:, 0]) - (log_probs_BP[:, 1] - start_BP[:, 1]))
    return -(1 - smoothing) * logsigmoid(margin_B) - smoothing * logsigmoid(-margin_B)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.mark.parametrize("objective", [{}, {"beta": 0.7, "label_smoothing": 0.2}], ids=["plain", "smoothed"])
def test_losses_and_gradients_are_those_of_the_formula(base: Path, tmp_path: Path, objective: dict[str, float]) -> None:
    adapted = Adapted(dpo(base, objective=objective))
    adapted.family.fuse(adapted.model, triton=False)
    start_BP = start_of(adapted.recipe)
    batch = batch_of(adapted.recipe, start_BP)
    assert batch["input_ids"].shape == (2, 2, 128), "both answers of both pairs are filled up to the longest"
    loss_B, measures = measured(adapted.family, adapted.model, batch, {})
    loss_B.sum().backward()
    theirs = reference(base, adapted.written(tmp_path))
    with torch.no_grad(), theirs.disable_adapter():
        before_BP = log_probs(theirs, adapted.family)
    assert off(start_BP, before_BP) < CLOSE
    after_BP = log_probs(theirs, adapted.family)
    beta, smoothing = objective.get("beta", 0.1), objective.get("label_smoothing", 0.0)
    wanted_B = by_hand(after_BP, before_BP, beta, smoothing)
    wanted_B.sum().backward()
    assert off(loss_B.detach(), wanted_B.detach()) < CLOSE
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    for name, leaf in adapted.adapter.leaves.items():
        module, _, role = name.removeprefix("model.").rpartition(".")
        wanted = gradients[f"base_model.model.{module}.{role}.default.weight"]
        assert leaf.grad is not None and wanted is not None and off(leaf.grad, wanted) < CLOSE, name
    gained_BP = (after_BP - before_BP).detach()
    margin_B = beta * (gained_BP[:, 0] - gained_BP[:, 1])
    assert off(measures["reward margin"], margin_B) < CLOSE
    assert measures["accuracy"].tolist() == (margin_B > 0).float().tolist()
    turned_B = by_hand(after_BP.flip(1), before_BP.flip(1), beta, smoothing).detach()
    assert off(loss_B.detach(), turned_B) > 100 * CLOSE, "the control: the answers change places"


def loss_at_start(recipe: Recipe, start_BP: Tensor) -> list[float]:
    family = CausalLM(recipe)
    model = family.load(torch.float32, CPU)
    inject(family, model, recipe.lora, 0)
    found: list[float] = losses(family, model, batch_of(recipe, start_BP), {}).tolist()
    return found


def test_the_loss_begins_at_ln_2_also_from_a_lora(base: Path, tmp_path: Path) -> None:
    plain = dpo(base)
    trained = Adapted(plain).written(tmp_path)
    resume_advice = dpo(base, lora={"init_from": str(trained)})
    for recipe in (plain, resume_advice):
        assert loss_at_start(recipe, start_of(recipe)) == pytest.approx([LN2] * 2, rel=1e-5)
    wrong = loss_at_start(resume_advice, start_of(plain))
    assert abs(wrong[0] - LN2) > 1e-3, "the control: compared with the base alone"


def test_what_changes_the_start_changes_its_entries(base: Path, tmp_path: Path) -> None:
    trained = Adapted(dpo(base)).written(tmp_path)

    def fingerprint(recipe: Recipe, dtype: torch.dtype = torch.float32) -> str:
        return start_encoders(recipe, CausalLM(recipe), dtype)[0].fingerprint

    plain = fingerprint(dpo(base))
    assert fingerprint(dpo(base, objective={"beta": 0.5}, lora={"rank": 4})) == plain
    others = {
        fingerprint(dpo(base, lora={"init_from": str(trained)})),
        fingerprint(dpo(base), torch.bfloat16),
        fingerprint(dpo(base, data={"path": str(base), "max_length": 9})),
    }
    before = (trained / "adapter_model.safetensors").read_bytes()
    (trained / "adapter_model.safetensors").write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    others.add(fingerprint(dpo(base, lora={"init_from": str(trained)})))
    assert len(others | {plain}) == 5
    assert start_encoders(recipe_of(base), CausalLM(recipe_of(base)), torch.float32) == ()


def test_a_pair_is_as_long_as_its_longer_answer(base: Path) -> None:
    family = CausalLM(dpo(base))
    (encoder,) = family.encoders()
    encode, found = encoder.load(Resident(DeviceTransfer(CPU, pin=False))), list[int]()
    for pair in pairs():
        length = family.texts.num_tokens(written(pair))
        found.append(-(-length // 64) * 64)
        assert length == max(len(family.texts.tokens(answer).ids) for answer in (pair.chosen, pair.rejected))
        assert found[-1] == encode({CAPTION: written(pair)})["input_ids"].shape[1]
    assert found == [64, 128]


def test_a_prompt_of_a_preview_has_entries_too(base: Path) -> None:
    family = CausalLM(dpo(base))
    assert isinstance(family, ComparesWithStart)
    door = Resident(DeviceTransfer(CPU, pin=False))

    def model() -> LoadedModel:
        raise AssertionError("the base is loaded for it")

    assert family.at_start(model, {CAPTION: "What is red?"}, door)["start_log_probs"].tolist() == [0.0, 0.0]
    with pytest.raises(AssertionError, match="the base is loaded"):
        family.at_start(model, {CAPTION: written(pairs()[0])}, door)
    assert family.encoders()[0].load(door)({CAPTION: "What is red?"})["input_ids"].shape == (2, 64)


RECIPE = """\
model: {family: causal-lm, name_or_path: base}
data: {sources: [{dataset: pairs.jsonl}]}
train: {max_train_steps: 1}
objective:
  train_on: all
"""


def test_keys_that_do_not_apply_are_named_with_their_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE, encoding="utf-8")
    with pytest.raises(RecipeError, check=saying("families/r-yaml-5-objective-train-on-has")):
        load_recipe("r.yaml", ["objective.loss=dpo"])
    with pytest.raises(
        RecipeError,
        check=saying("families/objective-beta-has-no-effect-with-loss", "families/fix", "families/loss-dpo"),
    ):
        load_recipe("r.yaml", ["objective.beta=0.2"])


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


NOISES = {"cat": "meow", "dog": "woof", "cow": "moo", "duck": "quack", "pig": "oink", "lion": "roar"}


def made_up(seed: int, count: int = 72) -> list[dict[str, Any]]:
    """Pairs with the chosen answer in brackets and a full stop after the rejected one; noise does not show it."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        animal, noise, place = rng.choice([*NOISES]), rng.choice([*NOISES.values()]), rng.randrange(100)
        prompt = [{"role": "user", "content": f"What does the {animal} in house {place} say?"}]
        rows.append({"prompt": prompt, "chosen": f"({noise})", "rejected": f"{noise}."})
    return rows


def run_recipe(folder: Path, rows: Sequence[Mapping[str, Any]], **sections: Any) -> Recipe:
    general = [{"text": f"There are {n} foxes in the field."} for n in range(12)]
    watched = {"dataset": str(write_rows(folder / "general.jsonl", general))}
    data = {"sources": [{"dataset": str(write_rows(folder / "pairs.jsonl", rows))}], "validation_split": 0.25}
    train = {"max_train_steps": 4, "batch_size": 4, "validation_every_n_steps": 2, "mixed_precision": "no"}
    return dpo(
        folder,
        model={"name_or_path": "builtin:tiny-llama"},
        data={**data, "watched": watched},
        lora={"rank": 8},
        optim={"learning_rate": 1e-3, "lr_scheduler": "constant"},
        train={**train, **sections.pop("train", {})},
        **sections,
    )


def of_type(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(RunDir(run_dir).events()) if event["type"] == kind]


def tensors_of(run_dir: Path) -> dict[str, bytes]:
    files = sorted(run_dir.rglob("adapter_model.safetensors"))
    assert len(files) == 1
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(files[0]).items()}


@pytest.mark.slow
def test_a_resume_is_exact_and_watching_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(dump_recipe(run_recipe(tmp_path, made_up(0))), encoding="utf-8")
    program = Program(monkeypatch)
    assert program.train("straight").code == 0
    assert program.train("resumed", "train.max_train_steps=2").code == 0
    assert tensors_of(tmp_path / "resumed") != tensors_of(tmp_path / "straight")
    assert program.train("resumed", "train.max_train_steps=4", resume="latest").code == 0
    assert tensors_of(tmp_path / "resumed") == tensors_of(tmp_path / "straight")
    assert program.train("unwatched", "data.watched=null").code == 0
    assert tensors_of(tmp_path / "unwatched") == tensors_of(tmp_path / "straight")
    steps, watched = of_type(tmp_path / "straight", "step"), of_type(tmp_path / "straight", "watched")
    assert steps[0]["loss"] == pytest.approx(LN2, rel=1e-5)
    assert steps[0]["measures"]["reward margin"] == pytest.approx(0.0, abs=1e-5)
    assert steps[-1]["measures"]["reward margin"] > 1e-5
    assert [event["updates"] for event in watched] == [0, 2, 4]
    assert not of_type(tmp_path / "unwatched", "watched")


@pytest.mark.slow
def test_a_tiny_model_learns_a_made_up_preference_and_not_one_that_is_none(tmp_path: Path) -> None:
    """The control has the same pairs, half of them the wrong way round by a coin: nothing holds for held-out ones."""
    rows, rng = made_up(0, 96), random.Random(1)
    tossed = [
        row if rng.random() < 0.5 else {**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows
    ]
    accuracy = {}
    for name, given in (("learned", rows), ("control", tossed)):
        (tmp_path / name).mkdir()
        recipe = run_recipe(tmp_path / name, given, train={"max_train_steps": 20, "validation_every_n_steps": 20})
        assert start(recipe, tmp_path / name / "run", stop_at=99)
        (last,) = of_type(tmp_path / name / "run", "validation")
        accuracy[name] = last["measures"]["accuracy"]
        of_steps = [step["measures"]["accuracy"] for step in of_type(tmp_path / name / "run", "step")]
        assert name == "control" or sum(of_steps[-5:]) / 5 > 0.9 > sum(of_steps[:2]) / 2
    assert accuracy["learned"] > 0.95
    assert 0.2 < accuracy["control"] < 0.8
