"""The canary passes on sound hardware, in every state the run can be in, and every wrong kernel or weight fails it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.checks.canary import SCALES, Canary
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import MachineError
from tests.device.broken import ATTENTION, CONVOLUTIONS, FAULTS, PRODUCTS, Broken, Fault, one_bit, one_nan, stale, zeros
from tests.wording import says

CPU = torch.device("cpu")
FORMATS = [torch.float32, torch.float16, torch.bfloat16]


def canary(dtype: torch.dtype = torch.bfloat16, rank: int = 8, module: nn.Module | None = None) -> Canary:
    placement = Resident(DeviceTransfer(CPU, pin=False))
    if module is not None:
        placement.place(module, "net")
    return Canary(CPU, dtype, rank, placement)


def base(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two frozen layers and one that is trained, with a buffer."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(7, 9, dtype=dtype), nn.Linear(9, 5, dtype=dtype), nn.Linear(5, 5)).requires_grad_(
        False
    )
    net[2].requires_grad_(True)
    net.register_buffer("places", torch.arange(3))
    return net


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("rank", [1, 5, 16, 256])
def test_sound_kernels_pass_every_time(dtype: torch.dtype, rank: int) -> None:
    look = canary(dtype, rank, base(dtype))
    assert [look.failure() for _ in range(len(SCALES) + 1)] == [None] * (len(SCALES) + 1)


KERNELS = [(PRODUCTS, "LoRA products"), (CONVOLUTIONS, "convolution"), (ATTENTION, "attention")]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("kernels", "name", "fault"),
    [
        *((kernels, name, fault) for kernels, name in KERNELS for fault in FAULTS),
        *(({"sum"}, "sums", fault) for fault in (zeros, one_bit, one_nan, stale)),  # a sum of all has no tail
    ],
)
def test_every_wrong_kernel_is_noticed(kernels: set[str], name: str, dtype: torch.dtype, fault: Fault) -> None:
    look = canary(dtype)
    with Broken(kernels, fault) as broken:
        found = look.failure()
    assert broken.hits and isinstance(found, MachineError) and found.exit_code == 3
    assert found.where.startswith(name) and "lora-rocm doctor" in found.fix and "--resume latest" in found.fix


@pytest.mark.parametrize("kernels", [PRODUCTS, CONVOLUTIONS, ATTENTION, {"sum"}], ids=lambda names: min(names))
def test_the_answers_of_the_look_before_do_not_pass(kernels: set[str]) -> None:
    """Kernels that stop running after they gave right answers."""

    look, answers = canary(), []

    def kept(right: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        answers.append(right.clone())
        return right

    with Broken(kernels, kept):
        assert look.failure() is None
    with Broken(kernels, lambda right, before: answers.pop(0)):
        assert look.failure() is not None


@pytest.mark.parametrize(
    ("layout", "name"), [("gradient of a weight", "TN"), ("forward", "NT"), ("gradient of the input", "NN")]
)
def test_each_layout_alone_is_noticed_and_named(layout: str, name: str) -> None:
    class OneLayout(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            given = func(*args, **(kwargs or {}))
            if func is not torch.ops.aten.mm.default or args[0].dtype is not torch.bfloat16:
                return given
            found = "".join("N" if operand.is_contiguous() else "T" for operand in args[:2])
            return torch.zeros_like(given) if found == name else given

    with OneLayout():
        found = canary().failure()
    assert found is not None and says(found.where, "checks/lora-products-layout", layout=layout)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("bit", [0, 7, 15])
def test_a_flipped_bit_in_a_frozen_weight_is_noticed(dtype: torch.dtype, bit: int) -> None:
    net = base(dtype)
    look = canary(dtype, module=net)
    assert look.failure() is None
    words = net[1].weight.data.view(torch.int16)
    words[-1, -1] ^= 1 << bit if bit < 15 else -(1 << 15)
    found = look.failure()
    assert found is not None and found.code == "canary-weights" and "net.1.weight" in found.where


def test_a_changed_buffer_is_noticed_and_a_trained_weight_may_change() -> None:
    net = base()
    look = canary(module=net)
    with torch.no_grad():
        net[2].weight.add_(1.0)
    assert look.failure() is None
    net.places[1] = 7
    found = look.failure()
    assert found is not None and "net.places" in found.where


def test_weights_that_read_as_they_did_at_the_look_before_do_not_pass() -> None:
    """The device's answer itself is stale: each check salts the fingerprints differently."""
    look = canary(module=base())
    answers: list[torch.Tensor] = []

    class Replay(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            given = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ in ("bitwise_xor", "__xor__"):
                answers.append(given.clone())
                return answers[0]
            return given

    with Replay():
        assert look.failure() is None
        assert look.failure() is not None
    assert len(answers) == 2


@pytest.mark.parametrize("grad", [True, False])
def test_it_leaves_everything_as_it_was(grad: bool) -> None:
    look = canary(module=base())
    flags = (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        assert look.failure() is None  # also where the loop is in the middle of something
        assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled() == grad
    assert torch.equal(torch.get_rng_state(), before)
    assert flags == (
        torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark,
    )  # fmt: skip


@pytest.mark.parametrize("fault", [zeros, one_nan, stale])
def test_one_look_that_failed_does_not_spoil_the_next(fault: Fault) -> None:
    look = canary()
    with Broken(PRODUCTS, fault):
        assert look.failure() is not None
    assert look.failure() is None
