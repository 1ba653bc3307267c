"""DeepSpeed-Ulysses: an all-to-all turns shards of the sequence into shards of the heads, and a second one turns back.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023. Neither heads nor tokens need to divide by the ranks. Where the query heads of two ranks read the same KV
head, both ranks receive it, and its two partial gradients are summed in float32 by the rank that holds the tokens.

Eight tokens, four heads, four ranks. Rank 1 holds tokens 2 and 3 of all heads before the all-to-all, and all tokens of
head 1 after it; each cell is the rank that holds that token of that head:

                   sequence shards                        head shards
    tokens     0  1  2  3  4  5  6  7               0  1  2  3  4  5  6  7
    head 0     0  0  1  1  2  2  3  3               0  0  0  0  0  0  0  0
    head 1     0  0  1  1  2  2  3  3   to_heads    1  1  1  1  1  1  1  1
    head 2     0  0  1  1  2  2  3  3   <------->   2  2  2  2  2  2  2  2
    head 3     0  0  1  1  2  2  3  3  to_sequence  3  3  3  3  3  3  3  3

[Note: overlap] Unless the sequence is short, the heads of each rank are exchanged in chunks. While one chunk is
computed, this rank receives the next chunk and sends the output of the previous one:

    to_heads     | q k v of 0 | q k v of 1 | q k v of 2 |
    compute      |            | attend 0   | attend 1   | attend 2   |
    to_sequence  |            |            | out of 0   | out of 1   | out of 2   |

On a GPU this rank receives two chunks at a time. A transfer starts after the kernels that were launched before it was
posted. The transfer of the chunk after the next is therefore posted before the kernel of this chunk, and may take as
long as two kernels.

[Note: shared KV heads] With more ranks than KV heads, every rank receives a whole KV head, however many ranks there
are. Autograd therefore keeps the sequence shards of k and v, which shrink with the number of ranks, and backward
exchanges them again, together with dout. If no two ranks read the same KV head, head shards of k and v take no more
memory than sequence shards, and autograd keeps the head shards.

Elements sent per rank of P, N tokens: (P-1)/P^2 * N * (h + n) * (d + e), in forward and in backward. If r ranks read
each KV head, it is h + r n instead of h + n, and backward sends (P-1)/P^2 * N * r n * (d + e) more, in float32. With
more ranks than query heads, some ranks have no work (use ``hybrid``).

``head_exchange.py`` holds the all-to-all, and decides which heads each rank receives.

Shapes: b batch, s tokens of this rank, t tokens of the ulysses group, h query heads, n KV heads, d head_dim of q and k,
e head_dim of v, w = h*d + n*d + n*e elements of a token in its heads of q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..kernels.base import accumulator
from ..placement.heads import Heads
from .call import Run
from .head_exchange import HeadExchange, Incoming
from .ring import ring_backward, ring_forward

NewRun = Callable[[Heads, Tensor, Tensor, Tensor], Run]  # (heads, q, k, v), head shards of one chunk


def ulysses_forward(
    exchange: HeadExchange, new_run: NewRun, q: Tensor, k: Tensor, v: Tensor, out_dim: int
) -> tuple[Tensor, ...]:
    """Communicate, attend, communicate back, chunk by chunk.

    Args:
        exchange: the all-to-all.
        new_run: makes the run of a chunk, over the keys of this rank's group or of a ring across groups.
        q: ``[b, s, h, d]``, this rank's sequence shard of all heads.
        k: ``[b, s, n, d]``.
        v: ``[b, s, n, e]``.
        out_dim: the head_dim of the output: e, unless k and v are expanded.

    Returns:
        ``out [b, s, h, out_dim]``, followed by three tensors per chunk for ``ulysses_backward``: the chunk's head shard
        (see ``HeadExchange.to_heads``; without k and v if ``exchange.shares_kv``), its ``out`` and its ``lse``.
    """
    dims = q.shape[3], k.shape[3], v.shape[3]
    out = q.new_empty(*q.shape[:3], out_dim)
    saved: list[Tensor] = []
    outgoing: list[list[Incoming]] = []  # by chunk
    chunk_kv: list[Tensor] = []
    for chunk, shard in exchange.head_shards(q, k, v):  # [t, b, w]
        chunk_q, *new_kv = chunk.split(shard, dims)  # [b, t, h, d], [b, t, n, d], [b, t, n, e]
        chunk_kv = new_kv or chunk_kv
        chunk_k, chunk_v = chunk_kv
        chunk_out, chunk_lse = ring_forward(new_run(chunk.heads, chunk_q, chunk_k, chunk_v), chunk_q, chunk_k, chunk_v)
        outgoing.append([exchange.to_sequence(chunk.query_slices, (chunk_out, out))])
        _finish(outgoing, 2)
        if new_kv and exchange.shares_kv:
            shard = shard[:, :, : len(chunk.heads.queries) * dims[0]].contiguous()
        saved += [shard, chunk_out, chunk_lse]
    _finish(outgoing, 0)
    return out, *saved


def ulysses_backward(
    exchange: HeadExchange,
    new_run: NewRun,
    saved: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of ``ulysses_forward``: communicate, backward of attention, communicate back, chunk by chunk.

    Args:
        exchange: the all-to-all.
        new_run: as in ``ulysses_forward``.
        saved: the tensors that ``ulysses_forward`` returned after ``out``; if ``exchange.shares_kv``, followed by the
            sequence shards k and v.
        dout: ``[b, s, h, e]``, this rank's sequence shard.
        dlse: ``[b, h, t]``, this rank's head shard (see ``HeadExchange.lse_gradient_to_heads``), or None.
        q_shape, k_shape, v_shape: the shapes of ``q [b, s, h, d]``, ``k [b, s, n, d]`` and ``v [b, s, n, e]``.

    Returns:
        ``dq``, ``dk`` and ``dv``, of these shapes, and ``dsinks [h]``, which is 0 for the heads of other ranks.
        ``dsinks`` is None if attention has no sinks.
    """
    like, chunks = saved[0], exchange.chunks
    # Final gradients are sent in the model's dtype. Partial gradients of a KV head are sent in float32, then summed.
    kv_dtype = accumulator(like.dtype) if exchange.shares_kv else like.dtype
    dims = q_shape[3], k_shape[3], v_shape[3]
    dq = like.new_empty(*q_shape)
    dk, dv = (like.new_empty(*shape, dtype=kv_dtype) for shape in (k_shape, v_shape))
    dsinks: Tensor | None = None
    kv_shards = saved[-2:] if exchange.shares_kv else ()  # exchanged again
    outgoing: list[list[Incoming]] = []  # by chunk
    chunk_kv: list[Tensor] = []
    for i, (chunk, shard) in enumerate(exchange.head_shards(dout, *kv_shards)):
        saved_shard, out, lse = saved[3 * i : 3 * i + 3]
        chunk_dout, *received_kv = chunk.split(shard, (dout.shape[3], *dims[1:]))  # [b, t, h, e], [b, t, n, d or e]
        chunk_q, *saved_kv = chunk.split(saved_shard, dims)
        chunk_kv = received_kv or saved_kv or chunk_kv
        at = chunk.heads.q_range(within=exchange.full_chunk.heads)
        chunk_dlse = None if dlse is None else dlse[:, at.start : at.stop]  # [b, h, t]
        chunk_k, chunk_v = chunk_kv
        run = new_run(chunk.heads, chunk_q, chunk_k, chunk_v)
        chunk_dq, *chunk_dkv, chunk_dsinks = ring_backward(
            run, chunk_dout, chunk_dlse, chunk_q, chunk_k, chunk_v, out, lse
        )
        outgoing.append([exchange.to_sequence(chunk.query_slices, (chunk_dq.to(dq.dtype), dq))])
        # Consecutive chunks may read the same KV heads. The last of these chunks sends the sum of their gradients.
        if chunk.has_kv:
            kv_slices, sum_dkv = chunk.kv_slices, chunk_dkv
        else:
            sum_dkv = [x.to(accumulator(x.dtype)) + y for x, y in zip(sum_dkv, chunk_dkv, strict=True)]
        if i + 1 == len(chunks) or chunks[i + 1].has_kv:
            sum_dk, sum_dv = (x.to(kv_dtype) for x in sum_dkv)
            outgoing[-1].append(exchange.to_sequence(kv_slices, (sum_dk, dk), (sum_dv, dv)))
        _finish(outgoing, 2)
        if chunk_dsinks is not None:
            dsinks = chunk_dsinks.new_zeros(dout.shape[2]) if dsinks is None else dsinks
            at = chunk.heads.q_range(within=exchange.heads)
            dsinks[at.start : at.stop] = chunk_dsinks
    _finish(outgoing, 0)
    return dq, dk, dv, dsinks


def _finish(outgoing: list[list[Incoming]], keep: int) -> None:
    """Wait for the messages of all chunks but the last ``keep``, and free the messages.

    With ``keep`` 2, a kernel waits for no more than before: the chunk that it reads was posted after these messages.
    """
    while len(outgoing) > keep:
        for sent in outgoing.pop(0):
            sent.wait()
