"""How token losses become the one number that is differentiated.

The engine sums each micro-batch with `batch_share`; the shares of all micro-batches and ranks add
up to the mean over the action tokens of the whole optimizer batch, however it was cut.

Source: token-mean aggregation: DAPO, arXiv:2503.14476, section 3.3.
"""

from __future__ import annotations

import torch


def batch_share(losses_N: torch.Tensor, total_weight: float) -> torch.Tensor:
    """Return this micro-batch's share of the token mean: a scalar, sum / total_weight.

    Args:
        losses_N: [N] losses of the trained tokens of one micro-batch; N may be 0.
        total_weight: loss-mask tokens of the optimizer batch (for SFT: their summed weight), over
            all micro-batches and ranks.

    Raises:
        ValueError: total_weight is not above 0.
    """
    if not total_weight > 0:
        raise ValueError(
            f"the optimizer batch has a token weight of {total_weight}; it needs at least one "
            "token that counts in the loss"
        )
    return losses_N.sum() / total_weight
