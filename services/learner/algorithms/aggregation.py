"""Aggregation of token losses into the one number that is differentiated.

The engine weighs each token's loss with `aggregation_weights` and sums; the sums of all
micro-batches and ranks add up to the loss of the whole optimizer batch, however it was cut.

Source: token mean: DAPO, arXiv:2503.14476, section 3.3; a fixed length: Dr. GRPO, arXiv:2503.20783,
section 3.2; the mean of sequence means: GRPO, arXiv:2402.03300, equation 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]


def aggregation_weights(
    token_counts_S: Sequence[int], aggregation: Aggregation, *, fixed_length: int = 1
) -> list[float]:
    """Return what every token of each sequence weighs in the loss.

    The aggregated loss is the sum over all tokens of weight times loss. With n the tokens of the
    sequence and S' the sequences that have any:

    - "token_mean": 1 / all tokens; every token counts the same.
    - "sequence_mean": 1 / (S' n), the mean over sequences of each one's token mean.
    - "sequence_sum": 1 / S', the mean over sequences of each one's token sum.
    - "fixed_length": 1 / (S' fixed_length), the same divided by a constant (Dr. GRPO).

    Args:
        token_counts_S: [S] trained tokens of each sequence of the optimizer batch, over all
            micro-batches and ranks; may be 0, but not all of them.
        aggregation: one of the above.
        fixed_length: tokens, at least 1; read by "fixed_length" alone.

    Returns:
        [S] weights; 0.0 for a sequence without tokens.
    """
    total = sum(token_counts_S)
    sequences = sum(count > 0 for count in token_counts_S)
    match aggregation:
        case "token_mean":
            weights = [1.0 / total for _ in token_counts_S]
        case "sequence_mean":
            weights = [1.0 / (sequences * max(count, 1)) for count in token_counts_S]
        case "sequence_sum":
            weights = [1.0 / sequences for _ in token_counts_S]
        case "fixed_length":
            weights = [1.0 / (sequences * fixed_length) for _ in token_counts_S]
    return [weight if count else 0.0 for weight, count in zip(weights, token_counts_S, strict=True)]
