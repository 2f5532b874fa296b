"""Torch and its neighbours, read from files that look like the wheels of each index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_rocm.hardware.facts import Torch
from lora_rocm.hardware.probe.sources import ProbeReads, Sources, run_tool
from lora_rocm.hardware.probe.torch_files import ASK, installed
from tests.hardware.fake_machine import Tools, put, put_aotriton, put_torch, signature
from tests.wording import worded

ROCM = Torch("2.13.0+rocm7.2", hip="7.2.53211")


def look_at(folder: Path, tools: Tools | None = None) -> ProbeReads:
    run = (tools or Tools()).run
    return ProbeReads(
        Sources(
            "linux", environ={}, site_packages=(folder,), app_dir=folder / "app", run=run, python="/venv/bin/python"
        )
    )


def torch_in(folder: Path, deep: bool = False, tools: Tools | None = None) -> Torch | None:
    return installed(look_at(folder, tools), deep)[0]


def test_a_wheel_of_pytorch_org_names_its_kernels(tmp_path: Path) -> None:
    put_torch(tmp_path, ROCM, {})
    library = "torch/lib/rocblas/library"
    tensile = "TensileLibrary_lazy_gfx1100.dat", "TensileLibrary_lazy_gfx90a.dat", "TensileLibrary_Type_HH_fallback.dat"
    for name in (*tensile, "Kernels.so-000-gfx1201.hsaco", "Kernels.so-000-gfx942-xnack-.hsaco", "gfx1153"):
        put(tmp_path, f"{library}/{name}", "")
    put(tmp_path, "torch/share/miopen/db/gfx1030_36.HIP.fdb.txt", "")  # proves nothing
    put(tmp_path, "torch/lib/libaotriton_v2.so.0.11.2", "")
    put(tmp_path, "torch/lib/libaotriton_v2.so", "")
    torch = torch_in(tmp_path)
    assert torch is not None
    assert torch.arch_list == ("gfx90a", "gfx942", "gfx1100", "gfx1201")
    assert (torch.arch_source, torch.aotriton, torch.hip, torch.cuda) == ("files", "0.11.2", "7.2.53211", None)


@pytest.mark.parametrize(
    ("version", "line", "named"),
    [
        ("2.14.0+rocm10.1.0", "rocm: Optional[str] = '10.1.0'\n", "10.1.0"),
        ("2.15.0a0+git1f2e3d4", "rocm = '10.1.0'\n", "10.1.0"),
        ("2.14.0+rocm10.1.0", "rocm: Optional[str] = None\n", "10.1.0"),
        ("2.12.0+rocm7.14.0a20260608", "", "7.14.0"),
        ("2.12.0a0+git1f2e3d4", "", "7.16"),
    ],
)
def test_rocm_is_what_torch_names_before_what_its_version_says(
    version: str, line: str, named: str, tmp_path: Path
) -> None:
    put_torch(tmp_path, Torch(version, hip="7.16.26270"), {})
    with (tmp_path / "torch" / "version.py").open("a", encoding="utf-8") as file:
        file.write("\n" + line)
    tools = Tools({"python": "archs: gfx1100\n"})
    torch = torch_in(tmp_path, tools=tools)
    assert torch is not None and torch.rocm_version == named
    assert Torch("2.14.0", hip=None, rocm="10.1.0").rocm_version is None


def test_amds_older_wheels_have_a_package_of_libraries(tmp_path: Path) -> None:
    put_torch(tmp_path, Torch("2.9.1+rocm7.10.0", hip="7.10.1"), {})
    put(tmp_path, "_rocm_sdk_libraries_gfx1151/bin/rocblas/library/TensileLibrary_lazy_gfx1151.dat", "")
    torch = torch_in(tmp_path)
    assert torch is not None and torch.arch_list == ("gfx1151",) and torch.arch_source == "files"


def test_amds_multi_arch_wheels_have_a_package_for_each_architecture(tmp_path: Path) -> None:
    packages = {
        "amd-torch-device-gfx1151": "2.13.0+rocm7.14.0",
        "amd-torch-device-gfx90a": "2.13.0+rocm7.14.0",
        "amd-torch-device-gfx11": "2.13.0+rocm7.14.0",  # attention only
        "amd-torch-device-gfx12-0": "2.13.0+rocm7.14.0",
        "amd-torch-device-gfx115x": "2.13.0+rocm7.14.0",
        "amd-torchvision-device-gfx1030": "0.28.0",
    }
    put_torch(tmp_path, Torch("2.13.0+rocm7.14.0", hip="7.14.26221"), packages)
    torch = torch_in(tmp_path)
    assert torch is not None and torch.arch_list == ("gfx90a", "gfx1151") and torch.arch_source == "metadata"


def test_a_multi_arch_torch_without_any_kernels_says_so(tmp_path: Path) -> None:
    put_torch(tmp_path, Torch("2.13.0+rocm7.14.0", hip="7.14.26221"), {})
    put(tmp_path, "torch-2.13.0+rocm7.14.0.dist-info/METADATA", "Name: torch\nProvides-Extra: device-gfx1151\n")
    torch = torch_in(tmp_path)
    assert torch is not None and torch.arch_list == () and torch.arch_source == "metadata"


def test_a_build_that_tells_nothing_is_asked_once_per_wheel(tmp_path: Path) -> None:
    put_torch(tmp_path, ROCM, {})
    tools = Tools({"python": "a warning\narchs: gfx1100 gfx1101\n"})
    for _ in range(2):
        torch = torch_in(tmp_path, tools=tools)
        assert torch is not None and torch.arch_list == ("gfx1100", "gfx1101") and torch.arch_source == "asked"
    assert len(tools.asked) == 1
    put(tmp_path, f"torch-{ROCM.version}.dist-info/RECORD", "another build of the same version\n")
    torch_in(tmp_path, tools=tools)
    assert len(tools.asked) == 2


def test_one_that_was_asked_stays_known_after_a_new_start_of_the_machine(tmp_path: Path) -> None:
    put_torch(tmp_path, ROCM, {})
    tools = Tools({"python": "archs: gfx1100\n"})
    for boot in ("one", "two"):
        look = look_at(tmp_path, tools)
        look.boot = boot
        installed(look, False)
        assert look.boot == boot
    assert len(tools.asked) == 1


@pytest.mark.parametrize("answer", [TimeoutError("no answer within 120 s"), OSError("exit code 1"), "", "nonsense\n"])
def test_one_that_does_not_answer_is_noted(answer: str | OSError, tmp_path: Path) -> None:
    put_torch(tmp_path, ROCM, {})
    look = look_at(tmp_path, Tools({"python": answer}))
    torch, _ = installed(look, False)
    assert torch is not None and torch.arch_list is None and torch.arch_source is None
    assert len(look.unread) == 1


@pytest.mark.parametrize(("version", "cuda"), [("2.13.0+cpu", None), ("2.13.0+cu130", "13.0")])
def test_other_builds_are_not_asked_in_haste(version: str, cuda: str | None, tmp_path: Path) -> None:
    put_torch(tmp_path, Torch(version, cuda=cuda), {})
    tools = Tools()
    assert torch_in(tmp_path, tools=tools) == Torch(version, cuda=cuda)
    assert tools.asked == []
    torch_in(tmp_path, deep=True, tools=tools)
    assert tools.asked == (["python"] if cuda else [])


def test_the_question_works_on_this_torch() -> None:
    """A CPU build has no such list, and reports that in the same format."""
    import sys

    assert run_tool([sys.executable, "-c", ASK], 120.0).strip().startswith("archs:")


def test_a_version_file_that_says_nothing(tmp_path: Path) -> None:
    put(tmp_path, "torch/version.py", "raise SystemExit\n")
    look = look_at(tmp_path)
    assert installed(look, False)[0] is None
    assert look.unread[0].what == worded("hardware/version-of-torch")


def test_a_version_file_that_cannot_be_read(tmp_path: Path) -> None:
    put_torch(tmp_path, ROCM, {})
    (tmp_path / "torch" / "version.py").unlink()
    (tmp_path / "torch" / "version.py").mkdir()
    look = look_at(tmp_path)
    torch, _ = installed(look, False)
    assert torch == Torch(ROCM.version)  # the package's name still has the version
    assert look.unread[0].why == "is a directory"


def test_the_first_torch_on_the_path_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    put_torch(first, Torch("2.12.0+cpu"), {"triton": "3.6.0"})
    put_torch(second, Torch("2.13.0+cpu"), {"triton": "3.7.0", "bitsandbytes": "0.50.0"})
    look = look_at(first)
    look.sources = replace(look.sources, site_packages=(tmp_path / "none", first, second))
    torch, libraries = installed(look, False)
    assert torch == Torch("2.12.0+cpu")
    assert libraries == {"triton": "3.6.0", "bitsandbytes": "0.50.0"}


def test_packages_that_matter_are_listed_and_no_others(tmp_path: Path) -> None:
    put_torch(tmp_path, None, {"flash_attn": "2.8.3", "rocm-sdk-core": "7.14.0", "requests": "2.0", "rocm": "7.14.0"})
    torch, libraries = installed(look_at(tmp_path), False)
    assert torch is None
    assert libraries == {"flash_attn": "2.8.3", "rocm": "7.14.0", "rocm-sdk-core": "7.14.0"}


# AOTriton: the library and its images


def attention_of(folder: Path) -> tuple[str | None, dict[str, str]]:
    torch = torch_in(folder)
    assert torch is not None
    return torch.aotriton, torch.aotriton_images


HEADER = """\
#ifndef AOTRITON_V2_CONFIG_H
#define AOTRITON_V2_CONFIG_H
#define AOTRITON_ENABLE_SUFFIX 0
/* #undef AOTRITON_NAME_SUFFIX */
#define AOTRITON_NS aotriton
#define AOTRITON_VERSION_MAJOR 0u
#define AOTRITON_VERSION_MINOR 12u
#define AOTRITON_VERSION_PATCH 50u
#define AOTRITON_GIT_SHA1 05f26c2d8fbdcf8dd6d95b9544d04f7a39fc9920
#endif
"""
IMAGES = "torch/lib/aotriton.images/{}/__signature__"


@pytest.mark.parametrize("library", ["torch/lib/libaotriton_v2.so.0.13.0", "torch/lib/aotriton_v2.dll"])
def test_library_and_images_are_read_on_both_systems(library: str, tmp_path: Path) -> None:
    put_torch(tmp_path, ROCM, {})
    put(tmp_path, library, "")
    put(tmp_path, "torch/include/aotriton/config.h", HEADER)
    put(tmp_path, IMAGES.format("amd-gfx120x"), signature("0.13"))
    put(tmp_path, IMAGES.format("amd-gfx115x"), signature("0.12"))
    assert attention_of(tmp_path) == ("0.12.50", {"amd-gfx115x": "0.12", "amd-gfx120x": "0.13"})


@pytest.mark.parametrize("text", ["#define AOTRITON_VERSION 0.12.50\n", '#define AOTRITON_VERSION "0.12.50"\r\n'])
def test_a_version_in_one_piece_is_read_too(text: str, tmp_path: Path) -> None:
    put_torch(tmp_path, ROCM, {})
    put(tmp_path, "torch/include/aotriton/config.h", text)
    assert attention_of(tmp_path)[0] == "0.12.50"


@pytest.mark.parametrize(
    "text", ["", "{", '{"TRITON_VERSION": "3.4.0"}', signature("0.13") + signature("0.12"), "\0\xff"]
)
def test_images_that_do_not_say_their_version_are_left_out(text: str, tmp_path: Path) -> None:
    put_torch(tmp_path, ROCM, {})
    put_aotriton(tmp_path, "0.12.50")
    put(tmp_path, IMAGES.format("amd-gfx120x"), text)
    (tmp_path / IMAGES.format("amd-gfx115x")).mkdir(parents=True)
    put(tmp_path, "torch/lib/aotriton.images/readme.txt", "aotriton0.13")
    assert attention_of(tmp_path) == ("0.12.50", {})


@pytest.mark.parametrize("text", ["", "#define AOTRITON_VERSION_MAJOR 0u\n", "/* AOTRITON_VERSION_MINOR 12 */"])
def test_a_header_that_says_nothing_leaves_the_name_of_the_library(text: str, tmp_path: Path) -> None:
    put_torch(tmp_path, ROCM, {})
    put(tmp_path, "torch/include/aotriton/config.h", text)
    assert attention_of(tmp_path) == (None, {})
    put(tmp_path, "torch/lib/libaotriton_v2.so.0.11.2", "")
    assert attention_of(tmp_path) == ("0.11.2", {})
