"""Load a recipe file into a ``Recipe``: merge base recipe, file and ``--set``, and report all problems together."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from lora_rocm.errors import LoraRocmError, Problem, RecipeError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.names import BUILTIN, name_key, usable_stem
from lora_rocm.foundation.terminal_text import legible, quoted
from lora_rocm.foundation.undecodable_names import NOT_TEXT, fix_of_name
from lora_rocm.recipe.auto_rank import resolve_rank
from lora_rocm.recipe.excerpt import with_excerpt
from lora_rocm.recipe.explain import boolean_problems, explain, real_key, shown
from lora_rocm.recipe.family_rules import given_unread, without_unread
from lora_rocm.recipe.foreign import recognised
from lora_rocm.recipe.judge import Broken, broken_rules, readable, values_of
from lora_rocm.recipe.key_rules.table import rules_for
from lora_rocm.recipe.kinds import FAMILY, Kinds, kinds_of
from lora_rocm.recipe.layers import Layered, ValueOrigin
from lora_rocm.recipe.optimizer_args import resolve_arguments
from lora_rocm.recipe.paths import every_path, paths_of, with_absolute_paths
from lora_rocm.recipe.questions import questions
from lora_rocm.recipe.schema import MOVED, RULES_ARE_JUDGED_APART, Recipe
from lora_rocm.recipe.set_values import one_as_list
from lora_rocm.recipe.standard_input import INPUT_NAME, STANDARD_INPUT, read_standard_input
from lora_rocm.recipe.trigger import with_prompts_filled_in
from lora_rocm.recipe.yaml_tree import (
    ESCAPE_FIX,
    MAX_OPEN_BRACKETS,
    Key,
    YamlSyntaxError,
    YamlTree,
    dotted,
    is_clean,
    parse_yaml,
)
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_name import DEFAULT_NAME, output_name_fault

MAX_RECIPE_BYTES = 1 << 18  # parsing this much YAML takes a few seconds
NEXT_LINE = "\x85"  # a line end in YAML 1.1 (section 5.4)
PATH_LETTERS = 400  # long, because the wrong part of a path is usually its end
PATH_FIX = "Correct the path. Relative paths start where the command runs."
CONTROL, VARIABLE = re.compile(r"[\0-\x1f]"), re.compile(r"\$\w|\$\{|%\w+%")
KEY_PATH = re.compile(r"(\w+)(\.\w+|\[\d+\])+")
TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
FOR_IMAGES = "sdxl.yaml"
"""The shipped recipe that is suggested to a user who gives a folder of images in place of a recipe."""
TABLE_FIX = "Write dataset for a table, in an entry of data.sources or in data.watched. path is only for folders."


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe with the facts about how it was loaded.

    Attributes:
        recipe: the recipe, with absolute paths.
        path: the recipe file.
        name: the file's stem, used for run directories.
        notices: sentences to show the user.
        layers: the merged data with the origin of each key.
        registry: the families with which it was read.
        overrides: the values of --set.
    """

    recipe: Recipe
    path: Path
    name: str
    notices: tuple[str, ...]
    layers: Layered
    registry: FamilyRegistry
    overrides: tuple[str, ...] = ()

    def require_files(self, begun: bool = False) -> None:
        """Check that the recipe's input files and folders exist, and that its output folders can be created.

        Args:
            begun: whether the run has already started. If so, three things are not checked: the image folders, which a
                run with finished training does not need; the file of lora.init_from, which is already in the
                checkpoints; and output.name, because the run keeps its file names.

        Raises:
            RecipeError: with one problem per path.
        """
        problems = [] if begun else self.name_problems()
        for key, value, rule in every_path(self.recipe):
            if rule.absolute == "always":
                problems += self._cannot_be_made(key, value)
            if (
                not rule.must_be
                or value.startswith(BUILTIN)
                or value in rule.words
                or (begun and (key[0] == "data" or key == INIT_FROM))
            ):
                continue
            if not (os.path.isdir if rule.must_be == "folder" else os.path.exists)(value):
                path = shown(value, PATH_LETTERS)
                kind = rule.must_be
                what = f"{path} is not a {kind}" if os.path.exists(value) else f"there is no {kind} {path}"
                is_table = rule.must_be == "folder" and key[0] == "data" and Path(value).suffix.lower() in TABLES
                problems.append(Problem(self.layers.where(key), what, TABLE_FIX if is_table else _path_fix(value)))
        if problems:
            raise RecipeError([with_excerpt(problem, self.layers) for problem in problems])

    def name_problems(self) -> list[Problem]:
        """Return a problem if ``output.name`` is not a valid file name on every system, else an empty list."""
        return _name_problems(self.layers)

    def placed(self, error: LoraRocmError) -> Problem:
        """Turn an error into a problem. If its ``where`` begins with a recipe key, add the key's file and line."""
        named = KEY_PATH.match(error.where)
        if named is None or named[1] not in Recipe.model_fields:
            return Problem(error.where, error.what, error.fix)
        key = tuple(int(part) if part.isdigit() else part for part in re.findall(r"\w+", named[0]))
        return Problem(self.layers.where(key) + error.where[named.end() :], error.what, error.fix)

    def _cannot_be_made(self, key: Key, folder: str) -> list[Problem]:
        above = next(path for path in (Path(folder), *Path(folder).parents) if os.path.exists(path))
        if os.path.isdir(above):
            return []
        what = f"{shown(str(above), PATH_LETTERS)} is a file, not a folder"
        return [Problem(self.layers.where(key), what, "Move that file away, or choose another folder.")]


def _name_problems(layers: Layered) -> list[Problem]:
    """Return a problem if ``output.name`` is text that is not a valid file name on every system, else an empty list."""
    output = layers.data.get("output")
    written = output.get("name", DEFAULT_NAME) if isinstance(output, dict) else DEFAULT_NAME
    name = name_key(written) if isinstance(written, str) else DEFAULT_NAME
    if not (fault := output_name_fault(name)):
        return []
    better = usable_stem(name)
    better = f"lora-{better}" if output_name_fault(better) else better
    fix = f"Choose another name, such as {better}. output.description takes any text."
    return [Problem(layers.where(("output", "name")), f"{shown(name)} {fault}", fix)]


def _path_fix(path: str) -> str:
    """Return the fix to suggest for a path that does not exist."""
    if CONTROL.search(path):
        return ESCAPE_FIX
    if VARIABLE.search(path):
        return "Write the folder itself: a recipe does not expand variables, only ~ for the home folder."
    return PATH_FIX


def load_recipe(path: str | Path, overrides: Sequence[str] = (), registry: FamilyRegistry = FAMILIES) -> LoadedRecipe:
    """Read, merge and validate a recipe.

    Args:
        path: path of a recipe file, name of a shipped recipe if there is no such file, or "-" for standard input.
        overrides: ``section.key=value`` settings; each value is parsed as YAML.
        registry: the available families.

    Raises:
        RecipeError: with all problems.
    """
    notices: list[str] = []
    if str(path) == STANDARD_INPUT:
        found, text = Path(INPUT_NAME), _decoded(read_standard_input(MAX_RECIPE_BYTES + 1), Path(INPUT_NAME))
    else:
        found = _find(Path(path), notices)
        text = _read_text(found)
    return load_text(text, found, overrides, registry, notices)


def load_text(
    text: str,
    found: Path,
    overrides: Sequence[str] = (),
    registry: FamilyRegistry = FAMILIES,
    notices: Sequence[str] = (),
) -> LoadedRecipe:
    """Merge and validate the text of a recipe.

    Args:
        text: the text of the recipe.
        found: the path of the text, or a name for messages. A ``base`` is searched for next to it.
        overrides: see ``load_recipe``.
        registry: see ``load_recipe``.
        notices: sentences to show before those about the recipe.

    Raises:
        RecipeError: with all problems, each with the line of its file.
    """
    layers = Layered(str(found), texts={str(found): text})
    try:
        return _load(layers, found, overrides, registry, [*notices])
    except RecipeError as error:
        excerpted = [with_excerpt(problem, layers) for problem in error.problems]
        raise RecipeError(excerpted, is_foreign=error.code == "recipe-foreign") from None


def _load(
    layers: Layered, found: Path, overrides: Sequence[str], registry: FamilyRegistry, notices: list[str]
) -> LoadedRecipe:
    # merge the layers: base, file, --set
    problems: list[Problem] = []
    own, places = _read_layer(layers.texts[str(found)], found, problems)
    base = own.pop("base", None)
    if base is not None:
        _lay_base(layers, base, found, places, notices, problems)
    layers.merge(*_moved(own, places, problems))
    set_names: dict[Key, str] = {}
    for override in overrides:
        problems += _lay_override(layers, override, set_names)
    # replace shorthand values by typed ones, then validate
    problems += resolve_rank(layers.data, layers.where)
    problems += resolve_arguments(layers)
    spoiled = {problem.where for problem in problems}
    recipe, more = _validate(layers, registry, spoiled)
    recipe = recipe and with_prompts_filled_in(recipe)
    problems += [problem for problem in more if problem.where not in spoiled]
    if problems or recipe is None:  # a valid recipe of a begun run may have any name (require_files)
        told = {problem.where for problem in problems}
        named = [problem for problem in _name_problems(layers) if problem.where not in told]
        raise RecipeError(_in_order([*problems, *named], layers))
    # collect notices about a valid recipe
    notices += [*_notice_of_moved(layers), *questions(recipe, layers)]
    runtime = recipe.runtime
    if runtime.workers != runtime.workers_on(sys.platform):
        notices.append(
            f"runtime.workers: {runtime.workers} counts as 0 on Windows, where loader workers often hang. "
            "To use them anyway, add runtime.workers_on_windows: true."
        )
    absolute = with_absolute_paths(recipe)
    _require_text_names(absolute, found)
    return LoadedRecipe(absolute, found, found.stem, tuple(notices), layers, registry, tuple(overrides))


def _require_text_names(recipe: Recipe, found: Path) -> None:
    """Check that the recipe's file name, after which run directories are named, and its absolute paths are valid text.

    Raises:
        RecipeError: one of them is not valid text, for example because the current folder's name is not.
    """
    for place in (Path(found.name), *map(Path, paths_of(recipe))):
        if (fix := fix_of_name(place)) is not None:
            here = Path.cwd()
            where = here if place.is_relative_to(here) and fix_of_name(here) else place
            raise RecipeError([Problem(legible(str(where)), NOT_TEXT, fix)])


INIT_FROM: Key = ("lora", "init_from")


def _in_order(problems: list[Problem], layers: Layered) -> list[Problem]:
    """Return the problems sorted by file and line. In each file, problems without a line come last."""
    origins = list(dict.fromkeys([layers.origin, *(place.origin for place in layers.places.values())]))

    def order(problem: Problem) -> tuple[int, float]:
        for number, origin in enumerate(origins):
            if problem.where.startswith(origin):
                line = re.match(r":(\d+)", problem.where[len(origin) :])
                return number, int(line[1]) if line else math.inf
        return len(origins), math.inf

    return sorted(problems, key=order)


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes by file name. They are inside the package, or next to it in a checkout."""
    package = Path(str(files("lora_rocm")))
    found: dict[str, Path] = {}
    for folder in (package.parent / "recipes", package / "recipes"):
        found.update({file.name: file for file in sorted(folder.glob("*.yaml"))})
    return found


def dump_recipe(recipe: Recipe) -> str:
    """Return the whole recipe as YAML, including all defaults. ``load_recipe`` reads it back to an equal recipe.

    Keys that the family does not read are omitted.
    """
    yaml = YAML()
    yaml.width = 4096
    stream = io.StringIO()
    yaml.dump(_quoted(without_unread(recipe.model_dump(mode="json"), recipe.spec)), stream)
    return stream.getvalue()


def _quoted(value: Any) -> Any:
    """Return the value with all strings that contain NEXT_LINE quoted.

    Without quotes, the YAML library would change them when it reads them back.
    """
    if isinstance(value, dict):
        return {_quoted(key): _quoted(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_quoted(each) for each in value]
    return DoubleQuotedScalarString(value) if isinstance(value, str) and NEXT_LINE in value else value


def _find(path: Path, notices: list[str], folder: Path | None = None) -> Path:
    """Return the recipe file at a path, or the shipped recipe of that name if there is no such file."""
    here = (folder or Path()) / path
    if os.path.isfile(here):  # False for names that are too long, where pathlib raises
        return here
    if _is_locked(here):
        fix = "Change the permissions of the folder."
        raise RecipeError([Problem(str(here), "cannot be read: no permission to open its folder", fix)])
    if os.path.isdir(here):
        raise RecipeError([Problem(str(here), "is a folder, not a recipe", _folder_fix(here))])
    shipped = shipped_recipes()
    if path.name in shipped and not path.is_absolute() and path.parent in (Path(), Path("recipes")):
        notices.append(f"{here} does not exist; using the shipped recipe of that name.")
        return shipped[path.name]
    near = [str(file) for file in sorted(here.parent.glob("*.y*ml"))] if os.path.isdir(here.parent) else []
    parts = [f"Recipes there: {', '.join(near[:10])}."] if near else []
    parts += [f"Recipes that ship with the program: {', '.join(sorted(shipped))}."] if shipped else []
    raise RecipeError([Problem(str(here), "there is no such file", " ".join(parts))])


def _folder_fix(folder: Path) -> str:
    """Return advice for a user who gave a folder as a recipe: the command for its run, its recipes or its images."""
    train = ["lora-rocm", "train"]
    if RunDir(folder).holds_run():
        return f"It is a run directory. To continue the run: {quoted(['lora-rocm', 'resume', str(folder)])}"
    inside = [str(file) for file in sorted(folder.glob("*.yaml"))]
    if inside:
        return f"Recipes in it: {', '.join(inside[:10])}. The command: {quoted([*train, inside[0]])}"
    images = ["--set", f"data.path={json.dumps(str(folder), ensure_ascii=False)}"]
    known = f"Recipes that ship with the program: {', '.join(sorted(shipped_recipes()))}."
    return f"{known} To train SDXL on its images: {quoted([*train, FOR_IMAGES, *images])}"


def _is_locked(path: Path) -> bool:
    try:
        os.stat(path)
    except PermissionError:
        return True
    except (OSError, ValueError):  # it does not exist, or the name is not valid for a file
        pass
    return False


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise RecipeError([Problem(str(path), f"cannot be read: {error.strerror}")]) from None
    return _decoded(content, path)


def _decoded(content: bytes, path: Path) -> str:
    if len(content) > MAX_RECIPE_BYTES:
        raise RecipeError([Problem(str(path), f"is larger than {MAX_RECIPE_BYTES >> 10} KiB, so it is not a recipe")])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RecipeError(
            [Problem(f"{path}:{line}", "is not UTF-8 text", "Give a .yaml file, saved as UTF-8.")]
        ) from None


def _read_layer(text: str, path: Path, problems: list[Problem]) -> tuple[dict[str, Any], dict[Key, ValueOrigin]]:
    """Parse the text of one recipe file. Return its data and the origin of each key.

    Problems inside the file are added to ``problems``. A file that is not a mapping raises RecipeError.
    """
    unreadable = None
    try:
        tree = parse_yaml(text)
    except YamlSyntaxError as error:
        tree, unreadable = YamlTree(), error
    foreign = recognised(text, str(path), tree.value)
    if foreign is not None:
        raise RecipeError([foreign], is_foreign=True)
    if unreadable is not None:
        where = f"{path}:{unreadable.line}:{unreadable.column}"
        raise RecipeError([Problem(where, f"this is not valid YAML: {unreadable}", unreadable.fix)])
    problems += tree.place_problems(str(path))
    if tree.value is None and not tree.problems:
        raise RecipeError([Problem(str(path), "the file is empty", "A recipe has at least model, data and train.")])
    if not isinstance(tree.value, dict):
        fix = "A recipe is sections with keys, such as `lora:` and below it `  rank: 16`."
        raise RecipeError([*problems, Problem(f"{path}:1", "the file has no sections", fix)])
    return tree.value, _places(tree, str(path))


def _places(tree: YamlTree, origin: str) -> dict[Key, ValueOrigin]:
    return {
        key: ValueOrigin(origin, line, text=tree.texts.get(key, ""), span=tree.spans.get(key))
        for key, line in tree.lines.items()
    }


def _lay_base(
    layers: Layered, base: Any, path: Path, places: dict[Key, ValueOrigin], notices: list[str], problems: list[Problem]
) -> None:
    """Merge the base recipe into ``layers`` and add its problems to ``problems``.

    An unreadable base raises RecipeError at once, because its keys are unknown.
    """
    where = f"{places[('base',)]} base"
    if not isinstance(base, str) or not base:
        wrong = Problem(where, f"expected the path of another recipe, got {shown(base)}", "Give a .yaml file.")
        raise RecipeError([*problems, wrong])
    try:
        beside = (path.parent, path.resolve().parent)  # the link's folder first, then its target's
        folder = next((each for each in beside if os.path.isfile(each / base)), path.parent)
        found = _find(Path(base), notices, folder)
        if found.resolve() == path.resolve():
            fix = "Give another recipe, or remove it."
            raise RecipeError([*problems, Problem(where, "a recipe cannot be its own base", fix)])
        inside: list[Problem] = []
        layers.texts[str(found)] = _read_text(found)
        data, base_places = _read_layer(layers.texts[str(found)], found, inside)
    except RecipeError as error:
        if error.problems[-1].where == where:
            raise
        seen = [with_excerpt(problem, layers) for problem in error.problems]
        wrongs = [replace(problem, where=f"{where}: {problem.where}") for problem in seen]
        raise RecipeError([*problems, *wrongs]) from None
    problems += inside
    if "base" in data:
        del data["base"]
        what = f"a base recipe cannot have a base itself, and {path} builds on this one"
        fix = "Only one level is possible: copy the keys that you need into one of the two."
        problems.append(Problem(f"{base_places[('base',)]} base", what, fix))
    layers.merge(*_moved(data, base_places, problems))


def _lay_override(layers: Layered, override: str, set_names: dict[Key, str]) -> list[Problem]:
    """Merge one ``--set`` on top and return its problems.

    Args:
        layers: the layers so far; changed in place.
        override: the value of ``--set``, as section.key=value.
        set_names: name under which the user has set each key of ``MOVED``, by its new place; changed in place.
    """
    # parse key and value
    name, equals, text = override.partition("=")
    key: Key = tuple(name.strip().split("."))
    origin = f"--set {shown(override)}"
    if not equals or not all(key) or not is_clean(override):
        return [Problem(origin, "expected section.key=value", "For example --set lora.rank=8")]
    if text.count("[") + text.count("{") > MAX_OPEN_BRACKETS:  # recipe.yaml could not be read back
        return [Problem(f"--set {name}", "too many brackets for a value")]
    try:
        tree = parse_yaml(text)
    except YamlSyntaxError:
        tree = YamlTree(text)  # a string: the shell has removed its quotes
    if isinstance(tree.value, str) and text.strip().startswith(tree.value):
        tree = YamlTree(text.strip())  # "#" after a space begins a comment only in files
    if tree.problems:
        return tree.place_problems(origin)
    if len(key) == 1 and not isinstance(tree.value, dict):
        what = f"expected section.key=value, got {shown(override)}"
        return [Problem(f"--set {name}", what, "For example --set lora.rank=8")]
    # build a layer with its places
    data: Any = one_as_list(key, tree.value)
    for part in reversed(key):
        data = {part: data}
    place = ValueOrigin("--set")
    sections = {key[:n]: place for n in range(1, len(key)) if key[:n] not in layers.places}
    problems: list[Problem] = []
    of_set = {(*key, *rest): replace(place, text=tree.texts.get(rest, "")) for rest in ((), *tree.lines)}
    places = {**sections, **of_set}
    data, places = _moved(data, places, problems)
    # report keys that are set by their old and their new name
    for new in set(MOVED.values()) & places.keys():
        given = places[new].name or dotted(new)
        if (before := set_names.setdefault(new, given)) != given:
            what = f"is given twice: {before} is the same key and is set too"
            problems.append(Problem(f"--set {given}", what, f"Remove one of them. The name is now {dotted(new)}."))
    layers.merge(data, places)
    return problems


def _moved(
    data: dict[str, Any], places: dict[Key, ValueOrigin], problems: list[Problem]
) -> tuple[dict[str, Any], dict[Key, ValueOrigin]]:
    """Return a layer with each key of ``MOVED`` moved to its new place.

    A key given at both places is added to ``problems``.
    """
    data, places = dict(data), dict(places)
    for old, new in MOVED.items():
        section = data.get(old[0])
        if not isinstance(section, dict) or old[1] not in section:
            continue
        data[old[0]] = {name: value for name, value in section.items() if name != old[1]}
        below = {key: place for key, place in places.items() if key[:2] == old}
        place = below.get(old, places.get(old[:1], ValueOrigin("--set")))
        places = {key: place for key, place in places.items() if key not in below}
        if new in places:
            what = f"is the old name of {dotted(new)}, which is also given in {places[new]}"
            problems.append(Problem(f"{place} {dotted(old)}", what, f"Remove one of them: {dotted(old)}."))
        elif isinstance(target := data.get(new[0], {}), dict):
            data[new[0]] = {**target, new[1]: section[old[1]]}
            places = {new[:1]: place, **places, **{(*new, *key[2:]): each for key, each in below.items()}}
            places[new] = replace(place, name=dotted(old))
    return data, places


def _notice_of_moved(layers: Layered) -> list[str]:
    """Return one notice about all keys that the user gave at their old place, or an empty list."""
    given = [
        (layers.where(key), dotted(key)) for key, place in layers.places.items() if place.name and key in MOVED.values()
    ]
    if not given:
        return []
    moves = ", ".join(f"{where} is now {new}" for where, new in given)
    return [f"{moves}. The old place still works, but write the new one."]


@dataclass(frozen=True)
class JudgedRecipe:
    """The result of ``judge``.

    Attributes:
        recipe: the recipe, or None if a value is wrong.
        error: pydantic's error if a value is wrong.
        broken: all broken rules.
    """

    recipe: Recipe | None
    error: ValidationError | None
    broken: Sequence[Broken]


def judge(data: Mapping[str, Any], kinds: Kinds, failed: Collection[Key] = ()) -> JudgedRecipe:
    """Validate each value of recipe data, and check the rules over several keys with all valid values.

    Args:
        data: unvalidated sections by name, as written by a user.
        kinds: the kinds of the data.
        failed: keys that already have a problem. No rule reads them.
    """
    cls, spec, rules = kinds.recipe, kinds.family, rules_for(kinds.family)
    try:
        recipe = cls.model_validate(data, context=RULES_ARE_JUDGED_APART)
    except ValidationError as error:
        wrong = {real_key(detail, data) for detail in error.errors(include_url=False)} | kinds.unjudged
        return JudgedRecipe(
            None, error, broken_rules(rules, readable(cls, spec, data, wrong.union(failed)), of_file=True)
        )
    return JudgedRecipe(recipe, None, broken_rules(rules, values_of(recipe, spec, data, failed), of_file=True))


def _validate(
    layers: Layered, registry: FamilyRegistry, spoiled: Collection[str]
) -> tuple[Recipe | None, list[Problem]]:
    """Return the recipe, or None if a value is wrong, and all problems: wrong values, unknown keys and broken rules.

    Args:
        layers: the merged recipe data.
        registry: the available families.
        spoiled: places that already have a problem.
    """
    data, where = layers.data, layers.where
    kinds = kinds_of(data, registry)
    found = boolean_problems(data, where, kinds)
    if FAMILY not in kinds.unknown:
        what = f"{kinds.family.title} does not read this key"
        found |= {
            key: Problem(where(key), what, "Remove it.", keys=(dotted(key),))
            for key in given_unread(data, kinds.family)
        }
    known = {problem.where for problem in found.values()}
    failed = {key for key in layers.places if spoiled and where(key) in spoiled}
    judged = judge(data, kinds, failed | found.keys())
    told = explain(judged.error, data, where, kinds, layers.written) if judged.error else []
    return judged.recipe, [
        *found.values(),
        *(problem for problem in told if problem.where not in known),  # one problem for each wrong value
        *(
            Problem(
                where(each.key),
                each.what,
                each.fix,
                keys=tuple(map(dotted, (each.key, *each.keys))),
                is_idle=each.rule.is_idle,
            )
            for each in judged.broken
        ),
    ]
