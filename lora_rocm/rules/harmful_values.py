"""Harmful values of the user's variables (``harmful_values.toml``), and the functions that detect them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import by_name, read_rows
from lora_rocm.hardware.archs import arch_of, has_kernels
from lora_rocm.hardware.facts import Gpu
from lora_rocm.hardware.gpu_select import ROCR, visible
from lora_rocm.rules.amd_rules import OVERRIDE, STRIX_HALO, override_rules
from lora_rocm.rules.rule import Harm, Situation

Test = Callable[[str, Situation], bool]
Numbers = tuple[int, ...]

# In the order in which torch reads them: the first one that is set wins.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
OPTION = r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)"
LEGAL: dict[str, Callable[[str], bool]] = {
    "expandable_segments": lambda text: text.lower() in ("true", "false"),
    "max_split_size_mb": lambda text: text.isdecimal() and int(text) >= 20,
    "garbage_collection_threshold": lambda text: re.fullmatch(r"0?\.\d*[1-9]\d*", text) is not None,
    "roundup_power2_divisions": lambda text: text.startswith("[") or (text.isdecimal() and int(text).bit_count() == 1),
}


def is_on(value: str, situation: Situation) -> bool:
    """Whether the value turns a switch on."""
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def is_off(value: str, situation: Situation) -> bool:
    """Whether the value turns a switch off."""
    return not is_on(value, situation)


def is_set(value: str, situation: Situation) -> bool:
    """Return True for every value."""
    return True


def at_least(limit: int) -> Test:
    """Return a function that tests whether the value is a number of at least ``limit``."""
    return lambda value, situation: value.strip().isdecimal() and int(value) >= limit


def _numbers(value: str) -> Numbers | None:
    """Return major, minor and stepping of an override as libhsakmt parses it; None if libhsakmt rejects the value."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", value)
    numbers = tuple(int(part) for part in found.groups()) if found else ()
    return numbers if numbers and numbers[0] <= 63 and max(numbers[1:]) <= 255 else None


def _own_numbers(gpu: Gpu) -> Numbers | None:
    found = re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", gpu.gfx or "")
    return (int(found[1]), int(found[2], 16), int(found[3], 16)) if found else None


def _overridden(value: str, situation: Situation) -> list[Gpu]:
    """Return the GPUs of this run that this override value applies to.

    Strix Halo is excluded, because rules with an id that starts with "owner-" handle its override.
    """
    environ = situation.environ
    reached = visible(situation.facts, environ) if situation.selection.by_user else None
    gpus = reached or ([situation.gpu] if situation.gpu else [])
    counts = {gpu: environ.get(f"{OVERRIDE}_{gpu.node}", environ.get(OVERRIDE)) for gpu in gpus}
    return [gpu for gpu in gpus if gpu.gfx != STRIX_HALO and counts[gpu] == value]


def malformed_override(value: str, situation: Situation) -> bool:
    """Whether libhsakmt rejects the override value, and it applies to a GPU of this run."""
    return _numbers(value) is None and bool(_overridden(value, situation))


def other_generation(value: str, situation: Situation) -> bool:
    """Whether the override makes a GPU of this run pass for one with another major version."""
    theirs = _numbers(value)
    own = [_own_numbers(gpu) for gpu in _overridden(value, situation)]
    return theirs is not None and any(numbers is not None and numbers[0] != theirs[0] for numbers in own)


def other_card(value: str, situation: Situation) -> bool:
    """Whether the override makes a GPU of this run pass for another GPU of its generation without a known need."""
    theirs = _numbers(value)
    if theirs is None or other_generation(value, situation):
        return False
    return any(
        _own_numbers(gpu) not in (None, theirs) and not _works(value, gpu, situation)
        for gpu in _overridden(value, situation)
    )


def _works(value: str, gpu: Gpu, situation: Situation) -> bool:
    """Whether an override value is harmless for this GPU.

    It is harmless if the plan sets the same value, or if torch may lack kernels for the GPU and the value is known to
    help.
    """
    planned = [found[1] for rule in override_rules() if (found := rule.planned(situation)) is not None]
    torch, arch = situation.facts.torch, arch_of(gpu.gfx)
    lacking = has_kernels(torch.arch_list if torch else None, gpu.gfx) is not True
    return value in planned or (lacking and arch is not None and arch.override == value)


def _options(value: str) -> dict[str, str] | None:
    """Return the options in an allocator variable, or None if torch rejects the value."""
    if value.strip() and not re.fullmatch(f"{OPTION}(,{OPTION})*,?", value):
        return None
    return {name: text.strip() for name, text in re.findall(OPTION, value)}


def _counts(value: str, situation: Situation) -> bool:
    return value == next((situation.environ[name] for name in ALLOCATOR if name in situation.environ), None)


def expandable(with_split: bool) -> Test:
    """Return a function that tests whether expandable_segments is on.

    with_split: whether max_split_size_mb must be set as well; if False, it must not be set.
    """

    def harmful(value: str, situation: Situation) -> bool:
        options = _options(value) or {}
        asked = options.get("expandable_segments", "").lower() == "true"
        return asked and _counts(value, situation) and ("max_split_size_mb" in options) is with_split

    return harmful


def expandable_at_all(value: str, situation: Situation) -> bool:
    """Whether expandable_segments is on."""
    return expandable(True)(value, situation) or expandable(False)(value, situation)


def registers_host_memory(value: str, situation: Situation) -> bool:
    """Whether pinned memory is allocated as ordinary memory and then registered."""
    asked = (_options(value) or {}).get("pinned_use_cuda_host_register", "")
    return asked.lower() == "true" and _counts(value, situation)


def bad_options(value: str, situation: Situation) -> bool:
    """Whether torch rejects the value of this allocator variable."""
    options = _options(value)
    if not _counts(value, situation):
        return False
    return options is None or any(not LEGAL[name](text) for name, text in options.items() if name in LEGAL)


def hidden_by(*others: str) -> Test:
    """Return a function that tests whether one of ``others`` is also set.

    torch then reads the other variable and ignores this one.
    """
    return lambda value, situation: any(name in situation.environ for name in others)


def hides_all(value: str, situation: Situation) -> bool:
    """Whether the user's variables hide every AMD GPU."""
    return situation.selection.by_user and situation.gpu is None and bool(situation.facts.amd_gpus)


def chooses_apu(value: str, situation: Situation) -> bool:
    """Whether the user's variables select an APU although there is a discrete GPU.

    Strix Halo does not count, because it has more memory than most discrete GPUs.
    """
    gpu, cards = situation.gpu, [gpu for gpu in situation.facts.amd_gpus if gpu.integrated is False]
    is_small = gpu is not None and gpu.integrated is True and gpu.gfx != STRIX_HALO
    return situation.selection.by_user and is_small and bool(cards) and bool(value)


def longer_than_rocr(value: str, situation: Situation) -> bool:
    """Whether HIP's list of GPUs is longer than ROCr's."""
    rocr = situation.environ.get(ROCR)
    return rocr is not None and len(value.split(",")) > len(rocr.split(","))


def empty(value: str, situation: Situation) -> bool:
    """Whether the value is blank."""
    return not value.strip()


def shadows_wheel(value: str, situation: Situation) -> bool:
    """Whether the path contains ROCm libraries that may be loaded in place of torch's own."""
    torch = situation.facts.torch
    has_rocm = torch is not None and torch.hip is not None
    return has_rocm and any(folder.startswith("/opt/rocm") for folder in value.split(":"))


def is_temporary(value: str, situation: Situation) -> bool:
    """Whether the folder is one that the system empties regularly."""
    return value.startswith(("/tmp", "/var/tmp", "/dev/shm")) or "\\temp\\" in value.lower()


TESTS = {
    **by_name(bad_options, chooses_apu, empty, expandable_at_all, hides_all, is_off, is_on, is_set, is_temporary),
    **by_name(longer_than_rocr, malformed_override, other_card, other_generation, registers_host_memory),
    **by_name(shadows_wheel),
    "at_least_5": at_least(5),
    "beside_cuda_name": hidden_by(*ALLOCATOR[:1]),
    "beside_older_names": hidden_by(*ALLOCATOR[:2]),
    "expandable_with_split": expandable(with_split=True),
    "expandable_without_split": expandable(with_split=False),
    "not_4": lambda value, situation: value.strip() != "4",
    "not_strix_halo": lambda value, situation: situation.gpu is not None and situation.gpu.gfx != STRIX_HALO,
    "searches_long": lambda value, situation: value.strip().upper() not in ("2", "FAST"),
}


@cache
def harms() -> tuple[Harm, ...]:
    """Return the table of harmful values. Errors are as in ``read_rows``."""
    return read_rows(Path(__file__).with_name("harmful_values.toml"), Harm, TESTS)
