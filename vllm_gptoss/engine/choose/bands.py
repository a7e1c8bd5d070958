"""What runs a step, by how many tokens it has.

The one place that names the thresholds. A kernel's own limit is data of its host file; a band never exceeds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ONE_LAUNCH = "one launch"
SIX_LAUNCHES = "six launches"
GPTOSS = "gptoss"
UPSTREAM = "upstream"
PLANNED = "FLASH_ATTN, planned once a step"
AROUND_CUBLAS = "around cuBLAS"
DECODES = "where each request has one token or few drafts"
AROUND = f"{AROUND_CUBLAS} {DECODES}, else {UPSTREAM}"
ALL_OURS = f"seven launches {DECODES}, else {UPSTREAM}"
DECODE = f"gptoss {DECODES}, else {PLANNED}"


@dataclass(frozen=True, slots=True)
class Band:
    """Steps of up to `most` tokens, more than the band before; None: any number.

    layers: `one launch` for all, `six launches` or `seven launches` each, kernels `around cuBLAS`'s products, or
    `upstream`'s compiled model; attention, experts: the `gptoss` kernels or what `upstream` runs. Layers and attention
    may be either, by what the step is.
    """

    most: int | None
    layers: str
    attention: str
    experts: str


SM90: Final = (
    Band(1, ONE_LAUNCH, GPTOSS, GPTOSS),
    Band(16, SIX_LAUNCHES, GPTOSS, GPTOSS),
    Band(32, ALL_OURS, DECODE, GPTOSS),
    Band(512, AROUND, DECODE, GPTOSS),
    Band(None, UPSTREAM, PLANNED, GPTOSS),
)
"""docs/kernels/ has the measurements behind the numbers."""


def of(tokens: int, bands: tuple[Band, ...] = SM90) -> Band:
    """The band of a step."""
    return next(band for band in bands if band.most is None or tokens <= band.most)


def most(part: str, value: str, bands: tuple[Band, ...] = SM90) -> int:
    """Tokens of the largest step for which `part` (`layers`, `attention` or `experts`) is `value`."""
    return max(band.most or 0 for band in bands if getattr(band, part) == value)


ONE_TOKEN: Final = most("layers", ONE_LAUNCH)
FUSED_TOKENS: Final = most("layers", SIX_LAUNCHES)
PRODUCT_TOKENS: Final = most("layers", ALL_OURS)
ATTENTION_TOKENS: Final = most("attention", DECODE)
MANY_TOKENS: Final = ATTENTION_TOKENS
"""Tokens of the largest decode step. `engine/kernels/experts_many.py` selects the expert kernels of larger steps."""
MOST_PER_REQUEST: Final = 8
"""Most tokens of one request in a step of more than `FUSED_TOKENS` that the plugin's layers and attention take: seven
drafts and the token after them. `decide.tokens_per_request` returns 1 where drafts are vLLM's."""
MANY_PAIRS: Final = 3
"""Pairs (a token and one of its experts) for each routed expert, above which a step of more than
`experts_plan.NARROW_TOKENS` tokens runs `engine/kernels/experts_many.py`: more than 24 tokens of the 20b, and 96 of the
120b. Both take as long there where routing is even and the GPU is hot, and this one takes less where it is not even
(docs/kernels/experiments.md).
"""

_SPACED = ((16, 256, 8), (256, 768, 32), (768, 1025, 64))
GRAPHS: Final = (1, 2, 3, 4, 6, 8, 12, *(size for spaced in _SPACED for size in range(*spaced)))
"""Sizes, in tokens, of the steps for which CUDA graphs are captured, 58 instead of vLLM's 83. A step is padded to the
next one.

Up to 256 tokens they are vLLM's and 3, 6 and 12, because a padded token may read further experts. Beyond, by the times
of docs/kernels/measurements.md, more padding than vLLM's costs at most 3 % of a step, from 768 tokens on 5 %. Bands and
the kernels of `engine/kernels/experts_many.py` end at one of the sizes.
"""


def graph_sizes(requests: int, tokens: int) -> list[int]:
    """The sizes where a step has at most so many requests and tokens.

    `requests` is one of them: vLLM captures no decode step of more, so the largest step would have no graph.
    """
    return sorted(size for size in {*GRAPHS, requests, tokens} if size <= min(tokens, max(GRAPHS)))
