"""Hides packages that ``transformers``, ``diffusers``, ``peft`` and ``accelerate`` import only because they find them.

Such a package may take a second to import, or fail because it was built for another torch. A run calls none of them.
For Python a hidden package is not installed: ``import`` raises ``ModuleNotFoundError``, and ``find_spec`` returns None.
``sys.modules`` has no entry for it: SciPy, MLflow and einops call a package as soon as its name is there.

Three things are postponed until somebody needs them. Modules of SciPy run when they are used (``LATE``). The
losses of transformers' other models are imported when they are called (``WITH_CALLS``). ``diffusers`` asks at its
import which distribution each package is from, for which Python reads the file lists of all of them (``LateMap``).
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, wraps
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from threading import RLock
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed.importlib import MetaPathFinderProtocol

HIDDEN = (
    # quantisation
    "bitsandbytes", "torchao", "hqq", "optimum", "gptqmodel", "auto_gptq", "awq", "aqlm", "eetq", "auto_round", "sdnq",
    "nunchaku", "modelopt", "compressed_tensors", "quark", "vptq", "fbgemm_gpu", "gguf", "neural_compressor",
    # attention, kernels and devices; PyTorch's own attention is used, and tested
    "xformers", "flash_attn", "flash_attn_interface", "sageattention", "flashinfer", "kernels", "causal_conv1d",
    "mamba_ssm", "fla", "liger_kernel", "transformer_engine", "apex", "torch_npu", "torch_xla", "torch_mlu",
    "torch_musa", "torch_neuronx", "torch_tpu", "torch_sdaa", "habana_frameworks",
    # distribution, services and other frameworks
    "deepspeed", "torchdistx", "boto3", "sagemaker", "tensorflow", "jax", "flax", "sklearn", "unsloth", "vllm",
    # sound; and images, which transformers would otherwise resize by torchvision or Pillow, whichever it finds
    "torchaudio", "soundfile", "soxr", "librosa", "torchvision",
)  # fmt: skip
"""Packages that no process of this program calls."""
LATE = ("scipy.stats", "scipy.integrate")
"""Modules that are imported at the top of files of which a run uses something else."""
WITH_CALLS = ("transformers.loss.loss_utils",)
"""Modules that import functions from each of their submodules, only to list them in a table."""
DISTRIBUTIONS = ("diffusers.utils.import_utils",)
"""Modules that ask for the distributions of all packages when they are imported."""
ON_CALL = "__on_call__"
"""Name in the changed source of the function that makes a replacement."""


class _Hiding:
    """A finder of ``sys.meta_path`` that does not find hidden packages."""

    def __init__(self, finder: MetaPathFinderProtocol, hidden: frozenset[str]) -> None:
        self.finder, self._hidden = finder, hidden

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname in self._hidden else self.finder.find_spec(fullname, path, target)

    def __getattr__(self, name: str) -> object:  # importlib.metadata asks finders for distributions
        return getattr(self.finder, name)


def hide(packages: Collection[str] = HIDDEN) -> None:
    """Hide these packages from now on. A package that is already imported stays as it is.

    torch would import a hidden one of another device as its backend, so it does not load backends by itself.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    if not any(isinstance(finder, _Hiding) for finder in sys.meta_path):
        sys.meta_path[:] = [_Hiding(finder, frozenset(packages)) for finder in sys.meta_path]


def show() -> None:
    """Hide no package from now on, because foreign code is imported next."""
    sys.meta_path[:] = [finder.finder if isinstance(finder, _Hiding) else finder for finder in sys.meta_path]


class LateLoader(SourceFileLoader):
    """Runs a module when a name is read that it defines. ``importlib.util.LazyLoader`` runs it at its second import."""

    def exec_module(self, module: ModuleType) -> None:
        lock, run, running = RLock(), super().exec_module, list[bool]()

        def read(name: str) -> object:
            with lock:  # other threads wait until the module has run
                if not running and vars(module).get("__getattr__") is read:
                    running.append(True)
                    try:
                        run(module)
                    finally:  # after an error, the next reader gets the same error
                        running.clear()
                    if vars(module).get("__getattr__") is read:  # it may define its own
                        del module.__getattr__
            if "__getattr__" not in vars(module) or vars(module)["__getattr__"] is not read:
                return getattr(module, name)
            if name not in vars(module):  # the module itself, while it runs
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return vars(module)[name]

        setattr(module, "__getattr__", read)  # noqa: B010 - of a module, which mypy knows no attributes of


class AfterLateLoader(Loader):
    """Runs a late module before its submodule, as Python does. It may import the submodule itself, which then has run.

    ``loader``: Python's own loader of the submodule.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._found: ModuleType | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        with suppress(AttributeError):  # raised while the late module runs
            _ = sys.modules[spec.name.rpartition(".")[0]].__all__
        self._found = sys.modules.get(spec.name)
        return self._loader.create_module(spec) if self._found is None else self._found

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        if self._found is None:
            self._loader.exec_module(module)


class CallsLoader(SourceFileLoader):
    """Runs a module in which functions of submodules are replacements that import the function when they are called."""

    def get_code(self, fullname: str) -> CodeType:
        tree = _Standing().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

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


class _Standing(ast.NodeTransformer):
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
