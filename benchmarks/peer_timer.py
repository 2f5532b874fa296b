"""Times the steps of a trainer that is built on transformers' ``Trainer``, from a callback."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback

from benchmarks.training_step.profile import WINDOW, summary

TRACED = 2
LIBRARIES = ("trl", "llamafactory", "unsloth", "liger-kernel", "transformers", "peft", "accelerate", "torch", "triton")


def held_bytes(device: torch.device) -> int:
    """Bytes of all tensors on a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def versions() -> dict[str, str]:
    """Versions of the libraries that are installed for this process."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Timer(TrainerCallback):
    """Wall time from the end of a step to the end of the next, on a device that has done all work.

    The loop's own work (data loader, callbacks) is part of it. The trainer must make ``total_steps`` steps, of which
    the last ``TRACED`` are not timed but traced, and must log once, at the end.
    """

    def __init__(self, warm_up: int, steps: int, device: torch.device, folder: Path) -> None:
        self.first_timed, self.last_timed = warm_up, warm_up + steps
        self.total_steps = self.last_timed + TRACED
        self.device, self.trace_path = device, folder / "trace.json"
        self.held_bytes = held_bytes(device)  # before the trainer has loaded anything
        self.ends_s, self.row = list[float](), dict[str, Any]()
        self.profiler: profile | None = None
        self.window = record_function(WINDOW)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Record the trained parameters, and the model's memory."""
        self._settle()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.row["trained_parameters"] = sum(parameter.numel() for parameter in trained)
        self.row["trained_dtypes"] = dict(Counter(str(parameter.dtype) for parameter in trained))
        self.row["base_dtypes"] = sorted({str(each.dtype) for each in model.parameters() if not each.requires_grad})
        self.row["weights_bytes"] = held_bytes(self.device) - self.held_bytes
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

        def note(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            ids_BS = named["input_ids"] if "input_ids" in named else inputs[0]
            self.row["batch"] = list(ids_BS.shape)
            seen.remove()

        seen = model.register_forward_pre_hook(note, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the trace after the last timed step."""
        if state.global_step == self.last_timed:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.profiler = profile(activities=activities)
            self.profiler.start()
            self.window.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time at which all work of the step is done."""
        self._settle()
        self.ends_s.append(time.perf_counter())
        if state.global_step == self.total_steps and self.profiler is not None:
            self.window.__exit__(None, None, None)
            self.profiler.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Note the mean loss."""
        if "loss" in logs:
            self.row["loss"] = float(logs["loss"])

    def measured(self) -> dict[str, Any]:
        """Return the figures, once the trainer has made all steps.

        Raises:
            RuntimeError: it made fewer.
        """
        if len(self.ends_s) != self.total_steps or self.profiler is None:
            raise RuntimeError(f"the trainer made {len(self.ends_s)} steps; {self.total_steps} were asked for")
        if self.device.type == "cuda":
            self.row["peak_bytes"] = torch.cuda.max_memory_allocated(self.device) - self.held_bytes
        ends_s = self.ends_s[self.first_timed - 1 : self.last_timed]
        self.row["steps_s"] = [after - before for before, after in zip(ends_s, ends_s[1:], strict=False)]
        self.row["median_s"] = statistics.median(self.row["steps_s"])
        self.profiler.export_chrome_trace(str(self.trace_path))
        found = summary(json.loads(self.trace_path.read_bytes())["traceEvents"], TRACED)
        self.row |= {key: found[key] for key in ("busy_s", "kernels", "waits", "by_kind", "top")}
        return self.row | {"held_before_bytes": self.held_bytes, "versions": versions()}
