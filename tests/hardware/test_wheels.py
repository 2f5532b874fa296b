"""The choice of a machine's torch: the table, the choice, the variables, the refusals."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement

from lora_rocm.errors import MachineError, UserError
from lora_rocm.hardware.archs import ARCHS
from lora_rocm.hardware.facts import Gpu, HostFacts, Linux, Torch, facts_from_json, load_facts
from lora_rocm.hardware.wheels import (
    ANY_TORCH,
    Index,
    WheelChoice,
    choose,
    indexes,
    makeshift,
    mismatch,
    wheel_table,
)
from tests.golden import HOSTS, machines
from tests.wording import Worded, holds, says, worded

BY_ID, UNSERVED, AS_CPU = indexes(), wheel_table().unserved, wheel_table().as_cpu
INDEXES = wheel_table().index
INDEX = "LORA_ROCM_TORCH_INDEX"
ROOT = Path(__file__).parents[2]
AMD = "https://repo.amd.com/rocm/whl-multi-arch/"
AMD_TORCH = "2.12.0+rocm7.14.0"
PYTORCH = "https://download.pytorch.org/whl/rocm7.2"
NVIDIA = Gpu("nvidia", "RTX 4090", integrated=False)


def machine(gpu: str | None = None, system: str = "linux", **more: Any) -> HostFacts:
    """A machine with one AMD GPU of that architecture, or with those given as ``gpus``."""
    integrated = any(arch.gfx == gpu and arch.integrated for arch in ARCHS)
    gpus = (Gpu("amd", "Radeon", gfx=gpu, integrated=integrated),) if gpu else ()
    linux = Linux("6.17") if system == "linux" else None
    facts = {"python": "3.12.3 64-bit", "cpu": "Ryzen", "cpu_count": 8, "gpus": gpus, "linux": linux, **more}
    return HostFacts("test", system, **facts)  # type: ignore[arg-type]


def with_drm(version: str) -> HostFacts:
    return machine("gfx1031", linux=Linux("6.8", drm_version=version))


def asking(index: str, facts: HostFacts) -> WheelChoice:
    return choose(facts, {"LORA_ROCM_TORCH_INDEX": index})


@pytest.mark.parametrize(
    ("gfx", "system", "requirement", "url"),
    [
        ("gfx1100", "linux", "torch==2.13.0", PYTORCH),
        ("gfx1151", "linux", "torch==2.13.0", PYTORCH),
        ("gfx908", "linux", "torch==2.13.0", PYTORCH),
        ("gfx1031", "linux", f"torch[device-gfx1031]=={AMD_TORCH}", AMD),
        ("gfx1010", "linux", f"torch[device-gfx1010]=={AMD_TORCH}", AMD),
        ("gfx1153", "linux", f"torch[device-gfx1153]=={AMD_TORCH}", AMD),
        ("gfx1100", "windows", f"torch[device-gfx1100]=={AMD_TORCH}", AMD),
        ("gfx1201", "windows", f"torch[device-gfx1201]=={AMD_TORCH}", AMD),
        ("gfx1299", "linux", f"torch[device-all]=={AMD_TORCH}", AMD),
        ("gfx1250", "linux", "torch[device-gfx1250]==2.14.0+rocm10.1.0", BY_ID["amd-next"].url),
    ],
)
def test_amd(gfx: str, system: str, requirement: str, url: str) -> None:
    made = choose(machine(gfx, system), {})
    assert (made.requirement, made.url, made.kind, made.gfx) == (requirement, url, "rocm", gfx)
    assert not made.by_user and not made.else_default and gfx in made.why


def test_wsl_gets_amds_wheels_and_is_told_of_the_bridge() -> None:
    made = choose(machine("gfx1100", linux=Linux("6.6", wsl=True)), {})
    assert made.url == AMD and any("librocdxg" in text for text in made.warnings)
    assert not any("librocdxg" in text for text in choose(machine("gfx1100"), {}).warnings)


@pytest.mark.parametrize(
    ("gpus", "system", "expected"),
    [
        ((), "linux", ("torch==2.13.0", "https://download.pytorch.org/whl/cpu", "cpu")),
        ((), "windows", ("torch==2.13.0", "https://download.pytorch.org/whl/cpu", "cpu")),
        ((NVIDIA,), "linux", ("torch==2.13.0", None, "cuda")),
        ((NVIDIA,), "windows", ("torch==2.13.0", "https://download.pytorch.org/whl/cu130", "cuda")),
        ((Gpu("apple", "M3"),), "macos", ("torch==2.13.0", None, "cpu")),
        ((Gpu("amd", "Radeon Pro", gfx="gfx1010"),), "macos", ("torch==2.13.0", None, "cpu")),
        ((Gpu("intel", "UHD"),), "linux", ("torch==2.13.0", "https://download.pytorch.org/whl/cpu", "cpu")),
    ],
)
def test_second_class_citizens_are_served_and_told_so(
    gpus: tuple[Gpu, ...], system: str, expected: tuple[str, str | None, str]
) -> None:
    made = choose(machine(system=system, gpus=gpus), {})
    assert (made.requirement, made.url, made.kind) == expected
    note = wheel_table().second_class[made.kind]
    assert note and note in made.notes
    assert made.else_default == (made.url == "https://download.pytorch.org/whl/cpu")


@pytest.mark.parametrize(
    ("first", "second", "kind", "word"),
    [
        (Gpu("amd", "RX", gfx="gfx1100", integrated=False), NVIDIA, "rocm", worded("hardware/amd-comes-first")),
        (Gpu("amd", "780M", gfx="gfx1103", integrated=True), NVIDIA, "cuda", worded("hardware/is-left-out")),
        (Gpu("amd", "Raphael", gfx="gfx1036", integrated=True), NVIDIA, "cuda", worded("hardware/is-left-out")),
        (Gpu("amd", "what?", gfx=None), NVIDIA, "cuda", worded("hardware/is-left-out")),
        (Gpu("amd", "Raphael", gfx="gfx1036", integrated=True), None, "cpu", "two compute units"),
        (Gpu("amd", "Cezanne", gfx="gfx90c", integrated=True), None, "cpu", "no index has kernels"),
        (Gpu("amd", "780M", gfx="gfx1103", integrated=True), None, "rocm", ""),
    ],
)
def test_who_is_served_where_several_could(first: Gpu, second: Gpu | None, kind: str, word: str | Worded) -> None:
    made = choose(machine(gpus=(first, *([second] if second else []))), {})
    assert made.kind == kind and holds(" ".join(made.notes), word)


def test_what_the_user_made_visible_decides() -> None:
    pair = (Gpu("amd", "RX", 0, "gfx1100", integrated=False), Gpu("amd", "Raphael", 1, "gfx1036", integrated=True))
    made = choose(machine(gpus=pair), {})
    assert made.gfx == "gfx1100" and says(made.notes[0], "hardware/raphael-gfx1036-is-left-out")
    assert choose(machine(gpus=pair[:1] * 2), {}).notes == ()
    assert choose(machine(gpus=pair), {"HIP_VISIBLE_DEVICES": "1"}).gfx == "gfx1036"
    hidden = choose(machine(gpus=pair), {"HIP_VISIBLE_DEVICES": "-1"})
    assert hidden.kind == "cpu" and any("hides" in note for note in hidden.notes)


def test_the_torch_that_is_there_does_not_decide() -> None:
    facts = machine("gfx1100")
    assert choose(replace(facts, torch=Torch("2.13.0", cuda="13.0")), {}) == choose(facts, {})


@pytest.mark.parametrize(
    ("gfx", "system", "word"),
    [
        *((gfx, "linux", why[:20]) for gfx, why in UNSERVED.items()),
        ("gfx906", "windows", "ROCm 6.3"),
        ("gfx1153", "windows", "crashes"),
        ("gfx942", "windows", worded("hardware/names-no-wheel")),
    ],
)
def test_refused_with_the_reason_and_a_way_out(gfx: str, system: str, word: str | Worded) -> None:
    with pytest.raises(MachineError) as refused:
        choose(machine(gfx, system), {})
    assert holds(refused.value, word)
    way_out = {"LORA_ROCM_TORCH_INDEX": "cpu"}
    assert "LORA_ROCM_TORCH_INDEX=cpu" in refused.value.fix
    made = choose(machine(gfx, system), way_out)
    assert made.kind == "cpu" and says(made.warnings, "hardware/will-not-be-used")


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (machine("gfx1201", "windows"), worded("hardware/only-that-its-wheels-build")),
        (machine("gfx1201", "windows"), "ROCm#6461"),
        (machine("gfx1151", "windows"), "ROCm#6517"),
        (with_drm("3.57"), "a newer kernel"),
        (machine("gfx1299"), "10 GB"),
        (machine("gfx1151"), "LORA_ROCM_TORCH_INDEX=amd-next"),
        (machine("gfx1151", "windows"), "ROCm 10.1"),
        (machine("gfx1201", "windows"), "ROCm 10.1"),
    ],
)
def test_what_is_known_to_be_wrong_is_said(facts: HostFacts, word: str | Worded) -> None:
    assert holds(choose(facts, {}).warnings, word)


@pytest.mark.parametrize(
    "facts", [machine("gfx1201"), machine("gfx1100", "windows"), with_drm("3.64"), with_drm("new"), machine("gfx1031")]
)
def test_silent_where_nothing_is_wrong(facts: HostFacts) -> None:
    assert choose(facts, {}).warnings == ()


def test_the_wheels_of_rocm_10_1() -> None:
    made = asking("amd-next", machine("gfx1201", "windows"))
    assert made.requirement == "torch[device-gfx1201]==2.14.0+rocm10.1.0" and made.warnings == ()
    nightly = asking("amd-nightly", machine("gfx1201", "windows"))
    assert nightly.requirement == "torch[device-gfx1201]>=2.13"  # builds of 2.12 have attention that fails
    assert says(nightly.warnings, "hardware/only-that-its-wheels-build")


@pytest.mark.parametrize("index", [index for index in INDEXES if index.rocm], ids=lambda index: index.id)
def test_a_driver_that_is_too_old_for_a_rocm_is_said(index: Index) -> None:
    said = [
        any("a newer kernel" in text for text in asking(index.id, with_drm(drm)).warnings) for drm in ("3.61", "3.64")
    ]
    known = re.fullmatch(r"\d+\.\d+", index.rocm) is not None and index.rocm != "7.2"
    assert said == [known, False] and (index.rocm in wheel_table().oldest_drm) is known


@pytest.mark.parametrize(
    ("gpu", "system", "environ", "expected"),
    [
        ("gfx1151", "windows", {"LORA_ROCM_TORCH_INDEX": "https://a/b"}, ("torch>=2.11", "https://a/b", None)),
        ("gfx1100", "linux", {"LORA_ROCM_TORCH": "torch==2.11.0"}, ("torch==2.11.0", None, None)),
        (None, "linux", {"LORA_ROCM_TORCH_INDEX": "cpu"}, ("torch==2.13.0", BY_ID["cpu"].url, "cpu")),
        ("gfx1036", "linux", {"LORA_ROCM_TORCH_INDEX": "amd"}, (f"torch[device-gfx1036]=={AMD_TORCH}", AMD, "rocm")),
        (None, "linux", {"LORA_ROCM_TORCH_INDEX": "amd"}, (f"torch[device-all]=={AMD_TORCH}", AMD, "rocm")),
        ("gfx1151", "windows", {INDEX: AMD[:-1]}, (f"torch[device-gfx1151]=={AMD_TORCH}", AMD, "rocm")),
        ("gfx1100", "linux", {INDEX: "https://m/rocm7.2"}, (ANY_TORCH, "https://m/rocm7.2", "rocm")),
    ],
)  # fmt: skip
def test_the_variables_win(
    gpu: str | None, system: str, environ: dict[str, str], expected: tuple[str, str | None, str | None]
) -> None:
    made = choose(machine(gpu, system), environ)
    assert (made.requirement, made.url, made.kind) == expected
    assert made.by_user and not made.else_default and next(iter(environ)) in made.why


@pytest.mark.parametrize(
    ("gpu", "system", "environ", "word"),
    [
        ("gfx1100", "linux", {"LORA_ROCM_TORCH_INDEX": "cpu"}, worded("hardware/for-the-cpu-alone")),
        ("gfx1100", "linux", {"LORA_ROCM_TORCH": "torch==2.13.0"}, "for NVIDIA"),
        ("gfx1100", "windows", {"LORA_ROCM_TORCH": "torch==2.13.0"}, worded("hardware/for-the-cpu-alone")),
        ("gfx1100", "linux", {"LORA_ROCM_TORCH": "torch==2.13.0+cpu"}, worded("hardware/for-the-cpu-alone")),
        ("gfx1100", "windows", {"LORA_ROCM_TORCH_INDEX": "pytorch"}, "none for Windows"),
        (
            "gfx1100",
            "linux",
            {"LORA_ROCM_TORCH_INDEX": "amd", "LORA_ROCM_TORCH": "torch"},
            worded("hardware/no-device-code"),
        ),
        ("gfx1151", "windows", {"LORA_ROCM_TORCH_INDEX": "amd"}, "ROCm#6517"),
    ],
)
def test_variables_that_harm_are_obeyed_and_warned_about(
    gpu: str, system: str, environ: dict[str, str], word: str | Worded
) -> None:
    assert holds(choose(machine(gpu, system), environ).warnings, word)


def test_variables_that_do_not_harm_are_obeyed_in_silence() -> None:
    assert choose(machine("gfx1100"), {"LORA_ROCM_TORCH_INDEX": "pytorch"}).warnings == ()
    assert choose(machine(), {"LORA_ROCM_TORCH_INDEX": "cpu", "LORA_ROCM_TORCH": " "}).warnings == ()


@pytest.mark.parametrize(
    "environ",
    [
        {"LORA_ROCM_TORCH": "2.13.0"},
        {"LORA_ROCM_TORCH": "torchvision"},
        {"LORA_ROCM_TORCH": "--index-url=x"},
        {"LORA_ROCM_TORCH_INDEX": "rocm"},
    ],
)
def test_variables_without_sense_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(UserError, match="LORA_ROCM_TORCH"):
        choose(machine("gfx1100"), environ)


@pytest.mark.parametrize("python", ["3.10.2 64-bit", "3.15.0 64-bit", "3.12.1 32-bit", "2.7.18 64-bit"])
def test_a_python_without_wheels_is_refused(python: str) -> None:
    with pytest.raises(MachineError, match="Python"):
        choose(machine("gfx1100", python=python), {})


@pytest.mark.parametrize("python", ["3.11.0 64-bit", "3.14.2 64-bit", "3.14.0rc1 64-bit", "3.12.4", "garbled", ""])
def test_a_python_with_wheels_or_one_that_says_nothing_passes(python: str) -> None:
    assert choose(machine("gfx1100", python=python), {}).url == PYTORCH


def test_a_newer_python_passes_where_the_user_chose() -> None:
    assert choose(machine(python="3.15.0 64-bit"), {"LORA_ROCM_TORCH": "torch==2.14.0"}).requirement == "torch==2.14.0"


ROCM = WheelChoice("torch", None, "", "rocm", "gfx1100")
RDNA2 = replace(ROCM, gfx="gfx1031", override="10.3.0")


@pytest.mark.parametrize(
    ("torch", "choice", "word"),
    [
        (Torch("2.13.0+cpu"), ROCM, worded("hardware/the-cpu-alone")),
        (Torch("2.13.0", cuda="13.0"), ROCM, "CUDA 13.0"),
        (Torch("2.13.0", hip="7.2", arch_list=("gfx1030",)), ROCM, worded("hardware/no-kernels-for-gfx1100")),
        (Torch("2.14.0+rocm10.1.0", hip="7.16.26270"), replace(ROCM, kind="cuda"), "ROCm 10.1.0"),
        (Torch("2.13.0", hip="7.2", arch_list=()), ROCM, worded("hardware/no-gpu-at-all")),
        (Torch("2.13.0+cpu"), replace(ROCM, kind="cuda"), "NVIDIA"),
        (Torch("2.13.0", hip="7.2", arch_list=("gfx1100",)), ROCM, None),
        (Torch("2.13.0", hip="7.2", arch_list=None), ROCM, None),
        (Torch("2.13.0", hip="7.2", arch_list=("gfx1030",)), replace(ROCM, gfx=None), None),
        (Torch("2.13.0", hip="7.2", arch_list=("gfx11-generic",)), ROCM, None),
        (Torch("2.13.0", cuda="13.0"), replace(ROCM, kind="cuda"), None),
        (Torch("2.13.0", cuda="13.0"), replace(ROCM, kind="cpu"), None),
        (Torch("2.13.0+cpu"), replace(ROCM, kind=None), None),
        (Torch("2.13.0", hip="7.2", arch_list=("gfx1030",)), RDNA2, None),
        (Torch("2.13.0", hip="7.2", arch_list=("gfx1100",)), RDNA2, worded("hardware/no-kernels-for-gfx1031")),
        (Torch("2.13.0", hip="7.2", arch_list=()), RDNA2, worded("hardware/no-gpu-at-all")),
    ],
)
def test_mismatch(torch: Torch, choice: WheelChoice, word: str | Worded | None) -> None:
    found = mismatch(torch, choice)
    assert found is None if word is None else holds(str(found), word)


def test_under_wsl_the_wheel_of_pytorch_org_only_just_serves() -> None:
    facts = load_facts(HOSTS / "wsl-rx7900xtx.json")
    assert facts.torch is not None
    choice = choose(facts, {})
    assert says(str(makeshift(facts.torch, choice)), "hardware/may-abort-under-wsl")
    assert makeshift(replace(facts.torch, version="2.12.0+rocm7.14.0"), choice) is None
    at_home = load_facts(HOSTS / "linux-rx7900xtx.json")
    assert at_home.torch is not None and makeshift(at_home.torch, choose(at_home, {})) is None


def test_makeshift() -> None:
    pretends = Torch("2.13.0", hip="7.2", arch_list=("gfx1030",))
    assert "HSA_OVERRIDE_GFX_VERSION=10.3.0" in str(makeshift(pretends, RDNA2))
    assert makeshift(replace(pretends, arch_list=("gfx1030", "gfx1031")), RDNA2) is None
    assert makeshift(replace(pretends, arch_list=None), RDNA2) is None
    assert makeshift(pretends, ROCM) is None
    assert choose(machine("gfx1031"), {}).override == "10.3.0"
    assert choose(machine("gfx1031", "windows"), {}).override is None


def test_the_table_is_whole() -> None:
    assert len(BY_ID) == len(INDEXES)
    assert all(index.source and index.what and re.fullmatch(r"2\d{3}-\d\d-\d\d", index.reviewed) for index in INDEXES)
    assert all(index.url is None or index.url.startswith("https://") for index in INDEXES)
    assert not set(AS_CPU) & set(UNSERVED)
    assert wheel_table().only_in.keys().isdisjoint({*AS_CPU, *UNSERVED, *(arch.gfx for arch in ARCHS)})
    assert set(wheel_table().only_in.values()) <= {index.id for index in INDEXES if "{gfx}" in index.torch}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert ANY_TORCH in project["dependencies"]


@pytest.mark.parametrize("name", machines())
def test_recorded_machines_get_an_index_of_the_table_or_a_reason(name: str) -> None:
    facts = load_facts(HOSTS / f"{name}.json")
    try:
        made = choose(facts, facts.variables)
    except MachineError as refused:
        assert refused.fix
        return
    row = next(index for index in INDEXES if index.url == made.url and facts.system in index.systems)
    assert not row.only_asked or made.gfx in wheel_table().only_in
    assert re.fullmatch(re.escape(row.torch).replace(r"\{gfx\}", "[a-z0-9]+"), made.requirement)


RECORDED: list[dict[str, Any]] = [json.loads((HOSTS / f"{name}.json").read_bytes()) for name in machines()]
GPUS = st.fixed_dictionaries(
    {"vendor": st.sampled_from(["amd", "nvidia", "apple", "intel", "other"]), "name": st.text(max_size=9)},
    optional={
        "gfx": st.none() | st.text(max_size=8) | st.sampled_from([*(arch.gfx for arch in ARCHS), *UNSERVED, *AS_CPU]),
        "integrated": st.none() | st.booleans(),
        "index": st.integers(0, 3),
        "vram_bytes": st.none() | st.integers(0, 2**63 - 1),
    },
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.lists(GPUS, max_size=3),
        "system": st.sampled_from(["linux", "windows", "macos"]),
        "python": st.text(max_size=12) | st.sampled_from(["3.9.1 64-bit", "3.12.0 32-bit", "3.99.0 64-bit"]),
        "linux": st.none(),
        "torch": st.none(),
    },
)
ENVIRON = st.dictionaries(
    st.sampled_from(["LORA_ROCM_TORCH", "LORA_ROCM_TORCH_INDEX", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]),
    st.text(max_size=9) | st.sampled_from(["torch==2.13.0", "torch", "0", "1,0", "-1", *BY_ID, "https://a/b"]),
)


@pytest.mark.parametrize("index", [index for index in INDEXES if index.kind == "rocm"], ids=lambda index: index.id)
def test_no_index_leads_to_a_torch_whose_attention_gives_zeros(index: Index) -> None:
    """Torch 2.11 and 2.12 with ROCm 7.14.1, 10.0 and nightlies of 10.1 (TheRock#7992, ROCm/aotriton#210)."""
    broken = ("2.12.0+rocm7.14.1", "2.12.0+rocm10.0.0", "2.12.0+rocm10.1.0a20260812", "2.11.0+rocm10.1.0a20260818")
    requirement = Requirement(index.torch.format(gfx="gfx1201"))
    assert not [version for version in broken if requirement.specifier.contains(version, prereleases=True)]


def test_a_pin_to_a_broken_torch_would_be_noticed() -> None:
    for text in ("torch==2.12.0+rocm7.14.1", "torch>=2.12", "torch==2.12.*"):
        assert Requirement(text).specifier.contains("2.12.0+rocm7.14.1", prereleases=True)


@given(st.sampled_from(RECORDED), CHANGES, ENVIRON)
@settings(max_examples=100, deadline=None)
def test_any_machine_gets_a_choice_or_a_sentence(
    recorded: dict[str, Any], changes: dict[str, Any], environ: dict[str, str]
) -> None:
    facts = facts_from_json({**recorded, **changes}, "test")
    try:
        made = choose(facts, environ)
    except (UserError, MachineError) as refused:
        assert refused.what and refused.fix
        return
    assert made.why.strip() and made.requirement.startswith("torch") and "{" not in made.requirement
    assert made.by_user or made.url in {index.url for index in INDEXES}


@pytest.mark.parametrize(
    "variables",
    [
        {"LORA_ROCM_TORCH": 'torch"; echo broken; "'},
        {"LORA_ROCM_TORCH": "torch==2.13.0`id`"},
        {"LORA_ROCM_TORCH": "torch==2.13.0\nid"},
        {"LORA_ROCM_TORCH_INDEX": "https://x/y; echo broken"},
        {"LORA_ROCM_TORCH_INDEX": "https://x/$(id)"},
    ],
)
def test_what_is_asked_for_is_no_command(variables: dict[str, str]) -> None:
    with pytest.raises(UserError):
        choose(machine("gfx1100"), variables)


@pytest.mark.parametrize("index", ["https://u:p@x.y/whl/rocm7.2/?a=b", "file:///C:/wheels/100%25"])
def test_ordinary_addresses_are_taken(index: str) -> None:
    assert choose(machine("gfx1100"), {"LORA_ROCM_TORCH_INDEX": index}).url == index
