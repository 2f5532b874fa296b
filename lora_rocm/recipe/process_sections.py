"""The sections about the machine, the worker process and the files that it keeps between runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_rocm.recipe.sections import MAX_STEPS, MAX_TIMEOUT_S, MAX_WORKERS, OutputFolder, Section, on_resume


class RuntimeSection(Section):
    """Use of the machine. All keys may change on resume, but a bit-exact resume needs an unchanged thread count."""

    device: Literal["auto", "cpu", "gpu"] = on_resume("auto", "Training device.")
    workers: int = on_resume(
        0, "DataLoader workers (spawned, CPU tensors only). 0 is right on AMD.", ge=0, le=MAX_WORKERS
    )
    worker_timeout_s: float = on_resume(
        300.0,
        "Seconds of silence after which loader workers are given up. The rest is read without workers.",
        gt=0,
        le=MAX_TIMEOUT_S,
    )
    persistent_workers: bool = on_resume(
        False,
        "Keep the workers when reading restarts (validation, a repaired cache entry), instead of starting new ones.",
    )
    workers_on_windows: bool = on_resume(False, "On Windows runtime.workers counts as 0 unless this is true.")
    pin_memory: Literal["auto", "yes", "no"] = on_resume("auto", "Pinned memory for batches; auto means yes on a GPU.")
    deterministic: bool = on_resume(
        False, "Use deterministic GPU kernels only: slower, but a resume is exact to the byte."
    )
    graphs: Literal["auto", "off"] = on_resume(
        "auto",
        "auto: on a GPU each step is captured and replayed as one graph if this gives the same gradients; not with "
        "lora.dropout.",
    )
    compile: Literal["auto", "off", "regional", "full"] = on_resume(
        "auto",
        "torch.compile on a GPU. regional: the repeated blocks; full: whole components. Each image size is compiled "
        "before the first step, which takes minutes. auto is off: this program's own kernels are faster.",
    )
    attention: Literal["auto", "sdpa", "flash", "aiter", "math"] = on_resume(
        "auto",
        "Attention in training. sdpa: torch's own; flash: the package flash-attn; aiter: AITER; math: plain. The first "
        "three are compared with plain attention on the GPU before the run. auto is torch's own; in the profile fast "
        "the fastest that is right at the shapes of the recipe.",
    )
    memory: Literal["auto", "keep", "selective", "recompute", "offload"] = on_resume(
        "auto",
        "How a step uses GPU memory. keep: all activations are kept; selective: those of as few blocks as possible are "
        "recomputed; recompute: those of all blocks; offload: in addition the frozen weights of blocks stay in main "
        "memory. auto: the fastest that fits, also with micro-batches cut into parts (lora-rocm plan shows it).",
    )
    canary_every_n_steps: int = on_resume(
        250,
        "Updates between two checks of kernels with known results and of the frozen base. Both are always checked at "
        "the start and before anything is written; 0: only then.",
        ge=0,
        le=MAX_STEPS,
    )
    profile: Literal["safe", "fast"] = on_resume(
        "safe",
        "fast: use faster GPU libraries too, if the self-test has cleared them on exactly this software; measured "
        "attention; and matrix products as lora-rocm tune has chosen them.",
    )
    self_test: Literal["auto", "no"] = on_resume(
        "auto", "auto: an AMD GPU is tested once before its first run (minutes); no: never."
    )
    telemetry: bool = on_resume(
        True,
        "Read temperature, power and memory of the GPU every few seconds, in a process of its own that the run never "
        "waits for. It warns of a hot card, and of memory that spills into main memory.",
    )
    max_restarts: int = on_resume(
        10,
        "Budget of restarts after failures. A restart that gets no further than the one before counts twice, and each "
        "checkpoint gives one back. 0: never restart.",
        ge=0,
        le=10_000,
    )
    threads: int | None = on_resume(None, "CPU threads of torch; unset keeps torch's default.", gt=0, le=1024)

    def workers_on(self, system: str) -> int:
        """The effective number of workers on a system (named as in ``sys.platform``): 0 on Windows unless confirmed."""
        return self.workers if system != "win32" or self.workers_on_windows else 0


Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]


class TimeoutsSection(Section):
    """Seconds of silence per phase before the worker is killed and restarted.

    Unset: a generous first limit, then a multiple of the usual time measured in the run.
    """

    start: Seconds | None = on_resume(None, "From the start of the process to its first phase, and between phases.")
    load: Seconds | None = on_resume(None, "Loading the base model.")
    cache: Seconds | None = on_resume(None, "Caching one image or caption.")
    compile: Seconds | None = on_resume(None, "Compilation of each part (runtime.compile).")
    first_step: Seconds | None = on_resume(None, "The first step after a start, in which kernels are compiled.")
    step: Seconds | None = on_resume(None, "Every further step, and each held-out batch.")
    checkpoint: Seconds | None = on_resume(None, "Checking the state and writing a checkpoint.")
    preview: Seconds | None = on_resume(None, "One round of previews, or eight class images.")
    export: Seconds | None = on_resume(None, "Writing and checking the LoRA.")


class CacheSection(Section):
    """The cache of encoded images and captions, kept between runs."""

    dir: OutputFolder = on_resume("cache", "Cache folder, relative to where the command runs.")
