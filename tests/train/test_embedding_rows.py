"""Whole runs with the token embedding in main memory: equal bytes, and each wrong row is found."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.device.placement.embedding_rows import ROWS, EmbeddingRows, TokenTable
from lora_rocm.device.transfer import DeviceTransfer, copy_to_device, fingerprint
from lora_rocm.families.base import token_table
from lora_rocm.families.causal_lm.family import CausalLM
from lora_rocm.memory.manager import MemoryManager
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import dump_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.worker_group import environments
from tests.event_lines import read_events
from tests.families.causal_lm.adapted import Adapted, recipe_of
from tests.tiny_llm import write_tiny_llm
from tests.train.runs import losses_of, start

CPU, ROOT, WAIT_S = torch.device("cpu"), Path(__file__).parents[2], 120
IDS_BS = torch.tensor([[3, 1, 3], [9, 0, 7]])


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pairs": {"objective": {"loss": "dpo"}},
    "packed": {"data": {"packing": True, "max_length": 128}},
}


def recipe_in(folder: Path, max_train_steps: int = 4, kind: str = "plain", **changed: Any) -> Recipe:
    write_tiny_llm(folder / "model", **changed)
    data, answer = folder / "texts.jsonl", "chosen" if kind == "pairs" else "completion"
    rows = [{"prompt": f"What is number {number}?", answer: f"zibu {number}"} for number in range(10)]
    rows = [row | ({"rejected": "no"} if kind == "pairs" else {}) for row in rows]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    more = KINDS[kind]
    return recipe_from(
        {
            "model": {"family": "causal-lm", "name_or_path": str(folder / "model")},
            "data": {"sources": [{"dataset": str(data)}], "validation_split": 0.2, **more.get("data", {})},
            "objective": more.get("objective", {}),
            "lora": {"rank": 2},
            "optim": {"learning_rate": 1e-3},
            "train": {
                "max_train_steps": max_train_steps,
                "validation_every_n_steps": 2,
                "batch_size": 2,
                "gradient_accumulation_steps": 2,
                "mixed_precision": "no",
            },
            "sample": {"every_n_steps": 2, "prompts": ["a zibu"], "steps": 4},
            "cache": {"dir": str(folder / "cache")},
            "output": {"save_every_n_steps": 2},
        }
    )


def shown(run: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(run.rglob("*.txt"))]


def held_out(run: Path) -> list[Any]:
    events = read_events(RunDir(run).events())
    return [event["loss"] for event in events if event["type"] == "validation"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_equal_bytes_with_the_embedding_in_main_memory_and_after_a_resume(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, sent = recipe_in(tmp_path, kind=kind), list[tuple[int, ...]]()
    assert start(recipe, tmp_path / "plain")
    whole, several = EmbeddingRows.sent, list[bool]()

    def counted(self: EmbeddingRows, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = whole(self, tensors)
        sent.append(tuple(tensors["input_ids"].shape))
        assert found[ROWS].shape[:-1] == tensors["input_ids"].shape
        positions = tensors.get("positions")
        several.append(positions is not None and bool(((positions == 0).sum(-1) > 1).any()))
        return found

    monkeypatch.setattr(EmbeddingRows, "sent", counted)
    monkeypatch.setattr(MemoryManager, "_table", lambda self, family, model: token_table(family, model))
    assert not start(recipe, tmp_path / "rows", stop_at=2)
    assert start(recipe, tmp_path / "rows")
    assert sent and {len(shape) for shape in sent} == {3 if kind == "pairs" else 2}, "the control: rows were sent"
    assert any(several) == (kind == "packed"), "the control: several texts in a row"
    result = Path("peft", "model", "adapter_model.safetensors")
    assert (tmp_path / "rows" / result).read_bytes() == (tmp_path / "plain" / result).read_bytes()
    assert losses_of(tmp_path / "rows") == losses_of(tmp_path / "plain")
    assert held_out(tmp_path / "rows") == held_out(tmp_path / "plain") != []
    assert shown(tmp_path / "rows") == shown(tmp_path / "plain")
    monkeypatch.setattr(EmbeddingRows, "sent", lambda *given: {ROWS: whole(*given)[ROWS].roll(1, -1)})
    assert start(recipe, tmp_path / "wrong")
    assert losses_of(tmp_path / "wrong") != losses_of(tmp_path / "plain"), "the control: wrong rows change the losses"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_equal_bytes_with_the_embedding_in_main_memory_and_after_a_resume(
    kind: str, tmp_path: Path
) -> None:
    """Real processes over gloo. The second run stops after two updates, and continues."""
    recipe = recipe_in(tmp_path, kind=kind)
    for name, ends in (("plain", [(4, 0)]), ("rows", [(2, 0), (4, 0)])):
        run_dir = RunDir(tmp_path / name).create()
        for steps, code in ends:
            given = recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_train_steps": steps})})
            run_dir.recipe.write_text(dump_recipe(given), encoding="utf-8")
            assert ranks(run_dir, in_main_memory=name == "rows") == [(code, name == "rows")] * 2
    results = [RunDir(tmp_path / name).checkpoint(4) / "adapter.safetensors" for name in ("plain", "rows")]
    assert results[0].read_bytes() == results[1].read_bytes()
    assert losses_of(tmp_path / "rows") == losses_of(tmp_path / "plain")
    assert held_out(tmp_path / "rows") == held_out(tmp_path / "plain") != []


def ranks(run_dir: RunDir, in_main_memory: bool) -> list[tuple[int, bool]]:
    """Train with two processes; (exit code, whether it has sent rows) of each."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "LORA_ROCM_HOME": str(run_dir.path.parent)}
    command = [sys.executable, "-m", "tests.train.embedding_rank", str(int(in_main_memory)), str(run_dir.path)]
    with ExitStack() as stack:
        children = [  # their standard input stays open: when that closes, a worker stops
            stack.enter_context(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for env in environments(environ, 2)
        ]
        said = [child.stdout.read() if child.stdout else b"" for child in children]
        codes = [child.wait(WAIT_S) for child in children]
    return [(code, int(text.splitlines()[-1]) > 0) for code, text in zip(codes, said, strict=True)]


def rows_with(fault: str) -> tuple[EmbeddingRows, DeviceTransfer, nn.Embedding]:
    def copy(tensor: Tensor, device: torch.device, method: str) -> Tensor:
        arrived = copy_to_device(tensor, device, method).clone()
        if arrived.ndim == 2 and arrived.shape[1] == 8 and fault:
            arrived[4] = 0 if fault == "zeros" else arrived[3]
        return arrived

    torch.manual_seed(0)
    table, transfer = nn.Embedding(16, 8).requires_grad_(False), DeviceTransfer(CPU, pin=False, copy=copy)
    return EmbeddingRows(TokenTable(table, "net.weight", "ids"), None, transfer), transfer, table


@pytest.mark.parametrize("fault", ["", "zeros", "other row"])
def test_a_row_that_arrives_wrong_is_found(fault: str) -> None:
    _, transfer, table = rows_with(fault)
    arrived, _ = transfer.send({"ids": IDS_BS}, {"ids": fingerprint(IDS_BS)})
    assert bool(transfer.bad) == bool(fault)
    assert torch.equal(arrived[ROWS], table.weight[IDS_BS]) == (not fault)


def test_a_byte_that_changes_in_main_memory_is_found() -> None:
    rows, transfer, table = rows_with("")
    assert rows.changed() == []
    table.weight.data[9, 2] += 1
    assert rows.changed() == ["net.weight"]
    transfer.send({"ids": IDS_BS}, {"ids": fingerprint(IDS_BS)})
    assert transfer.bad, "also when the row is sent"


def test_lookups_outside_a_batch_give_the_same_rows() -> None:
    rows, transfer, table = rows_with("")
    assert torch.equal(table(IDS_BS), table.weight[IDS_BS])
    assert transfer.send({"noise": torch.zeros(2, 3)}, {"noise": fingerprint(torch.zeros(2, 3))})[0].keys() == {"noise"}
    assert table.state_dict().keys() == {"weight"}
    rows.close()
    assert transfer.extra is None and torch.equal(table(IDS_BS), table.weight[IDS_BS])
    again = pickle.loads(pickle.dumps(table))
    assert torch.equal(again(IDS_BS), table(IDS_BS)), "nothing of the placement stays in the module"


@pytest.mark.parametrize(("name", "moves"), [("llama", True), ("smollm", False), ("gemma3", False)])
def test_an_embedding_moves_only_if_it_is_just_looked_up(name: str, moves: bool, tmp_path: Path) -> None:
    """The second is tied to the output head, and the third scales its rows too."""
    adapted = Adapted(recipe_of(write_tiny_llm(tmp_path, name)))
    assert isinstance(adapted.family, CausalLM)
    found = token_table(adapted.family, adapted.model)
    assert (found is not None) == moves
    if found is not None:
        found.module.weight.requires_grad_(True)
        assert token_table(adapted.family, adapted.model) is None
