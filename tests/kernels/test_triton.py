"""The Triton kernels: equal to their eager implementations, and compiled for AMD cards without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lora_rocm.checks import kernel_check, kernel_choice
from lora_rocm.checks.kernel_choice import choose
from lora_rocm.hardware import archs
from lora_rocm.kernels import backend
from lora_rocm.rules.rule import release
from tests.event_lines import hearing
from tests.wording import says

triton = pytest.importorskip("triton")
from benchmarks.registers import recorded_in  # noqa: E402

ROOT = Path(__file__).parents[2]
TOLERANCE = {"torch.float32": 1e-5, "torch.bfloat16": 2e-2}
ARCHS = {arch.gfx: 64 if arch.is_cdna or arch.generation == "vega" else 32 for arch in archs.ARCHS}
NUMBERS = {"width", "pixels", "channels", "chunks", "groups", "count", "buffers", "stride", "rows"}
NUMBERS |= {
    "x_batch",
    "x_row",
    "turn_batch",
    "turn_row",
    "turn_pair",
    "first",
    "tokens",
    "all_tokens",
    "heads",
    "pairs",
}
WORDS, COUNTS = ({f"{name}_{number}" for number in range(6)} for name in ("words", "count"))
SUMS = {"means", "spreads", "mean_out", "rstd_out", "mean", "rstd", "plain_sums", "normal_sums", "plain_out"}
SUMS |= {"normal_out", "plain_mean", "normal_mean"}
SUMS |= {"changed_K", "changed", "held", "stays", "cos", "sin", "losses"}
TYPES = {
    **dict.fromkeys(WORDS, "*i32"),
    **dict.fromkeys(NUMBERS | COUNTS, "i32"),
    **dict.fromkeys(SUMS, "*fp32"),
    **dict.fromkeys(("found", "known"), "*i64"),
    **dict.fromkeys(("eps", "branch_eps", "factor", "cap"), "fp32"),
    **dict.fromkeys(("labels",), "*i64"),
    **dict.fromkeys(("ignored",), "i32"),
    **dict.fromkeys(("codes", "packed", "nested_codes", "slopes"), "*u8"),
    **dict.fromkeys(("scale", "code", "nested", "offset"), "*fp32"),
    "blocks": "i32",
}
FLAGS = ("SHIFT", "SILU", "RESIDUAL", "BRANCH", "GATE", "BRANCH_NORM", "NORM", "CENTRED", "BIAS", "GELU", "INTERLEAVED")
CHOICES = {**dict.fromkeys((*FLAGS, "GATE_GRADIENT", "WEIGHT_GRADIENT", "FP8", "TANH", "CAP"), True), "ROUNDS": 2}


def twins(*arguments: str, **environment: str) -> dict[str, float]:
    script = [sys.executable, str(ROOT / "tests" / "kernels" / "triton_twins.py"), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(script, env=env, capture_output=True, encoding="utf-8", timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def too_far(off: dict[str, float]) -> list[str]:
    return [name for name, far in off.items() if not far <= TOLERANCE[name.rpartition(" ")[2]]]


def test_a_thread_hashes_triton_before_the_first_kernel_needs_it() -> None:
    from triton.runtime.cache import triton_key

    triton_key.cache_clear()
    thread = backend.hash_triton()
    assert thread is not None
    thread.join()
    assert triton_key.cache_info().currsize == 1


@pytest.mark.parametrize("error", [None, FileNotFoundError("libtriton.so"), TypeError("no origin")])
def test_triton_is_imported_by_the_caller_and_hashed_by_the_thread(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that import Triton at once get half of it. An error of the hash is reported by the first kernel."""
    imported, hashed, uncaught = list[str](), list[str](), list[object]()

    class Cache(ModuleType):
        def __getattr__(self, name: str) -> object:
            if name != "triton_key":
                raise AttributeError(name)
            imported.append(threading.current_thread().name)
            return key

    def key() -> None:
        hashed.append(threading.current_thread().name)
        if error is not None:
            raise error

    monkeypatch.setitem(sys.modules, "triton.runtime.cache", Cache("triton.runtime.cache"))
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    thread = backend.hash_triton()
    assert thread is not None
    thread.join()
    assert (imported, hashed, uncaught) == ([threading.current_thread().name], [thread.name], [])


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_a_triton_that_cannot_be_imported_is_not_hashed(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cache(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise error(name)

    monkeypatch.setitem(sys.modules, "triton.runtime.cache", Cache("triton.runtime.cache"))
    assert backend.hash_triton() is None


@pytest.mark.slow  # tests/machine_code runs the same in the emulator
def test_kernels_equal_their_plain_forms_in_the_interpreter() -> None:
    off = twins("cpu", "few", TRITON_INTERPRET="1")
    assert len(off) == 6 and too_far(off) == []
    assert too_far(off | {"geglu, torch.float32": 2e-5, "norm, torch.bfloat16": float("nan")})


@pytest.mark.slow
def test_more_sizes_and_the_proof_at_load_in_the_interpreter() -> None:
    off = twins("cpu", TRITON_INTERPRET="1")
    assert len(off) == 16 and too_far(off) == []


@pytest.mark.gpu
def test_kernels_equal_their_plain_forms_on_the_gpu() -> None:
    off = twins("cuda", TRITON_INTERPRET="0")
    assert len(off) == 16 and too_far(off) == []


def kernels() -> Iterator[tuple[Any, dict[str, Any], int]]:
    """(kernel, its constants as the launches set them at the largest images, warps)."""
    from lora_rocm.kernels import (
        add_norm_triton,
        fingerprint_triton,
        gated_triton,
        group_norm_triton,
        rotary_triton,
        token_loss_triton,
        unpack_triton,
    )

    of_module = {
        fingerprint_triton: ({"WIDTH": fingerprint_triton.WIDTH}, fingerprint_triton.WARPS),
        gated_triton: ({"BLOCK": gated_triton.BLOCK}, 4),
        add_norm_triton: ({"BLOCK": 4096}, 8),
        token_loss_triton: ({"BLOCK": token_loss_triton.BLOCK}, token_loss_triton.WARPS),
        unpack_triton: ({"BLOCK": unpack_triton.BLOCK, "BLOCKS": unpack_triton.NF4_BLOCKS}, 4),
        rotary_triton: ({"HEADS": 32, "PAIRS": 64, "TURN_PAIR": 2}, 8),
        group_norm_triton: (
            {"BLOCK": group_norm_triton.BLOCK, "PIXELS": group_norm_triton.LARGE_PIXELS, "JOINED": 64, "WIDTH": 32},
            group_norm_triton.WARPS,
        ),
    }
    for module, (constants, warps) in of_module.items():
        for name, kernel in vars(module).items():
            if isinstance(kernel, triton.JITFunction) and not name.startswith("_"):
                known = {**CHOICES, **constants}
                yield kernel, {key: known[key] for key in kernel.arg_names if key in known}, warps


def assembly(kernel: Any, constants: dict[str, Any], arch: str, warps: int, **types: str) -> str:
    """The assembly of a kernel for an AMD card, for arguments as launches have them: aligned buffers of less than 2
    GiB.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, TYPES.get(name, "*bf16")) for name in names}
    signature |= {name: "constexpr" for name in constants}
    told = {"*": [["tt.divisibility", 16], ["tt.pointer_range", 32]], "i": [["tt.divisibility", 16]]}
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): told[signature[name][0]] for at, name in enumerate(names) if signature[name][0] in told},
    )
    options = {"num_warps": warps, **backend.LAUNCH}
    text: str = triton.compile(source, target=GPUTarget("hip", arch, ARCHS[arch]), options=options).asm["amdgcn"]
    assert arch in text
    return text


def is_refused(arch: str) -> bool:
    return archs.triton_takes(triton.__version__, arch) is False


@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"], ids=["wave 32", "wave 64"])
def test_kernels_without_a_budget_spill_nothing(arch: str) -> None:
    """Those that have one are compiled for both cards by test_register_budget.py, which sees what spills."""
    budgeted = {name.partition(" ")[0] for name in recorded_in(triton.__version__).get(arch, {})}
    for kernel, constants, warps in kernels():
        if kernel.fn.__name__ not in budgeted:
            text = assembly(kernel, constants, arch, warps)
            assert re.search(r"\.vgpr_spill_count:\s*0\b", text), f"{kernel.fn.__name__} spills"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_for_amd(arch: str) -> None:
    compiled = 0
    for kernel, constants, warps in () if is_refused(arch) else kernels():
        text = assembly(kernel, constants, arch, warps)
        assert re.search(r"\.vgpr_spill_count:\s*0\b", text), f"{kernel.fn.__name__} spills"
        compiled += 1
    assert compiled == (0 if is_refused(arch) else 21)


@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
@pytest.mark.parametrize("of_large", [False, True], ids=["small", "beyond 2**31 words"])
def test_fingerprints_read_16_bytes_at_once_and_multiply_no_64_bit_words(arch: str, of_large: bool) -> None:
    from lora_rocm.kernels import fingerprint_triton as module

    large = {"count_1": "i64"} if of_large else {}
    text = assembly(module.add_fingerprints, {}, arch, module.WARPS, **large)
    loads = re.findall(r"(?:buffer|global|flat)_load_(\w+)", text)
    words = module.TILE.value // (module.WARPS * ARCHS[arch])
    assert loads == ["b128" if arch == "gfx1100" else "dwordx4"] * (words // 4)
    assert text.count("v_mad_i64_i32") == words and text.count("v_mul_lo") < 1.5 * words


@pytest.mark.parametrize("arch", ARCHS)
def test_this_triton_compiles_for_the_cards_that_the_table_says(arch: str) -> None:
    """By one kernel: a target is refused for any kernel."""
    kernel = next(kernels())
    if is_refused(arch):
        with pytest.raises(RuntimeError, match=kernel_check.REFUSED):
            assembly(kernel[0], kernel[1], arch, kernel[2])
    else:
        assembly(kernel[0], kernel[1], arch, kernel[2])


def test_the_table_knows_the_triton_that_is_installed() -> None:
    assert release(triton.__version__)[:2] in [series.version for series in archs.TRITON]
    assert backend.triton_version() == triton.__version__


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("folder", os.environ.get("LORA_ROCM_OTHER_TRITON", "").split(os.pathsep))
def test_another_triton_does_what_the_table_says_and_warns_of_nothing(folder: str) -> None:
    """LORA_ROCM_OTHER_TRITON: folders made by ``pip install --no-deps --target FOLDER triton==VERSION``."""
    if not folder:
        pytest.skip("LORA_ROCM_OTHER_TRITON names no folder")
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(Path(__file__)),
        "-m",
        "not gpu",
        "-k",
        "compiles or knows_the_triton",
    ]
    env = {**os.environ, "PYTHONPATH": folder, "LORA_ROCM_OTHER_TRITON": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{2 * len(ARCHS) + 1} passed" in done.stdout


def test_every_launch_says_whether_products_and_sums_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3.10 on Triton has another default, and 3.9 warns about it."""
    seen: dict[str, Any] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen[self.fn.__name__] = options.get("enable_fp_fusion")

    monkeypatch.setattr(triton.JITFunction, "run", run)
    for case in kernel_check.SMALL:
        kernel_check._KernelInputs(case, torch.device("cpu"), torch.float32).outcome("triton", torch.float32)
    assert len(seen) == 16 and None not in seen.values()
    assert {name for name, fused in seen.items() if not fused} == {"unpack_nf4", "unpack_rows"}  # bit for bit


def test_triton_is_chosen_for_gpus_and_only_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert backend.implementation_for(gpu) == "triton"
    assert backend.implementation_for(gpu, triton=False) == backend.implementation_for(cpu) == "eager"
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert backend.implementation_for(gpu) == "eager"


def on_gpu(monkeypatch: pytest.MonkeyPatch, gfx: str, version: str) -> None:
    """As if this were a ROCm build of torch on that card, with that Triton."""
    monkeypatch.setattr(torch.version, "hip", "7.2.53211")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = SimpleNamespace(gcnArchName=f"{gfx}:sramecc-:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(backend, "triton_version", lambda: version)


@pytest.mark.parametrize(
    ("gfx", "version", "others"),
    [
        ("gfx1030", "3.9.0", "Triton 3.6 to 3.8 can"),
        ("gfx1010", "3.9.1+rocm7.14", "Triton 3.6 to 3.8 can"),
        ("gfx906", "3.6.0.post25", "Triton 3.8 to 3.9 can"),
        ("gfx900", "3.8.0", "no known version can"),
    ],
)
def test_a_triton_that_does_not_take_the_card_is_said_in_one_sentence_and_not_tried(
    gfx: str, version: str, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    on_gpu(monkeypatch, gfx, version)
    monkeypatch.setattr(kernel_choice, "first_wrong", lambda *_: pytest.fail("it was compiled"))
    for device in (
        torch.device("cuda"),
        torch.device("meta"),
    ):  # the memory count uses the implementation that will run
        assert backend.implementation_for(device) == "eager"
    assert not choose(torch.device("cuda"), torch.float16, None, context=hearing(said)).triton
    assert len(said) == 1 and says(
        said[0], "kernels/slower-triton-version-compiles-nothing-for-this", version=version, gfx=gfx, others=others
    )


@pytest.mark.parametrize(("gfx", "version"), [("gfx1030", "3.8.0"), ("gfx1030", "3.12.0"), ("gfx1299", "3.9.0")])
def test_what_no_table_knows_is_tried(gfx: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, gfx, version)
    assert backend.implementation_for(torch.device("cuda")) == "triton"
