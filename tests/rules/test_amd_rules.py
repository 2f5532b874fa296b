"""The rules for AMD: the conditions of each, restated by hand, and checked on every recorded machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from lora_rocm.hardware.archs import ARCHS
from lora_rocm.hardware.facts import Gpu, HostFacts
from lora_rocm.rules.amd_rules import PRICE_OF_SAFE, amd_table
from lora_rocm.rules.environment import EnvPlan, plan, rules
from lora_rocm.rules.harmful_values import harms
from lora_rocm.rules.rule import Situation
from lora_rocm.supervisor.multi_gpu import with_gpus
from tests.golden import HOSTS, machines
from tests.hardware.situations import facts_of, fast, situation, with_gpu, with_linux, with_torch

RX9060 = "windows-rx9060xt-fits"
SWITCH = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
WINDOWS_TORCH: dict[str, dict[str, Any]] = {
    version: {"version": version, "hip": hip, "rocm": None, "aotriton": aotriton, "aotriton_images": {}}
    for version, hip, aotriton in (
        ("2.11.0+rocm7.13.0", "7.13.26100", None),
        ("2.11.0+rocm10.1.0a20260818", "7.16.26320", None),
        ("2.12.0+rocm7.13.0", "7.13.26100", None),
        ("2.12.0+rocm7.14.0", "7.14.26221", None),
        ("2.12.0+rocm7.14.1", "7.14.26250", None),
        ("2.12.0+rocm10.0.0", "7.15.26333", "0.12.50"),
        ("2.12.0+rocm10.1.0a20260812", "7.16.26310", "0.12.50"),
        ("2.13.0+rocm10.0.0", "7.15.26333", "0.13.0"),
        ("2.14.0+rocm10.1.0", "7.16.26400", None),
    )
}
XTX, HALO, BESIDE = "linux-rx7900xtx", "linux-strix-halo", "linux-strix-halo-rx7900xtx"
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
OTHER_NAMES = ("TORCH_BLAS_PREFER_CUBLASLT", "PYTORCH_TUNABLEOP_HIPBLASLT_ENABLED")


def rows(made: Situation) -> dict[str, str]:
    return {row.variable: row.value for row in plan(made).variables}


def fired(made: Situation) -> set[str]:
    return {row.rule for row in plan(made).rows}


def numbers(version: str | None) -> list[int]:
    return [int(part) for part in (version or "0").split("+")[0].split("-")[0].split(".")]


class Machine:
    """The input of the oracle: the recorded file itself and the card that is expected to be chosen."""

    def __init__(self, name: str) -> None:
        self.raw: dict[str, Any] = json.loads((HOSTS / f"{name}.json").read_text(encoding="utf-8"))
        amd = [gpu for gpu in self.raw["gpus"] if gpu["vendor"] == "amd"]
        self.amd = amd
        self.gfx: str = next((gpu.get("gfx") or "?" for gpu in amd if not gpu.get("integrated")), "") or (
            amd[0].get("gfx") or "?" if amd else ""
        )
        self.torch: dict[str, Any] = self.raw.get("torch") or {}
        self.linux: dict[str, Any] = self.raw.get("linux") or {}
        self.system: str = self.raw["system"]
        self.hip = numbers(self.torch.get("hip"))
        self.rdna = self.gfx.startswith(("gfx10", "gfx11", "gfx12")) or self.gfx == "?"
        self.alone = len(amd) == 1


EXPERIMENTAL = ("gfx1101", "gfx1102", "gfx1150", "gfx1152", "gfx1200")
ORACLE: dict[str, Callable[[Machine], bool]] = {
    "owner-ipc": lambda m: bool(m.amd),
    "owner-gfx1151": lambda m: m.gfx == "gfx1151",
    "owner-gfx1151-node": lambda m: m.system == "linux" and m.gfx != "gfx1151" and "gfx1151" in str(m.amd),
    "override-rdna2": lambda m: m.system == "linux" and m.gfx in ("gfx1031", "gfx1032", "gfx1033", "gfx1034"),
    "override-gfx1103": lambda m: False,
    "override-gfx1152": lambda m: False,
    "one-gpu-linux": lambda m: m.system == "linux" and len(m.amd) > 1,
    "one-gpu-windows": lambda m: m.system == "windows" and len(m.amd) > 1,
    "several-gpus-linux": lambda m: False,
    "no-p2p": lambda m: False,
    "torch-hipblaslt": lambda m: m.rdna,
    "rocblas-hipblaslt": lambda m: m.rdna,
    "addmm-hipblaslt": lambda m: m.rdna and bool(m.torch) and numbers(m.torch["version"]) < [2, 12],
    "attention-0.10": lambda m: False,
    "attention-0.11": lambda m: False,
    "attention-0.11.1": lambda m: False,
    "attention-0.11.2": lambda m: False,
    "attention-0.12": lambda m: m.system == "linux" and m.hip > [0] and m.gfx in EXPERIMENTAL,
    "attention-0.11.2-windows": lambda m: False,
    "attention-0.12-windows": lambda m: (
        m.system == "windows" and m.hip > [0] and m.gfx in EXPERIMENTAL and numbers(m.torch["version"]) >= [2, 13]
    ),
    "attention-0.12-windows-7.14.0": lambda m: (
        m.system == "windows" and m.gfx in EXPERIMENTAL and m.torch.get("version") == "2.12.0+rocm7.14.0"
    ),
    "attention-misfit": lambda m: bool(m.torch.get("aotriton_images")) and m.torch["version"].startswith("2.12."),
    "torch-cublaslt": lambda m: m.rdna,
    "tunable-hipblaslt": lambda m: m.rdna,
    "miopen-find": lambda m: m.rdna,
    "miopen-db": lambda m: bool(m.amd) and m.hip > [0],
    "miopen-cache": lambda m: bool(m.amd) and m.hip > [0],
    "miopen-nhwc": lambda m: m.hip >= [7] and m.gfx.startswith(("gfx11", "gfx12", "?")),
    "sdma": lambda m: (
        m.system == "linux"
        and not m.linux.get("wsl")
        and m.gfx in ("gfx1100", "gfx1101", "gfx1102", "gfx1103")
        and [6, 18] <= numbers(m.linux["kernel"])[:2] < [7, 1]
    ),
    "wsl-dxg": lambda m: bool(m.linux.get("wsl")) and [0] < m.hip < [7, 13],
    "no-graphs": lambda m: bool(m.amd) and [7, 0] <= m.hip < [7, 1],
    "no-compile": lambda m: m.system == "windows" and bool(m.amd),
}
BESIDE_APU = replace(
    facts_of("linux-rx9060xt-pair"),
    gpus=(*facts_of("linux-rx9060xt-pair").gpus, Gpu("amd", "APU", 2, "gfx1036", integrated=True, node=3)),
)


def together(facts: HostFacts, ranks: int) -> Situation:
    return with_gpus(situation(facts), ranks, ranks)


VARIATIONS: dict[str, Situation] = {
    "override-gfx1103": situation(
        replace(
            with_gpu("linux-strix-point", gfx="gfx1103"),
            torch=with_torch(XTX, hip="6.4.43482", arch_list=("gfx1030", "gfx1100")).torch,
        )
    ),
    "override-gfx1152": situation(
        replace(
            with_gpu("linux-strix-point", gfx="gfx1152"),
            torch=with_torch(XTX, arch_list=("gfx1100", "gfx1150")).torch,
        )
    ),
    "several-gpus-linux": together(BESIDE_APU, 2),
    "no-p2p": together(facts_of("linux-rx9060xt-pair"), 2),
    "no-graphs": situation(with_torch(XTX, hip="7.0.51831")),
    "addmm-hipblaslt": situation(with_torch(XTX, version="2.11.0+rocm7.1")),
    "attention-0.10": situation(with_torch(HALO, version="2.8.0+rocm6.4", aotriton=None)),
    "attention-0.11": situation(with_torch(HALO, version="2.9.1+rocm6.4", aotriton=None)),
    "attention-0.11.1": situation(with_torch(HALO, version="2.10.0+rocm7.1", aotriton=None)),
    "attention-0.11.2": situation(with_torch(HALO, version="2.11.0+rocm7.2", aotriton="0.11.2b")),
    "attention-0.11.2-windows": situation(with_torch("windows-strix-halo", version="2.11.0+rocm7.13.0", hip="7.13.1")),
    "attention-0.12-windows-7.14.0": situation(with_torch(RX9060, **WINDOWS_TORCH["2.12.0+rocm7.14.0"])),
}


@pytest.mark.parametrize("name", machines())
def test_every_rule_fires_where_it_names_the_machine_and_nowhere_else(name: str) -> None:
    machine, own = Machine(name), {rule.id for rule in amd_table().rule}
    assert set(ORACLE) == own
    assert fired(situation(name)) & own == {rule for rule, fires in ORACLE.items() if fires(machine)}


def test_every_rule_fires_somewhere() -> None:
    seen = set().union(*(fired(situation(name)) for name in machines()))
    for rule, made in VARIATIONS.items():
        assert rule in fired(made), rule
    assert {rule.id for rule in amd_table().rule} == (seen & set(ORACLE)) | set(VARIATIONS)


def test_rules_and_harms_say_why_who_says_so_and_when_they_were_reviewed() -> None:
    reviewed = [date.fromisoformat(row.reviewed) for row in (*rules(), *harms())]
    assert (max(reviewed) - min(reviewed)).days <= 365
    assert all(rule.why and rule.source and rule.id for rule in rules())
    assert all(harm.what and harm.source and harm.values for harm in harms())
    for table in (rules(), harms()):
        assert len({row.id for row in table}) == len(table)
    computed = [text for rule in rules() for text in (rule.variable, rule.value) if not isinstance(text, str)]
    assert computed and all(text.shown for text in computed), "docs need a value in words"


def test_the_copy_engine_is_switched_off_where_it_harms() -> None:
    (rule,), (harm,) = ([row for row in rows if row.id in ("sdma", "sdma-on")] for rows in (rules(), harms()))
    assert rule.when == harm.when and rule.when.kernel_below is not None


@pytest.mark.parametrize("exported", [None, "11.0.0", "11.5.1", "rubbish", ""])
def test_gfx1151_alone_gets_its_own_version_whatever_the_user_has(exported: str | None) -> None:
    environ = {} if exported is None else {OVERRIDE: exported}
    made = plan(situation(HALO, environ))
    (row,) = [row for row in made.variables if row.variable == OVERRIDE]
    assert row.value == "11.5.1"
    assert row.replaced == (exported if exported not in (None, "11.5.1") else None)
    assert not [warning for warning in made.warnings if warning.variable == OVERRIDE], "what is gone harms no more"


def test_a_poisoned_value_for_the_node_of_gfx1151_is_replaced_too() -> None:
    made = plan(situation(HALO, {f"{OVERRIDE}_1": "11.0.0"}))
    found = {row.variable: (row.value, row.replaced) for row in made.variables if row.variable.startswith(OVERRIDE)}
    assert found == {OVERRIDE: ("11.5.1", None), f"{OVERRIDE}_1": ("11.5.1", "11.0.0")}
    assert made.warnings == ()


def overrides(made: EnvPlan) -> dict[str, str]:
    return {row.variable: row.value for row in made.variables if row.variable.startswith(OVERRIDE)}


def test_a_card_beside_strix_halo_is_not_touched() -> None:
    made = situation(BESIDE, {})
    assert overrides(plan(made)) == {f"{OVERRIDE}_2": "11.5.1"}
    assert rows(made)["ROCR_VISIBLE_DEVICES"] == "0" and plan(made).warnings == ()


def test_strix_halo_chosen_by_the_user_gets_the_global_form_unless_the_card_is_visible_too() -> None:
    assert overrides(plan(situation(BESIDE, {"ROCR_VISIBLE_DEVICES": "1"}))) == {OVERRIDE: "11.5.1"}
    both = plan(situation(BESIDE, {"HIP_VISIBLE_DEVICES": "1,0"}))
    assert overrides(both) == {f"{OVERRIDE}_2": "11.5.1"}


def test_with_several_processes_nothing_is_hidden_so_nothing_is_global() -> None:
    facts = facts_of(BESIDE)
    twins = replace(facts, gpus=tuple(replace(gpu, gfx="gfx1151", integrated=True) for gpu in facts.gpus))
    assert overrides(plan(situation(twins, {}))) == {OVERRIDE: "11.5.1"}
    made = plan(situation(twins, {}, ranks=2))
    assert OVERRIDE not in overrides(made) and "ROCR_VISIBLE_DEVICES" not in {row.variable for row in made.rows}


def test_a_poisoned_global_value_stays_and_is_warned_about_where_another_card_trains() -> None:
    made = plan(situation(BESIDE, {OVERRIDE: "12.0.1"}))
    assert overrides(made) == {f"{OVERRIDE}_2": "11.5.1"}, "the user's own value is no row: it is inherited"
    assert [(warning.rule, warning.level) for warning in made.warnings] == [("override-generation", "breaks")]


@pytest.mark.parametrize("exported", ["0", "", "yes"])
def test_ipc_is_off_whatever_the_user_has(exported: str) -> None:
    (row,) = [row for row in plan(situation(XTX, {"HIP_DISABLE_IPC": exported})).rows if row.rule == "owner-ipc"]
    assert (row.value, row.replaced, row.from_user) == ("1", exported, False)


def test_only_the_owners_rules_replace_what_the_user_set() -> None:
    assert {rule.id for rule in rules() if rule.over_user} == {"owner-ipc", "owner-gfx1151", "owner-gfx1151-node"}


@pytest.mark.parametrize(
    "changed",
    [
        with_torch("linux-rx6700xt", arch_list=None),
        with_torch("linux-rx6700xt", arch_list=("gfx1100",)),
        with_torch("linux-rx6700xt", arch_list=("gfx1030", "gfx1031")),
        with_torch("linux-rx6700xt", arch_list=("gfx10-3-generic",)),
        replace(with_gpu("windows-rx9070xt", gfx="gfx1031"), torch=with_torch("linux-rx6700xt").torch),
    ],
)
def test_no_override_where_the_wheel_is_unknown_or_needs_none(changed: HostFacts) -> None:
    assert overrides(plan(situation(changed))) == {}


def test_with_several_cards_an_override_is_for_the_node_of_the_chosen_one() -> None:
    facts = with_gpu("linux-rx7600-raphael", gfx="gfx1032")
    assert overrides(plan(situation(facts))) == {f"{OVERRIDE}_1": "10.3.0"}
    blind = replace(facts, gpus=tuple(replace(gpu, node=None) for gpu in facts.gpus))
    assert overrides(plan(situation(blind))) == {}


@pytest.mark.parametrize("version", WINDOWS_TORCH)
def test_fused_attention_is_switched_on_under_windows_only_where_it_is_known_to_be_right(version: str) -> None:
    right = version.startswith(("2.13", "2.14", "2.11.0+rocm7.13")) or version == "2.12.0+rocm7.14.0"
    made = situation(with_torch(RX9060, **WINDOWS_TORCH[version]))
    assert (SWITCH in rows(made)) is right
    linux = situation(with_torch("linux-rx9060xt-pair", **WINDOWS_TORCH[version]))
    assert SWITCH in rows(linux), "the fault is in wheels for Windows"


def test_images_of_another_version_leave_plain_attention_to_every_process() -> None:
    bad, good = situation("windows-rx9060xt"), situation(RX9060)
    assert plan(bad).settings.attention == "math" and plan(good).settings.attention == "auto"
    elsewhere = with_torch("windows-rx9060xt", aotriton_images={"amd-gfx110x": "0.13", "amd-gfx120x": "0.12"})
    assert plan(situation(elsewhere)).settings.attention == "auto", "images for other GPUs do not matter"


def test_the_price_of_safe_is_said_where_it_is_large() -> None:
    said = {
        name: next(row.why for row in plan(situation(name)).variables if row.rule == "torch-hipblaslt")
        for name in ("linux-rx9070xt", RX9060, XTX)
    }
    assert {name for name, why in said.items() if PRICE_OF_SAFE in why} == {"linux-rx9070xt", RX9060}
    assert all("10.1" in why for why in said.values())


def test_a_cleared_fast_profile_leaves_only_hipblaslt_alone() -> None:
    for name in machines():
        gone = set(rows(situation(name))) - set(rows(fast(name)))
        assert gone <= {"TORCH_BLAS_PREFER_HIPBLASLT", "ROCBLAS_USE_HIPBLASLT", "DISABLE_ADDMM_HIP_LT", *OTHER_NAMES}
    assert "ROCBLAS_USE_HIPBLASLT" not in rows(fast(XTX)) and "ROCBLAS_USE_HIPBLASLT" in rows(situation(XTX))


@pytest.mark.parametrize("name", ["broken-unknown-gpu", "linux-gfx1299"])
def test_an_unknown_gpu_gets_the_safe_plan(name: str) -> None:
    found = rows(situation(name))
    assert found["TORCH_BLAS_PREFER_HIPBLASLT"] == found["ROCBLAS_USE_HIPBLASLT"] == "0"
    assert found["MIOPEN_FIND_MODE"] == "2" and found["HIP_DISABLE_IPC"] == "1"
    assert not [variable for variable in found if variable.startswith((OVERRIDE, "TORCH_ROCM_AOTRITON"))]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        (XTX, "~/.cache/lora-rocm/miopen/gfx1100-rocm7.2/db"),
        ("windows-rx9070xt", r"%LOCALAPPDATA%\lora-rocm\miopen\gfx1201-rocm7.14\db"),
    ],
)
def test_miopen_folders_are_of_this_gpu_and_rocm_and_written_as_the_system_does(name: str, folder: str) -> None:
    assert rows(situation(name))["MIOPEN_USER_DB_PATH"] == folder
    moved = replace(situation(name), app_dir="/home/zoë k/app" if name == XTX else r"D:\Zoë K\app")
    assert rows(moved)["MIOPEN_CUSTOM_CACHE_DIR"].startswith(moved.app_dir)


@pytest.mark.parametrize(
    ("kernel", "planned"), [("6.17.9", False), ("6.18.0", True), ("7.0.9", True), ("7.1.0", False)]
)
def test_the_copy_engine_is_off_exactly_in_the_bad_range(kernel: str, planned: bool) -> None:
    assert ("HSA_ENABLE_SDMA" in rows(situation(with_linux(XTX, kernel=kernel)))) is planned


def test_nan_attention_is_not_switched_on() -> None:
    old = situation(with_torch(XTX, version="2.9.1", aotriton="0.11b"))
    assert "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL" not in rows(old)


NEWEST = {"gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1152", "gfx1153", "gfx1200"}
BY_AOTRITON = {
    "0.10b": {"gfx1101", "gfx1150", "gfx1151", "gfx1200"},
    "0.11b": {"gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200"},  # gfx1100, too, but it gives NaN there
    "0.11.1b": {"gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1200"},
    "0.11.2b": {"gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153", "gfx1200"},
    "0.12b": NEWEST,
    "0.13.1": NEWEST,
}


@pytest.mark.parametrize("aotriton", BY_AOTRITON)
def test_experimental_attention_by_release_and_architecture(aotriton: str) -> None:
    def asked_for(gfx: str) -> bool:
        made = replace(with_gpu(XTX, gfx=gfx), torch=with_torch(XTX, aotriton=aotriton).torch)
        return "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL" in rows(situation(made))

    assert {arch.gfx for arch in ARCHS if asked_for(arch.gfx)} == BY_AOTRITON[aotriton]


@pytest.mark.parametrize(
    ("variable", "made", "planned"),
    [
        ("PYTORCH_MIOPEN_SUGGEST_NHWC", with_torch(XTX, hip="6.4.43483"), False),
        ("PYTORCH_MIOPEN_SUGGEST_NHWC", with_torch(XTX, hip="7.0.51831-0fa1b3c"), True),
        ("DISABLE_ADDMM_HIP_LT", with_torch(XTX, version="2.11.2+rocm7.2"), True),
        ("DISABLE_ADDMM_HIP_LT", with_torch(XTX, version="2.12.0a0+git1f2e3d4"), False),
        ("HSA_ENABLE_DXG_DETECTION", with_torch("wsl-rx7900xtx", hip="7.12.26001"), True),
        ("HSA_ENABLE_DXG_DETECTION", with_torch("wsl-rx7900xtx", hip="7.13.26100"), False),
    ],
)
def test_ranges_end_where_they_are_said_to(variable: str, made: HostFacts, planned: bool) -> None:
    assert (variable in rows(situation(made))) is planned


@pytest.mark.parametrize(
    ("gfx", "sibling", "hip", "value"),
    [
        ("gfx1152", "gfx1150", "7.12.26001", "11.5.0"),
        ("gfx1152", "gfx1150", "7.13.26100", None),
        ("gfx1103", "gfx1100", "6.4.43483", "11.0.0"),
        ("gfx1103", "gfx1100", "7.0.51831", None),
        ("gfx1036", "gfx1030", "7.14.26221", "10.3.0"),
        ("gfx1010", "gfx1030", "7.14.26221", None),
        ("gfx1150", "gfx1151", "7.2.53211", None),
    ],
)
def test_a_sibling_s_kernels_only_where_they_are_known_to_work(
    gfx: str, sibling: str, hip: str, value: str | None
) -> None:
    made = replace(with_gpu(XTX, gfx=gfx), torch=with_torch(XTX, arch_list=(sibling,), hip=hip).torch)
    assert rows(situation(made)).get(OVERRIDE) == value
