"""``lora-rocm check``: predicts a run from headers and arithmetic; nothing is loaded or encoded."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_rocm import __version__
from lora_rocm.dataset.preview_images import require_preview_images
from lora_rocm.dataset.update_note import larger_updates_note
from lora_rocm.errors import DataError, LoraRocmError, Problem, RecipeError, StorageError, storage_error
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.foundation.files import temporary_folder, write_atomic
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.model_files.models import BASE_JUDGED_BY
from lora_rocm.recipe.load import LoadedRecipe, load_recipe
from lora_rocm.recipe.paths import paths_of
from lora_rocm.recipe.schema import Recipe
from lora_rocm.supervisor.trackers import require_trackers

if TYPE_CHECKING:
    from lora_rocm.dataset.caption_length import TokenLimit
    from lora_rocm.dataset.sample_table import Sample
    from lora_rocm.dataset.shape import Shape
    from lora_rocm.dataset.text_scan import TextCount

WEIGH_MODULE, TEXTS_MODULE = "lora_rocm.train.check_child", "lora_rocm.train.texts_child"
SHOWN_LETTERS = 1200
MAX_NAMED, MAX_BUCKETS = 20, 40
NOUNS = {"image": "images", "video": "videos", "text": "texts"}  # keys: values of FamilySpec.samples
KEPT_WEIGHTS = 50


def check(
    recipe_path: str, overrides: Sequence[str] = (), *, schema_only: bool = False, registry: Registry = PRODUCT
) -> None:
    """Validate a recipe and its dataset and print the training plan.

    Raises:
        LoraRocmError: the first error; if there are several, one ``RecipeError`` with all. A ``RecipeError`` or
            ``DataError`` names file and line.
    """
    loaded = load_recipe(recipe_path, overrides, registry)
    _say(loaded.notices)
    if schema_only:
        if problems := loaded.name_problems():
            raise RecipeError(problems)
        _say([f"{loaded.path}: keys and values are valid; images and base model were not looked at"])
        return
    loaded.require_files()
    require_preview_images(loaded)
    require_trackers(loaded.recipe.output)
    # scan the data, while a child process examines the base model
    weighing = _Weighing(loaded.recipe)
    errors: list[LoraRocmError] = []
    samples: list[Sample] = []
    texts: _Texts | None = None
    try:
        if loaded.recipe.spec.trains_on_texts:
            texts = _Texts.counted(loaded.recipe)
        _say(_heading(loaded) if texts else _data_lines(loaded, samples))
    except DataError as error:
        errors.append(error)
    try:
        base = weighing.result()
    except LoraRocmError as error:
        errors.append(error)
    _raise_all(loaded, errors)
    if texts is not None:
        texts.look_at_first()
        _say(texts.data_lines())
    _say(_memory_lines(base))
    _say(_last_lines(loaded, base, samples, texts))


def _memory_lines(base: BaseFacts) -> Iterator[str]:
    yield "memory of weights"
    for component, size in sorted(base.num_bytes.items(), key=lambda pair: -pair[1]):
        yield f"  {component}: {size_text(size)}"
    total = sum(base.num_bytes.values())
    yield f"  together: {size_text(total)} (training adds activations, adapter and optimizer)"
    yield f"  {BASE_JUDGED_BY}"


def _raise_all(loaded: LoadedRecipe, errors: Sequence[LoraRocmError]) -> None:
    problems = [loaded.placed(error) for error in errors]
    if len(errors) == 1:
        errors[0].where = problems[0].where
        raise errors[0]
    if errors:
        raise RecipeError([replace(problem, where=problem.where or "model") for problem in problems])


@dataclass(frozen=True)
class DataPlan:
    """Size of the training data.

    buckets: samples per epoch by shape. how_sure: empty, or "about" or "at most" of the numbers.
    num_samples: samples per epoch.
    one_bucket_steps: updates per epoch if all micro-batches of an update came from one bucket, as in earlier versions.
    held_out: number of samples for the validation loss; None: not known.
    cached: texts that are in the cache, and texts that were looked for there; None: not looked for.
    """

    buckets: dict[Shape, int]
    steps_per_epoch: int
    max_train_steps: int
    num_images: int
    num_captions: int
    how_sure: str = ""
    held_out: int | None = None
    num_samples: int = 0
    one_bucket_steps: int = 0
    cached: tuple[int, int] | None = None


@dataclass(frozen=True)
class BaseFacts:
    """Facts about the base, found by a child process: see ``train.check_child.Weighed``."""

    num_bytes: dict[str, int]
    notices: list[str]
    files: list[list[Any]]
    token_limits: Sequence[TokenLimit]


def _cut_captions(recipe: Recipe, samples: Iterable[Sample], limits: Sequence[TokenLimit]) -> tuple[str, ...]:
    from lora_rocm.dataset.caption_length import cut_notice
    from lora_rocm.dataset.captions import prepare

    captioned = ((sample.key, prepare(sample.caption, sample.options)) for sample in samples)
    return cut_notice(captioned, limits, recipe.spec.trains_on_texts)


def _last_lines(
    loaded: LoadedRecipe, base: BaseFacts, samples: Sequence[Sample], texts: _Texts | None
) -> Iterator[str]:
    """Yield the notices about the base and about captions, the first texts, and the verdict."""
    recipe = loaded.recipe
    if texts is None:
        of_samples = (*_cut_captions(recipe, samples, base.token_limits), *_unused_tokens(recipe, samples))
    else:
        of_samples = _cut_captions(recipe, texts.samples() if base.token_limits else (), base.token_limits)
    for notice in (*base.notices, *of_samples):
        yield f"  note: {notice}"
    if texts is not None:
        yield from texts.lines()
    yield f"recipe {loaded.path}: valid"


class _Texts:
    """The texts of a recipe: all are counted, and a child process looks at the first with the model's tokenizer."""

    def __init__(self, recipe: Recipe, counted: TextCount, watched: TextCount | None) -> None:
        self.recipe, self._counted, self._watched = recipe, counted, watched
        self._said: dict[str, Any] = {}

    @classmethod
    def counted(cls, recipe: Recipe) -> _Texts:
        """Count the texts, and those that are only watched.

        Raises:
            DataError: as ``text_scan.count_texts``.
        """
        from lora_rocm.dataset.text_scan import count_texts

        return cls(recipe, count_texts(recipe), count_texts(recipe.watching) if recipe.watching else None)

    def samples(self) -> Iterator[Sample]:
        """The texts, read once more."""
        from lora_rocm.dataset.text_scan import FoundText, Notes, texts_of

        found = texts_of(self.recipe.data, Notes(), pairs=self.recipe.objective.compares_pairs)
        return (each.sample for each in found if isinstance(each, FoundText))

    def look_at_first(self) -> None:
        """Have the child process look at the first texts.

        Raises:
            LoraRocmError: the error of the child process.
        """
        from lora_rocm.rules.this_machine import plan_here
        from lora_rocm.supervisor.subprocesses import run_for_json

        with temporary_folder() as folder:
            file = folder / "job.json"
            write_atomic(file, json.dumps({"recipe": self.recipe.model_dump(mode="json")}).encode("ascii"))
            self._said = run_for_json(TEXTS_MODULE, [str(file)], plan_here(self.recipe).applied_to(os.environ))

    @property
    def _only_first(self) -> str:
        """How many texts were looked at; "" if all."""
        looked_at = self._said["looked_at"]
        return count_text(looked_at, "text") if 0 < looked_at < self._counted.of_source.total() else ""

    def data_lines(self) -> Iterator[str]:
        """Yield how many texts can be used, and which cannot."""
        recipe, counted, first = self.recipe, self._counted, self._only_first
        refused = Counter({int(source): number for source, number in self._said["refused"].items()})
        usable, num_aside = counted.of_source - refused, counted.aside.count + refused.total()
        most, least = ("at most ", "at least ") if first else ("", "")
        yield f"texts: {most}{usable.total()} usable, {least}{num_aside} set aside"
        if first:
            yield f"  the first {first} were looked at with the model's tokenizer; a run looks at all"
        for index, source in enumerate(recipe.data.resolved_sources()):
            yield f"  {source.name}: {most}{count_text(usable[index], 'text')}, repeats {source.repeats}"
        named = [*(Problem(**problem) for problem in self._said["problems"]), *counted.aside.first]
        if self._watched is not None:
            number = count_text(self._watched.of_source.total(), "text")
            yield f"  {recipe.data.watched_name}: {number}, watched and never trained on"
            named += self._watched.aside.first
            num_aside += self._watched.aside.count
        yield from _aside_lines(named, num_aside)
        for notice in (*counted.notices, *(self._watched.notices if self._watched is not None else ())):
            yield f"  note: {notice}"

    def lines(self) -> Iterator[str]:
        """Yield notices about the first texts, these as the model reads them, and the plan."""
        first, said = self._only_first, self._said
        for notice in said["notices"]:
            yield f"  note: {f'of the first {first}: ' if first else ''}{notice}"
        if said["shown"]:
            yield "the first samples, with \u27e6 \u27e7 around what is trained on"
        for text in said["shown"]:
            yield from (f"  | {line}" for line in text[:SHOWN_LETTERS].splitlines())
            yield "  " + "-" * 20
        yield from _plan_lines(self.recipe, plan_texts(self.recipe, self._counted.of_source, said), NOUNS["text"])


def plan_texts(recipe: Recipe, of_source: Counter[int], said: Mapping[str, Any]) -> DataPlan:
    """Return the plan of texts.

    Args:
        recipe: the recipe.
        of_source: number of texts by index of the source.
        said: see ``train.texts_child.Seen``.
    """
    from lora_rocm.dataset.shape import Shape

    num_texts = of_source.total() - sum(said["refused"].values())
    num_captions = num_texts + len({"", recipe.sample.negative_prompt, *recipe.sample.texts})
    if said["lengths"] is None:  # in the worst case each text has a length of its own
        sources = recipe.data.resolved_sources()
        alone = chain.from_iterable(repeat(sources[index].repeats, number) for index, number in of_source.items())
        return replace(_plan(recipe, {recipe.train.batch_size: alone}, num_captions), how_sure="at most ")
    scale = of_source.total() / said["looked_at"]
    (axis,) = recipe.spec.shapes.axes
    buckets = {Shape.of(**{axis.name: int(length)}): round(n * scale) for length, n in said["lengths"].items()}
    how_sure, held_out = "about " if scale > 1 else "", round(said["held_out"] * scale)
    plan = _plan(recipe, {recipe.train.batch_size: buckets.values()}, num_captions)
    cached = tuple(said["cached"]) if said.get("cached") else None
    return replace(plan, buckets=buckets, how_sure=how_sure, held_out=held_out, cached=cached)


def _unused_tokens(recipe: Recipe, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield a notice for each new token that no caption has."""
    from lora_rocm.dataset.captions import variants

    left = list(recipe.lora.new_tokens)
    for sample in samples if left else ():
        texts = variants(sample.captions, sample.options, recipe.data.caption_variants, recipe.train.seed)
        left = [token for token in left if not any(map(token.is_in, texts))]
    for token in left:
        yield f"no caption has the token {token.token} of lora.new_tokens: its vectors are not trained."


def _heading(loaded: LoadedRecipe) -> Iterator[str]:
    yield f"recipe {loaded.path}"
    yield f"model: {loaded.recipe.model.name_or_path} ({loaded.recipe.model.family})"


def _data_lines(loaded: LoadedRecipe, usable: list[Any]) -> Iterator[str]:
    """Yield the lines about images; append the usable samples (``dataset.sample_table.Sample``) to ``usable``."""
    from lora_rocm.dataset.regularisation import evened, unused_notice
    from lora_rocm.dataset.scan import geometries, nothing_left
    from lora_rocm.dataset.text_scan import find_samples
    from lora_rocm.dataset.views import price_of

    recipe = loaded.recipe
    # find the usable samples
    found = find_samples(recipe)
    fitted, too_small, cropped = geometries(found.samples, recipe.data)
    aside = [*found.set_aside, *too_small]
    samples = [sample for sample in found.samples if sample.key in fitted]
    if not samples:
        raise nothing_left(aside)
    num_found, samples = len(samples), evened(samples)
    usable += samples
    # describe them
    yield from _heading(loaded)
    kind = recipe.spec.samples[0]
    noun = NOUNS[kind]
    yield f"{noun}: {num_found} usable, {len(aside)} set aside"
    yield "  judged by headers and ends of files: no pixels were decoded, and a run sets aside what fails there"
    # a sample of each resolution has the same captions
    num_captions = {sample.location: sum(text.count("\n") + 1 for text in sample.captions) for sample in samples}
    if several := {place: number for place, number in num_captions.items() if number > 1}:
        have = f"1 {kind} has" if len(several) == 1 else f"{len(several)} {noun} have"
        yield f"  {have} several captions, {sum(several.values())} in all"
    per_source = Counter(sample.source for sample in samples)
    for index, source in enumerate(recipe.data.resolved_sources()):
        resolution = f"resolution {source.resolution}, " if recipe.spec.reads("data.resolution") else ""
        seen = sum(sample.repeats for sample in samples if sample.source == index)
        how = f"for regularisation, {seen} in an epoch" if source.is_reg else f"repeats {source.repeats}"
        yield f"  {source.name}: {count_text(per_source[index], kind)}, {resolution}{how}"
        if price := price_of(source):
            yield f"    {price}"
    of_watched: Sequence[str] = ()
    if (watching := recipe.watching) is not None:
        watched = find_samples(watching)
        aside += watched.set_aside
        of_watched = watched.notices
        yield f"  {recipe.data.watched_name}: {count_text(len(watched.samples), kind)}, watched and never trained on"
    yield from _aside_lines(aside, len(aside))
    for notice in (*found.notices, *of_watched, *cropped, *unused_notice(num_found, len(samples))):
        yield f"  note: {notice}"
    shapes = {key: geometry.shape for key, geometry in fitted.items()}
    how_sure = "at most " if recipe.data.validation_split else ""
    yield from _plan_lines(recipe, replace(plan_data(recipe, samples, shapes), how_sure=how_sure), noun)


def _aside_lines(problems: Sequence[Problem], count: int) -> Iterator[str]:
    """Yield the first problems, and how many more there are; ``count`` is the number of all."""
    for problem in problems[:MAX_NAMED]:
        yield f"  set aside: {problem.where}: {problem.what} {problem.fix}".rstrip()
    if count > MAX_NAMED:
        yield f"  ... and {count - MAX_NAMED} more"


def plan_data(recipe: Recipe, samples: Sequence[Any], shapes: Mapping[str, Shape]) -> DataPlan:
    """Return steps, buckets and cache entries of samples (``dataset.sample_table.Sample``); ``shapes`` is by key."""
    from lora_rocm.dataset.captions import variants
    from lora_rocm.dataset.views import views_of

    buckets: Counter[Shape] = Counter()
    of_size: dict[int, Counter[Shape]] = {}  # batch size -> the same of the sources that have it
    sizes = [source.max_batch_size or recipe.train.batch_size for source in recipe.data.resolved_sources()]
    captions: set[str] = {"", recipe.sample.negative_prompt, *recipe.sample.texts}
    for sample in samples:
        buckets[shapes[sample.key]] += sample.repeats
        of_size.setdefault(sizes[sample.source], Counter())[shapes[sample.key]] += sample.repeats
        captions.update(variants(sample.captions, sample.options, recipe.data.caption_variants, recipe.train.seed))
    num_images = sum(len(views_of(sample.options)) for sample in samples)
    plan = _plan(recipe, {size: counts.values() for size, counts in of_size.items()}, len(captions))
    return replace(plan, buckets=dict(buckets), num_images=num_images)


def _plan(recipe: Recipe, counts: Mapping[int, Iterable[int]], num_captions: int) -> DataPlan:
    """The plan of buckets with these numbers of samples per epoch, by batch size; their shapes are left open."""
    from lora_rocm.dataset.batch_sampler import num_batches, num_updates

    accumulation, of_size = (
        recipe.train.gradient_accumulation_steps,
        {size: list(each) for size, each in counts.items()},
    )
    micro_batches = sum(num_batches(each, size) for size, each in of_size.items())
    steps_per_epoch = num_updates(micro_batches, accumulation)
    return DataPlan(
        {},
        steps_per_epoch,
        recipe.train.num_steps(steps_per_epoch),
        0,
        num_captions,
        num_samples=sum(map(sum, of_size.values())),
        one_bucket_steps=sum(num_batches(each, size * accumulation) for size, each in of_size.items()),
    )


def _why_fewer(recipe: Recipe, plan: DataPlan) -> str:
    """Why updates hold fewer samples than the recipe says."""
    sizes = {source.max_batch_size for source in recipe.data.resolved_sources()} - {None}
    why = ["the last batch of a bucket is not full"]
    if recipe.train.gradient_accumulation_steps > 1:
        why.append("the last update of an epoch has fewer batches")
    if sizes:
        why.append("max_batch_size of a source is smaller")
    return f"for {' and '.join(why)}"


def _plan_lines(recipe: Recipe, plan: DataPlan, noun: str) -> Iterator[str]:
    train, data, texts = recipe.train, recipe.data, recipe.spec.trains_on_texts
    limit = plan.how_sure
    if not plan.buckets:
        yield "buckets: by the number of tokens, which the run counts"
    else:
        of_axes = "" if texts else "width x height: "
        yield f"buckets ({of_axes}{'rows of ' if data.packing else ''}{noun} an epoch)"
        by_count = sorted(plan.buckets.items(), key=lambda pair: (-pair[1], pair[0].axes))
        for shape, count in by_count[: MAX_BUCKETS if texts else None]:
            yield f"  {shape}: {count}"
        if texts and len(by_count) > MAX_BUCKETS:
            yield f"  ... and {len(by_count) - MAX_BUCKETS} more"
    if data.validation_split:  # images are chosen by their content, which is not read here
        held = f"about {data.validation_split:.0%} of the" if plan.held_out is None else f"{limit}{plan.held_out}"
        yield f"held out for the validation loss: {held} {noun}"
    effective = train.batch_size * train.gradient_accumulation_steps
    epochs = train.epochs or plan.max_train_steps / plan.steps_per_epoch
    mean = plan.num_samples / plan.steps_per_epoch
    yield (
        f"effective batch: {effective} ({train.batch_size} x {train.gradient_accumulation_steps}), "
        f"steps per epoch: {limit}{plan.steps_per_epoch}"
        + ("" if limit or mean > 0.95 * effective else f" of {mean:.1f} samples on average, {_why_fewer(recipe, plan)}")
    )
    yield f"steps: {'' if train.max_train_steps else limit}{plan.max_train_steps}, epochs: {epochs:.2f}"
    if note := larger_updates_note(train, plan.steps_per_epoch, plan.one_bucket_steps, limit):
        yield f"  note: {note}"
    captions = count_text(plan.num_captions, "text" if texts else "caption")
    entries = captions if texts else f"{count_text(plan.num_images, 'image')} and {captions}"
    if plan.cached is None:
        yield f"caches in {recipe.cache.dir}: a run needs {entries} there, and encodes those that are missing"
    else:
        there, needed = plan.cached
        looked_at = f"the first {count_text(needed, 'text')}" if limit else count_text(needed, "text")
        yield f"caches in {recipe.cache.dir}: {there} of {looked_at} cached; a run encodes the others"
    yield f"run directory: {os.path.join(recipe.output.dir, '<recipe>-<time>')}"


class _Weighing:
    """Facts about the base: recalled from an earlier check, or found by a child process during the scan."""

    def __init__(self, recipe: Recipe) -> None:
        from lora_rocm.rules.this_machine import plan_here

        self._recipe, self._cache = recipe, Path(recipe.cache.dir)
        self._memory = self._cache / "weights.json"
        self._plan = plan_here(recipe)
        self._key = _weights_key(recipe, self._plan.settings.precision)
        self._found = _recalled(self._cache, _remembered(self._memory).get(self._key))
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._weigh, daemon=True)
        if self._found is None:
            self._thread.start()

    def _weigh(self) -> None:
        from lora_rocm.dataset.caption_length import TokenLimit
        from lora_rocm.supervisor.subprocesses import run_for_json

        env = self._plan.applied_to(os.environ)
        try:
            with temporary_folder() as folder:
                file = folder / "recipe.json"
                write_atomic(file, self._recipe.model_dump_json().encode("utf-8"))
                said = run_for_json(WEIGH_MODULE, [str(file)], env)
            limits = [TokenLimit(**limit) for limit in said["tokenizers"]]
            self._found = BaseFacts(said["num_bytes"], said["notices"], said["files"], limits)
        except LoraRocmError as error:
            self._error = error
        except OSError as error:  # no room for the file, no memory for the process
            self._error = storage_error(error, error.filename or tempfile.gettempdir())
        except BaseException as error:  # of any class: result() raises it in the thread that asks
            self._error = error

    def result(self) -> BaseFacts:
        """Wait for the child process and return the facts."""
        from lora_rocm.dataset.caption_length import keep_limits
        from lora_rocm.foundation.files import write_json

        if self._thread.ident is None:
            assert self._found is not None
            return self._found
        while self._thread.is_alive():
            self._thread.join(timeout=0.1)  # a join with a timeout can be interrupted by Ctrl-C on every system
        if self._error is not None:
            raise self._error
        found = self._found
        assert found is not None
        kept = list(_remembered(self._memory).items())[-KEPT_WEIGHTS:]
        try:
            facts = {"num_bytes": found.num_bytes, "notices": found.notices, "files": found.files}
            facts["tokenizers"] = keep_limits(self._cache, found.token_limits)
            write_json(self._memory, {**dict(kept), self._key: facts})
        except StorageError:
            pass
        return found


def _weights_key(recipe: Recipe, planned_precision: str | None) -> str:
    """Return a key of everything that determines the facts, including the names of the base's files."""
    model = recipe.model
    # Names of files too: a new file may be read instead of another.
    files = [str(file) for name in paths_of(model) for file in _files(Path(name))]
    precision = [recipe.train.mixed_precision, planned_precision, recipe.runtime.device]
    sections = [section.model_dump(mode="json") for section in (model, recipe.lora, recipe.objective)]
    masked = any(preview.mask for _, _, preview in recipe.sample.numbered())  # not every base reads masks
    parts = [__version__, sections, precision, files, masked]
    return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()


def _files(path: Path) -> list[Path]:
    if not os.path.isdir(path):  # pathlib raises if a name is too long for the file system
        return [path] if os.path.isfile(path) else []
    return sorted(file for file in path.rglob("*") if file.suffix in (".json", ".safetensors") and file.is_file())


def _recalled(cache: Path, kept: Any) -> BaseFacts | None:
    """Return the facts of an earlier check; None if a file of the base has changed, or a kept tokenizer is gone."""
    from lora_rocm.dataset.caption_length import recall_limits

    try:
        same = all(list(astuple(FileVersion.of(Path(file[0])))) == file for file in kept["files"])
        limits = recall_limits(cache, kept["tokenizers"])
        if not same or limits is None or not kept["num_bytes"]:
            return None
        return BaseFacts(dict(kept["num_bytes"]), list(kept["notices"]), list(kept["files"]), limits)
    except (OSError, LookupError, TypeError, ValueError):  # a file is gone, or another version wrote it
        return None


def _remembered(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(legible(line) + "\n")
        sys.stdout.flush()
