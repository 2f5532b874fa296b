"""``lora-rocm check``: predict a run from file headers and arithmetic. Nothing is loaded or encoded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.commands.check_base import Weighing
from lora_rocm.commands.named_inputs import require_inputs
from lora_rocm.commands.next_command import train_command
from lora_rocm.commands.output import Failure, Notify, unheard
from lora_rocm.errors import DataError, LoraRocmError, Problem, RecipeError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.model_files.models import BASE_JUDGED_BY
from lora_rocm.planning.data_plan import RunPlan, Seen, plan_data, plan_texts, run_plan
from lora_rocm.processes.jobs import CheckTextsJob
from lora_rocm.recipe.load import LoadedRecipe, load_recipe  # recipe: the user names it
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.eight_bit_refusal import eight_bit_refusal, eight_bit_text
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.rundir.event_types import CacheEvent, Event

if TYPE_CHECKING:
    from lora_rocm.dataset.captions.caption_length import TokenLimit
    from lora_rocm.dataset.sample_table import Sample
    from lora_rocm.dataset.sources.text_scan import TextCount

SHOWN_LETTERS = 1200
MAX_NAMED, MAX_BUCKETS = 20, 40
NOUNS = {"image": "images", "video": "videos", "text": "texts"}  # keys: values of FamilySpec.samples


@dataclass(frozen=True)
class SourceFacts:
    """One source of samples at one of its resolutions.

    Attributes:
        name: folder or dataset.
        usable: number of usable samples.
        repeats: number of times that each sample is seen per epoch.
        resolution: resolution in pixels, or null if the model does not read it.
        is_reg: whether the samples are regularisation images.
        seen: number of samples seen per epoch (regularisation images).
        versions: number of encoded versions per sample, as text; empty if there is one.
    """

    name: str
    usable: int
    repeats: int
    resolution: int | None = None
    is_reg: bool = False
    seen: int = 0
    versions: str = ""


@dataclass(frozen=True)
class DataFacts:
    """The samples of a recipe.

    Attributes:
        kind: image, video or text.
        usable: number of usable samples.
        set_aside: number of skipped samples, which are not usable.
        looked_at: number of texts, the first ones, that the tokenizer inspected; 0 if it inspected all.
        captioned_several_times: number of samples with more than one caption.
        several_captions: total number of captions of these samples.
        uncaptioned: number of images that have no caption.
        masked: number of images with a mask.
        cropped: number of images with a crop in the metadata.
        sources: each source at each of its resolutions.
        watched: number of samples that are never trained on, and only have their loss measured, by source.
        problems: samples that are not usable, with the reasons. For texts, only the first ones are listed.
        num_problems: total number of samples that are not usable.
        notices: notices about the samples.
        first_warnings: warnings about the inspected texts.
        first_notices: notices about the inspected texts.
        shown: the first texts as the model reads them, with marks around the parts that are trained on.
    """

    kind: str
    usable: int
    set_aside: int
    sources: tuple[SourceFacts, ...]
    problems: tuple[Problem, ...]
    num_problems: int
    notices: tuple[str, ...]
    looked_at: int = 0
    captioned_several_times: int = 0
    several_captions: int = 0
    uncaptioned: int = 0
    masked: int = 0
    cropped: int = 0
    watched: dict[str, int] | None = None
    first_warnings: tuple[str, ...] = ()
    first_notices: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckResult:
    """Result of ``lora-rocm check``.

    Attributes:
        recipe: the recipe file.
        family: model family.
        model: path or name of the model.
        schema_only: whether only the recipe was checked.
        notices: notices about the recipe.
        data: the samples, or null if they were not inspected or are not usable.
        plan: how a run uses the samples, or null if ``data`` is null.
        weight_bytes: memory of the weights by component, or null if the base was not inspected or is not usable.
        notes: notices about the base, the captions and new tokens.
        error: why training is not possible, or null if it is.
        next: the command that trains, or null if there is an error or only the recipe was checked.
    """

    recipe: Path
    family: str
    model: str
    schema_only: bool = False
    notices: tuple[str, ...] = ()
    data: DataFacts | None = None
    plan: RunPlan | None = None
    weight_bytes: dict[str, int] | None = None
    notes: tuple[str, ...] = ()
    error: Failure | None = None
    next: str | None = None


def check(
    recipe_path: str,
    overrides: Sequence[str] = (),
    *,
    schema_only: bool = False,
    registry: FamilyRegistry = FAMILIES,
    notify: Notify = unheard,
) -> CheckResult:
    """Check a recipe, its data and its base model. Faults of data and base are returned as the result's ``error``.

    Args:
        recipe_path: path of a recipe, or name of a shipped one.
        overrides: ``section.key=value`` settings.
        schema_only: whether to check only the recipe.
        registry: the available families.
        notify: receives the recipe's notices as soon as they are known.

    Raises:
        LoraRocmError: the recipe is wrong, or names files that do not exist.
    """
    loaded = load_recipe(recipe_path, overrides, registry)
    for notice in loaded.notices:
        notify(notice)
    if schema_only:
        if problems := loaded.name_problems():
            raise RecipeError(problems)
        return _unchecked(loaded, schema_only=True)
    return checked(loaded, train_command(recipe_path, overrides))


def _unchecked(loaded: LoadedRecipe, *, schema_only: bool = False) -> CheckResult:
    model = loaded.recipe.model
    return CheckResult(loaded.path, model.family, model.name_or_path, schema_only, tuple(loaded.notices))


def checked(
    loaded: LoadedRecipe, command: str, advance: Callable[[int, int], None] = lambda done, total: None
) -> CheckResult:
    """Check files, data and base model of a recipe. Their faults are returned as the result's ``error``.

    Args:
        loaded: the recipe.
        command: the command that trains it, for ``CheckResult.next``.
        advance: is called regularly with the number of texts that the tokenizer has inspected, and their total. If it
            raises an error, the check ends at once.

    Raises:
        LoraRocmError: the recipe names files that do not exist.
    """
    # check files and packages
    recipe, found = loaded.recipe, _unchecked(loaded)
    require_inputs(loaded)
    # scan the data, while a child process examines the base model
    weighing = Weighing(recipe)
    in_eight_bits = situation_here(recipe) if recipe.model.compute != "bf16" else None
    refused = eight_bit_refusal(in_eight_bits) if in_eight_bits is not None else None
    errors: list[LoraRocmError] = [] if refused is None else [refused]
    samples: Sequence[Sample] = ()
    texts: _CheckedTexts | None = None
    try:
        if recipe.spec.trains_on_texts:
            texts = _CheckedTexts.counted(recipe)
        else:
            data, plan, samples = _images(recipe)
            found = replace(found, data=data, plan=plan)
    except DataError as error:
        errors.append(error)
    try:
        base = weighing.result()
    except LoraRocmError as error:
        errors.append(error)
    if errors:
        return replace(found, error=_failure(loaded, errors))
    # with both known: inspect the first texts with the model's tokenizer, and find captions that it cuts
    if texts is None:
        notes = (*_cut_captions(recipe, samples, base.tokenizers), *_unused_tokens(recipe, samples))
    else:
        data, plan = texts.inspected(advance)
        found = replace(found, data=data, plan=plan)
        notes = _cut_captions(recipe, texts.samples() if base.tokenizers else (), base.tokenizers)
    if in_eight_bits is not None and (text := eight_bit_text(in_eight_bits)) is not None:
        notes = (text, *notes)
    return replace(found, weight_bytes=base.num_bytes, notes=(*base.notices, *notes), next=command)


def _failure(loaded: LoadedRecipe, errors: Sequence[LoraRocmError]) -> Failure:
    """Return a single error with its recipe key's file and line, or several errors as problems of the recipe."""
    problems = [loaded.placed(error) for error in errors]
    if len(errors) == 1:
        return replace(Failure.of(errors[0]), where=problems[0].where)
    return Failure.of(RecipeError([replace(problem, where=problem.where or "model") for problem in problems]))


def _cut_captions(recipe: Recipe, samples: Iterable[Sample], limits: Sequence[TokenLimit]) -> tuple[str, ...]:
    from lora_rocm.dataset.captions.caption_length import cut_notice
    from lora_rocm.dataset.captions.captions import prepare

    captioned = ((sample.key, prepare(sample.caption, sample.options)) for sample in samples)
    return cut_notice(captioned, limits, recipe.spec.trains_on_texts)


def _unused_tokens(recipe: Recipe, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield a notice for each new token that is in no caption."""
    from lora_rocm.dataset.captions.captions import variants

    left = list(recipe.lora.new_tokens)
    for sample in samples if left else ():
        texts = variants(sample.captions, sample.options, recipe.data.caption_variants, recipe.train.seed)
        left = [token for token in left if not any(map(token.is_in, texts))]
    for token in left:
        yield f"no caption contains the token {token.token} of lora.new_tokens, so its vectors are not trained."


def _images(recipe: Recipe) -> tuple[DataFacts, RunPlan, list[Sample]]:
    """Return facts about the images of a recipe, the plan of a run with them, and the usable samples.

    Raises:
        DataError: no image is usable, or a source cannot be read.
    """
    from lora_rocm.dataset.companions.masks import MASK
    from lora_rocm.dataset.images.views import view_count
    from lora_rocm.dataset.order.regularisation import evened, unused_notice
    from lora_rocm.dataset.sources.scan import geometries, nothing_left
    from lora_rocm.dataset.sources.text_scan import find_samples

    # find the usable samples
    found = find_samples(recipe)
    fitted, too_small, cropped = geometries(found.samples, recipe.data)
    aside = [*found.set_aside, *too_small]
    samples = [sample for sample in found.samples if sample.key in fitted]
    if not samples:
        raise nothing_left(aside)
    num_found, num_aside, samples = len(samples), len(aside), evened(samples)
    # count each place once: its samples at several resolutions have the same captions
    num_captions = {sample.location: sum(text.count("\n") + 1 for text in sample.captions) for sample in samples}
    several = [number for number in num_captions.values() if number > 1]
    masked = {sample.location for sample in samples if sample.companion(MASK) is not None}
    given_crop = {sample.location for sample in samples if sample.given.crop is not None}
    per_source = Counter(sample.source for sample in samples)
    sources = tuple(
        SourceFacts(
            source.name,
            per_source[index],
            source.repeats,
            source.resolution if recipe.spec.reads("data.resolution") else None,
            source.is_reg,
            sum(sample.repeats for sample in samples if sample.source == index),
            view_count(source),
        )
        for index, source in enumerate(recipe.data.resolved_sources())
    )
    # samples that are only watched
    watched, of_watched = None, tuple[str, ...]()
    if (watching := recipe.watching) is not None:
        of_watching = find_samples(watching)
        aside += of_watching.set_aside
        of_watched = tuple(of_watching.notices)
        watched = {recipe.data.watched_name: len(of_watching.samples)}
    data = DataFacts(
        recipe.spec.samples[0],
        num_found,
        num_aside,
        sources,
        tuple(aside),
        len(aside),
        (*found.notices, *of_watched, *cropped, *unused_notice(num_found, len(samples))),
        captioned_several_times=len(several),
        several_captions=sum(several),
        uncaptioned=found.num_uncaptioned,
        masked=len(masked),
        cropped=len(given_crop),
        watched=watched,
    )
    planned = plan_data(recipe, samples, {key: geometry.shape for key, geometry in fitted.items()})
    how_sure = "at most " if recipe.data.validation_split else ""
    return data, run_plan(recipe, replace(planned, how_sure=how_sure)), samples


class _CheckedTexts:
    """The texts of a recipe.

    All are counted, and a child process inspects the first ones with the model's tokenizer.
    """

    def __init__(self, recipe: Recipe, counted: TextCount, watched: TextCount | None) -> None:
        self.recipe, self._counted, self._watched = recipe, counted, watched

    @classmethod
    def counted(cls, recipe: Recipe) -> _CheckedTexts:
        """Count the texts, including texts that are only validated and not trained on.

        Raises:
            DataError: see ``text_scan.count_texts``.
        """
        from lora_rocm.dataset.sources.text_scan import count_texts

        return cls(recipe, count_texts(recipe), count_texts(recipe.watching) if recipe.watching else None)

    def samples(self) -> Iterator[Sample]:
        """Read the texts again and yield them as samples."""
        from lora_rocm.dataset.sources.text_scan import FoundText, Notes, texts_of

        found = texts_of(self.recipe.data, Notes(), pairs=self.recipe.objective.compares_pairs)
        return (each.sample for each in found if isinstance(each, FoundText))

    def inspected(self, advance: Callable[[int, int], None]) -> tuple[DataFacts, RunPlan]:
        """Let a child process inspect the first texts. Return facts about all texts, and the plan of a run with them.

        ``advance``: see ``checked``.

        Raises:
            LoraRocmError: the child process failed.
        """
        from lora_rocm.processes.tool import ask
        from lora_rocm.rules.this_machine import plan_here

        recipe, counted, watched = self.recipe, self._counted, self._watched
        job, done = CheckTextsJob(recipe.model_dump(mode="json"), counted.of_source.total()), [(0, 0)]

        def on_event(event: Event) -> None:
            if isinstance(event, CacheEvent):
                done.append((event.done, event.total))

        env = plan_here(recipe).applied_to(os.environ)
        seen = ask(job, Seen, env, on_event, lambda: advance(*done[-1]))
        # count the usable texts
        refused = Counter(seen.refused)
        usable, num_aside = counted.of_source - refused, counted.aside.count + refused.total()
        problems = [*seen.problems, *counted.aside.first]
        data = DataFacts(
            "text",
            usable.total(),
            num_aside,
            tuple(
                SourceFacts(source.name, usable[index], source.repeats)
                for index, source in enumerate(recipe.data.resolved_sources())
            ),
            (*problems, *(watched.aside.first if watched is not None else ())),
            num_aside + (watched.aside.count if watched is not None else 0),
            (*counted.notices, *(watched.notices if watched is not None else ())),
            looked_at=seen.looked_at if seen.looked_at < counted.of_source.total() else 0,
            watched=None if watched is None else {recipe.data.watched_name: watched.of_source.total()},
            first_warnings=tuple(seen.warnings),
            first_notices=tuple(seen.notices),
            shown=tuple(seen.shown),
        )
        return data, run_plan(recipe, plan_texts(recipe, counted.of_source, seen))


def render(result: CheckResult) -> str:
    """Return the result as text, without the notices about the recipe, which were already shown."""
    if result.schema_only:
        return f"{result.recipe}: keys and values are valid; images and base model were not checked"
    if result.data is None and result.error is not None:
        return ""  # the error alone is shown
    return "\n".join(_lines(result))


def _lines(result: CheckResult) -> Iterator[str]:
    # recipe and data
    data, plan = result.data, result.plan
    yield f"recipe {result.recipe}"
    yield f"model: {result.model} ({result.family})"
    of_texts = data is not None and data.kind == "text"
    if data is not None:
        yield from _data_lines(data)
    if plan is not None and not of_texts:
        yield from _plan_lines(plan, data)
    # base model
    if result.weight_bytes is not None:
        yield "memory of weights"
        for component, size in sorted(result.weight_bytes.items(), key=lambda pair: -pair[1]):
            yield f"  {component}: {size_text(size)}"
        total = sum(result.weight_bytes.values())
        yield f"  together: {size_text(total)} (training adds activations, adapter and optimizer)"
        yield f"  {BASE_JUDGED_BY}"
    yield from (f"  note: {note}" for note in result.notes)
    # texts, which come last because their first samples are shown
    if data is not None and plan is not None and of_texts:
        first = f"of the first {count_text(data.looked_at, 'text')}: " if data.looked_at else ""
        yield from (f"  warning: {first}{warning}" for warning in data.first_warnings)
        yield from (f"  note: {first}{notice}" for notice in data.first_notices)
        if data.shown:
            yield "the first samples, with \u27e6 \u27e7 around the parts that are trained on"
        for text in data.shown:
            yield from (f"  | {line}" for line in text[:SHOWN_LETTERS].splitlines())
            yield "  " + "-" * 20
        yield from _plan_lines(plan, data)
    if result.error is None:
        yield f"recipe {result.recipe}: valid"
    if result.next is not None:
        yield f"next: {result.next}"


def _data_lines(data: DataFacts) -> Iterator[str]:
    noun, of_texts = NOUNS[data.kind], data.kind == "text"
    most, least = ("at most ", "at least ") if data.looked_at else ("", "")
    yield f"{noun}: {most}{data.usable} usable, {least}{data.set_aside} skipped"
    if not of_texts:
        yield "  only headers and ends of files were checked; a run also skips images that fail to decode"
    if data.looked_at:
        first = count_text(data.looked_at, "text")
        yield f"  the first {first} were checked with the model's tokenizer; a run checks all"
    if number := data.captioned_several_times:
        have = f"1 {data.kind} has" if number == 1 else f"{number} {noun} have"
        yield f"  {have} several captions, {data.several_captions} in all"
    if data.masked or data.cropped:
        yield f"  with a mask: {data.masked}, with a crop: {data.cropped}"
    for source in data.sources:
        resolution = f"resolution {source.resolution}, " if source.resolution is not None else ""
        how = f"for regularisation, {source.seen} per epoch" if source.is_reg else f"repeats {source.repeats}"
        yield f"  {source.name}: {most}{count_text(source.usable, data.kind)}, {resolution}{how}"
        if source.versions:
            yield f"    {source.versions}"
    for name, number in (data.watched or {}).items():
        yield f"  {name}: {count_text(number, data.kind)}, watched and never trained on"
    for problem in data.problems[:MAX_NAMED]:
        yield f"  skipped: {problem.where}: {problem.what} {problem.fix}".rstrip()
    if data.num_problems > MAX_NAMED:
        yield f"  ... and {data.num_problems - MAX_NAMED} more"
    yield from (f"  note: {notice}" for notice in data.notices)


def _plan_lines(plan: RunPlan, data: DataFacts | None) -> Iterator[str]:
    kind = "image" if data is None else data.kind
    noun, texts, size, limit = NOUNS[kind], kind == "text", plan.data, plan.data.how_sure
    # buckets
    if not size.buckets:
        yield "buckets: by the number of tokens, which the run counts"
    else:
        of_axes = "" if texts else "width x height: "
        yield f"buckets ({of_axes}{'rows of ' if plan.packing else ''}{noun} per epoch)"
        by_count = sorted(size.buckets.items(), key=lambda pair: (-pair[1], pair[0].axes))
        for shape, count in by_count[: MAX_BUCKETS if texts else None]:
            yield f"  {shape}: {count}"
        if texts and len(by_count) > MAX_BUCKETS:
            yield f"  ... and {len(by_count) - MAX_BUCKETS} more"
    if plan.validation_split:  # images are chosen by their content, which is not read here
        held = f"about {plan.validation_split:.0%} of the" if size.held_out is None else f"{limit}{size.held_out}"
        yield f"held out for the validation loss: {held} {noun}"
    # steps and epochs
    effective = plan.batch_size * plan.gradient_accumulation_steps
    mean = size.num_samples / size.steps_per_epoch
    is_full = limit or mean > 0.95 * effective
    yield (
        f"effective batch: {effective} ({plan.batch_size} x {plan.gradient_accumulation_steps}), "
        f"steps per epoch: {limit}{size.steps_per_epoch}"
        + ("" if is_full else f" of {mean:.1f} samples on average, because {plan.fewer_because}")
    )
    yield f"steps: {'' if plan.steps_are_given else limit}{size.max_train_steps}, epochs: {plan.epochs:.2f}"
    if plan.note:
        yield f"  note: {plan.note}"
    # caches and run directory
    captions = count_text(size.num_captions, "text" if texts else "caption")
    entries = captions if texts else f"{count_text(size.num_images, 'image')} and {captions}"
    if size.cached is None:
        yield f"caches in {plan.cache_dir}: a run needs {entries} there, and encodes missing ones"
    else:
        there, needed = size.cached
        looked_at = f"the first {count_text(needed, 'text')}" if limit else count_text(needed, "text")
        yield f"caches in {plan.cache_dir}: {there} of {looked_at} cached; a run encodes the others"
    yield f"run directory: {os.path.join(plan.output_dir, '<recipe>-<time>')}"
