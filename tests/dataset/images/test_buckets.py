import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lora_rocm.dataset.images.buckets import Geometry, bucket_sizes, choose_bucket
from lora_rocm.errors import DataError

steps = st.sampled_from([8, 16, 32, 64])
resolutions = st.integers(64, 1536)
aspects = st.floats(1.0, 4.0)
sides = st.integers(1, 6000)


@given(resolutions, steps, aspects)
def test_buckets(resolution: int, step: int, max_aspect: float) -> None:
    sizes = bucket_sizes(resolution, step, max_aspect)
    square = resolution // step * step
    assert (square, square) in sizes
    assert len(set(sizes)) == len(sizes) and sizes == tuple(sorted(sizes))
    assert {(width, height) for height, width in sizes} == set(sizes)
    for height, width in sizes:
        assert height % step == width % step == 0 and height * width <= resolution**2
        assert max(height, width) <= max_aspect * min(height, width)


@given(resolutions, steps, aspects)
def test_every_width_has_its_highest_bucket_and_none_can_grow_both_ways(
    resolution: int, step: int, max_aspect: float
) -> None:
    sizes = set(bucket_sizes(resolution, step, max_aspect))
    square = resolution // step * step
    for height, width in sizes - {(square, square)}:
        assert (height + step) * width > resolution**2 or height * (width + step) > resolution**2
    for width in range(step, 2 * resolution, step):
        height = resolution**2 // width // step * step
        allowed = height > 0 and max(height, width) <= max_aspect * min(height, width)
        assert ((height, width) in sizes) or not allowed


def test_sdxl_sizes_are_among_them() -> None:
    published = {(1024, 1024), (896, 1152), (832, 1216), (768, 1344), (640, 1536), (1152, 896), (768, 1280)}
    assert published <= set(bucket_sizes(1024, 64, 2.5))


def test_a_resolution_below_one_step_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        bucket_sizes(48, 64, 2.0)
    assert caught.value.code == "resolution-too-small" and "data.resolution" in caught.value.fix


@given(sides, sides, resolutions, steps, aspects, st.booleans(), st.booleans())
def test_geometry(
    width: int, height: int, resolution: int, step: int, max_aspect: float, enable_bucket: bool, upscale: bool
) -> None:
    assume(upscale or min(width, height) >= step)
    found = choose_bucket(width, height, resolution, step, max_aspect, enable_bucket, upscale)
    (resized_height, resized_width), (target_height, target_width) = found.resized_hw, found.target_hw
    assert found.original_hw == (height, width)
    assert target_height % step == target_width % step == 0 and target_height * target_width <= resolution**2
    assert max(found.target_hw) <= (max_aspect if enable_bucket else 1.0) * min(found.target_hw)
    assert resized_height >= target_height and resized_width >= target_width
    assert resized_height == target_height or resized_width == target_width  # covers no more than it must
    assert found.crop_top_left == ((resized_height - target_height) // 2, (resized_width - target_width) // 2)
    if not upscale:
        assert resized_height <= height and resized_width <= width
    else:
        assert found.target_hw in bucket_sizes(resolution, step, max_aspect if enable_bucket else 1.0)
    assert choose_bucket(height, width, resolution, step, max_aspect, enable_bucket, upscale) == found.transposed()


@given(st.integers(200, 6000), st.integers(200, 6000))
def test_the_image_is_not_distorted(width: int, height: int) -> None:
    found = choose_bucket(width, height, 512, 64, 2.5, True, False)
    horizontal, vertical = found.resized_hw[1] / width, found.resized_hw[0] / height
    assert abs(horizontal * height - vertical * height) <= 1 or abs(horizontal * width - vertical * width) <= 1


@given(st.integers(1024, 6000), st.integers(1024, 6000))
def test_the_bucket_is_the_nearest(width: int, height: int) -> None:
    aspect = math.log(width / height)
    chosen = choose_bucket(width, height, 512, 64, 2.5, True, True).target_hw
    distances = {hw: abs(math.log(hw[1] / hw[0]) - aspect) for hw in bucket_sizes(512, 64, 2.5)}
    assert distances[chosen] <= min(distances.values()) + 1e-12


@pytest.mark.parametrize(
    ("width", "height", "upscale", "expected"),
    [
        (3000, 2000, False, Geometry((2000, 3000), (832, 1248), (0, 16), (832, 1216))),
        (1000, 1000, False, Geometry((1000, 1000), (960, 960), (0, 0), (960, 960))),
        (1000, 1000, True, Geometry((1000, 1000), (1024, 1024), (0, 0), (1024, 1024))),
        (3000, 500, False, Geometry((500, 3000), (448, 2688), (0, 800), (448, 1088))),
    ],
)
def test_known_images(width: int, height: int, upscale: bool, expected: Geometry) -> None:
    assert choose_bucket(width, height, 1024, 64, 2.5, True, upscale) == expected


def test_an_image_below_one_step_is_refused_unless_enlarged() -> None:
    with pytest.raises(DataError) as caught:
        choose_bucket(500, 40, 512, 64, 2.5, True, False)
    assert caught.value.code == "image-too-small"
    assert choose_bucket(500, 40, 512, 64, 2.5, True, True).target_hw == (320, 768)
