"""Rotary position embedding (arXiv 2104.09864), with an optional RMSNorm of heads (arXiv 1910.07467) before it.

Dimensions: B batch, S tokens, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_rocm.kernels import backend
from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.norms import rms_normal


@dataclass(frozen=True)
class Rotation:
    """The angle by which each pair of numbers of a head is rotated, for each token; in any float dtype.

    cos, sin: [S, D/2] or [B, S, D/2], the same for all heads. Both must have the same strides, because the kernels use
    one set of strides.
    interleaved: whether neighbouring numbers are a pair; otherwise number i of the first half and number i of the
    second.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def __post_init__(self) -> None:
        if self.cos.stride() != self.sin.stride():
            raise ValueError(f"cosines and sines have different strides: {self.cos.stride()}, {self.sin.stride()}")

    @classmethod
    def none(cls, heads: Tensor) -> Rotation:
        """Return a rotation by angle 0, which leaves ``heads`` [B, S, H, D] unchanged."""
        size = (heads.shape[1], heads.shape[3] // 2)
        cos, sin = (heads.new_full(size, number, dtype=torch.float32) for number in (1, 0))
        return cls(cos, sin, interleaved=False)


def norm_rotary(
    streams: Sequence[tuple[Tensor, Tensor | None]], eps: float, rotation: Rotation, implementation: Implementation
) -> Tensor:
    """Concatenate streams of tokens, normalise their heads, and rotate them.

    Only the rotation and the inputs of heads with a norm are kept for the backward pass.

    Args:
        streams: for each stream, its heads [B, S, H, D], and the frozen weight [D] of their RMSNorm or None for no
            norm.
        eps: epsilon of the norms.
        rotation: rotation of the tokens of all streams.
        implementation: see ``backend``.

    Returns:
        [B, S, H, D], contiguous, in the dtype of the heads; S is the number of tokens in all streams.
    """

    def name() -> str:
        pairs_of = "neighbours" if rotation.interleaved else "halves"
        return f"rotary.norm_rotary: {pairs_of}, {'no norm' if streams[0][1] is None else 'norm'}"

    implementation = backend.decided(implementation, name)
    if backend.launches(implementation, streams[0][0], name):
        from lora_rocm.kernels.rotary_triton import TritonNormRotary

        turned: Tensor = TritonNormRotary.apply(
            rotation.cos, rotation.sin, rotation.interleaved, eps, *[part for stream in streams for part in stream]
        )
        return turned
    each = [x if weight is None else _normal(x, eps, weight) for x, weight in streams]
    normal = torch.cat(each, dim=1) if len(each) > 1 else each[0]
    cos, sin = rotation.cos.unsqueeze(-2).float(), rotation.sin.unsqueeze(-2).float()
    if rotation.interleaved and not torch.compiler.is_compiling():  # a compiler fuses real numbers only
        pairs = torch.view_as_complex(normal.to(cos.dtype).unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    elif rotation.interleaved:
        a, b = normal.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = normal.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned.to(normal.dtype)


def _normal(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    if weight.dtype == x.dtype:
        return rms_normal(x, eps, weight)
    return (rms_normal(x, eps) * weight).to(x.dtype)
