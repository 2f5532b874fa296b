"""Rules about the keys of ``lora``, some in combination with how the base is stored and computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lora_rocm.recipe.adapter_sections import DROPOUTS, FROM_BASE, file_stem
from lora_rocm.recipe.rule import Breach, RecipeRule, exactly_one, no_effect, not_both

TOKEN, OVERRIDE = "lora.new_tokens[each]", "lora.overrides[each]"


def _same_names(tokens: Sequence[str]) -> list[Breach]:
    stems = [file_stem(token).lower() for token in tokens]
    return [
        {"at": f"lora.new_tokens[{number}].token", "name": file_stem(tokens[number])}
        for number, stem in enumerate(stems)
        if stem in stems[:number]
    ]


def _odd_ranks(init: str, rank: int, conv_rank: int | None, others: Sequence[int | None]) -> list[Breach]:
    odd = next((each for each in (rank, conv_rank, *others) if each and each % 2), 0)
    return [{"odd": odd, "even": odd + 1}] if init == "orthogonal" and odd else []


def _unread_by(kind: str, names: Sequence[str], why: str) -> tuple[RecipeRule, ...]:
    """Return rules that refuse keys which a kind of adapter does not read, in ``lora`` and in its overrides."""
    return tuple(
        replace(
            no_effect(f"{place}.{name}", ("lora.type",), lambda found: found == kind, why, "Remove it."),
            id=f"unread-by-{kind}:{place}.{name}",
        )
        for name in names
        for place in ("lora", OVERRIDE)
    )


RULES: tuple[RecipeRule, ...] = (
    *exactly_one(f"{TOKEN}.init", f"{TOKEN}.init_from"),
    RecipeRule(
        "tokens-have-names-of-their-own",
        ("lora.new_tokens[all].token",),
        _same_names,
        "another token has the same file name {name}",
        "Give each token its own file name.",
    ),
    RecipeRule(
        "an-override-sets-something",
        (f"{OVERRIDE}.rank", f"{OVERRIDE}.alpha", f"{OVERRIDE}.learning_rate"),
        lambda *values: all(value is None for value in values),
        "this override sets nothing",
        "Add rank, alpha or learning_rate, or remove the entry.",
        at=f"{OVERRIDE}.match",
    ),
    *_unread_by("oft", ("alpha",), "on an OFT: a rotation has no scale"),
    *_unread_by("ia3", ("rank", "alpha"), "on an IA3: it has no rank and no scale"),
    not_both("lora.rank_dropout", "lora.use_dora"),
    not_both("lora.module_dropout", "lora.use_dora"),
    # The start
    RecipeRule(
        "not-both:lora.init,init_from",
        ("lora.init", "lora.init_from"),
        lambda init, file: init != "default" and file is not None,
        "give only one of init and init_from",
        "Remove one of them: init or init_from.",
    ),
    *(
        RecipeRule(
            f"start-from-the-base:{name}",
            (f"lora.{name}", "lora.init"),
            lambda value, init: bool(value) and init in FROM_BASE,
            "cannot be used with init: {1}",
            f"Remove {name}, or use another init, such as default.",
            at=f"lora.{name}",
        )
        for name in (*DROPOUTS, "use_dora", "scale_weight_norms")
    ),
    RecipeRule(
        "orthogonal-ranks-are-even",
        ("lora.init", "lora.rank", "lora.conv_rank", "lora.overrides[all].rank"),
        _odd_ranks,
        "init: orthogonal needs even ranks, but one rank is {odd}",
        "Use {even}, or another init.",
        at="lora.init",
    ),
    # The base
    RecipeRule(
        "dora-needs-dense-weights",
        ("model.quantization", "lora.use_dora"),
        lambda quantization, use_dora: quantization != "none" and use_dora,
        "DoRA needs dense weights, but model.quantization is {0}",
        "Train without lora.use_dora, or set model.quantization: none.",
        at="lora",
    ),
    # A layer creates its mask tensor within a pass for a new number of rows, which compiled code cannot do.
    *(
        RecipeRule(
            f"compiled-code-draws-nothing:{name}",
            (f"lora.{name}", "runtime.compile"),
            lambda share, compile: bool(share) and compile in ("regional", "full"),
            f"lora.{name} cannot be used with compiled blocks",
            "Remove this key, or runtime.compile.",
            at=f"lora.{name}",
        )
        for name in DROPOUTS
        if name != "dropout"
    ),
)
