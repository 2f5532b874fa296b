"""The sections about the worker process and the files that it keeps between runs."""

from __future__ import annotations

from lora_rocm.recipe.sections import MAX_TIMEOUT_S, OutputFolder, Section, on_resume


class TimeoutsSection(Section):
    """Seconds of silence per phase before the worker is killed and restarted.

    Unset: a generous first limit, then a multiple of the usual time measured in the run.
    """

    start: float | None = on_resume(
        None, "From the start of the process to its first phase, and between phases.", gt=0, le=MAX_TIMEOUT_S
    )
    load: float | None = on_resume(None, "Loading the base model.", gt=0, le=MAX_TIMEOUT_S)
    cache: float | None = on_resume(None, "Caching one image or caption.", gt=0, le=MAX_TIMEOUT_S)
    compile: float | None = on_resume(None, "Compilation of each part (runtime.compile).", gt=0, le=MAX_TIMEOUT_S)
    first_step: float | None = on_resume(
        None, "The first step after a start, in which kernels are compiled.", gt=0, le=MAX_TIMEOUT_S
    )
    step: float | None = on_resume(None, "Every further step, and each held-out batch.", gt=0, le=MAX_TIMEOUT_S)
    checkpoint: float | None = on_resume(None, "Checking the state and writing a checkpoint.", gt=0, le=MAX_TIMEOUT_S)
    preview: float | None = on_resume(None, "One round of previews.", gt=0, le=MAX_TIMEOUT_S)
    export: float | None = on_resume(None, "Writing and checking the LoRA.", gt=0, le=MAX_TIMEOUT_S)


class CacheSection(Section):
    """The cache of encoded images and captions, kept between runs."""

    dir: OutputFolder = on_resume("cache", "Cache folder, relative to where the command runs.")
