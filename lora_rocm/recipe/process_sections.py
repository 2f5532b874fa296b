"""The sections about the machine, the worker process, and the files kept between runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_rocm.recipe.sections import MAX_STEPS, MAX_TIMEOUT_S, MAX_WORKERS, OutputFolder, Section, on_resume


class RuntimeSection(Section):
    """Settings for running on this machine. All keys may change on resume.

    A bit-exact resume needs an unchanged thread count.
    """

    device: Literal["auto", "cpu", "gpu"] = on_resume("auto", "Training device: the GPU, or the processor.")
    workers: int = on_resume(
        0, "DataLoader workers (spawned, CPU tensors only). 0 is recommended on AMD.", ge=0, le=MAX_WORKERS
    )
    worker_timeout_s: float = on_resume(
        300.0,
        "Seconds without an answer after which the loader workers are stopped. The rest is read without workers.",
        gt=0,
        le=MAX_TIMEOUT_S,
    )
    persistent_workers: bool = on_resume(
        False,
        "Keep the workers when reading restarts (validation, a repaired cache entry) instead of starting new ones.",
    )
    workers_on_windows: bool = on_resume(False, "On Windows, runtime.workers counts as 0 unless this is true.")
    pin_memory: Literal["auto", "yes", "no"] = on_resume("auto", "Pinned memory for batches; auto means yes on a GPU.")
    deterministic: bool = on_resume(
        False, "Use deterministic GPU kernels only: slower, but a resumed run is bit-exact."
    )
    graphs: Literal["auto", "off"] = on_resume(
        "auto",
        "auto: on a GPU, capture each step and replay it as one graph if the gradients stay the same. Not with "
        "lora.dropout.",
    )
    compile: Literal["auto", "off", "regional", "full"] = on_resume(
        "auto",
        "torch.compile on a GPU. regional: the repeated blocks; full: whole components. Each image size is compiled "
        "before the first step, which takes minutes. auto means off: the built-in kernels are faster.",
    )
    attention: Literal["auto", "sdpa", "flash", "aiter", "math"] = on_resume(
        "auto",
        "Attention in training. sdpa: torch's own; flash: the package flash-attn; aiter: AITER; math: plain. The first "
        "three are compared with plain attention on the GPU before the run. auto is torch's own; in the profile fast "
        "it is the fastest that gives correct results at the recipe's shapes.",
    )
    memory: Literal["auto", "keep", "selective", "attention", "recompute", "inputs", "offload"] = on_resume(
        "auto",
        "How a step uses GPU memory. keep: keep all activations. selective: recompute as few blocks as possible. "
        "attention: recompute all blocks, but keep the output of attention. recompute: recompute all blocks. inputs: "
        "recompute, and keep the inputs of blocks in main memory. offload: recompute, and keep the frozen weights of "
        "blocks in main memory. "
        "auto: the fastest that fits, also with split micro-batches (lora-rocm plan shows it).",
    )
    canary_every_n_steps: int = on_resume(
        250,
        "Updates between two checks of the kernels (against known results) and of the frozen base. Both are always "
        "checked at the start and before anything is written; 0: only then.",
        ge=0,
        le=MAX_STEPS,
    )
    profile: Literal["safe", "fast"] = on_resume(
        "safe",
        "fast: also use faster GPU libraries that passed the self-test on exactly this software, the attention that "
        "measured fastest, and the matrix products that lora-rocm tune has chosen.",
    )
    self_test: Literal["auto", "no"] = on_resume(
        "auto", "auto: an AMD GPU is tested once before its first run (minutes); no: never."
    )
    telemetry: bool = on_resume(
        True,
        "Read temperature, power and memory of the GPU every few seconds, in a separate process that the run never "
        "waits for. It warns of a hot card, and of GPU memory that spills into main memory.",
    )
    max_restarts: int = on_resume(
        10,
        "Restarts allowed after failures. A restart that gets no further than the previous one counts twice; each "
        "checkpoint adds one. 0: never restart.",
        ge=0,
        le=10_000,
    )
    threads: int | None = on_resume(None, "CPU threads of torch; unset keeps torch's default.", gt=0, le=1024)

    def workers_on(self, system: str) -> int:
        """Return the number of loader workers to run on a system; 0 on Windows unless the user has confirmed them.

        Args:
            system: name of the system, as in ``sys.platform``.
        """
        return self.workers if system != "win32" or self.workers_on_windows else 0


Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]


class TimeoutsSection(Section):
    """Seconds without progress, per phase, before the worker is killed and restarted.

    An unset limit is generous at first, then a multiple of the times measured during the run.
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
