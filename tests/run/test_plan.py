"""``lora-rocm plan``: the table, the choice, the errors; the model counted by the real child once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import RecipeError, UserError
from lora_rocm.host.settings import Settings
from lora_rocm.recipe.schema import Recipe
from lora_rocm.run import plan as command
from lora_rocm.run.memory_plan import MODES, Block, Footprint, Job, Moment, Rates, Work, choose
from lora_rocm.run.plan import Room, card_bytes, does_not_fit, job_of

GIB = 2**30


def net() -> Footprint:
    """Something of SDXL's size: 5 GiB of weights, 5 GiB of activations a sample in ten blocks."""
    blocks = tuple(
        Block(
            f"{n}",
            GIB // 2 - 2**20,
            GIB // 2,
            n * GIB // 2,
            GIB // 2 + 2**27,
            2**27,
            (n + 1) * GIB // 2,
            Work(1e12, 1e9, 9),
        )
        for n in range(10)
    )
    moments = tuple(Moment(n, (n + 1) * GIB // 2 + 2**27) for n in range(10))
    return Footprint(1024, 1024, 5 * GIB, GIB // 2, GIB // 8, GIB // 16, blocks, moments, Work(3e13, 3e10, 300))


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(**sections: dict[str, Any]) -> str:
        (tmp_path / "Bilder").mkdir(exist_ok=True)
        base: dict[str, dict[str, Any]] = {
            "model": {"name_or_path": "builtin:tiny-sdxl"},
            "data": {"path": str(tmp_path / "Bilder"), "resolution": 1024},
            "train": {"max_train_steps": 100, "batch_size": 4},
            "cache": {"dir": str(tmp_path / "cache")},
        }
        whole = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
        path = tmp_path / "mein Rezept.yaml"
        path.write_text(json.dumps(whole), encoding="utf-8")
        return str(path)

    return written


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The heavy child's answer, to be changed; "asked" gets the job."""
    answer: dict[str, Any] = {"footprint": net().to_json(), "precision": "bf16", "model_is_here": True, "gpu": None}

    def run_for_json(module: str, arguments: list[str], env: dict[str, str]) -> dict[str, Any]:
        asked = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
        answer["asked"] = asked
        return {key: value for key, value in answer.items() if key != "asked"}

    monkeypatch.setattr(command, "run_for_json", run_for_json)
    return answer


def gpu(budget_gib: float, **changes: Any) -> dict[str, Any]:
    rates = {"flops": 1e14, "moved_bytes": 1e12, "bus_bytes": 1e10, "launch_s": 4e-6, "known": True}
    return {"name": "Card", "integrated": False, "budget_bytes": int(budget_gib * GIB), "rates": rates} | changes


def rows_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(MODES)]


def test_the_table_for_a_card(write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.plan(write(), (), card="24GB", as_json=False) == 0
    assert child["asked"]["for_card"] is True
    output = capsys.readouterr().out
    rows = rows_of(output)
    assert [row.split()[0] for row in rows] == [*MODES] * 3  # 4, 2 and 1 samples at once
    assert sum("<- chosen" in row for row in rows) == 1
    assert rows[0].split()[-1] == "no" and "24.0 GiB" in output
    assert "would choose" in output and "relative" in output


def test_on_a_gpu_that_was_measured_times_are_seconds(
    write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    child["gpu"] = gpu(64)
    command.plan(write(), (), card=None, as_json=False)
    output = capsys.readouterr().out
    assert " s  yes  <- chosen" in rows_of(output)[0]
    assert "100 steps: about" in output and "Card, as training sees it" in output and "relative" not in output


def test_memory_that_the_gpu_shares_is_not_offloaded_to(
    write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    child["gpu"] = gpu(64, integrated=True)
    command.plan(write(), (), card=None, as_json=False)
    assert not any(row.startswith("offload") for row in rows_of(capsys.readouterr().out))


def test_without_a_gpu_nothing_is_said_to_fit(
    write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command.plan(write(), (), card=None, as_json=False)
    output = capsys.readouterr().out
    assert "--card" in output and not any(row.endswith(("yes", "no", "chosen")) for row in rows_of(output)[1:])


def test_json_says_the_same(write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    command.plan(write(), ["train.batch_size=2"], card="12", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] in found["plans"]
    assert found["chosen"]["needed_bytes"] <= found["room"]["num_bytes"] < 12 * GIB
    assert found["seconds_are_known"] is False
    assert found["footprint"]["blocks"] == 10


def test_what_cannot_fit_is_an_error_behind_the_table(
    write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as caught:
        command.plan(write(), (), card="2GB", as_json=False)
    assert caught.value.code == "does-not-fit" and caught.value.exit_code == 2
    assert rows_of(capsys.readouterr().out)


def test_the_real_child_counts_the_tiny_model(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(data={"resolution": 128}, lora={"rank": 4})
    assert command.plan(path, (), card="8GB", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["precision"] == "bf16"
    assert found["chosen"]["mode"] == "keep" and found["chosen"]["parts"] == 1
    assert found["footprint"]["work"]["flops"] > 1e8


def test_a_model_that_is_not_here_is_counted_all_the_same(
    write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(model={"name_or_path": "somebody/a-fine-tune"})
    assert command.plan(path, (), card="24GB", as_json=False) == 0
    assert "is not on this machine" not in capsys.readouterr().out
    child["model_is_here"] = False
    assert command.plan(path, (), card="24GB", as_json=False) == 0
    assert "somebody/a-fine-tune is not on this machine: counted by" in capsys.readouterr().out


def test_a_wrong_recipe_is_said(write: Any) -> None:
    with pytest.raises(RecipeError):
        command.plan(write(), ["runtime.memory=much"], card=None, as_json=False)


@pytest.mark.parametrize(("text", "gib"), [("24GB", 24), ("24", 24), ("7.5 gib", 7.5), (" 16G ", 16), ("0.5GB", 0.5)])
def test_memory_of_a_card(text: str, gib: float) -> None:
    assert card_bytes(text) == gib * GIB


@pytest.mark.parametrize("text", ["", "GB", "-8GB", "0", "24TB", "nan", "1e3", "99999", "RTX 4090", "\udcff"])
def test_what_is_no_memory_of_a_card(text: str) -> None:
    with pytest.raises(UserError, match="memory of a card"):
        card_bytes(text)


def recipe(**sections: dict[str, Any]) -> Recipe:
    base = {"model": {"name_or_path": "x"}, "data": {"path": "x"}, "train": {"max_train_steps": 1, "batch_size": 4}}
    return Recipe.model_validate({name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections})


@pytest.mark.parametrize(
    ("memory", "checkpointing", "can_offload", "modes"),
    [
        ("auto", False, True, MODES),
        ("auto", False, False, MODES[:-1]),
        ("auto", True, True, ("recompute", "offload")),
        ("auto", True, False, ("recompute",)),
        ("keep", False, True, ("keep",)),
        ("keep", True, True, ("recompute",)),
        ("selective", True, True, ("recompute",)),
        ("offload", True, False, ("offload",)),
    ],
)
def test_what_a_recipe_allows(memory: str, checkpointing: bool, can_offload: bool, modes: tuple[str, ...]) -> None:
    asked = recipe(runtime={"memory": memory}, train={"gradient_checkpointing": checkpointing})
    job = job_of(asked, Settings(), on_gpu=True, can_offload=can_offload)
    assert job.modes == modes
    assert job.all_offloaded == (memory == "offload")


def test_what_past_failures_made_necessary_holds() -> None:
    job = job_of(recipe(), Settings(micro_batch_parts=8, checkpointing=True), on_gpu=True, can_offload=True)
    assert job.modes == ("recompute", "offload") and job.min_parts == 4


@pytest.mark.parametrize(
    ("on_gpu", "sections", "graphs"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"runtime": {"graphs": "off"}}, False),
        (True, {"lora": {"dropout": 0.1}}, False),
    ],
)
def test_graphs_are_counted_where_there_are_some(on_gpu: bool, sections: dict[str, Any], graphs: bool) -> None:
    assert job_of(recipe(**sections), Settings(), on_gpu=on_gpu, can_offload=True).graphs is graphs
    assert not job_of(recipe(**sections), Settings(graphs=False), on_gpu=on_gpu, can_offload=True).graphs


@pytest.mark.parametrize(
    ("sections", "limit_gib", "fix"),
    [
        ({"runtime": {"memory": "keep"}}, 8, "runtime.memory to auto"),
        ({}, 2.2, "data.resolution to"),
        ({"runtime": {"memory": "keep"}}, 2.2, "and runtime.memory to auto"),
        ({}, 0.5, "no resolution and rank"),
    ],
)
def test_the_nearest_that_would_fit(sections: dict[str, Any], limit_gib: float, fix: str) -> None:
    asked = recipe(**sections)
    job = job_of(asked, Settings(), on_gpu=True, can_offload=True)
    error = does_not_fit(asked, net(), job, Rates(), int(limit_gib * GIB))
    assert fix in error.fix
    if "data.resolution to" in error.fix:  # it is true, and the next larger one would not do
        side = int(error.fix.split("data.resolution to ")[1].split()[0].rstrip(":"))
        free = Job(4, graphs=True)
        fits = [
            choose(int(limit_gib * GIB), net().with_area(s, s), free, Rates()) is not None for s in (side, side + 64)
        ]
        assert fits == [True, False]


@pytest.mark.parametrize("own", [512, None])  # None: the control
def test_the_nearest_resolution_is_that_of_the_sources(own: int | None) -> None:
    asked = recipe(data={"path": None, "sources": [{"path": "x", "resolution": own}], "resolution": 1024})
    large = replace(net(), height=own or 1024, width=own or 1024)
    job = job_of(asked, Settings(), on_gpu=True, can_offload=True)
    error = does_not_fit(asked, large, job, Rates(), int(2.2 * GIB))
    side = int(error.fix.split(" to ")[1].split(":")[0])
    assert side < (own or 1024) and (error.where or "").startswith(error.fix.split(" to ")[0].removeprefix("Set "))
    assert ("data.sources" in error.fix) is (own is not None)


def test_a_smaller_rank_where_adapter_and_optimizer_take_most() -> None:
    asked, large = recipe(lora={"rank": 64}), replace(net(), adapter_bytes=8 * GIB, gradient_bytes=0, landing_bytes=0)
    job = job_of(asked, Settings(), on_gpu=True, can_offload=True)
    error = does_not_fit(asked, large, job, Rates(), int(4.5 * GIB))
    assert error.fix.startswith("Set lora.rank to 16")


def test_a_room_says_what_it_is_made_of() -> None:
    room = command._room_of_card(24 * GIB)
    assert isinstance(room, Room) and room.num_bytes is not None and 22 * GIB < room.num_bytes < 24 * GIB
