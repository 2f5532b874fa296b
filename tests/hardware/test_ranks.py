"""Which process this is, and which GPUs several of them get."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_rocm.errors import UserError
from lora_rocm.hardware.facts import Gpu, HostFacts, Torch
from lora_rocm.hardware.gpu_select import Selection, select
from lora_rocm.hardware.ranks import Rank, rank_of, select_several
from lora_rocm.rules.environment import plan
from lora_rocm.supervisor.multi_gpu import with_gpus
from tests.hardware.situations import facts_of, situation
from tests.wording import Worded, holds, saying, worded

HIP, CUDA = Torch("2.13.0+rocm7.2", hip="7.2.1", arch_list=("gfx1100", "gfx1201")), Torch("2.13.0+cu130", cuda="13.0")
CARD = Gpu("amd", "card", 0, "gfx1201", integrated=False, node=1)
TWIN = replace(CARD, name="twin", index=1, node=2)
APU = Gpu("amd", "apu", 2, "gfx1036", integrated=True, node=3)
OLD = Gpu("amd", "old", 3, "gfx906", integrated=False, node=4)
LAUNCHED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
LAUNCHED |= {"MASTER_PORT": "1"}


def machine(*gpus: Gpu, torch: Torch | None = HIP, system: str = "linux") -> HostFacts:
    return HostFacts("test", system, "3.12", "cpu", 8, gpus=gpus, torch=torch)  # type: ignore[arg-type]


def test_a_process_knows_its_place() -> None:
    assert rank_of({}) == Rank() and Rank().is_first
    assert rank_of(LAUNCHED) == Rank(3, 4, 1, 2) and not rank_of(LAUNCHED).is_first
    assert rank_of(LAUNCHED | {"TORCHELASTIC_RESTART_COUNT": "2"}).start == 2
    mine = Rank(1, 2, 1, 2)
    assert rank_of(mine.variables(4711)) == mine and mine.variables(4711)["MASTER_ADDR"] == "127.0.0.1"
    assert mine.variables(4711)["TORCHELASTIC_USE_AGENT_STORE"] != "True", "a torchrun above would be waited for"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_some_platform_sets_makes_no_rank(missing: str) -> None:
    assert rank_of({name: value for name, value in LAUNCHED.items() if name != missing}) == Rank()


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "4"},
        {"RANK": "-1"},
        {"WORLD_SIZE": "two"},
        {"LOCAL_RANK": "x"},
        {"WORLD_SIZE": "9" * 30},
        {"MASTER_PORT": "http"},
        {"MASTER_PORT": "65536"},
    ],
)
def test_variables_that_contradict_each_other_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, check=saying("hardware/make-no-sense")) as caught:
        rank_of(LAUNCHED | wrong)
    assert next(iter(wrong.values())) in caught.value.where


def test_cards_are_taken_in_order_and_an_apu_is_hidden_from_all() -> None:
    found = select_several(machine(APU, TWIN, CARD), {}, 2)
    assert found.gpus == (CARD, TWIN) and found.gpu == CARD and not found.alone
    assert found.hide_with == ("ROCR_VISIBLE_DEVICES", "0,1")
    assert select_several(machine(CARD, TWIN), {}, 2).hide_with is None
    assert select_several(machine(CARD, TWIN), {}, 1).hide_with == ("ROCR_VISIBLE_DEVICES", "0")


def test_the_variable_reaches_every_process_and_no_single_one() -> None:
    facts = facts_of("linux-rx9060xt-pair")
    made = situation(replace(facts, gpus=(*facts.gpus, replace(APU, index=2))))
    rows = {row.rule: row.value for row in plan(with_gpus(made, 2, 2)).rows}
    assert rows["several-gpus-linux"] == "0,1" and rows["no-p2p"] == "1" and "one-gpu-linux" not in rows
    alone = {row.rule for row in plan(with_gpus(made, 1, 1)).rows}
    assert "one-gpu-linux" in alone and not alone & {"several-gpus-linux", "no-p2p"}
    elsewhere = {row.rule for row in plan(with_gpus(made, 1, 4)).rows}
    assert "no-p2p" in elsewhere


@pytest.mark.parametrize(
    ("facts", "environ", "words"),
    [
        (
            machine(CARD, APU),
            {},
            [worded("hardware/asks-for-3-gpus-and-1"), "0: card", worded("hardware/apu-integrated-left-out")],
        ),
        (machine(CARD, TWIN, OLD), {}, [worded("hardware/and-2-can-be-used"), "--gpus 2"]),
        (
            machine(CARD, TWIN, APU),
            {"HIP_VISIBLE_DEVICES": "1"},
            [worded("hardware/and-1-can"), "HIP_VISIBLE_DEVICES=1 limits"],
        ),
        (machine(APU), {}, [worded("hardware/and-1-can-be-used")]),
        (
            machine(),
            {},
            [worded("hardware/and-none-can-be-used"), worded("hardware/can-use-no-gpu"), "runtime.device=cpu"],
        ),
        (machine(CARD, TWIN, torch=Torch("2.13.0+cpu")), {}, ["2.13.0+cpu", worded("hardware/can-use-no-gpu")]),
        (machine(CARD, torch=None), {}, [worded("hardware/can-use-no-gpu")]),
        (machine(Gpu("nvidia", "H200", 0), torch=CUDA), {}, [worded("hardware/and-1-can"), "0: H200"]),
        (machine(torch=CUDA), {}, [worded("hardware/and-none-can-be-used"), worded("hardware/there-is-no-gpu")]),
        (
            machine(*[Gpu("nvidia", "H200", n) for n in range(8)], torch=CUDA),
            {"CUDA_VISIBLE_DEVICES": "2,5"},
            [worded("hardware/and-2")],
        ),
    ],
)
def test_more_than_there_are_is_refused_with_what_there_is(
    facts: HostFacts, environ: dict[str, str], words: list[str | Worded]
) -> None:
    with pytest.raises(UserError) as caught:
        select_several(facts, environ, 3)
    assert caught.value.code == "too-many-gpus" and all(holds(caught.value, word) for word in words)


def test_what_the_user_made_visible_counts() -> None:
    found = select_several(machine(CARD, TWIN, APU), {"ROCR_VISIBLE_DEVICES": "2,1"}, 2)
    assert found.hide_with is None and found.by_user and found.gpus == (APU, TWIN)
    by_name = select_several(machine(CARD, TWIN), {"ROCR_VISIBLE_DEVICES": "GPU-1,GPU-2"}, 2)
    assert by_name.by_user and by_name.gpus == ()
    four = machine(*[Gpu("nvidia", "H200", n) for n in range(4)], torch=CUDA)
    assert select_several(four, {}, 4) == select_several(four, {"CUDA_VISIBLE_DEVICES": "0,1"}, 2) == Selection(None)


def test_on_the_processor_any_number_may_try() -> None:
    facts = machine(CARD)
    assert select_several(facts, {}, 4, on_cpu=True) == select(facts, {})
    with pytest.raises(UserError):
        select_several(facts, {}, 65, on_cpu=True)
