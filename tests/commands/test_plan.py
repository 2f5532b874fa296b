"""``lora-rocm plan``: the table, the choice, the errors; the model counted by the real child once."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import plan as command
from lora_rocm.commands.output import Output, OutputMode
from lora_rocm.commands.plan import AvailableMemory, card_bytes
from lora_rocm.errors import RecipeError, UserError
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.foundation.units import size_text
from lora_rocm.hardware.eight_bit import NVIDIA, rate_of
from lora_rocm.hardware.settings import Settings
from lora_rocm.planning.step_choice import choose
from lora_rocm.planning.step_plan import (
    MODES,
    Block,
    Footprint,
    MemoryPeak,
    Mode,
    Rates,
    SampleCost,
    SmallerAdapter,
    StepRequirements,
)
from lora_rocm.planning.step_requirements import does_not_fit, job_of
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.memory_rules import budget_of
from tests.families.toy_families import TOYS
from tests.hardware.situations import fast, situation
from tests.wording import Worded, holds, mentions, saying, says, says_if, worded

GIB = 2**30


WORK = SampleCost(3e13, 3e10, 300)


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
            SampleCost(1e12, 1e9, 9),
        )
        for n in range(10)
    )
    moments = tuple(MemoryPeak(n, (n + 1) * GIB // 2 + 2**27) for n in range(10))
    work = SampleCost(3e13, 3e10, 300)
    return ranked(Footprint("1024x1024", 1024 * 1024, 5 * GIB, GIB // 2, GIB // 8, GIB // 16, blocks, moments, work))


def ranked(footprint: Footprint, rank: int = 16) -> Footprint:
    """With what lower ranks would take: as a LoRA's, proportional to the rank."""
    figures = (footprint.adapter_bytes, footprint.gradient_bytes, footprint.landing_bytes)
    lower = [2**power for power in reversed(range(13)) if 2**power < rank]
    smaller = (SmallerAdapter(f"lora.rank to {less}", *(value * less // rank for value in figures)) for less in lower)
    return replace(footprint, smaller=tuple(smaller))


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
    answer: dict[str, Any] = {"footprint": net().to_json(), "precision": "bf16", "model_is_here": True}
    answer |= {"gpu": None, "encoders": []}

    def run_for_json(module: str, arguments: list[str], env: dict[str, str], *follow: object) -> dict[str, Any]:
        asked = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
        answer["asked"] = asked
        return {key: value for key, value in answer.items() if key != "asked"}

    monkeypatch.setattr("lora_rocm.processes.tool.run_for_json", run_for_json)
    return answer


def plan(path: str, overrides: Any, *, card: str | None, as_json: bool) -> int:
    """``lora-rocm plan``."""
    found = command.plan(path, overrides, card=card)
    return Output(OutputMode.JSON if as_json else OutputMode.HUMAN).show(found, command.render(found))


def test_a_rank_that_is_larger_than_layers_is_told(write: Any, child: Any, capsys: Any) -> None:
    assert plan(write(), (), card="80GB", as_json=False) == 0
    assert not mentions(capsys.readouterr().out, "commands/lora-rank-is-larger")
    child["footprint"]["narrow_layers"] = 7
    assert plan(write(), (), card="80GB", as_json=False) == 0
    output = capsys.readouterr().out
    assert says(output, "commands/lora-rank-is-larger-than-the-inputs") and says(output, "commands/lora-rank-is-larger")
    for count in (0, 5):
        child["footprint"]["unstarted_layers"] = count
        assert plan(write(), ("lora.init=pissa",), card="80GB", as_json=False) == 0
        assert says_if(bool(count), capsys.readouterr().out, "commands/a-part-of-the-ranks-of-5")


def test_the_last_line_is_the_command_that_trains(write: Any, child: Any) -> None:
    path = write()
    found = command.plan(path, ("lora.rank=8",), card="80GB")
    assert found.next == quoted(["lora-rocm", "train", path, "--set", "lora.rank=8"])
    assert command.render(found).splitlines()[-1] == f"next: {found.next}"
    assert command.plan(path, (), card="1GB").next is None, "the control: no plan fits"


def test_the_reason_is_the_faster_plan_that_needs_least(write: Any, child: Any) -> None:
    found = command.plan(write(), (), card="12GB")
    assert found.chosen is not None and found.room.num_bytes is not None
    large = [row for row in found.plans if row.needed_bytes > found.room.num_bytes]
    nearest = min((row for row in large if row.step_s < found.chosen.step_s), key=lambda row: row.needed_bytes)
    assert len({row.needed_bytes for row in large}) > 1, "the control"
    (reason,) = [line for line in command.render(found).splitlines() if line.startswith("reason: ")]
    assert f"reason: {nearest.mode} " in reason and reason.endswith(size_text(nearest.needed_bytes))


def test_the_reason_for_an_embedding_in_main_memory_is_its_size(write: Any, child: Any) -> None:
    """The plan with the embedding on the GPU would be faster, and does not fit. On a larger card, it stays there."""
    child["footprint"] |= {"table_bytes": 3 * GIB, "row_bytes": 2**20}
    seen = dict[bool, str]()
    for gib in range(6, 80, 2):
        found = command.plan(write(), (), card=f"{gib}GB")
        if found.chosen is not None:
            seen.setdefault(found.chosen.looks_up_rows, command.render(found))
            reasons = [line for line in command.render(found).splitlines() if line.startswith("reason: ")]
            named = [line for line in reasons if "embedding" in line]
            assert len(named) == found.chosen.looks_up_rows
            assert (found.with_embedding_bytes is not None) == found.chosen.looks_up_rows
            if found.with_embedding_bytes is not None and found.room.num_bytes is not None:
                assert found.with_embedding_bytes > found.room.num_bytes >= found.chosen.needed_bytes
                assert named[0].endswith(size_text(found.with_embedding_bytes))
    assert seen.keys() == {True, False}, "the control: both are seen"


def test_the_rounding_of_a_quantised_base_is_named(write: Any, child: Any, capsys: Any) -> None:
    for name, said in (("none", False), ("nf4", True)):
        assert plan(write(), (f"model.quantization={name}",), card="80GB", as_json=False) == 0
        out = capsys.readouterr().out
        assert says_if(said, out, "commands/nf4-rounds-the-frozen-weights-9-3")
        assert says_if(said, out, "commands/over-full-size-image-models-with-random")


EIGHT_BITS = {"model": {"quantization": "int8", "compute": "int8"}, "runtime": {"profile": "fast"}}


@pytest.mark.parametrize(
    ("machine", "card", "target"),
    [
        ("linux-rx9070xt", None, "gfx1201"),
        ("linux-mi300x", None, "gfx942"),
        ("linux-rx9070xt", "16GB", None),
        ("linux-rx7900xtx", None, "refused"),
    ],
)
def test_the_rate_of_products_in_eight_bits_is_named_and_used(
    write: Any, child: Any, capsys: Any, monkeypatch: Any, machine: str, card: str | None, target: str | None
) -> None:
    monkeypatch.setattr(command, "situation_here", lambda recipe: replace(fast(machine), recipe=recipe))
    assert plan(write(**EIGHT_BITS), (), card=card, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    rate = rate_of(None if target == "refused" else target, "int8")
    assert (rate.text(None) in found["notes"]) == (target != "refused")
    if target != "refused":
        assert found["rates"]["eight_bit_flops"] == pytest.approx(rate.times * found["rates"]["flops"])
    assert plan(write(), (), card=card, as_json=True) == 0
    assert rate.text(None) not in json.loads(capsys.readouterr().out)["notes"], "the control: in bf16"


def test_a_rate_is_an_estimate_on_every_gpu_but_the_measured_one() -> None:
    rate = rate_of(NVIDIA, "fp8")
    assert rate.measured_on == "NVIDIA H200" and rate_of("gfx9999", "fp8") == rate_of(None, "fp8")
    of_others = {rate.text(name) for name in ("NVIDIA H200 NVL", "NVIDIA RTX 6000 Ada", None)}
    assert len(of_others) == 1 and rate.text("NVIDIA H200") not in of_others
    assert rate_of("gfx1201", "int8").times < 1 < rate_of("gfx1201", "fp8").times


@pytest.mark.parametrize(
    ("machine", "family", "precision", "said"),
    [
        (
            "linux-rx6800xt",
            "sdxl",
            "fp16",
            worded("commands/auto-is-fp16-gfx1030-computes-bf16-slowly"),
        ),
        ("linux-rx6800xt", "flux", "fp16", worded("commands/flux-1-products-in-fp16-the-residual")),
        ("linux-rx6800xt", "anima", "fp16", worded("commands/anima-products-in-fp16-the-residual-stream")),
        ("linux-rx6800xt", "z-image", "bf16", worded("commands/auto-is-bf16-gfx1030-computes-bf16-slowly")),
        ("linux-rx7900xtx", "flux", "bf16", worded("commands/auto-is-bf16-bf16-changes-the-gradients")),
    ],
)
def test_the_number_format_is_told_with_its_reason_and_its_rounding(
    write: Any, child: Any, capsys: Any, monkeypatch: Any, machine: str, family: str, precision: str, said: Worded
) -> None:
    monkeypatch.setattr(command, "situation_here", lambda recipe: situation(machine))
    child["precision"] = precision
    assert plan(write(model={"family": family}), (), card=None, as_json=False) == 0
    output = capsys.readouterr().out
    assert says(output, said) and says(output, "commands/precision-changes-the-gradients-by-up-to", precision=precision)
    assert plan(write(model={"family": family}), (), card="80GB", as_json=False) == 0
    assert "gfx" not in capsys.readouterr().out, "that of another card"
    assert plan(write(model={"family": family}), (), card=None, as_json=False) == 0
    assert (child["asked"]["for_card"], child["asked"]["for_gpu"]) == (False, True)


def test_a_quantised_text_encoder_is_named_with_its_memory(write: Any, child: Any, capsys: Any) -> None:
    assert plan(write(), (), card="80GB", as_json=False) == 0
    assert "while captions" not in capsys.readouterr().out
    sizes = {"weight_bytes": 5 * GIB, "dense_bytes": 9 * GIB}
    child["encoders"] = [{"component": "text_encoder_2", "format": "int8", **sizes}]
    assert plan(write(), (), card="80GB", as_json=False) == 0
    said = (
        "text_encoder_2 takes 5.0 GiB while captions are encoded (9.0 GiB dense); int8 rounds the frozen weights: 0.8 %"
    )
    assert said in capsys.readouterr().out


WITHOUT_MAIN_MEMORY = ("keep", "selective", "attention", "recompute")


def gpu(budget_gib: float, **changes: Any) -> dict[str, Any]:
    rates = asdict(Rates(flops=1e14, moved_bytes=1e12, bus_bytes=1e10, known=True))
    return {"name": "Card", "integrated": False, "budget_bytes": int(budget_gib * GIB), "rates": rates} | changes


def rows_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(tuple(f"{mode} " for mode in MODES))]


def test_the_table_for_a_card(write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    child["footprint"] = replace(net(), optimizer_bytes=300 * 2**20).to_json()
    assert plan(write(optim={"optimizer": "prodigy"}), (), card="24GB", as_json=False) == 0
    assert child["asked"]["for_card"] is child["asked"]["for_gpu"] is True
    output = capsys.readouterr().out
    rows = rows_of(output)
    assert [row.split()[0] for row in rows] == [*MODES] * 3  # 4, 2 and 1 samples at once
    assert sum("<- chosen" in row for row in rows) == 1
    assert rows[0].split()[-1] == "no" and "24.0 GiB" in output
    assert "would choose" in output and "relative" in output
    assert says(output, "commands/adapter-and-optimizer-704-0-mib-prodigy")


def test_the_key_that_makes_blocks_recomputed_is_named(write: Any, child: Any, capsys: Any) -> None:
    for given, why in (("true", " of train.gradient_checkpointing: true\n"), ("false", " at once, captured\n")):
        assert plan(write(), (f"train.gradient_checkpointing={given}",), card="80GB", as_json=False) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines(True) if "would choose" in line]
        assert line.endswith(why) and ("recomputed" in line) == (given == "true")


def test_on_a_gpu_that_was_measured_times_are_seconds(
    write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    child["gpu"] = gpu(64)
    plan(write(), (), card=None, as_json=False)
    output = capsys.readouterr().out
    assert " s  yes  <- chosen" in rows_of(output)[0]
    assert (
        "100 steps: about" in output and says(output, "commands/card-as-training-sees-it") and "relative" not in output
    )


def test_memory_that_the_gpu_shares_is_not_offloaded_to(
    write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    child["gpu"] = gpu(64, integrated=True)
    plan(write(), (), card=None, as_json=False)
    assert not any(row.startswith("offload") for row in rows_of(capsys.readouterr().out))


def test_without_a_gpu_nothing_is_said_to_fit(
    write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    child["precision"] = "no"
    plan(write(), (), card=None, as_json=False)
    assert child["asked"]["for_card"] is child["asked"]["for_gpu"] is False
    output = capsys.readouterr().out
    assert says(output, "commands/auto-is-no-float32-on-the-cpu")
    assert "--card" in output and not any(row.endswith(("yes", "no", "chosen")) for row in rows_of(output)[1:])


def test_that_texts_were_not_read_is_said(
    write: Any, child: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = """\
model: {family: causal-lm, name_or_path: builtin:tiny-llama}
data: {sources: [{dataset: builtin:demo-chats}]}
train: {max_train_steps: 1}
"""
    (tmp_path / "chats.yaml").write_text(chats, encoding="utf-8")
    for packing, said in (("false", "rows may be shorter"), ("true", "rows are full")):
        plan(str(tmp_path / "chats.yaml"), [f"data.packing={packing}"], card="24GB", as_json=False)
        assert says(capsys.readouterr().out, "commands/data-max-length-is-counted-and-said", said=said)
    plan(write(), (), card="24GB", as_json=False)
    assert "max_length" not in capsys.readouterr().out


def test_json_says_the_same(write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    plan(write(), ["train.batch_size=2"], card="12", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] in found["plans"]
    assert found["chosen"]["needed_bytes"] <= found["room"]["num_bytes"] < 12 * GIB
    assert found["seconds_are_known"] is False
    assert found["footprint"]["blocks"] == 10


def test_what_cannot_fit_is_an_error_behind_the_table(
    write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(write(), (), card="2GB", as_json=False) == 2
    said = capsys.readouterr()
    assert (
        rows_of(said.out)
        and says(said.err, "commands/does-not-fit")
        and not mentions(said.out, "commands/does-not-fit")
    )
    assert plan(write(), (), card="2GB", as_json=True) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["error"]["code"] == "does-not-fit" and found["error"]["exit_code"] == 2
    assert found["plans"] and found["chosen"] is None


@pytest.mark.slow
def test_the_real_child_counts_the_tiny_model(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(data={"resolution": 128}, lora={"rank": 4, "targets": r".*mid_block.*attn1\.to_q"})
    assert plan(path, (), card="8GB", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["precision"] == "bf16"
    assert found["chosen"]["mode"] == "keep" and found["chosen"]["parts"] == 1
    assert found["footprint"]["work"]["flops"] > 1e8


def test_a_model_that_is_not_here_is_counted_all_the_same(
    write: Any, child: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(model={"name_or_path": "somebody/a-fine-tune"})
    assert plan(path, (), card="24GB", as_json=False) == 0
    assert not mentions(capsys.readouterr().out, "commands/is-not-on-this-machine")
    child["model_is_here"] = False
    assert plan(path, (), card="24GB", as_json=False) == 0
    output = capsys.readouterr().out
    assert says(output, "commands/somebody-a-fine-tune-is-not-on") and says(output, "commands/is-not-on-this-machine")


def test_a_wrong_recipe_is_said(write: Any) -> None:
    with pytest.raises(RecipeError):
        plan(write(), ["runtime.memory=much"], card=None, as_json=False)


@pytest.mark.parametrize(("text", "gib"), [("24GB", 24), ("24", 24), ("7.5 gib", 7.5), (" 16G ", 16), ("0.5GB", 0.5)])
def test_memory_of_a_card(text: str, gib: float) -> None:
    assert card_bytes(text) == gib * GIB


@pytest.mark.parametrize("text", ["", "GB", "-8GB", "0", "24TB", "nan", "1e3", "99999", "RTX 4090", "\udcff"])
def test_what_is_no_memory_of_a_card(text: str) -> None:
    with pytest.raises(UserError, check=saying("commands/memory-of-a-card")):
        card_bytes(text)


def recipe(**sections: dict[str, Any]) -> Recipe:
    base = {"model": {"name_or_path": "x"}, "data": {"path": "x"}, "train": {"max_train_steps": 1, "batch_size": 4}}
    return recipe_from({name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections})


@pytest.mark.parametrize(
    ("memory", "checkpointing", "can_offload", "modes"),
    [
        ("auto", False, True, MODES),
        ("auto", False, False, WITHOUT_MAIN_MEMORY),
        ("auto", True, True, ("attention", "recompute", "inputs", "offload")),
        ("auto", True, False, ("attention", "recompute")),
        ("keep", False, True, ("keep",)),
        ("keep", True, True, ("recompute",)),
        ("selective", True, True, ("recompute",)),
        ("attention", False, False, ("attention",)),
        ("attention", True, True, ("recompute",)),
        ("inputs", True, True, ("inputs",)),
        ("offload", True, False, ("offload",)),
    ],
)
def test_what_a_recipe_allows(memory: str, checkpointing: bool, can_offload: bool, modes: tuple[str, ...]) -> None:
    by_recipe = checkpointing and memory == "auto"  # else the two contradict each other, and past failures decide
    asked = recipe(runtime={"memory": memory}, train={"gradient_checkpointing": by_recipe})
    settings = Settings(checkpointing=checkpointing and not by_recipe)
    job = job_of(asked, settings, on_gpu=True, can_offload=can_offload)
    assert job.modes == modes
    assert job.all_offloaded == (memory == "offload")


@pytest.mark.parametrize(
    ("compiled", "memory", "modes"),
    [
        ("off", "auto", MODES),  # the control
        ("auto", "auto", MODES),  # which is off
        ("regional", "auto", ("keep", "selective", "recompute")),
        ("full", "auto", ("keep", "selective", "recompute")),
        ("full", "offload", ("offload",)),  # asked for both: that is refused in words, not undone
    ],
)
def test_what_is_compiled_is_not_offloaded_by_auto(compiled: str, memory: str, modes: tuple[str, ...]) -> None:
    asked = recipe(runtime={"compile": compiled, "memory": memory})
    assert job_of(asked, Settings(), on_gpu=True, can_offload=True).modes == modes
    needs_little = int(4.3 * GIB)  # of the weights alone there are 5
    found = choose(
        needs_little, net().scaled((256 / 1024) ** 2), job_of(asked, Settings(), on_gpu=True, can_offload=True), Rates()
    )
    assert (found is not None and found.mode == "offload") is ("offload" in modes)


def test_what_past_failures_made_necessary_holds() -> None:
    job = job_of(recipe(), Settings(micro_batch_parts=8, checkpointing=True), on_gpu=True, can_offload=True)
    assert job.modes == ("recompute", "inputs", "offload") and job.min_parts == 4
    assert not job.keeps_attention and not job.unpacks_once


@pytest.mark.parametrize("attention", ["auto", "sdpa-flash", "math-groups"])
def test_only_attention_whose_output_can_be_kept_is_kept(attention: Any) -> None:
    compiled = {"runtime": {"compile": "full"}}
    found = [
        job_of(recipe(**sections), Settings(attention=name), on_gpu=True, can_offload=True).keeps_attention
        for name, sections in ((attention, {}), ("math", {}), ("flash", {}), (attention, compiled))
    ]
    assert found == [True, False, False, False]


def test_inputs_are_never_moved_to_memory_that_the_gpu_shares() -> None:
    asked = recipe(runtime={"memory": "inputs"})
    assert job_of(asked, Settings(), on_gpu=True, can_offload=True).modes == ("inputs",)
    with pytest.raises(UserError) as caught:
        job_of(asked, Settings(), on_gpu=True, can_offload=False)
    assert caught.value.code == "inputs-share-memory"
    for allowed in (job_of(recipe(), Settings(), on_gpu=True, can_offload=False).modes, WITHOUT_MAIN_MEMORY):
        assert not {"inputs", "offload"} & set(allowed)


@pytest.mark.parametrize(
    ("on_gpu", "sections", "graphs"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"runtime": {"graphs": "off"}}, False),
        (True, {"lora": {"dropout": 0.1}}, False),
        (True, {"lora": {"rank_dropout": 0.1}}, True),
    ],
)
def test_graphs_are_counted_where_there_are_some(on_gpu: bool, sections: dict[str, Any], graphs: bool) -> None:
    assert job_of(recipe(**sections), Settings(), on_gpu=on_gpu, can_offload=True).graphs is graphs
    assert not job_of(recipe(**sections), Settings(graphs=False), on_gpu=on_gpu, can_offload=True).graphs


@pytest.mark.parametrize(
    ("sections", "limit_gib", "fix"),
    [
        ({"runtime": {"memory": "keep"}}, 8, worded("commands/runtime-memory-to-auto")),
        ({}, 2.2, worded("commands/data-resolution-to")),
        ({"runtime": {"memory": "keep"}}, 2.2, worded("commands/and-runtime-memory-to-auto")),
        ({}, 0.5, worded("commands/no-rank-would-fit-at-any-resolution")),
    ],
)
def test_the_nearest_that_would_fit(sections: dict[str, Any], limit_gib: float, fix: Worded) -> None:
    asked = recipe(**sections)
    job = job_of(asked, Settings(), on_gpu=True, can_offload=True)
    error = does_not_fit(asked, net(), job, Rates(), int(limit_gib * GIB))
    assert says(error.fix, fix)
    if "data.resolution to" in error.fix:  # it is true, and the next larger one would not do
        side = int(error.fix.split("data.resolution to ")[1].split()[0].rstrip(":"))
        free = StepRequirements(4, graphs=True)
        fits = [
            choose(int(limit_gib * GIB), net().scaled((s / 1024) ** 2), free, Rates()) is not None
            for s in (side, side + 64)
        ]
        assert fits == [True, False]


def slim() -> Footprint:
    """Little but an adapter and activations: there is a budget for which less of one of them is not enough."""
    blocks = tuple(replace(block, weight_bytes=2**20) for block in net().blocks)
    return ranked(replace(net(), weight_bytes=2**26, adapter_bytes=2 * GIB, blocks=blocks))


def followed(fix: str, asked: Recipe, footprint: Footprint) -> tuple[Recipe, Footprint]:
    """The recipe changed as the sentence advises, and its footprint. The settings are read from the words alone."""
    changes = dict(re.findall(r"(\w+\.\w+) to (\w+)", fix))
    sections = asked.model_dump(mode="json")
    for name, value in changes.items():
        section, key = name.split(".")
        sections[section][key] = value
    now = recipe_from(sections)
    side, rank = now.data.resolution, now.lora.rank
    adapter = {name: getattr(footprint, name) * rank // asked.lora.rank for name in command.ADAPTER}
    return now, replace(footprint.scaled((side / asked.data.resolution) ** 2), **adapter)


NEAREST: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "kept": {"runtime": {"memory": "keep"}},
    "all offloaded": {"runtime": {"memory": "offload"}},
    "recomputed": {"train": {"gradient_checkpointing": True}},
    "compiled": {"runtime": {"compile": "regional"}},
    "kept and compiled": {"runtime": {"compile": "full", "memory": "keep"}},
}


BUDGETS_GIB = (0.4, 0.6, 0.75, 1, 1.5, 2, 2.6, 3, 4, 5, 5.5, 5.8, 6.2, 7, 8, 9)


def untrue(
    asked: Recipe,
    footprint: Footprint,
    can_offload: bool,
    auto_modes: tuple[Mode, ...] | None,
    budgets_gib: tuple[float, ...] = BUDGETS_GIB,
) -> list[str]:
    """Fixes, over many budgets, that do not keep their word. auto_modes: given to the search. None: the
    expected ones.
    """
    found = []
    for budget_bytes in (int(gib * GIB) for gib in budgets_gib):
        job = job_of(asked, Settings(), on_gpu=True, can_offload=can_offload)
        if choose(budget_bytes, footprint, job, Rates()) is not None:
            continue
        told = job if auto_modes is None else replace(job, auto_modes=auto_modes, eager_modes=auto_modes)
        fix = does_not_fit(asked, footprint, told, Rates(), budget_bytes).fix
        words = fix
        if fix.startswith("Free memory"):
            words = "data.resolution to 256, lora.rank to 1, runtime.memory to auto, runtime.compile to off"
        now, smaller = followed(words, asked, footprint)
        then = job_of(now, Settings(), on_gpu=True, can_offload=can_offload)
        fits = choose(budget_bytes, smaller, then, Rates()) is not None
        if fits is fix.startswith("Free memory"):
            found.append(f"{budget_bytes / GIB} GiB: {fix}")
    return found


@pytest.mark.parametrize(("sections", "footprint", "can_offload"), [
    pytest.param(sections, footprint, can_offload, id=f"{way}-{model}-{can_offload}",
                 marks=() if (model == "net") is can_offload else pytest.mark.slow)
    for way, sections in NEAREST.items()
    for model, footprint in (("net", net()), ("slim", slim()))
    for can_offload in (True, False)
])  # fmt: skip
def test_what_is_said_would_fit_does_and_what_is_said_would_not_does_not(
    sections: dict[str, Any], footprint: Footprint, can_offload: bool
) -> None:
    budgets_gib = BUDGETS_GIB[::2] if can_offload else BUDGETS_GIB[1::2]
    assert not untrue(recipe(**sections), footprint, can_offload, None, budgets_gib)


def test_a_search_with_more_than_auto_has_here_would_be_seen() -> None:
    """The control: memory that the GPU shares, and a search that offloads all the same."""
    told = untrue(recipe(runtime={"memory": "keep"}), net(), False, MODES)
    assert says(told, "commands/set-runtime-memory-to-auto")


def test_both_are_named_where_neither_is_enough() -> None:
    def said(gib: float) -> str:
        job = job_of(recipe(), Settings(), on_gpu=True, can_offload=True)
        return does_not_fit(recipe(), slim(), job, Rates(), int(gib * GIB)).fix or ""

    resolution, rank = re.findall(r"\d+", said(1.0))
    assert 1 <= int(rank) <= 8
    assert said(1.0) == worded("commands/set-both", resolution=resolution, rank=rank)
    assert says(said(0.3), "commands/free-memory-of-the-gpu")  # the control


def test_a_family_without_a_resolution_is_not_told_to_lower_it() -> None:
    sections = {"model": {"family": "toy-text", "name_or_path": "x"}, "data": {"path": "x"}, "train": {"epochs": 1}}
    asked = recipe_from(sections, TOYS)
    job = job_of(asked, Settings(), on_gpu=True, can_offload=True)
    errors = [does_not_fit(asked, slim(), job, Rates(), int(gib * GIB)) for gib in (1.0, 0.3)]
    assert all("resolution" not in str(error) for error in errors)
    assert "lora.rank: 16" in errors[0].where and says(errors[1].fix, "commands/no-rank-would-fit")


def test_what_compiling_forbids_is_named_before_smaller_images() -> None:
    def said(**runtime: str) -> str:
        asked = recipe(runtime=runtime)
        job = job_of(asked, Settings(), on_gpu=True, can_offload=True)
        return does_not_fit(asked, net(), job, Rates(), int(5.5 * GIB)).fix or ""

    assert said(compile="full") == worded("commands/set-runtime-compile-to-off-that-would")
    assert said(compile="full", memory="keep") == worded("commands/set-runtime-memory-to-auto-and-runtime")
    assert said(memory="keep") == worded("commands/set-runtime-memory-to-auto-that-would")  # the control


@pytest.mark.parametrize("own", [512, None])  # None: the control
def test_the_nearest_resolution_is_that_of_the_sources(own: int | None) -> None:
    asked = recipe(data={"path": None, "sources": [{"path": "x", "resolution": own}], "resolution": 1024})
    large = replace(net(), cost=(own or 1024) ** 2)
    job = job_of(asked, Settings(), on_gpu=True, can_offload=True)
    error = does_not_fit(asked, large, job, Rates(), int(2.2 * GIB))
    side = int(error.fix.split(" to ")[1].split(":")[0])
    assert side < (own or 1024) and (error.where or "").startswith(error.fix.split(" to ")[0].removeprefix("Set "))
    assert ("data.sources" in error.fix) is (own is not None)


def test_a_smaller_rank_where_adapter_and_optimizer_take_most() -> None:
    asked = recipe(lora={"rank": 64})
    large = ranked(replace(net(), adapter_bytes=8 * GIB, gradient_bytes=0, landing_bytes=0), 64)
    job = job_of(asked, Settings(), on_gpu=True, can_offload=True)
    error = does_not_fit(asked, large, job, Rates(), int(4.5 * GIB))
    assert error.fix.startswith("Set lora.rank to 16")


def test_a_room_says_what_it_is_made_of() -> None:
    room = command._room_of_card(24 * GIB)
    assert isinstance(room, AvailableMemory) and room.num_bytes == sum(part.num_bytes for part in room.parts)
    assert 21 * GIB < room.num_bytes < 22 * GIB
    assert says(room.why, "commands/24-0-gib-memory-of-the-card")


@pytest.mark.parametrize(
    ("machine", "held_gib", "said"),
    [
        ("linux-rx7900xtx", 1.4, worded("commands/24-0-gib-memory-of-the-card-2")),
        ("linux-rx7900xtx", 9.5, worded("commands/24-0-gib-memory-of-the-card-3")),
        ("linux-rx7900xtx", 0.0, worded("commands/24-0-gib-memory-of-the-card-4")),
        ("wsl-rx7900xtx", 1.0, worded("commands/24-0-gib-memory-of-the-card-5")),
        ("linux-strix-halo", 0.0, worded("commands/62-6-gib-can-be-mapped-gtt")),
        ("nvidia-rtx4090", 0.0, ""),  # as measured: nothing is subtracted
    ],
)
def test_the_room_says_what_was_counted(
    machine: str, held_gib: float, said: str | Worded, write: Any, child: Any, monkeypatch: Any, capsys: Any
) -> None:
    """The child measures the memory of training; other processes use the rest of the card."""
    made = situation(machine)
    known = budget_of(made.facts, made.gpu)
    whole = known.limit_bytes if known is not None else 24 * GIB
    measured = whole - (int(held_gib * GIB) if machine != "wsl-rx7900xtx" else 0)
    child["gpu"] = gpu(0, budget_bytes=measured, name="Card", integrated=machine == "linux-strix-halo")
    monkeypatch.setattr(command, "situation_here", lambda recipe: made)
    assert plan(write(), (), card=None, as_json=False) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory for training")]
    assert (
        says(line, "commands/card-as-training-sees-it")
        and holds(line, said)
        and ("GiB" in line.partition("sees it")[2]) == bool(said)
    )


def test_without_torch_the_room_is_what_the_system_says(write: Any, child: Any, monkeypatch: Any, capsys: Any) -> None:
    for machine, held in (("linux-rx7900xtx", "1.4 GiB held by other programs"), ("nvidia-rtx4090", "")):
        made = situation(machine)
        monkeypatch.setattr(command, "situation_here", lambda recipe, made=made: made)
        assert plan(write(), (), card=None, as_json=True) == 0
        room = json.loads(capsys.readouterr().out)["room"]
        known = budget_of(made.facts, made.gpu)
        if known is None:
            assert room["num_bytes"] is None
        else:
            assert held in room["why"] and room["num_bytes"] == known.total_bytes
            assert sum(part["num_bytes"] for part in room["parts"]) == known.total_bytes
