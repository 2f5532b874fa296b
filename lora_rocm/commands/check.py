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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_rocm import __version__
from lora_rocm.dataset.preview_images import require_preview_images
from lora_rocm.errors import DataError, LoraRocmError, RecipeError, StorageError, storage_error
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.recipe.load import LoadedRecipe, load_recipe, paths_of
from lora_rocm.recipe.schema import Recipe
from lora_rocm.supervisor.trackers import require_trackers

if TYPE_CHECKING:
    from lora_rocm.dataset.caption_length import TokenLimit
    from lora_rocm.dataset.sample_table import Sample
    from lora_rocm.dataset.shape import Shape

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
    for notice in loaded.notices:
        _say(notice)
    if schema_only:
        _say(f"{loaded.path}: keys and values are valid; images and base model were not looked at")
        return
    loaded.require_files()
    require_preview_images(loaded)
    require_trackers(loaded.recipe.output)
    # scan the data, while a child process examines the base model
    weighing = _Weighing(loaded.recipe)
    errors: list[LoraRocmError] = []
    samples: list[Any] = []
    try:
        for line in _data_lines(loaded, samples):
            _say(line)
    except DataError as error:
        errors.append(error)
    try:
        base = weighing.result()
    except LoraRocmError as error:
        errors.append(error)
    # raise all errors at once
    problems = [loaded.placed(error) for error in errors]
    if len(errors) == 1:
        errors[0].where = problems[0].where
        raise errors[0]
    if errors:
        raise RecipeError([replace(problem, where=problem.where or "model") for problem in problems])
    # memory and notices
    _say("memory of weights")
    for component, size in sorted(base.num_bytes.items(), key=lambda pair: -pair[1]):
        _say(f"  {component}: {size_text(size)}")
    total = sum(base.num_bytes.values())
    _say(f"  together: {size_text(total)} (training adds activations, adapter and optimizer)")
    for line in _last_lines(loaded, base, samples):
        _say(line)


@dataclass(frozen=True)
class DataPlan:
    """Size of the training data.

    buckets: samples per epoch by shape. how_sure: empty, or "about" or "at most" of the numbers.
    held_out: number of samples for the validation loss; None: not known.
    """

    buckets: dict[Shape, int]
    steps_per_epoch: int
    max_train_steps: int
    num_images: int
    num_captions: int
    how_sure: str = ""
    held_out: int | None = None


@dataclass(frozen=True)
class BaseFacts:
    """Facts about the base, found by a child process: see ``train.check_child.Weighed``."""

    num_bytes: dict[str, int]
    notices: list[str]
    files: list[list[Any]]
    token_limits: Sequence[TokenLimit]


def _cut_captions(recipe: Recipe, samples: Iterable[Any], limits: Sequence[TokenLimit]) -> tuple[str, ...]:
    from lora_rocm.dataset.caption_length import cut_notice
    from lora_rocm.dataset.captions import prepare

    captioned = ((sample.key, prepare(sample.caption, sample.options)) for sample in samples)
    return cut_notice(captioned, limits, recipe.spec.trains_on_texts)


def _last_lines(loaded: LoadedRecipe, base: BaseFacts, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield the notices about the base and about captions, the first texts, and the verdict."""
    of_captions = (
        *_cut_captions(loaded.recipe, samples, base.token_limits),
        *_unused_tokens(loaded.recipe, samples),
    )
    for notice in (*base.notices, *of_captions):
        yield f"  note: {notice}"
    if loaded.recipe.spec.trains_on_texts:
        yield from _text_lines(loaded.recipe, samples)
    yield f"recipe {loaded.path}: valid"


def _text_lines(recipe: Recipe, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield the first texts as the model reads them, notices about those that were looked at, and the plan."""
    from lora_rocm.rules.this_machine import plan_here
    from lora_rocm.supervisor.subprocesses import run_for_json

    with tempfile.TemporaryDirectory(prefix="lora-rocm-") as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps({"recipe": recipe.model_dump(mode="json")}), encoding="utf-8")
        said = run_for_json(TEXTS_MODULE, [str(file)], plan_here(recipe).applied_to(os.environ))
    first = f"of the first {count_text(said['looked_at'], 'text')}: " if said["looked_at"] < said["texts"] else ""
    for notice in said["notices"]:
        yield f"  note: {first}{notice}"
    if said["shown"]:
        yield "the first samples, with \u27e6 \u27e7 around what is trained on"
    for text in said["shown"]:
        yield from (f"  | {line}" for line in text[:SHOWN_LETTERS].splitlines())
        yield "  " + "-" * 20
    yield from _plan_lines(recipe, plan_texts(recipe, samples, said), NOUNS["text"])


def plan_texts(recipe: Recipe, samples: Sequence[Sample], said: Mapping[str, Any]) -> DataPlan:
    """Return the plan of texts. ``said``: see ``train.texts_child.Seen``."""
    from lora_rocm.dataset.shape import Shape

    if said["lengths"] is None:  # in the worst case each text has a length of its own
        shapes = {sample.key: Shape.of(number=number) for number, sample in enumerate(samples)}
        return replace(plan_data(recipe, samples, shapes), buckets={}, how_sure="at most ")
    scale = said["texts"] / said["looked_at"]
    (axis,) = recipe.spec.shapes.axes
    buckets = {Shape.of(**{axis.name: int(length)}): round(n * scale) for length, n in said["lengths"].items()}
    how_sure, held_out = "about " if scale > 1 else "", round(said["held_out"] * scale)
    return replace(_plan(recipe, samples, buckets), how_sure=how_sure, held_out=held_out)


def _unused_tokens(recipe: Recipe, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield a notice for each new token that no caption has."""
    from lora_rocm.dataset.captions import variants

    left = list(recipe.lora.new_tokens)
    for sample in samples if left else ():
        texts = variants(sample.captions, sample.options, recipe.data.caption_variants, recipe.train.seed)
        left = [token for token in left if not any(map(token.is_in, texts))]
    for token in left:
        yield f"no caption has the token {token.token} of lora.new_tokens: its vectors are not trained."


def _data_lines(loaded: LoadedRecipe, usable: list[Any]) -> Iterator[str]:
    """Yield the lines about the data; append the usable samples (``dataset.sample_table.Sample``) to ``usable``."""
    from lora_rocm.dataset.regularisation import evened, unused_notice
    from lora_rocm.dataset.scan import geometries, nothing_left
    from lora_rocm.dataset.text_scan import find_samples
    from lora_rocm.dataset.views import price_of

    recipe = loaded.recipe
    # find the usable samples
    found, texts = find_samples(recipe), recipe.spec.trains_on_texts
    fitted, too_small, cropped = ({}, [], []) if texts else geometries(found.samples, recipe.data)
    aside = [*found.set_aside, *too_small]
    samples = [sample for sample in found.samples if texts or sample.key in fitted]
    if not samples:
        raise nothing_left(aside)
    num_found, samples = len(samples), evened(samples)
    usable += samples
    # describe them
    yield f"recipe {loaded.path}"
    yield f"model: {recipe.model.name_or_path} ({recipe.model.family})"
    kind = recipe.spec.samples[0]
    noun = NOUNS[kind]
    yield f"{noun}: {num_found} usable, {len(aside)} set aside"
    if not texts:
        yield "  judged by headers and ends of files: no pixels were decoded, and a run sets aside what fails there"
    per_source = Counter(sample.source for sample in samples)
    for index, source in enumerate(recipe.data.resolved_sources()):
        resolution = f"resolution {source.resolution}, " if recipe.spec.reads("data.resolution") else ""
        seen = sum(sample.repeats for sample in samples if sample.source == index)
        how = f"for regularisation, {seen} in an epoch" if source.is_reg else f"repeats {source.repeats}"
        yield f"  {source.name}: {count_text(per_source[index], kind)}, {resolution}{how}"
        if price := price_of(source):
            yield f"    {price}"
    if (watching := recipe.watching) is not None:
        watched = find_samples(watching)
        aside += watched.set_aside
        yield f"  {recipe.data.watched_name}: {count_text(len(watched.samples), kind)}, watched and never trained on"
    for problem in aside[:MAX_NAMED]:
        yield f"  set aside: {problem.where}: {problem.what} {problem.fix}".rstrip()
    if len(aside) > MAX_NAMED:
        yield f"  ... and {len(aside) - MAX_NAMED} more"
    for notice in (*found.notices, *cropped, *unused_notice(num_found, len(samples))):
        yield f"  note: {notice}"
    if not texts:  # these are counted with the model's tokenizer
        shapes = {key: geometry.shape for key, geometry in fitted.items()}
        how_sure = "at most " if recipe.data.validation_split else ""
        yield from _plan_lines(recipe, replace(plan_data(recipe, samples, shapes), how_sure=how_sure), noun)


def plan_data(recipe: Recipe, samples: Sequence[Any], shapes: Mapping[str, Shape]) -> DataPlan:
    """Return steps, buckets and cache entries of samples (``dataset.sample_table.Sample``); ``shapes`` is by key.

    A bucket's tail is filled up, so each bucket has a whole number of effective batches per epoch.
    """
    buckets: Counter[Shape] = Counter()
    for sample in samples:
        buckets[shapes[sample.key]] += sample.repeats
    return _plan(recipe, samples, buckets)


def _plan(recipe: Recipe, samples: Sequence[Sample], buckets: Mapping[Shape, int]) -> DataPlan:
    from lora_rocm.dataset.captions import variants
    from lora_rocm.dataset.views import views_of

    train, data = recipe.train, recipe.data
    captions: set[str] = {"", recipe.sample.negative_prompt, *recipe.sample.texts}
    for sample in samples:
        captions.update(variants(sample.captions, sample.options, data.caption_variants, train.seed))
    effective = train.batch_size * train.gradient_accumulation_steps
    steps_per_epoch = sum(-(-count // effective) for count in buckets.values())
    return DataPlan(
        buckets=dict(buckets),
        steps_per_epoch=steps_per_epoch,
        max_train_steps=train.num_steps(steps_per_epoch),
        num_images=sum(len(views_of(sample.options)) for sample in samples),
        num_captions=len(captions),
    )


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
    yield (
        f"effective batch: {effective} ({train.batch_size} x {train.gradient_accumulation_steps}), "
        f"steps an epoch: {limit}{plan.steps_per_epoch}"
    )
    yield f"steps: {'' if train.max_train_steps else limit}{plan.max_train_steps}, epochs: {epochs:.2f}"
    captions = count_text(plan.num_captions, "text" if texts else "caption")
    entries = captions if texts else f"{count_text(plan.num_images, 'image')} and {captions}"
    yield f"caches in {recipe.cache.dir}: at most {entries} to encode"
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
        self._error: LoraRocmError | None = None
        self._thread = threading.Thread(target=self._weigh, daemon=True)
        if self._found is None:
            self._thread.start()

    def _weigh(self) -> None:
        from lora_rocm.dataset.caption_length import TokenLimit
        from lora_rocm.supervisor.subprocesses import run_for_json

        env = self._plan.applied_to(os.environ)
        try:
            with tempfile.TemporaryDirectory(prefix="lora-rocm-") as folder:
                file = Path(folder) / "recipe.json"
                file.write_text(self._recipe.model_dump_json(), encoding="utf-8")
                said = run_for_json(WEIGH_MODULE, [str(file)], env)
            limits = [TokenLimit(**limit) for limit in said["tokenizers"]]
            self._found = BaseFacts(said["num_bytes"], said["notices"], said["files"], limits)
        except LoraRocmError as error:
            self._error = error
        except OSError as error:  # no room for the file, no memory for the process
            self._error = storage_error(error, error.filename or tempfile.gettempdir())

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


def _say(text: str) -> None:
    sys.stdout.write(legible(text) + "\n")
    sys.stdout.flush()
