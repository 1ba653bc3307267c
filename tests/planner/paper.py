"""Formulas of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022."""

from __future__ import annotations

from seqpar.planner.shape import ModelShape


def paper_activations(
    model: ModelShape,
    seq_len: int,
    batch: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes that one layer of the paper's GPT keeps on one rank with 16-bit activations.

    The paper's equations 1, 2 and 4 and table 2 (Korthikanti et al., arXiv 2205.05198).

    Args:
        model: the model, of which the heads and the hidden size count.
        seq_len: tokens of a sequence.
        batch: number of sequences.
        tensor: number of tensor-parallel ranks.
        sequence_parallel: whether the tokens are sharded outside the linear layers too.
        recompute: what backward recomputes: "none", "selective" (attention) or "full".
    """
    sbh = float(seq_len) * batch * model.hidden
    if recompute == "full":
        return 2 * sbh
    scores = 0.0 if recompute == "selective" else 5.0 * model.attention.heads * seq_len / model.hidden / tensor
    outside = 10.0 / tensor if sequence_parallel else 10.0
    return sbh * (outside + 24.0 / tensor + scores)
