from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.dataset.captions.captions import as_read, open_wildcard, prepare, tags_of, variants
from lora_rocm.recipe.source_sections import SourceOptions

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


WILD = options(enable_wildcard=True)


def test_prefix_and_suffix_frame_the_caption() -> None:
    framed = options(caption_prefix="photo of", caption_suffix=", outdoors", trigger_word="zibu")
    assert prepare("a house", framed) == "zibu, photo of a house , outdoors"
    assert prepare("", options(caption_prefix="photo")) == "photo"


def test_wildcards_are_chosen_within_the_bound_and_by_the_seed() -> None:
    caption = "a {red|green|blue} {house|tree}, {{x}}"
    every = {f"a {colour} {thing}, {{x}}" for colour in ("red", "green", "blue") for thing in ("house", "tree")}
    assert set(variants(caption, WILD, 20, 0)) == every
    assert len(variants(caption, WILD, 4, 0)) == 4 and set(variants(caption, WILD, 4, 0)) < every
    assert variants(caption, WILD, 4, 0) == variants(caption, WILD, 4, 0) != variants(caption, WILD, 4, 1)
    assert prepare(caption, WILD) == "a red house, {x}"
    assert variants(caption, options(), 4, 0) == (caption,)  # not read without the key


def test_each_line_is_a_caption_of_its_own_only_with_wildcards() -> None:
    text = "a house\r\n\n  a {red|green}  tree \n"
    assert as_read(text, options()) == "a house a {red|green} tree"
    caption = as_read(text, WILD)
    assert set(variants(caption, WILD, 9, 0)) == {"a house", "a red tree", "a green tree"}
    assert prepare(caption, WILD) == "a house"


def test_a_wildcard_that_is_not_closed_is_found() -> None:
    assert open_wildcard("a {red|green house", WILD) == "{red|green house"
    assert open_wildcard("a house\na red} house", WILD) == "} house"
    assert open_wildcard("a {} house", WILD) == "{} house"
    assert open_wildcard("a {red|green} {{house", WILD) == "" == open_wildcard("a {red", options())
    assert open_wildcard("a house", options(enable_wildcard=True, caption_prefix="{a")) == "{a a house"


def test_tags_are_dropped_by_their_share_and_the_first_ones_stay() -> None:
    dropping = options(caption_tag_dropout_rate=0.3, keep_tokens=2, trigger_word="zibu")
    tags = ["zibu", "first", *(f"tag{number}" for number in range(50))]
    made = variants(", ".join(tags), dropping, 20, 0)
    assert len(made) == 20 and all(tags_of(caption)[:2] == ["zibu", "first"] for caption in made)
    assert all([tag for tag in tags if tag in tags_of(caption)] == tags_of(caption) for caption in made)  # in order
    share = sum(52 - len(tags_of(caption)) for caption in made) / (20 * 50)
    assert 0.25 < share < 0.35
    assert variants("a, b", options(caption_tag_dropout_rate=1.0), 4, 0) == ("",)


def test_several_captions_take_turns() -> None:
    assert variants(("a", "b", "a"), options(), 4, 0) == ("a", "b")
    assert variants(tuple("abcdef"), options(), 4, 0) == tuple("abcdef"), "each is used, also if there are more"
    shuffled = variants(("a, b", "c"), options(shuffle_caption=True), 4, 0)
    assert shuffled[1] == "c" and {shuffled[0], shuffled[2]} == {"a, b", "b, a"} and len(shuffled) == 3
    assert variants(("x, y, z", "c"), options(shuffle_caption=True), 2, 0)[1] == "c"
    assert (
        variants(("a",), options(trigger_word="zibu"), 4, 0)
        == ("zibu, a",)
        == variants("a", options(trigger_word="zibu"), 4, 0)
    )
    wild = options(enable_wildcard=True)
    assert variants("{a|b}", wild, 4, 7) == variants(("{a|b}",), wild, 4, 7)
