"""Which modules of a model a recipe adapts: a preset of the family, or regular expressions of the user's."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Sequence

from lora_rocm.adapters.names import adaptable
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.foundation.safe_path import python_command
from lora_rocm.recipe.schema import AdapterSection

EXAMPLES = 4
MATCHING_S = 20.0
"""For all modules of a component; what people write takes some milliseconds, and the process that does it some more."""
MATCHER = """
import json, re, sys, warnings
warnings.simplefilter("ignore")
pattern, paths = json.load(sys.stdin)
print(json.dumps([path for path in paths if re.fullmatch(pattern, path)]))
"""


def targets(family: ModelFamily, model: LoadedModel, lora: AdapterSection) -> dict[str, str]:
    """Component -> regular expression of exactly the modules to adapt.

    Raises:
        AdapterError: targets-invalid, targets-endless, targets-match-nothing.
    """
    presets = family.lora_targets
    if isinstance(lora.targets, str) and lora.targets in presets:
        wanted = dict(presets[lora.targets])
    else:
        own = (lora.targets,) if isinstance(lora.targets, str) else lora.targets
        default = next(iter(presets.values()))
        wanted = {c: p if c in family.text_components else "|".join(own) for c, p in default.items()}
    chosen = {}
    for component, pattern in wanted.items():
        if component not in model.components:
            continue
        paths = [path for path, _ in adaptable(model.components[component])]
        fix = f"Presets: {', '.join(presets)}. Else a regular expression of Python's for whole module names."
        try:
            ours = pattern in (preset[component] for preset in presets.values())
            matching = [path for path in paths if re.fullmatch(pattern, path)] if ours else _matching(pattern, paths)
        except (re.error, OverflowError, RecursionError) as error:
            raise AdapterError(
                "targets-invalid",
                f"This is no regular expression: {error}.",
                where=f"lora.targets: {pattern}",
                fix=fix,
            ) from error
        except subprocess.SubprocessError as error:
            raise AdapterError(
                "targets-endless",
                f"The modules' names could not be matched within {MATCHING_S:g} s: there are too many ways to try.",
                where=f"lora.targets: {pattern}",
                fix=f"Write it without repetitions inside repetitions, such as (.*)*. {fix}",
            ) from error
        if not matching:
            raise AdapterError(
                "targets-match-nothing",
                f"No module of {component} is matched.",
                where=f"lora.targets: {pattern}",
                fix=f"Presets: {', '.join(presets)}. Module names look like {', '.join(_spread(paths))}.",
            )
        chosen[component] = either(matching)
    return chosen


def _matching(pattern: str, paths: Sequence[str]) -> list[str]:
    """The paths that a user's regular expression matches whole.

    Some expressions try more ways than there is time for, and nothing in a process can stop them: so another one does.

    Raises:
        re.error, OverflowError, RecursionError: it is none.
        subprocess.SubprocessError: it took too long, or too much.
    """
    re.compile(pattern)
    done = subprocess.run(
        python_command("-I", "-c", MATCHER),
        input=json.dumps([pattern, list(paths)]).encode("ascii"),
        capture_output=True,
        timeout=MATCHING_S,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def either(paths: Iterable[str]) -> str:
    """A regular expression of exactly these paths."""
    return "|".join(re.escape(path) for path in sorted(paths))


def _spread(paths: list[str]) -> list[str]:
    """A few of many names, from all over."""
    step = max(1, len(paths) // EXAMPLES)
    return paths[step // 2 :: step][:EXAMPLES]
