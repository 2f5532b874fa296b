"""Run the tests that compute as other processors would: with fewer instructions, and with other numbers of threads.

    python scripts/other_cpus.py [--only SETTING]... [--workers 2] [--log FOLDER] [arguments of pytest]

Runs with the Python that starts it. Prints one line per setting; ends with 0 if all are green. Without a path among
the arguments of pytest, all tests run except tests that never compute. The libraries use only
instructions that both the setting and the processor allow, so a setting above the processor's level changes nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS: dict[str, dict[str, str]] = {
    "as-it-is": {},
    "mkl-avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "mkl-sse42": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "aten-default": {"ATEN_CPU_CAPABILITY": "default"},
    "threads-4": {"LORA_ROCM_TEST_THREADS": "4", "MKL_DYNAMIC": "FALSE"},  # else no more threads than cores
}
NEVER_COMPUTE = """
    doctor host recipe windows test_architecture.py test_install.py test_portability.py test_project.py test_recipes.py
"""
VERSIONS = "import torch; print(f'PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}')"


def processor() -> str:
    """The processor's name, from Linux, else from Python."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {os.cpu_count()} cores" if names else platform.processor()


def tested(name: str, options: argparse.Namespace, pytest_arguments: list[str]) -> bool:
    """Run pytest once; print its line, and keep its whole output in a file."""
    environment = {**os.environ, **SETTINGS[name]}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["-n", str(options.workers), "--dist", "worksteal"] if options.workers else []
    command += [f"--ignore=tests/{path}" for path in NEVER_COMPUTE.split()]
    log = options.log / f"{name}.log"
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(
            [*command, *pytest_arguments], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    counts = [line for line in lines if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    what = " ".join(f"{key}={value}" for key, value in SETTINGS[name].items()) or "nothing set"
    verdict = "green" if code == 0 else f"NOT GREEN (pytest ended with {code}; {log})"
    print(f"{name:12} {verdict}: {counts[-1] if counts else 'no tests'} [{what}]", flush=True)
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"    {line}", flush=True)
    return code == 0


def main() -> int:
    """Run the chosen settings one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", action="append", choices=list(SETTINGS), help="this setting; may be given repeatedly")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest-xdist; 0 runs without it")
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "other_cpus", help="folder for pytest's output")
    options, pytest_arguments = parser.parse_known_args()
    options.log.mkdir(parents=True, exist_ok=True)
    versions = subprocess.run([sys.executable, "-c", VERSIONS], stdout=subprocess.PIPE, check=True).stdout
    print(f"{processor()}; {versions.decode().strip()}; Python {platform.python_version()}", flush=True)
    return 0 if all([tested(name, options, pytest_arguments) for name in options.only or SETTINGS]) else 1


if __name__ == "__main__":
    sys.exit(main())
