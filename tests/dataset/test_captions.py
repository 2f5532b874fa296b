from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.dataset.captions import prepare, tags_of, variants
from lora_rocm.recipe.schema import SourceOptions

captions = st.lists(st.text("abc xyz", min_size=1).map(str.strip).filter(bool), max_size=8).map(", ".join)


def options(**keys: object) -> SourceOptions:
    return SourceOptions(**keys)


def test_the_trigger_word_is_put_in_front() -> None:
    assert prepare("a red house", options(trigger_word="zibu")) == "zibu, a red house"
    assert prepare("", options(trigger_word="zibu")) == "zibu"
    assert prepare("a red house", options()) == "a red house"


def test_a_trigger_word_that_is_there_is_not_repeated() -> None:
    assert prepare("a photo of Zibu, red", options(trigger_word="zibu")) == "a photo of Zibu, red"
    assert prepare("two zibus", options(trigger_word="zibu")) == "zibu, two zibus"
    assert prepare("a c++ (x) sign", options(trigger_word="c++ (x)")) == "a c++ (x) sign"


@given(captions, st.sampled_from([None, "zibu", "zibu style, x"]))
def test_preparing_twice_changes_nothing(caption: str, trigger: str | None) -> None:
    once = prepare(caption, options(trigger_word=trigger))
    assert prepare(once, options(trigger_word=trigger)) == once


@given(captions, st.integers(0, 5), st.integers(0, 4), st.integers(1, 6))
def test_shuffling_keeps_the_tags(caption: str, seed: int, keep: int, count: int) -> None:
    made = variants(caption, options(shuffle_caption=True, keep_tokens=keep), count, seed)
    assert 1 <= len(made) <= count and len(set(made)) == len(made)
    assert made == variants(caption, options(shuffle_caption=True, keep_tokens=keep), count, seed)
    for variant in made:
        assert sorted(tags_of(variant)) == sorted(tags_of(caption))
        assert tags_of(variant)[:keep] == tags_of(caption)[:keep]


def test_without_shuffling_there_is_the_caption_alone() -> None:
    assert variants("b,a , c", options(), 4, 0) == ("b,a , c",)


def test_as_many_orders_as_there_are() -> None:
    shuffled = options(shuffle_caption=True)
    assert set(variants("a, b", shuffled, 4, 0)) == {"a, b", "b, a"}
    assert len(variants("a, b, c", shuffled, 6, 3)) == 6
    assert len(variants("a, b, c, d, e, f", shuffled, 4, 3)) == 4
    assert variants("a, a, a", shuffled, 4, 3) == ("a, a, a",)
    assert len(variants("a, a, b", shuffled, 10**6, 3)) == 3  # and does not try millions of times for a fourth


def test_the_trigger_word_stays_where_it_is() -> None:
    for variant in variants("a, b, c, d", options(shuffle_caption=True, trigger_word="zibu"), 6, 0):
        assert tags_of(variant)[0] == "zibu"
    for variant in variants("a, the Zibu, c, d", options(shuffle_caption=True, trigger_word="zibu"), 6, 0):
        assert tags_of(variant)[1] == "the Zibu"


def test_another_seed_shuffles_otherwise() -> None:
    shuffled = options(shuffle_caption=True)
    assert variants("a, b, c, d, e, f", shuffled, 2, 0) != variants("a, b, c, d, e, f", shuffled, 2, 1)
