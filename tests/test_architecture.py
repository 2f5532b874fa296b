"""The rules of the house, read from the source: who may import whom, what the light half may touch, sizes, encodings.

What Windows lacks is in ``test_portability.py``.

Every rule has a negative control: a bad snippet on which it must fire.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.markers import unmarked

ROOT = Path(__file__).parents[1]
PACKAGE = "lora_rocm"
HEAVY_PACKAGES = {"torch", "peft", "diffusers", "transformers", "accelerate", "datasets"}
STANDARD, LIGHT, HEAVY = "standard library only", "never torch", "may import torch"
ROOMS: dict[str, str] = {
    "": STANDARD,
    "builtin": STANDARD,
    "errors": STANDARD,
    "foundation": STANDARD,
    "hardware": STANDARD,
    "hardware.probe": STANDARD,
    "model_files": STANDARD,
    "rundir": LIGHT,
    "telemetry": LIGHT,
    "sections": LIGHT,
    "specs": LIGHT,
    "recipe": LIGHT,
    "importing": LIGHT,
    "rules": LIGHT,
    "dataset": LIGHT,
    "planning": LIGHT,
    "cache_store": LIGHT,
    "processes": LIGHT,
    "page_parts": LIGHT,
    "report": LIGHT,
    "supervisor": LIGHT,
    "device": HEAVY,
    "kernels": HEAVY,
    "checks": HEAVY,
    "base_models": HEAVY,
    "families": HEAVY,
    "encoded_cache": HEAVY,
    "loader": HEAVY,
    "optim": HEAVY,
    "adapters": HEAVY,
    "memory": HEAVY,
    "export": HEAVY,
    "train": HEAVY,
    "children": HEAVY,
    "doctor": LIGHT,
    "commands": LIGHT,
    "api": LIGHT,
    "ui": LIGHT,
    "json_reference": LIGHT,
    "cli": LIGHT,
    "entry": LIGHT,
    "__main__": LIGHT,
}
"""A room imports from itself and from rooms above it, so there is no circle of rooms."""
BINARY_OPENERS = {"Image", "os", "webbrowser", "zipfile", "tarfile", "archive"}
NOT_AT_START = ("tensorboard", "torch.utils.tensorboard", "datasets", "torch._dynamo", "torch._inductor", "pandas")
OF_BLAS = (
    "_int_mm",
    "_scaled_mm",
    "_scaled_mm_v2",
    "_scaled_grouped_mm",
    "_scaled_grouped_mm_v2",
    "scaled_mm",
    "preferred_blas_library",
)
"""Operations of torch that no preference keeps away from hipBLASLt, and the preference itself."""
HOMES_OF_BLAS = (f"{PACKAGE}.device.hipblaslt", f"{PACKAGE}.kernels.eight_bit_library")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_UNLABELLED_LINES = 600, 80, 60
MEMORY_HOMES = {
    "(?i)mem_?get_?info|get_memory_info|is_integrated": (f"{PACKAGE}.device.device_memory",),
    "memory_fraction$": (f"{PACKAGE}.device.allocator",),
    "mem_info_": tuple(
        f"{PACKAGE}.{name}" for name in ("hardware.card_memory", "hardware.probe.gpu_probe", "telemetry.linux_sysfs")
    ),
}
"""Names in code -> the modules that may use them: HIP's free memory and the driver's counters are wrong alone.
One function decides whether a GPU shares main memory.

Telemetry shows the counters, and decides nothing by them."""
FAMILY_WORDS = re.compile(
    r"(?<![a-z])(sdxl|unet|vae|time_ids|pooled|clip(?!_grad|_threshold)|text_encoder|lora_te)(?![a-z]{2})",
    re.IGNORECASE,
)
FOREIGN_NAMES = (
    *("families", "base_models.tokenizers", "recipe.peer_names", "recipe.suggest", "recipe.foreign", "importing"),
    *("adapters.lora_files.lora_reader", "adapters.lora_parts", "model_files"),
)
"""Where the words of families belong: in these, and in tables of other trainers' names and of LoRA files."""
MAX_FAMILY_LINES = 11


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    source: str

    @property
    def tree(self) -> ast.Module:
        return _parse(self.source)

    @property
    def nodes(self) -> Iterator[ast.AST]:
        """Every node but the marks of reading and writing (``ast.expr_context``)."""
        return (node for _, node in _with_function(self.source))

    @property
    def room(self) -> str:
        """The package of a module, by its name in ROOMS.

        Three are not packages. "specs" is the light half's knowledge of families: their registry and every ``spec.py``.
        "sections" contains the sections' building blocks. A package of ``families`` belongs to "families".
        """
        parts = self.name.split(".")[1:]
        if parts[:1] == ["families"]:
            return "specs" if parts[-1] in ("spec", "registry") else "families"
        if parts in (["recipe", "sections"], ["recipe", "source_sections"], ["recipe", "rule"]):
            return "sections"
        return next((room for count in (2, 1) if (room := ".".join(parts[:count])) in ROOMS), parts[0] if parts else "")

    @property
    def is_light(self) -> bool:
        return ROOMS[self.room] != HEAVY


@dataclass(frozen=True)
class Import:
    """One imported name: ``target`` is the deepest module that the statement names."""

    target: str
    name: str
    line: int
    for_types: bool
    at_top: bool


@cache
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def _with_function(source: str) -> tuple[tuple[str, ast.AST], ...]:
    """Every node, with the name of the outermost function around it; cached, as most rules check all of them."""
    found: list[tuple[str, ast.AST]] = [("", _parse(source))]
    for function, node in found:  # it grows
        inside = function or (node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else "")
        children = ast.iter_child_nodes(node)
        found += [(inside, child) for child in children if not isinstance(child, ast.expr_context)]
    return tuple(found)


@cache
def package_modules() -> tuple[Module, ...]:
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path.read_text(encoding="utf-8")))
    return tuple(found)


@cache
def script_modules() -> tuple[Module, ...]:
    paths = [path for folder in ("scripts", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(Module(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths)


@cache
def module_names() -> frozenset[str]:
    return frozenset(module.name for module in package_modules())


@cache
def imports_of(module: Module) -> tuple[Import, ...]:
    return tuple(_imports(module.tree, for_types=False, at_top=True))


def _imports(node: ast.AST, *, for_types: bool, at_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr | ast.expr_context):
            continue  # no import is in there
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, "", child.lineno, for_types, at_top)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: write the whole name of the module"
            for alias in child.names:
                deeper = f"{child.module}.{alias.name}"
                target = deeper if deeper in module_names() else str(child.module)
                yield Import(target, alias.name, child.lineno, for_types, at_top)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(child, for_types=True, at_top=at_top)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(child, for_types=for_types, at_top=at_top and not is_function)


@cache
def families() -> tuple[str, ...]:
    """The packages of ``families`` that have a ``spec.py``."""
    return tuple(sorted(path.parent.name for path in (ROOT / PACKAGE / "families").glob("*/spec.py")))


def family_of(name: str) -> str:
    """The family that a module belongs to (``families.sdxl.family`` to ``sdxl``); empty for what families share."""
    parts = name.split(".")
    if parts[:2] != [PACKAGE, "families"] or len(parts) < 3:
        return ""
    return next((family for family in families() if parts[2] == family), "")


def arrow_faults(module: Module) -> Iterator[str]:
    """Imports from rooms below, for types too."""
    order = list(ROOMS)
    for found in imports_of(module):
        if module.name == PACKAGE and found.for_types and found.target == f"{PACKAGE}.api":
            continue  # the names that the package has for its users, which it imports on demand
        if found.target.partition(".")[0] == PACKAGE:
            other = Module(found.target, "").room
            if order.index(other) > order.index(module.room):
                yield f"{module.name}:{found.line} imports {found.target}"


def family_faults(module: Module) -> Iterator[str]:
    """A family that knows another, or shared code that knows one. The registry knows their specs."""
    if module.name == f"{PACKAGE}.families.registry":
        return
    for found in imports_of(module):
        other = family_of(found.target)
        if other and other != family_of(module.name):
            yield f"{module.name}:{found.line} imports {found.target}"


def light_faults(module: Module) -> Iterator[str]:
    """The light half reaching the heavy one: ours and packages, also inside functions; ``datasets`` only there."""
    if not module.is_light:
        return
    for found in imports_of(module):
        root = found.target.partition(".")[0]
        ours = root == PACKAGE and not Module(found.target, "").is_light
        lazy_datasets = root == "datasets" and not found.at_top
        if not found.for_types and (ours or (root in HEAVY_PACKAGES and not lazy_datasets)):
            yield f"{module.name}:{found.line} imports {found.target}"


def eager_faults(module: Module) -> Iterator[str]:
    """A package at the top of a module that most starts can do without, or at first: it costs each of them seconds."""
    for found in imports_of(module):
        if found.at_top and not found.for_types and found.target.startswith(NOT_AT_START):
            yield f"{module.name}:{found.line} imports {found.target} at its top"


def standard_library_faults(module: Module) -> Iterator[str]:
    """Modules used by the installer that would have to be installed first."""
    if ROOMS[module.room] != STANDARD:
        return
    for found in imports_of(module):
        root = found.target.partition(".")[0]
        ours = root == PACKAGE and ROOMS[Module(found.target, "").room] == STANDARD
        if not (root in sys.stdlib_module_names or ours or found.for_types):
            yield f"{module.name}:{found.line} imports {found.target}"


def size_faults(module: Module) -> Iterator[str]:
    lines = module.source.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield f"{module.name} has {len(lines)} lines"
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{module.name}:{node.lineno} {node.name} has {length} lines"
            inside = lines[node.lineno - 1 : node.end_lineno]
            if length > MAX_UNLABELLED_LINES and sum(line.lstrip().startswith("# ") for line in inside) < 2:
                yield f"{module.name}:{node.lineno} {node.name} has {length} lines, and no comments label its steps"


def broad_except_faults(module: Module) -> Iterator[str]:
    """Bare and broad ``except`` without a comment ``# edge: REASON``.

    It may be at the edge of a process, of a thread that passes its exceptions on, of a request, or of a row.
    """
    places = []
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = {part.id for part in ast.walk(node.type or node) if isinstance(part, ast.Name)}
            if node.type is None or caught & {"Exception", "BaseException"}:
                places.append((node.lineno, node.lineno))
    return unmarked(module.name, module.source, "edge", places)


def json_faults(module: Module) -> Iterator[str]:
    """JSON that does not go through ``parse_json``, which reports faults, without a comment ``# json: REASON``.

    The text may be from a process of the same start, from a library, or from a file of the program.
    """
    places = []
    for node in module.nodes:
        names = (
            [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) and node.module == "json" else []
        )
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "json":
            names = [node.attr]
        if {"load", "loads", "JSONDecoder", "decoder"} & {*names}:
            places.append((node.lineno, node.end_lineno or node.lineno))  # type: ignore[attr-defined]
    return unmarked(module.name, module.source, "json", places)


def unfinished_faults(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.source.splitlines(), 1):
        is_handled = line.lstrip().startswith("except ")  # ruamel raises NotImplementedError
        if re.search(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b", line) and not is_handled:
            yield f"{module.name}:{number} is unfinished: {line.strip()}"


def encoding_faults(module: Module) -> Iterator[str]:
    """Text read or written in an encoding that depends on the machine."""
    for node in module.nodes:
        if isinstance(node, ast.Call) and _is_text_io(node):
            if not any(keyword.arg in ("encoding", None) for keyword in node.keywords):
                yield f"{module.name}:{node.lineno} names no encoding: {ast.unparse(node)}"


def _is_text_io(call: ast.Call) -> bool:
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if isinstance(call.func, ast.Name):
        name, owner = call.func.id, ""
    elif isinstance(call.func, ast.Attribute):
        name, owner = call.func.attr, ast.unparse(call.func.value)
    else:
        return False
    if name in ("read_text", "write_text"):
        return True
    if owner == "subprocess":
        return "text" in named or "universal_newlines" in named
    if name in ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile") and owner.split(".")[0] not in BINARY_OPENERS:
        position = 0 if owner and name == "open" else 1  # path.open("rb"), open(path, "rb")
        mode = named.get("mode", call.args[position] if len(call.args) > position else ast.Constant("r"))
        if name.endswith("TemporaryFile"):
            mode = named.get("mode", call.args[0] if call.args else ast.Constant("w+b"))
        return not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
    return False


def python_child_faults(module: Module) -> Iterator[str]:
    """The command of a Python child that ``host.safe_path`` has not made: it would import from the current folder.

    The installer starts Pythons that may know no ``-P``, all through two functions that set PYTHONSAFEPATH.
    """
    if module.name in (f"{PACKAGE}.foundation.safe_path", "scripts/venv_state.py", "scripts/install.py"):
        return
    for node in module.nodes:
        if isinstance(node, ast.List | ast.Tuple) and node.elts:
            first = ast.unparse(node.elts[0])
            words = {element.value for element in node.elts if isinstance(element, ast.Constant)}
            if re.fullmatch(r"(str\()?(sys\.executable|[\w.]+\.python)\)?", first):
                yield f"{module.name}:{node.lineno} makes a command of its own: {ast.unparse(node)}"
            elif first != "'sh'" and not {"-m", "-c", "-I"}.isdisjoint(words):
                yield f"{module.name}:{node.lineno} makes a command of its own: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_start = re.fullmatch(r"system|popen|exec\w+|spawn\w+", node.func.attr)
            if is_start and ast.unparse(node.func.value) == "os":
                yield f"{module.name}:{node.lineno} starts a process by {ast.unparse(node.func)}"


def family_word_lines(module: Module) -> Iterator[str]:
    """Lines of shared code with a word of some family as an identifier or a key; messages to users do not count."""
    if module.name.removeprefix(f"{PACKAGE}.").startswith(FOREIGN_NAMES):
        return
    said = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
    lines: dict[int, str] = {}
    for node in module.nodes:
        if isinstance(node, ast.expr | ast.stmt | ast.arg | ast.keyword | ast.alias) and id(node) not in said:
            for word in _words_of(node):
                if FAMILY_WORDS.search(word):
                    lines[node.lineno] = word
    yield from (f"{module.name}:{line} {word}" for line, word in lines.items())


def _words_of(node: ast.AST) -> Iterator[str]:
    """The identifiers that a node itself holds, and a text that has no spaces. numpy's ``clip`` is none."""
    for field in ("id", "attr", "arg", "name", "value"):
        word = getattr(node, field, None)
        if isinstance(word, str) and " " not in word and (field, word) != ("attr", "clip"):
            yield word


def product_faults(module: Module) -> Iterator[str]:
    """Names for ``HOMES_OF_BLAS`` alone, and questions that attention has to answer by being called."""
    words_of_blas, words_of_attention = "|".join(OF_BLAS), "can_use_(flash|efficient|cudnn)_attention|SDPAParams"
    may_have = re.search(f"{words_of_blas}|{words_of_attention}", module.source)  # no regular expression for each node
    if module.name in HOMES_OF_BLAS or not may_have:
        return
    for node in module.nodes:
        for word in _words_of(node):
            if re.search(rf"(?<![a-z])({words_of_blas})(?![a-z_])", word):
                yield f"{module.name}:{getattr(node, 'lineno', 0)} {word}: it goes to hipBLASLt, or decides about it"
            if re.match(words_of_attention, word):
                yield f"{module.name}:{getattr(node, 'lineno', 0)} {word}: it says yes where a call fails"


def memory_faults(module: Module) -> Iterator[str]:
    """A question for free memory, or a limit of the allocator, outside the one module that has all sources for it."""
    asked = {words: homes for words, homes in MEMORY_HOMES.items() if re.search(words.removesuffix("$"), module.source)}
    for node in module.nodes if asked else ():
        named = node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else ""
        named = node.id if isinstance(node, ast.Name) else named
        for words, homes in asked.items():
            if isinstance(named, str) and re.search(words, named) and " " not in named and module.name not in homes:
                yield f"{module.name}:{getattr(node, 'lineno', 0)} asks by {named}; {homes[0]} is there for it"


def output_faults(module: Module) -> Iterator[str]:
    """A command that writes by itself: only ``commands.output`` knows whether standard output is a JSON document."""
    if module.room not in ("commands", "doctor", "cli") or module.name == f"{PACKAGE}.commands.output":
        return
    for node in module.nodes:
        text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        writes = text in ("print", "typer.echo", "sys.stdout.write", "sys.stderr.write")
        if writes or (module.room != "cli" and text in ("sys.stdout", "sys.stderr")):
            yield f"{module.name}:{getattr(node, 'lineno', 0)} uses {text}; an Output is there for it"


def warning_faults(module: Module) -> Iterator[str]:
    """A change of the filters of warnings, which all threads share, outside the module that has them for one thread."""
    if module.name == f"{PACKAGE}.foundation.quiet":
        return
    for node in module.nodes:
        word = next(iter(_words_of(node)), "")
        if word in ("catch_warnings", "simplefilter", "filterwarnings", "resetwarnings", "showwarning"):
            yield f"{module.name}:{getattr(node, 'lineno', 0)} {word} changes other threads too; Quiet does not"


RULES: list[tuple[Callable[[Module], Iterator[str]], bool]] = [  # rule, does it hold for scripts too
    (arrow_faults, False),
    (family_faults, False),
    (light_faults, False),
    (eager_faults, False),
    (standard_library_faults, False),
    (size_faults, True),
    (broad_except_faults, True),
    (unfinished_faults, True),
    (encoding_faults, True),
    (python_child_faults, False),
    (product_faults, False),
    (memory_faults, False),
    (output_faults, False),
    (json_faults, False),
    (warning_faults, False),
]


@pytest.mark.parametrize(("rule", "scripts_too"), RULES, ids=lambda value: getattr(value, "__name__", None))
def test_holds(rule: Callable[[Module], Iterator[str]], scripts_too: bool) -> None:
    modules = package_modules() + (script_modules() if scripts_too else ())
    faults = sorted({fault for module in modules for fault in rule(module)})
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("kernels.eight_bit", "import torch\ny = torch._int_mm(a, b)", 1),
        ("kernels.eight_bit", "y = torch.ops.aten._scaled_mm.default(a, b, s, t)", 1),
        ("kernels.eight_bit", "y = getattr(torch, '_scaled_mm')(a, b)", 1),
        ("train.loop", "torch.backends.cuda.preferred_blas_library('hipblaslt')", 1),
        ("checks.x", "from torch.backends.cuda import SDPAParams, can_use_flash_attention", 2),
        ("device.hipblaslt", "torch._int_mm(a, b)", 0),
        ("kernels.eight_bit", "y = torch.mm(a, b)\nprint_int_mmm = 'goes to _int_mm by itself'", 0),
    ],
)
def test_products_that_bring_hipblaslt_back_are_noticed(name: str, source: str, count: int) -> None:
    assert len(list(product_faults(Module(f"{PACKAGE}.{name}", source)))) == count


def test_shared_code_hardly_names_a_family() -> None:
    found = sorted(line for module in package_modules() for line in family_word_lines(module))
    assert len(found) <= MAX_FAMILY_LINES, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("train.loop", "unet = model.components['x']", 1),
        ("train.loop", "x = model.components['unet']", 1),
        ("train.loop", "def f(time_ids: int) -> None:\n    send(pooled_embeds=1)", 2),
        ("train.loop", "import vae\nlora_te1_x = sample.vae_name", 2),
        ("families.common.unet.family", "unet = model.components['unet']", 0),
        ("recipe.peer_names", "X = {'unet_lr': 1}", 0),
        ("train.loop", '"""The UNet."""\n# vae\nx = "SDXL has a VAE"\nx.clip(1)\nclip_grad_norm(x)\nclipped = x', 0),
    ],
)
def test_family_words_are_found_where_they_do_not_belong(name: str, source: str, count: int) -> None:
    assert len(list(family_word_lines(Module(f"{PACKAGE}.{name}", source)))) == count


def bad(rule: Callable[[Module], Iterator[str]], name: str, source: str) -> object:
    return pytest.param(rule, Module(f"{PACKAGE}.{name}", source), id=f"{rule.__name__}: {source[:50]}")


@pytest.mark.parametrize(
    ("rule", "planted"),
    [
        bad(arrow_faults, "errors", "from lora_rocm.recipe.schema import Recipe"),
        bad(arrow_faults, "commands.status", "def f():\n    import lora_rocm.cli"),
        bad(arrow_faults, "families.sdxl.family", "from lora_rocm.train import loop"),
        bad(arrow_faults, "adapters.kinds.lora", "from lora_rocm.export.writers import write"),
        bad(arrow_faults, "families.sdxl.family", "from lora_rocm.adapters.base import Adapter"),
        bad(arrow_faults, "checks.canary", "from lora_rocm.encoded_cache.cache import LatentCache"),
        bad(family_faults, "encoded_cache.cache", "from lora_rocm.families.sdxl.family import Sdxl"),
        bad(family_faults, "families.flux", "from lora_rocm.families.sdxl.family import Sdxl"),
        bad(family_faults, "families.objectives.ddpm", "from lora_rocm.families import sdxl"),
        bad(family_faults, "families.flux.spec", "from lora_rocm.families.sdxl.spec import SdxlSection"),
        bad(arrow_faults, "families.flux.spec", "from lora_rocm.families.base import Encoder"),
        bad(light_faults, "families.flux.spec", "import torch"),
        bad(light_faults, "recipe.kinds", "from lora_rocm.families.base import family_for"),
        bad(light_faults, "cli", "def f():\n    import torch"),
        bad(light_faults, "hardware.probe.detection", "from transformers import CLIPTextModel"),
        bad(light_faults, "dataset.sources.scan", "import datasets"),
        bad(output_faults, "commands.check", "print('x')"),
        bad(output_faults, "commands.check", "import sys\nsay = sys.stdout.write"),
        bad(output_faults, "commands.doctor", "import sys\nshow(Console(file=sys.stderr))"),
        bad(output_faults, "cli", "import typer\ntyper.echo('x')"),
        bad(light_faults, "commands.check", "def f():\n    from lora_rocm.encoded_cache.cache import LatentCache"),
        bad(eager_faults, "train.hooks", "from torch.utils.tensorboard import SummaryWriter"),
        bad(eager_faults, "encoded_cache.encode", "import datasets"),
        bad(standard_library_faults, "hardware.probe.detection", "import psutil"),
        bad(standard_library_faults, "hardware.wheels", "from lora_rocm.recipe.schema import Recipe"),
        bad(size_faults, "errors", "x = 1\n" * (MAX_FILE_LINES + 1)),
        bad(size_faults, "errors", "def f():\n" + "    # Step.\n" * 2 + "    x = 1\n" * MAX_FUNCTION_LINES),
        bad(size_faults, "errors", "def f():\n" + "    x = 1\n" * MAX_UNLABELLED_LINES),
        bad(broad_except_faults, "train.loop", "try:\n    f()\nexcept Exception:\n    raise"),
        bad(broad_except_faults, "train.worker", "def run():\n    try:\n        f()\n    except:\n        raise"),
        bad(broad_except_faults, "train.loop", "try:\n    f()\nexcept (OSError, BaseException):\n    raise"),
        bad(unfinished_faults, "errors", "x = 1  # TO" + "DO: more"),
        bad(unfinished_faults, "errors", "raise NotImplemented" + "Error"),
        bad(encoding_faults, "errors", "open('a')"),
        bad(encoding_faults, "errors", "open('a', 'w')"),
        bad(encoding_faults, "errors", "path.open('a')"),
        bad(encoding_faults, "errors", "path.read_text()"),
        bad(encoding_faults, "errors", "path.write_text('a')"),
        bad(encoding_faults, "errors", "tempfile.NamedTemporaryFile('w')"),
        bad(encoding_faults, "errors", "subprocess.run(['a'], text=True)"),
        bad(python_child_faults, "processes.process", "subprocess.Popen([sys.executable, '-m', 'x'])"),
        bad(python_child_faults, "processes.process", "command = [str(look.sources.python), script]"),
        bad(python_child_faults, "train.loop", "f('python3', *['-c', code])"),
        bad(python_child_faults, "train.loop", "os.execv(python, words)"),
        bad(memory_faults, "train.loop", "free, total = torch.cuda.mem_get_info(device)"),
        bad(memory_faults, "device.allocator", "from torch.cuda import mem_get_info as ask\nfree = mem_get_info()"),
        bad(memory_faults, "memory.manager", "torch.accelerator.get_memory_info(0)"),
        bad(memory_faults, "children.bench.device_child", "getattr(torch.cuda, 'mem_get_info')(0)"),
        bad(memory_faults, "train.guard", "torch.cuda.cudart().cudaMemGetInfo(0)"),
        bad(memory_faults, "device.allocator", "getattr(torch.cuda.get_device_properties(0), 'is_integrated', False)"),
        bad(memory_faults, "children.plan", "torch.cuda.get_device_properties(0).is_integrated"),
        bad(json_faults, "dataset.rows.text_rows", "def _parsed(line):\n    return json.loads(line)"),
        bad(json_faults, "dataset.rows.records", "def record_of(cell):\n    return list(map(json.loads, cell))"),
        bad(json_faults, "model_files.config_file", "from json import load"),
        bad(json_faults, "model_files.config_file", "a = 1  # json: a library prints it"),
        bad(broad_except_faults, "train.loop", "try:\n    f()\nexcept Exception:  # edge: ok\n    raise"),
        bad(memory_faults, "device.placement.offloaded", "torch.cuda.set_per_process_memory_fraction(0.5)"),
        bad(warning_faults, "checks.x", "with warnings.catch_warnings():\n    f()"),
        bad(warning_faults, "checks.x", "from warnings import simplefilter\nsimplefilter('ignore')"),
        bad(memory_faults, "report.report", "(folder / 'mem_info_vram_used').read_bytes()"),
    ],
)
def test_fires_on_a_planted_fault(rule: Callable[[Module], Iterator[str]], planted: Module) -> None:
    assert list(rule(planted))


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (arrow_faults, "encoded_cache.cache", "from lora_rocm.families.base import Encoder"),
        (arrow_faults, "train.loop", "from lora_rocm import __version__"),
        (family_faults, "families.sdxl.family", "from lora_rocm.families.sdxl.family import Sdxl"),
        (light_faults, "dataset.sources.scan", "def f():\n    import datasets"),
        (size_faults, "errors", "def f():\n" + "    # Step.\n" * 2 + "    x = 1\n" * (MAX_FUNCTION_LINES - 3)),
        (eager_faults, "train.hooks", "def f():\n    from torch.utils.tensorboard import SummaryWriter"),
        (eager_faults, "train.hooks", "import torch"),
        (light_faults, "encoded_cache.cache", "import torch"),
        (light_faults, "families.flux.family", "import torch"),
        (light_faults, "recipe.kinds", "from lora_rocm.families.flux.spec import SPEC"),
        (arrow_faults, "recipe.kinds", "from lora_rocm.families.registry import PRODUCT"),
        (family_faults, "families.registry", "from lora_rocm.families.sdxl.spec import SPEC"),
        (broad_except_faults, "train.loop", "try:\n    f()\nexcept Exception:  # edge: the page shows it\n    g()"),
        (
            standard_library_faults,
            "hardware.probe.detection",
            "import ctypes\nfrom lora_rocm.hardware.facts import Gpu",
        ),
        (encoding_faults, "errors", "open('a', 'rb')\npath.open('ab')\nImage.open('a')\nopen('a', encoding='utf-8')"),
        (encoding_faults, "errors", "tempfile.TemporaryFile()\nsubprocess.run(['a'])"),
        (memory_faults, "device.device_memory", "free, total = torch.cuda.mem_get_info(device)"),
        (memory_faults, "children.plan", "CountedGpu(integrated=shares_main_memory(device))"),
        (json_faults, "processes.job_file", "a = json.loads(sys.argv[1])  # json: the parent's job"),
        (json_faults, "dataset.rows.text_rows", "def _parsed(line):\n    return json.dumps(parse_json(line))"),
        (unfinished_faults, "errors", "try:\n    f()\nexcept NotImplemented" + "Error:\n    g()"),
        (warning_faults, "checks.x", "warnings.warn('text', stacklevel=2)\nwith Quiet():\n    f()"),
        (memory_faults, "device.allocator", "torch.cuda.set_per_process_memory_fraction(0.5)"),
        (memory_faults, "train.loop", '"""What mem_get_info says is too much."""\ntorch.cuda.memory_allocated(0)'),
        (
            python_child_faults,
            "processes.process",
            "Popen(python_command('-m', module))\nwhere = f'{sys.executable} -m'",
        ),
    ],
)
def test_stays_silent_on_good_code(rule: Callable[[Module], Iterator[str]], name: str, source: str) -> None:
    assert list(rule(Module(f"{PACKAGE}.{name}", source))) == []


@cache
def light_modules() -> tuple[str, ...]:
    return tuple(module.name for module in package_modules() if module.is_light)


IMPORT_EACH = """
import importlib, sys
heavy, reached = set(sys.argv[1].split()), []
for name in sys.argv[2:]:
    importlib.import_module(name)
    if heavy & set(sys.modules):
        reached.append(f"{name} loads {sorted(heavy & set(sys.modules))}")
        break
print("\\n".join(reached))
"""


def loads_heavy(*names: str) -> str:
    """Import modules one after the other in a fresh Python; the first that brings a heavy package, or nothing."""
    command = [sys.executable, "-c", IMPORT_EACH, " ".join(sorted(HEAVY_PACKAGES)), *names]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_light_module_loads_a_heavy_package() -> None:
    assert loads_heavy(*light_modules()) == ""


def test_a_heavy_module_is_noticed_when_imported() -> None:
    assert loads_heavy(f"{PACKAGE}.errors", f"{PACKAGE}.device.transfer").startswith(f"{PACKAGE}.device.transfer loads")


def test_every_room_is_in_the_list() -> None:
    assert {module.room for module in package_modules()} == set(ROOMS)


def circles(imports: dict[str, set[str]]) -> list[str]:
    """A circle of imports, if there is one."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    """Imports for types and imports inside functions count too."""
    ours = module_names()
    imports = {m.name: {i.target for i in imports_of(m) if i.target in ours} - {m.name} for m in package_modules()}
    imports[PACKAGE].discard(f"{PACKAGE}.api")  # imported on demand
    assert circles(imports) == []
    assert circles({**imports, f"{PACKAGE}.errors": {f"{PACKAGE}.cli"}}) != []  # control
