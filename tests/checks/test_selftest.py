"""The table runs, every check in it can fail, and its child reports its progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lora_rocm.checks import selftest
from lora_rocm.checks.selftest import DEVICE_LOST, checks, main, run_check
from lora_rocm.checks.selftest_attention import attention_checks
from lora_rocm.checks.selftest_base import Check, NotHereError, WrongAnswerError, judge, poison
from lora_rocm.checks.selftest_copies import memory_checks
from lora_rocm.checks.selftest_maths import conv_checks, gemm_checks
from lora_rocm.checks.selftest_training import training_checks
from lora_rocm.processes.jobs import SelfTestJob
from lora_rocm.processes.tool import write_job
from tests.device.broken import ATTENTION, CONVOLUTIONS, FAULTS, PRODUCTS, Broken, Fault
from tests.device.fake_card import FakeCard
from tests.hardware.simulated_sysfs import SimulatedCard
from tests.supervisor.fake_run import as_heard
from tests.wording import Worded, saying, says, worded

CPU = torch.device("cpu")
GROUPS = {"copies", "memory", "gemm", "conv", "attention", "training"}


def outcome(check: Check) -> str:
    result, _ = run_check(check, CPU)
    assert "Error" not in result.detail, result  # it compared, and did not stumble
    return result.status


def test_sound_hardware_passes() -> None:
    found = {check.name: run_check(check, CPU) for check in checks(CPU)}
    wrong = {name: result for name, (result, _) in found.items() if not result.ok}
    assert not wrong
    assert {name.partition(".")[0] for name in found} == GROUPS
    for group in GROUPS:
        assert any(result.status == "passed" for name, (result, _) in found.items() if name.startswith(group))
    skipped = [result for result, _ in found.values() if result.status == "skipped"]
    assert all(result.detail for result in skipped)
    assert {result.name.rpartition(".")[0] for result in skipped} == {
        "copies.pinned",
        "copies.pinned-async",
        "attention.efficient",
        "attention.cudnn",
    }


def test_names_are_unique_and_have_a_group() -> None:
    for device in (CPU, torch.device("cuda", 0)):
        names = [check.name for check in checks(device)]
        assert len(set(names)) == len(names)
        assert {name.partition(".")[0] for name in names} == GROUPS


def test_a_gpu_gets_what_was_promised() -> None:
    names = {check.name for check in checks(torch.device("cuda", 0))}
    for method in ("pageable", "pinned", "pinned-async", "mapped"):
        assert {f"copies.{method}.{size}" for size in ("4KiB", "1MiB", "64MiB", "256MiB")} <= names
    for dtype in ("fp32", "fp16", "bf16"):
        for layout in ("NN", "NT", "TN", "TT"):
            assert {f"gemm.square-{dtype}-{layout}", f"gemm.lora-{dtype}-{layout}"} <= names
        for library in ("miopen", "native"):
            assert {f"conv.{library}.3x3-{dtype}", f"conv.{library}.1x1-{dtype}"} <= names
    for backend in ("flash", "efficient", "math", "cudnn", "default"):
        assert {f"attention.{backend}.{dtype}-d{d}" for dtype in ("bf16", "fp16") for d in (64, 128, 256)} <= names
    assert {"gemm.tall-fp32-4", "gemm.twice-bf16", "gemm.batched-bf16", "training.lora-bf16", "memory.reuse"} <= names


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("kernels", "table"),
    [
        (PRODUCTS, gemm_checks),
        (CONVOLUTIONS, conv_checks),
        (ATTENTION, lambda device: (c for c in attention_checks(device) if c.name.startswith("attention.flash"))),
        (PRODUCTS, lambda device: (c for c in attention_checks(device) if c.name.startswith("attention.math"))),
        (PRODUCTS, training_checks),
    ],
    ids=["gemm", "conv", "attention.flash", "attention.math", "training"],
)
def test_every_check_notices_every_wrong_kernel(
    kernels: set[str], table: Callable[[torch.device], Iterator[Check]], fault: Fault
) -> None:
    with Broken(kernels, fault) as broken:
        missed = [check.name for check in table(CPU) if outcome(check) != "failed"]
    assert broken.hits and not missed


@pytest.mark.parametrize("bit", [0, 13, 22])
def test_float32_products_are_right_to_the_bit(bit: int) -> None:
    def flipped(right: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        words = right.contiguous().view(torch.int32).clone()
        words.view(-1)[-1] ^= 1 << bit
        return words.view(torch.float32)

    with Broken(PRODUCTS, flipped):
        found = {check.name: outcome(check) for check in gemm_checks(CPU) if "fp32" in check.name}
    assert set(found.values()) == {"failed"}


def test_one_wrong_layout_is_named_alone() -> None:
    """As in rocm-libraries#9962: only products with a transposed first matrix, only in 16 bits."""
    lora = torch.ops.aten.mm.default

    class Transposed(Broken):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            given = func(*args, **(kwargs or {}))
            wrong = func is lora and not args[0].is_contiguous() and args[0].dtype is torch.bfloat16
            return torch.zeros_like(given) if wrong else given

    with Transposed((), FAULTS[0]):
        failed = {check.name for check in gemm_checks(CPU) if outcome(check) == "failed"}
    assert failed == {f"gemm.{shape}-bf16-{layout}" for shape in ("square", "lora") for layout in ("TN", "TT")}


def test_a_gradient_alone_is_noticed() -> None:
    with Broken({"convolution_backward"}, FAULTS[2]):
        assert {outcome(check) for check in conv_checks(CPU)} == {"failed"}
    with Broken({"_scaled_dot_product_flash_attention_for_cpu_backward"}, FAULTS[2]):
        found = [outcome(check) for check in attention_checks(CPU) if ".flash." in check.name]
    assert set(found) == {"failed"}


def test_an_update_that_does_not_arrive_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {outcome(check) for check in training_checks(CPU)} == {"passed"}  # and the known losses are kept
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    assert {outcome(check) for check in training_checks(CPU)} == {"failed"}


def test_weights_that_break_in_the_last_step_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {outcome(check) for check in training_checks(CPU)} == {"passed"}  # and the known losses are kept
    step, steps = torch.optim.AdamW.step, []

    def broken(self: torch.optim.AdamW) -> None:
        step(self)
        steps.append(1)
        if len(steps) % 10 == 0 and self.param_groups[0]["params"][0].dtype is torch.float32:
            self.param_groups[0]["params"][0].data.view(-1)[0] = float("nan")

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    (result, _), *_ = (run_check(check, CPU) for check in training_checks(CPU))
    assert result.status == "failed" and "not finite" in result.detail


# judging


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -3.0, 3.2])
def test_judge_says_what_is_wrong_and_where(value: float) -> None:
    wanted = torch.full((2, 3), 3.0)
    found = wanted.clone()
    found[1, 2] = value
    with pytest.raises(
        WrongAnswerError, check=saying("checks/the-thing-1-of-6-numbers-are", "checks/the-first-at-1-2")
    ):
        judge(found, wanted, "the thing", 0.05)


def test_judge_lets_small_errors_pass_and_other_shapes_not() -> None:
    judge(torch.full((2,), 3.1), torch.full((2,), 3.0), "x", 0.05)
    judge(torch.full((2,), 3.0), torch.full((2,), 3.0), "x", 0.0)
    with pytest.raises(WrongAnswerError, match="shape"):
        judge(torch.zeros(2), torch.zeros(1, 2), "x", 0.05)


def test_poisoned_memory_reads_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *args, **kwargs: made.append(full(*args, **kwargs)) or made[-1])
    poison(CPU, 8, 64)
    assert [tensor.numel() for tensor in made] == [8, 64]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert made[0].view(dtype).isnan().all()


# one check, and the child


def raising(error: Exception) -> Check:
    def run() -> None:
        raise error

    return Check("group.detail", run)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (WrongAnswerError("3 of 4 numbers"), "failed", worded("checks/3-of-4-numbers")),
        (NotHereError("not built"), "skipped", worded("checks/not-built")),
        (
            torch.OutOfMemoryError("HIP out of memory\nmore"),
            "skipped",
            worded("checks/not-enough-memory-on-the-gpu-hip"),
        ),
        (OSError(28, "No space left on device"), "skipped", worded("checks/no-temporary-file")),
        (
            RuntimeError("miopenStatusUnknownError\nstack"),
            "failed",
            worded("checks/runtimeerror-miopenstatusunknownerror"),
        ),
    ],
)
def test_how_a_check_ends(error: Exception, status: str, words: Worded) -> None:
    result, works = run_check(raising(error), CPU)
    assert result.status == status and says(result.detail, words) and "\n" not in result.detail and works


def test_a_device_that_is_lost_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: object, **kwargs: object) -> None:
        raise RuntimeError("HIP error: an illegal memory access was encountered")

    monkeypatch.setattr(selftest.torch, "zeros", lost)
    result, works = run_check(raising(RuntimeError("illegal memory access")), CPU)
    assert result.status == "crashed" and not works


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [as_heard(line) for line in capsys.readouterr().out.splitlines()]


def small_table(device: torch.device) -> Iterator[Check]:
    yield Check("a.one", lambda: None, 7.0)
    yield raising(WrongAnswerError("off"))
    yield Check("b.c.two", lambda: None)


Give = Callable[[SelfTestJob], None]


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Give:
    """Sets this process's job."""
    return lambda job: monkeypatch.setattr(sys, "argv", ["selftest", str(write_job(tmp_path, job))])


def test_the_child_says_before_and_after(give: Give, capsys: pytest.CaptureFixture[str]) -> None:
    give(SelfTestJob(on_cpu=True))
    assert main(small_table) == 0
    events = said(capsys)
    assert [(event["type"], event.get("name")) for event in events] == [
        ("checks", None),
        ("check", "a.one"),
        ("result", "a.one"),
        ("check", "group.detail"),
        ("result", "group.detail"),
        ("check", "b.c.two"),
        ("result", "b.c.two"),
    ]
    assert events[0]["names"] == ["a.one", "group.detail", "b.c.two"] and events[1]["timeout_s"] == 7.0
    assert events[4]["status"] == "failed" and events[4]["detail"] == "off"


@pytest.mark.parametrize(
    ("job", "begun"),
    [
        (SelfTestJob(on_cpu=True, skip=("a.one",)), ["group.detail", "b.c.two"]),
        (SelfTestJob(on_cpu=True, skip=("a", "b.c")), ["group.detail"]),
        (SelfTestJob(on_cpu=True, only=("a",)), ["a.one"]),
        (SelfTestJob(on_cpu=True, only=("a", "b"), skip=("a.one",)), ["b.c.two"]),
    ],
)
def test_what_is_left_out(job: SelfTestJob, begun: list[str], give: Give, capsys: pytest.CaptureFixture[str]) -> None:
    give(job)
    assert main(small_table) == 0
    assert [event["name"] for event in said(capsys) if event["type"] == "check"] == begun


def test_the_child_ends_when_the_device_is_lost(
    give: Give, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give(SelfTestJob(on_cpu=True))
    monkeypatch.setattr(selftest, "device_works", lambda device: False)
    table = partial(map, lambda name: Check(name, raising(RuntimeError("fault")).run), ["a.one", "a.two"])
    assert main(lambda device: table()) == DEVICE_LOST
    assert [event["name"] for event in said(capsys) if event["type"] == "result"] == ["a.one"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_an_error_event(give: Give, capsys: pytest.CaptureFixture[str]) -> None:
    give(SelfTestJob())
    assert main(small_table) == 3
    (event,) = said(capsys)
    assert event["type"] == "error" and event["code"] == "no-gpu"


def test_damaged_settings_are_an_error_event(
    give: Give, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give(SelfTestJob(on_cpu=True))
    monkeypatch.setenv("LORA_ROCM_SETTINGS", "{")
    assert main(small_table) == 3
    assert said(capsys)[0]["code"] == "settings-damaged"


@pytest.mark.parametrize(("seen_gib", "total_gib", "said"), [(8, 16, True), (15, 16, False), (16, 8, True)])
def test_memory_that_torch_does_not_find_is_a_remark(
    seen_gib: int, total_gib: int, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCard(tmp_path).install(monkeypatch)
    SimulatedCard(tmp_path, total=total_gib << 30, used=0)
    properties = SimpleNamespace(total_memory=seen_gib << 30, pci_domain_id=0, pci_bus_id=3, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    check = next(check for check in memory_checks(torch.device("cuda", 0)) if check.name == "memory.total")
    result, works = run_check(check, CPU)
    assert result.status == "passed" and works and bool(result.detail) is said
    assert not said or (f"{seen_gib}.0 GiB" in result.detail and f"{total_gib}.0 GiB" in result.detail)


def test_a_card_without_counters_has_no_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCard(tmp_path, has_counters=False).install(monkeypatch)
    (check,) = (check for check in memory_checks(torch.device("cuda", 0)) if check.name == "memory.total")
    assert run_check(check, CPU)[0].detail == ""
