"""Hides packages that ``transformers``, ``diffusers``, ``peft`` and ``accelerate`` import only because they find them.

Such a package may take a second to import, or fail because it was built for another torch. A run calls none of them.
For Python a hidden package is not installed: ``import`` raises ``ModuleNotFoundError``, and ``find_spec`` returns None.
``sys.modules`` has no entry for it: SciPy, MLflow and einops call a package as soon as its name is there.

Three things are postponed until somebody needs them. Schedulers of diffusers import SciPy when they use it
(``SCHEDULERS``). The losses of transformers' other models are imported when they are called (``WITH_CALLS``).
``diffusers`` asks at its import which distribution each package is from, for which Python reads the file lists of all
of them (``LateMap``).
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed.importlib import MetaPathFinderProtocol

HIDDEN = (
    # quantisation
    "bitsandbytes", "torchao", "hqq", "optimum", "gptqmodel", "auto_gptq", "awq", "aqlm", "eetq", "auto_round", "sdnq",
    "nunchaku", "modelopt", "compressed_tensors", "quark", "vptq", "fbgemm_gpu", "gguf", "neural_compressor",
    # attention, kernels and devices; not those that give transformers' hybrid language models their fast paths
    "xformers", "flash_attn", "flash_attn_interface", "sageattention", "flashinfer", "kernels", "liger_kernel",
    "transformer_engine", "apex", "torch_npu", "torch_xla", "torch_mlu", "torch_musa", "torch_neuronx", "torch_tpu",
    "torch_sdaa", "habana_frameworks",
    # distribution, services and other frameworks
    "deepspeed", "torchdistx", "boto3", "sagemaker", "tensorflow", "jax", "flax", "sklearn", "unsloth", "vllm",
    # sound; and images, which transformers would otherwise resize by torchvision or Pillow, whichever it finds
    "torchaudio", "soundfile", "soxr", "librosa", "torchvision",
)  # fmt: skip
"""Packages that this program does not call. A recipe may ask for flash-attn, and trackers find all (``show``)."""
_hidden = set[str]()
SCHEDULERS = "diffusers.schedulers.scheduling_"
"""Beginning of the names of modules that import SciPy at their top, and use it for few values of their config."""
WITH_CALLS = ("transformers.loss.loss_utils",)
"""Modules that import functions from each of their submodules, only to list them in a table."""
DISTRIBUTIONS = ("diffusers.utils.import_utils",)
"""Modules that ask for the distributions of all packages when they are imported."""
ON_CALL = "__on_call__"
ON_USE = "__on_use__"
"""Names in the changed source of the function and the class that make a replacement."""


class _Hiding:
    """A finder of ``sys.meta_path`` that does not find hidden packages."""

    def __init__(self, finder: MetaPathFinderProtocol) -> None:
        self.finder = finder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname in _hidden else self.finder.find_spec(fullname, path, target)

    def __getattr__(self, name: str) -> object:  # importlib.metadata asks finders for distributions
        return getattr(self.finder, name)


def hide(packages: Collection[str] = HIDDEN) -> None:
    """Hide these packages from now on. A package that is already imported stays as it is.

    torch would import a hidden one of another device as its backend, so it does not load backends by itself.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    _hidden.update(packages)
    if not any(isinstance(finder, _Hiding) for finder in sys.meta_path):
        sys.meta_path[:] = [_Hiding(finder) for finder in sys.meta_path]


def show(packages: Collection[str] = HIDDEN) -> None:
    """Find these packages again: a recipe asks for one, or foreign code is imported next."""
    _hidden.difference_update(packages)


class _OnUse:
    """Replaces a module, and imports it when an attribute is read."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        module = import_module(self._module)
        if not hasattr(module, name):
            import_module(f"{self._module}.{name}")
        found: object = getattr(module, name)
        return found


class LateSciPy(ast.NodeTransformer):
    """Replaces the imports of SciPy in a block ``if is_scipy_available()`` at the top level of a module."""

    def visit_If(self, node: ast.If) -> ast.If:
        match node.test:
            case ast.Call(ast.Name("is_scipy_available")):
                node.body = [made for each in node.body for made in self._late(each)]
        return node

    def _late(self, node: ast.stmt) -> list[ast.stmt]:
        match node:
            case ast.Import(names) if all(alias.asname is None for alias in names):
                wanted = {alias.name.partition(".")[0]: alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom("scipy", names, 0):
                wanted = {alias.asname or alias.name: f"scipy.{alias.name}" for alias in names}
            case _:
                return [node]
        calls = {name: ast.Call(ast.Name(ON_USE, ast.Load()), [ast.Constant(it)], []) for name, it in wanted.items()}
        made = [ast.Assign([ast.Name(name, ast.Store())], call) for name, call in calls.items()]
        return [ast.copy_location(each, node) for each in made]

    def _unchanged(self, node: ast.AST) -> ast.AST:
        return node

    visit_Try = visit_With = visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _unchanged


class LateFunctions(ast.NodeTransformer):
    """Replaces ``from .submodule import name`` at the top level of a module."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | list[ast.stmt]:
        if node.level != 1 or node.module is None or any(alias.name == "*" for alias in node.names):
            return node
        made: list[ast.stmt] = []
        for alias in node.names:
            call = ast.Call(ast.Name(ON_CALL, ast.Load()), [ast.Constant(node.module), ast.Constant(alias.name)], [])
            made.append(ast.Assign([ast.Name(alias.asname or alias.name, ast.Store())], call))
        return [ast.copy_location(each, node) for each in made]

    def _unchanged(self, node: ast.AST) -> ast.AST:
        return node

    visit_If = visit_Try = visit_With = visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _unchanged


class _ChangedLoader(SourceFileLoader):
    """Runs a module after ``change`` has changed its source."""

    change: type[ast.NodeTransformer]

    def get_code(self, fullname: str) -> CodeType:
        tree = self.change().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class SchedulerLoader(_ChangedLoader):
    """Runs a scheduler's module, which imports SciPy when it uses it."""

    change = LateSciPy

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, ON_USE, _OnUse)
        super().exec_module(module)


class CallsLoader(_ChangedLoader):
    """Runs a module that imports functions of other modules when they are called."""

    change = LateFunctions

    def exec_module(self, module: ModuleType) -> None:
        def on_call(submodule: str, name: str) -> Callable[..., object]:
            def replacement(*args: object, **kwargs: object) -> object:
                found: Callable[..., object] = getattr(
                    import_module(f"{module.__name__.rpartition('.')[0]}.{submodule}"), name
                )
                return found(*args, **kwargs)

            replacement.__name__ = replacement.__qualname__ = name
            return replacement

        setattr(module, ON_CALL, on_call)
        super().exec_module(module)


class LateMap(Mapping[str, list[str]]):
    """``importlib.metadata.packages_distributions()``, which is called when something is looked up."""

    def __init__(self, read: Callable[[], Mapping[str, list[str]]]) -> None:
        self._read = read

    @cached_property
    def _found(self) -> Mapping[str, list[str]]:
        return self._read()

    def __getitem__(self, key: str) -> list[str]:
        return self._found[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class DistributionsLoader(SourceFileLoader):
    """Runs a module for which the distributions of packages are looked up late."""

    def exec_module(self, module: ModuleType) -> None:
        read = importlib.metadata.packages_distributions

        @wraps(read)
        def late() -> Mapping[str, list[str]]:
            return LateMap(read)

        importlib.metadata.packages_distributions = late
        try:
            super().exec_module(module)
        finally:
            importlib.metadata.packages_distributions = read
