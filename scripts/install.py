"""Make ``.venv`` ready: packages, the torch for this machine's GPU, this package. Standard library only, any system.

    python scripts/install.py [--dev] [--repair | --upgrade]
    python scripts/install.py --dry-run [--facts FILE]

A torch that is in ``.venv`` and can use this machine's GPU is kept. Run again, it does nothing until the project, the
GPU or the variables change. Which torch and why: ``lora_rocm/hardware/wheels.toml``. Every other package has to have a
hash of ``locks/``, from whichever index it comes.

Environment (both win over the table, and are remembered until ``--repair``):
    LORA_ROCM_TORCH: pip requirement of torch, such as ``torch==2.13.0``.
    LORA_ROCM_TORCH_INDEX: where to take torch from: an address, or ``amd``, ``amd-next``, ``cpu``, ...

Exit codes: 0 ready; 2 the user's input; 3 something on this machine is missing or does not fit; 130 stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

OLDEST_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
if sys.version_info < OLDEST_PYTHON or sys.maxsize < 2**32:  # before anything that such a Python cannot read
    sys.stderr.write(f"install: A 64-bit Python 3.11 or newer is needed. This is {sys.version} ({sys.executable})\n")
    sys.exit(3)
sys.path.insert(0, str(ROOT))

from lora_rocm.errors import LoraRocmError, MachineError, storage_error  # noqa: E402
from lora_rocm.foundation.safe_path import forbid_programs_here  # noqa: E402
from lora_rocm.foundation.terminal_text import printable  # noqa: E402
from lora_rocm.hardware.archs import has_kernels  # noqa: E402
from lora_rocm.hardware.facts import HostFacts, load_facts  # noqa: E402
from lora_rocm.hardware.probe.detection import probe  # noqa: E402
from lora_rocm.hardware.wheels import (  # noqa: E402
    ANY_TORCH,
    INDEX_VARIABLE,
    VARIABLES,
    WheelChoice,
    choose,
    lacking_packages,
    makeshift,
    mismatch,
)
from scripts.venv_state import LOOK_TIMEOUT_S, Found, Venv, again, ask, notify, venv_command  # noqa: E402

Step = Literal["install", "upgrade", "keep"]
UNINSTALL = ["-m", "pip", "uninstall", "-q", "-y", "torch", "triton", "triton-rocm", "pytorch-triton-rocm"]
# pip compiles every file of every package, which takes a third of the installation. Importing the program once, or the
# tests, compiles what they use.
COMPILE = ["-c", "import lora_rocm.train.pipeline"]
COMPILE_TESTS = ["-m", "pytest", "--collect-only", "-p", "no:terminal", "-o", "addopts=--import-mode=importlib"]
QUICK = ["--retries", "0", "--timeout", "10"]


LOCKS = {part: f"locks/{part}.txt" for part in ("pip", "run", "dev", "triton")}
"""Made by ``scripts/lock_packages.py``: pip itself, what the program needs, what else tests and checks need."""
INSTALL = ["-m", "pip", "install", "--no-compile"]


def lock_command(part: str) -> list[str]:
    """Return the pip command for a lock's packages. It installs nothing else, not even to build a package."""
    built = ["--no-build-isolation"] if part == "dev" else ["--only-binary", ":all:"]
    return [*INSTALL, "-q", "--no-deps", "--require-hashes", *built, "-r", LOCKS[part]]


def lock_commands(dev: bool) -> list[list[str]]:
    """Return the commands for all packages except torch. pip is first: an old pip takes twice as long for the rest."""
    return [lock_command(part) for part in ("pip", "run", *(["dev"] if dev else []))]


def torch_command(choice: WheelChoice, upgrade: bool = False) -> list[str]:
    """Return the command that installs torch, the only one that uses its index. It keeps installed packages."""
    index = ["--index-url", choice.url] if choice.url else []
    return [*INSTALL, "-c", "constraints.txt", *(["--upgrade"] if upgrade else []), choice.requirement, *index]


def project_commands(dev: bool, cpu: bool) -> list[list[str]]:
    """Return the commands that install this package, editable, with the builder that is installed already.

    A torch for a GPU brings its own Triton; another one must not take its place.
    """
    triton = [lock_command("triton")] if dev and cpu else []
    return [*triton, [*INSTALL, "-q", "--no-deps", "--no-build-isolation", "-e", "."]]


def useless(venv: Venv, found: Found) -> str | None:
    """Why nothing can be installed into the venv."""
    if found.python is None:
        return f"its Python is gone or broken: {found.broken}"
    if found.python < OLDEST_PYTHON:
        return "it was made by an old Python"
    if not venv.has_pip() and not (venv.run("-m", "ensurepip") and venv.has_pip()):
        return "its pip does not work, and none could be added"
    return None


def ready_venv(venv: Venv, repair: bool) -> Found:
    """See that ``.venv`` has a Python that runs, and pip; what else it holds."""
    if not (venv.python.exists() or venv.stamp.exists()):
        venv.make()
    found = venv.look()
    why = useless(venv, found)
    if why is None:
        return found
    if not repair:
        fix = f"Rebuild it: {again('--repair')}"
        raise MachineError("venv-broken", f"{venv.folder.name} cannot be used: {why}.", where=str(venv.folder), fix=fix)
    notify(f"{venv.folder.name} cannot be used: {why}")
    venv.make(clear=True)
    return venv.look()


def unfit(found: Found, choice: WheelChoice) -> str | None:
    """Why the torch in the venv cannot be used, as the end of a sentence."""
    if found.broken:
        return f"it cannot be imported: {found.broken}"
    if found.release and numbers(found.release) < numbers(ANY_TORCH):
        return f"it is too old: {ANY_TORCH} is needed"
    why = mismatch(found.torch, choice) if found.torch is not None else None
    if why is None and found.release == choice.requirement.partition("==")[2]:  # any other torch is unknown
        missing = lacking(found, choice)
        why = f"packages that belong to it are missing: {missing}" if missing is not None else None
    return why


def numbers(version: str) -> tuple[int, ...]:
    """The numbers in a version or requirement."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def older(release: str, requirement: str) -> bool:
    """Whether the installed torch is older than the table's version; always true if the table names no version."""
    wanted = requirement.partition("==")[2]
    return not wanted or numbers(release) < numbers(wanted)


def torch_step(venv: Venv, found: Found, choice: WheelChoice, repair: bool, upgrade: bool) -> Step:
    """Choose the step for torch. A torch is replaced only on request, and it is uninstalled here.

    Raises:
        MachineError: "torch-unfit".
    """
    if found.release is None:
        return "install"
    why = unfit(found, choice)
    if why is not None and not repair:
        raise torch_unfit(found, why)
    if why is None and found.torch is not None and repair:
        why = makeshift(found.torch, choice)
    if why is None and upgrade and choice.by_user and found.release != choice.requirement.partition("==")[2]:
        why = f"{choice.requirement} is wanted, {choice.why.rstrip('.')}"
    if why is not None:
        notify(f"replacing torch {found.release}: {why}")
        if not venv.run(*UNINSTALL, hush=True):  # half installed: pip does not know its files
            venv.make(clear=True)
        return "install"
    return "upgrade" if upgrade and older(found.release, choice.requirement) else "keep"


def torch_unfit(found: Found, why: str) -> MachineError:
    """The torch in the venv is not taken: which, why and what to do."""
    what = f"The torch {found.release} in .venv does not serve this machine: {why}."
    fix = f"Replace it: {again('--repair')}. Or keep to the CPU: set {INDEX_VARIABLE}=cpu and run this again."
    return MachineError("torch-unfit", what, where=str(ROOT / ".venv"), fix=fix)


def install_torch(venv: Venv, choice: WheelChoice, upgrade: bool = False) -> None:
    """Install the chosen torch; for the CPU from the first index that answers."""
    notify(f"installing {choice.requirement} from {choice.url or 'the default package index'}: {choice.why}")
    if choice.else_default:
        if venv.run(*torch_command(choice, upgrade), *QUICK, hush=True):
            return
        notify("no answer from there; using the default index (its torch for Linux is larger and also runs on the CPU)")
        choice = replace(choice, url=None)
    if not venv.run(*torch_command(choice, upgrade)):
        what = "torch could not be installed (see pip's error above)."
        fix = "Common: no network, a proxy to set (HTTPS_PROXY), a full disk. Then run this again."
        raise MachineError("torch-failed", what, where=choice.url or "the default package index", fix=fix)


def verified(venv: Venv, choice: WheelChoice) -> Found:
    """Check the torch in the venv, print its version, and refuse one that cannot use this machine's GPU."""
    found = venv.look()
    why = "there is none, though pip reported no error" if found.release is None else unfit(found, choice)
    if why is not None:
        raise torch_unfit(found, why)
    torch = found.torch
    assert torch is not None  # there is a release, and nothing is broken
    kind = f"ROCm {torch.rocm_version}" if torch.hip else f"CUDA {torch.cuda}" if torch.cuda else "CPU only"
    kernels = f", kernels for {choice.gfx}" if has_kernels(torch.arch_list, choice.gfx) else ""
    notify(f"torch {torch.version} ({kind}{kernels})")
    poor = makeshift(torch, choice)
    if poor is not None:
        notify(f"note: {poor}; {again('--repair')} takes {choice.requirement}, which does not")
    return found


def lacking(found: Found, choice: WheelChoice) -> str | None:
    """The GPU's kernel packages that are missing or do not match the installed torch, as text; None if all match.

    pip can report an installation as complete without them, if torch's metadata does not name the extra.
    """
    extra = re.search(r"\[device-(gfx\w+)\]", choice.requirement)
    if extra is None or found.release is None or found.device_packages is None:
        return None
    return ", ".join(lacking_packages(found.release, extra[1], found.device_packages)) or None


def completed(venv: Venv, choice: WheelChoice) -> None:
    """Install torch once more where the packages with its kernels are missing or of another version.

    Raises:
        MachineError: "kernels-missing": they still are.
    """
    missing = lacking(venv.look(), choice)
    if missing is None:
        return
    notify(f"installing torch again: pip reported no error, but this is missing: {missing}")
    # Only torch: its metadata then names the packages, and the index lacks some of its other dependencies.
    venv.run(*torch_command(choice), "--force-reinstall", "--no-deps")
    install_torch(venv, choice)
    missing = lacking(venv.look(), choice)
    if missing is not None:
        what = f"The kernels for {choice.gfx or 'this GPU'} were not installed with torch: {missing}."
        fix = f"Reinstall torch: {again('--repair')}. Or choose another index: {INDEX_VARIABLE}."
        raise MachineError("kernels-missing", what, where=choice.url or "the default package index", fix=fix)


def run_all(venv: Venv, commands: list[list[str]]) -> None:
    """Run commands of pip in the venv.

    Raises:
        MachineError: "packages-failed".
    """
    for command in commands:
        if not venv.run(*command):
            what, fix = (
                "The packages could not be installed (see pip's error above).",
                "Common: no network, a full disk.",
            )
            fix += " If hashes do not match, the index or mirror that pip asks serves another file: try another one."
            raise MachineError("packages-failed", what, where=" ".join(command), fix=fix)


def fingerprint(choice: WheelChoice | None = None) -> str:
    """Of the project's files, or of a choice."""
    if choice is not None:
        return json.dumps([choice.requirement, choice.url, choice.gfx, choice.by_user])
    names = ("pyproject.toml", "constraints.txt", *LOCKS.values())
    inputs = [*(ROOT / name for name in names), Path(__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in inputs) + os.fsencode(ROOT)).hexdigest()


def command_of(venv: Venv) -> str:
    """How to call the program from here; the folder of its programs is rarely in PATH."""
    program = venv.python.with_name("lora-rocm.exe" if os.name == "nt" else "lora-rocm")
    here = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
    return quoted([str(here)], os.name == "nt")


def read_stamp(venv: Venv) -> dict[str, object]:
    """The record of the last installation; empty if there is none, or if an older version of this file wrote it."""
    try:
        stamp = json.loads(venv.stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def asked_for(stamp: dict[str, object], forget: bool) -> dict[str, str]:
    """The two variables as they are set now, else as they were when the venv was made."""
    now = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    then = stamp.get("asked")
    return now if now or forget or not isinstance(then, dict) else then


def install(options: argparse.Namespace, facts: HostFacts) -> None:
    """Do what is not yet done."""
    venv = Venv(ROOT)
    stamp, force = read_stamp(venv), options.repair or options.upgrade
    asked = asked_for(stamp, options.repair)
    choice = choose(facts, {**os.environ, **asked})
    same = stamp.get("project") == fingerprint() and bool(stamp.get("dev") or not options.dev) and venv.python.exists()
    if same and not force and stamp.get("choice") == fingerprint(choice):
        venv.stamp.touch()  # newer than its inputs again, for make
        return
    for text in (*choice.warnings, *choice.notes):
        notify(f"note: {text}")
    if same and not force:
        verified(venv, choice)  # another GPU, or other variables: the packages stay
    else:
        step = torch_step(venv, ready_venv(venv, options.repair), choice, options.repair, options.upgrade)
        notify("installing packages")
        run_all(venv, lock_commands(options.dev))  # before torch, because torch's index has some of them too
        if step != "keep":
            install_torch(venv, choice, upgrade=step == "upgrade")
            completed(venv, choice)
        found = verified(venv, choice)
        cpu = found.torch is not None and not (found.torch.hip or found.torch.cuda)
        run_all(venv, project_commands(options.dev, cpu))
        venv.run(*(COMPILE_TESTS if options.dev else COMPILE), hush=True)
        _, output, _ = ask([str(venv.python), "-m", "pip", "check", "--disable-pip-version-check"], LOOK_TIMEOUT_S)
        notify(f"pip check: {(output.strip().splitlines() or ['no answer'])[0]}")
    new = {"project": fingerprint(), "dev": bool(options.dev or (same and stamp.get("dev"))), "asked": asked}
    venv.stamp.write_text(json.dumps({**new, "choice": fingerprint(choice)}), encoding="utf-8")
    notify(f"ready; next: {command_of(venv)} doctor, then {command_of(venv)} demo")


def quoted(command: list[str], windows: bool) -> str:
    """A command line for a shell of that system."""
    if windows:
        return " ".join(f'"{word}"' if set(word) & set(' []<>&|^%"') else word for word in command)
    return shlex.join(command)


def _kept(facts: HostFacts, choice: WheelChoice) -> str:
    """The planned action on an installed torch, as the end of a sentence."""
    assert facts.torch is not None
    repair = f"{again('--repair', facts.system == 'windows')} replaces it"
    found = Found(release=facts.torch.version, torch=facts.torch, device_packages=facts.libraries)
    wrong, poor = unfit(found, choice), makeshift(facts.torch, choice)
    if wrong is not None:
        return f"does not serve: {wrong}. {repair}"
    return "is kept" if poor is None else f"is kept, though {poor}. {repair}"


def describe(facts: HostFacts, choice: WheelChoice, dev: bool) -> str:
    """The plan for a machine, with reasons: the exact commands, in order."""
    windows = facts.system == "windows"
    machine, inside = ("py -3", r".venv\Scripts\python.exe") if windows else ("python3", ".venv/bin/python")
    first = [*torch_command(choice), *(QUICK if choice.else_default else [])]
    lines = [f"torch: {choice.requirement}", f"from: {choice.url or 'the default package index'}", f"why: {choice.why}"]
    lines += [f"note: {text}" for text in (*choice.warnings, *choice.notes)]
    if facts.torch is not None:
        lines.append(f"here already: torch {facts.torch.version}, which {_kept(facts, choice)}")
    lines += ["", "In the folder of the repository:", f"  {machine} {quoted(venv_command(), windows)}"]
    lines += [f"  {inside} {quoted(command, windows)}" for command in lock_commands(dev)]
    lines.append(f"  {inside} {quoted(first, windows)}")
    if choice.else_default:
        plain = torch_command(replace(choice, url=None))
        lines.append(f"  where that does not answer: {inside} {quoted(plain, windows)}")
    lines += [f"  {inside} {quoted(command, windows)}" for command in project_commands(dev, choice.kind == "cpu")]
    compiled = quoted(COMPILE_TESTS if dev else COMPILE, windows)
    lines += [f"  {inside} {compiled}", f"  {inside} -m pip check"]
    return "\n".join(map(printable, lines))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make .venv ready for lora-rocm.")
    parser.add_argument("--dev", action="store_true", help="also the tools for tests and checks")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--repair", action="store_true", help="rebuild a broken .venv, replace a torch that does not fit")
    how.add_argument("--upgrade", action="store_true", help="take the torch that the table names now, and the packages")
    how.add_argument("--dry-run", action="store_true", help="print the commands and the reasons, run nothing")
    parser.add_argument("--facts", type=Path, metavar="FILE", help="with --dry-run: another machine, as JSON")
    options = parser.parse_args(arguments)
    if options.facts is not None and not options.dry_run:
        parser.error("--facts goes with --dry-run: nothing can be installed on another machine")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Install, or print the plan of the installation."""
    options = parse(arguments)
    forbid_programs_here()
    try:
        facts = load_facts(options.facts) if options.facts is not None else probe()
        if options.dry_run:
            here = options.facts is None
            asked = asked_for(read_stamp(Venv(ROOT)) if here else {}, forget=False)
            choice = choose(facts, {**(os.environ if here else facts.variables), **asked})
            print(describe(facts, choice, options.dev), flush=True)
        else:
            install(options, facts)
    except LoraRocmError as error:
        print(f"install: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone; Python would complain again while it shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 130
    except OSError as error:
        print(f"install: {storage_error(error, error.filename or ROOT)}", file=sys.stderr)
        return MachineError.exit_code
    except KeyboardInterrupt:
        print("install: stopped; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a path that the console's encoding lacks
    sys.exit(main())
