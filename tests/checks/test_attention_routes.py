"""A route of attention that gives zeros, other numbers or errors is named, held out and remembered before any step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lora_rocm.checks import attention_routes
from lora_rocm.checks.attention_routes import checked_attention
from lora_rocm.checks.selftest import run_check
from lora_rocm.checks.selftest_attention import attention_checks
from lora_rocm.device.attention import context_of
from lora_rocm.device.backend_settings import apply
from lora_rocm.errors import CanaryError, MachineError, StoppedError
from lora_rocm.families.registry import FAMILIES
from lora_rocm.families.spec import FamilySpec
from lora_rocm.hardware.settings import Settings
from lora_rocm.hardware.software_stack import STACK
from lora_rocm.rules import mitigation_store
from lora_rocm.rules.environment import plan
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.supervisor.hang_detection import LIMITS
from lora_rocm.train import pipeline, standalone, worker
from tests.event_lines import read_events
from tests.hardware.situations import situation
from tests.rules.test_environment import recipe
from tests.train.runs import run_dir
from tests.wording import says

__all__ = ["run_dir"]

CPU = torch.device("cpu")
PLANNED = Settings()
REAL = F.scaled_dot_product_attention
ENABLED: dict[str, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}
FIELDS = {"flash": "flash_attention", "math": "plain_attention"}
Fault = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def tried_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention_routes, "TRIED_ON", ("cpu",))
    apply(Settings(), CPU)
    yield
    apply(Settings(), CPU)


def taken() -> str:
    """The route that torch takes on a CPU: flash where it may."""
    return next((route for route, is_enabled in ENABLED.items() if is_enabled()), "none")


def spoil(monkeypatch: pytest.MonkeyPatch, routes: tuple[str, ...], fault: Fault) -> list[str]:
    """A torch with wrong attention on these routes; returns the routes that are taken."""
    calls: list[str] = []

    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(taken())
        right = REAL(*args, **kwargs)
        return fault(right) if calls[-1] in routes else right

    monkeypatch.setattr(F, "scaled_dot_product_attention", stand_in)
    return calls


def zeros(right: Tensor) -> Tensor:
    return right * 0


def a_tenth_off(right: Tensor) -> Tensor:
    return right * 0.9


def wrong_gradient(right: Tensor) -> Tensor:
    return right.detach() + (right - right.detach()) * 0.5


def fails(right: Tensor) -> Tensor:
    raise RuntimeError("HIP error: invalid argument\nCompile with TORCH_USE_HIP_DSA")


def look(settings: Settings = PLANNED) -> tuple[Settings, list[Any]]:
    events: list[Any] = []
    apply(settings, CPU)
    return checked_attention(settings, CPU, (torch.bfloat16, torch.float32), RunContext(emit=events.append)), events


def test_a_sound_torch_is_left_alone() -> None:
    assert look() == (Settings(), [])


@pytest.mark.parametrize("fault", [zeros, a_tenth_off, wrong_gradient, fails])
@pytest.mark.parametrize("route", ["flash", "math"])
def test_a_wrong_route_is_told_held_out_and_remembered(
    route: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = spoil(monkeypatch, (route,), fault)
    settings, (change, notice) = look()
    assert not getattr(settings, FIELDS[route]) and not ENABLED[route]()
    assert change.id == f"attention-{route}-off" and change.seen == "attention"
    assert f"route {route} " in notice.text and ("are zero" in notice.text) is (fault is zeros)
    # The next start begins without it, and everything in it does
    remembered = plan(situation("linux-rx7900xtx", changes=(change.id,))).settings
    assert getattr(remembered, FIELDS[route]) is False
    calls.clear()
    assert look(remembered)[1] == [] and route not in calls
    with context_of("sdpa-flash")():
        assert taken() != route
    with context_of("math")():
        assert taken() != route


def test_what_is_remembered_holds_for_runs_of_any_size(tmp_path: Path) -> None:
    here = replace(situation("linux-rx7900xtx"), app_dir=str(tmp_path))
    mitigation_store.keep(here, ["attention-flash-off"], "attention")
    remembered = mitigation_store.recall(tmp_path, mitigation_store.key_of(here.facts, here.selection))
    assert mitigation_store.in_force(remembered, ()) == ("attention-flash-off",)


def test_no_route_that_is_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, ("flash", "math"), zeros)
    events: list[Any] = []
    with pytest.raises(MachineError) as caught:
        checked_attention(Settings(), CPU, (torch.bfloat16,), RunContext(emit=events.append))
    assert caught.value.code == "no-attention" and "flash" in caught.value.where and "math" in caught.value.where
    assert events == [], "what leaves nothing is not remembered"


def test_a_wrong_choice_of_torch_among_right_routes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        both = ENABLED["flash"]() and ENABLED["math"]()
        return REAL(*args, **kwargs) * (0 if both else 1)

    monkeypatch.setattr(F, "scaled_dot_product_attention", stand_in)
    with pytest.raises(MachineError) as caught:
        look()
    assert caught.value.code == "no-attention" and caught.value.where.startswith("default: ")


def test_a_device_that_is_lost_begins_again_without_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, ("flash",), fails)
    monkeypatch.setattr(attention_routes, "device_works", lambda device: False)
    events: list[Any] = []
    with pytest.raises(CanaryError):
        checked_attention(Settings(), CPU, (torch.float32,), RunContext(emit=events.append))
    assert [event.id for event in events] == ["attention-flash-off"]


def test_routes_that_an_earlier_start_found_right_are_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are tried with another driver, variable, dtype or setting, where one was wrong, and by other code."""
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(STACK, "driver 1, GPU 1")
    calls = spoil(monkeypatch, (), zeros)

    def tries(settings: Settings = PLANNED) -> bool:
        calls.clear()
        look(settings)
        return bool(calls)

    assert [tries(), tries()] == [True, False]
    with monkeypatch.context() as patch:
        patch.setenv(STACK, "driver 2, GPU 1")
        wrong = spoil(patch, ("flash",), zeros)
        assert look()[1] and wrong
        wrong.clear()
        assert look()[1] and wrong, "a wrong result is not recorded"
    for variable in ("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", STACK):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert [tries(), tries()] == [True, False]
    assert [tries(Settings(attention="math")), tries(Settings(attention="math")), tries()] == [True, False, False]
    with monkeypatch.context() as patch:
        patch.setattr(attention_routes, "TESTED_BY", (*attention_routes.TESTED_BY, "canary"))
        assert tries(), "the code counts"
    calls.clear()
    checked_attention(Settings(), CPU, (torch.float32,), RunContext(emit=lambda event: None))
    assert calls, "the dtype counts"


def test_attention_is_tried_with_the_widths_of_the_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of one width does not count for another one."""
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(STACK, "driver 1, GPU 1")
    widths = set[int]()

    def stand_in(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        widths.add(query.shape[-1])
        return REAL(query, *args, **kwargs)

    def tried(*head_widths: int) -> set[int]:
        widths.clear()
        checked_attention(PLANNED, CPU, (torch.float32,), RunContext(emit=lambda event: None), head_widths)
        return set(widths)

    monkeypatch.setattr(F, "scaled_dot_product_attention", stand_in)
    assert [tried(64), tried(64), tried(64, 128), tried(128)] == [{64}, set(), {64, 128}, {128}]


@pytest.mark.parametrize("spec", [*FAMILIES], ids=lambda spec: spec.name)
def test_every_family_names_widths_that_can_be_tried(spec: FamilySpec) -> None:
    """Without one, nothing would be tried, and every route would be refused."""
    assert spec.head_widths and set(spec.head_widths) <= set(attention_routes.SHAPES)


def test_plain_attention_alone_is_tried_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spoil(monkeypatch, ("flash",), zeros)
    settings = Settings(attention="math")
    assert look(settings) == (settings, []) and set(calls) == {"math"}


def test_where_only_plain_attention_is_left_the_plan_of_memory_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, ("flash",), zeros)
    assert look()[0].attention == "math"


def test_a_deterministic_run_tries_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert look() == (Settings(), []) and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("route", ["flash", "math", "default"])
def test_the_self_test_names_zeros_on_each_route(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, ("flash", "math") if route == "default" else (route,), zeros)
    checks = [check for check in attention_checks(CPU) if check.name == f"attention.{route}.bf16-d64"]
    ((result, _),) = [run_check(check, CPU) for check in checks]
    assert result.status == "failed" and says(result.detail, "checks/numbers-are-zero")


# In the worker


def start_worker(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Settings]]:
    """Start a worker up to its first encoder. Return its exit code, and the settings with which it would encode."""
    begun: list[Settings] = []

    def encodes(start: Any, family: object) -> None:
        begun.append(start.settings)
        raise StoppedError("enough", "", where="", fix="")

    monkeypatch.setattr(pipeline, "prepare_data", encodes)
    return worker.main([str(run_dir.path)]), begun


def test_a_worker_holds_a_wrong_route_out_before_it_begins(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, ("flash",), zeros)
    code, (settings,) = start_worker(run_dir, monkeypatch)
    events = read_events(run_dir.events())
    (change,) = [event for event in events if event["type"] == "change"]
    assert code == StoppedError.exit_code
    assert change["id"] == "attention-flash-off" and settings.flash_attention is False


def test_a_worker_without_a_right_route_does_not_begin(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, ("flash", "math"), zeros)
    code, begun = start_worker(run_dir, monkeypatch)
    (error,) = read_events(run_dir.events(), "error")
    assert code == MachineError.exit_code and begun == [] and error["code"] == "no-attention"


def test_a_sound_worker_begins_as_planned(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    code, begun = start_worker(run_dir, monkeypatch)
    assert code == StoppedError.exit_code and begun == [Settings()] and read_events(run_dir.events(), "change") == []
    begins = [event["phase"] for event in read_events(run_dir.events(), "phase") if event["state"] == "begin"]
    assert begins == ["start", "cache", "attention"]
    assert "attention" not in LIMITS, "so a test that hangs has the limit of a start"


def test_samples_and_chats_do_without_a_wrong_route_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, ("flash",), zeros)
    _, settings = standalone.start_device(recipe())
    assert settings.flash_attention is False
    (told,) = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert told["type"] == "notice" and "route flash" in told["text"]


def test_a_cpu_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_routes, "TRIED_ON", ("cuda",))
    calls = spoil(monkeypatch, ("flash", "math"), zeros)
    assert look() == (Settings(), []) and calls == []
