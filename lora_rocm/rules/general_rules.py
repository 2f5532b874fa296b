"""Rules for every machine."""

from __future__ import annotations

from pathlib import PurePath, PurePosixPath, PureWindowsPath

from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.rules.rule import SETTING, Rule, Situation, When

ANY = When(amd=False)


def _deterministic(situation: Situation) -> str | None:
    recipe = situation.recipe
    return ":4096:8" if recipe is not None and recipe.runtime.deterministic else None


def _threads(situation: Situation) -> str | None:
    recipe = situation.recipe
    return str(recipe.runtime.threads) if recipe is not None and recipe.runtime.threads is not None else None


def _gpu_expected(situation: Situation) -> str | None:
    hidden = situation.gpu is None and situation.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return None if hidden or stack_of(situation.facts, situation.selection) is None else "true"


def _inductor_folder(situation: Situation) -> str | None:
    recipe = situation.recipe
    if recipe is None or recipe.runtime.compile in ("auto", "off"):
        return None
    path: type[PurePath] = PureWindowsPath if situation.facts.system == "windows" else PurePosixPath
    return str(path(situation.app_dir) / "inductor")


GENERAL_RULES: tuple[Rule, ...] = (
    Rule("utf8", "PYTHONUTF8", "1", "text files and pipes are UTF-8 on every system", "PEP 540", ANY),
    Rule(
        "faulthandler",
        "PYTHONFAULTHANDLER",
        "1",
        "a crash inside a library leaves a stack in worker.log",
        "https://docs.python.org/3/library/faulthandler.html",
        ANY,
    ),
    Rule(
        "tokenizers",
        "TOKENIZERS_PARALLELISM",
        "false",
        "one text at a time needs no threads, and the library warns otherwise",
        "https://github.com/huggingface/tokenizers",
        ANY,
    ),
    Rule(
        "telemetry",
        "HF_HUB_DISABLE_TELEMETRY",
        "1",
        "nothing about a run leaves the machine",
        "https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
        ANY,
    ),
    Rule(
        "cublas-workspace",
        "CUBLAS_WORKSPACE_CONFIG",
        _deterministic,
        "runtime.deterministic: matrix products repeat to the bit",
        "https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html",
        ANY,
        shown=("", ":4096:8"),
    ),
    Rule(
        "omp-wait",
        "OMP_WAIT_POLICY",
        "PASSIVE",
        "threads that spin while they wait make training on busy CPU cores several times slower (docs/log.md)",
        "https://www.openmp.org/spec-html/5.0/openmpse55.html",
        ANY,
    ),
    Rule(
        "omp-threads",
        "OMP_NUM_THREADS",
        _threads,
        "runtime.threads: results on the CPU depend on the thread count",
        "https://docs.pytorch.org/docs/stable/threading_environment_variables.html",
        ANY,
        shown=("", "runtime.threads"),
    ),
    Rule(
        "inductor-cache",
        "TORCHINDUCTOR_CACHE_DIR",
        _inductor_folder,
        "runtime.compile: what was compiled is kept between runs; the default is a temporary folder",
        "https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_configuration_tutorial.html",
        ANY,
        shown=("", "inductor in the program's folder, with runtime.compile: regional or full"),
    ),
    Rule(
        "gpu-expected",
        f"{SETTING}expect_gpu",
        _gpu_expected,
        "this PyTorch is one for the GPU of this machine: where it sees none, a run says so, and does not go on for "
        "days on the processor",
        "decision of this project, docs/amd.md",
        ANY,
        shown=("", "true, where GPU and PyTorch fit each other"),
    ),
)
