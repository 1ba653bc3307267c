"""Train a small block-diffusion language model, with each sequence sharded over several ranks.

python examples/block_diffusion.py                               # one process
torchrun --nproc-per-node 4 examples/block_diffusion.py          # four ranks, the same losses

A row has CLEAN tokens, and behind them the same tokens with noise: some tokens of each block are masked. The model
predicts them from the clean blocks before, and from the noisy block itself (Arriola et al., "Block Diffusion", 2025).
``Sharding.segments`` gives a rank the same blocks of both halves: it sends keys and values of clean tokens only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh

import seqpar

CLEAN, BLOCK, BATCH = 256, 8, 2  # clean tokens of a row, tokens of a block, rows
HIDDEN, HEADS, LAYERS, VOCAB = 64, 4, 2, 16
NOISE, IGNORED = VOCAB, -100  # the masked token; the label of a token that is not predicted


class Layer(nn.Module):
    """A transformer layer over this rank's tokens."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        rope = seqpar.RotaryEmbedding(HIDDEN // HEADS)
        self.attention = seqpar.ParallelAttention("ring", HIDDEN, HEADS, mesh=mesh, rope=rope)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: seqpar.Mask, sharding: seqpar.Sharding, positions: Tensor) -> Tensor:
        where = {"mask": mask, "sharding": sharding, "positions": positions}
        x = x + self.attention(F.rms_norm(x, x.shape[-1:]), **where)  # [b, s, hidden]
        return x + self.down(F.gelu(self.up(F.rms_norm(x, x.shape[-1:]))))


class Denoiser(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB + 1, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleList(Layer(mesh) for _ in range(LAYERS))

    def forward(self, ids: Tensor, *where: object) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, *where)
        logits: Tensor = self.head(F.rms_norm(x, x.shape[-1:]))
        return logits


def rows(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels and weights ``[BATCH, 2 * CLEAN]`` of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    clean = torch.randint(VOCAB, (BATCH, BLOCK), generator=generator).repeat(1, CLEAN // BLOCK)  # equal blocks
    level = torch.rand(BATCH, CLEAN // BLOCK, generator=generator).clamp(min=0.2).repeat_interleave(BLOCK, 1)
    hidden = torch.rand(BATCH, CLEAN, generator=generator) < level  # more of the tokens in blocks with more noise
    ids = torch.cat([clean, clean.masked_fill(hidden, NOISE)], 1)
    labels = torch.cat([torch.full_like(clean, IGNORED), clean.masked_fill(~hidden, IGNORED)], 1)
    return ids, labels, torch.cat([level, 1 / level], 1)


def train(mesh: DeviceMesh, steps: int = 80) -> tuple[list[float], Denoiser, int]:
    """The loss of each step, the model with the gradients of the last one, and the bytes of K and V that this rank
    sends in a forward."""
    torch.manual_seed(0)
    mask, model = seqpar.Mask.block_diffusion(CLEAN, BLOCK), Denoiser(mesh)
    sharding = seqpar.Sharding.segments([CLEAN, CLEAN], layout="zigzag", mesh=mesh)
    positions = sharding.shard(torch.arange(CLEAN).repeat(2), dim=0)  # a noisy token has its clean token's position
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        ids, labels, weights = (sharding.shard(x) for x in rows(step))  # [b, s]
        with seqpar.trace() as forward:
            logits = model(ids, mask, sharding, positions)
        each = F.cross_entropy(logits.mT, labels, ignore_index=IGNORED, reduction="none")
        loss = seqpar.token_loss(each * weights, labels, sharding=sharding, ignore_index=IGNORED)
        loss.backward()
        seqpar.sync_gradients(model, mesh=mesh)
        optimizer.step()
        losses.append(loss.item())
    return losses, model, forward.bytes_sent


if __name__ == "__main__":
    mesh = seqpar.init_mesh(ring=-1, device_type="cpu")
    losses, model, sent = train(mesh)
    total = torch.tensor(sent)
    torch.distributed.all_reduce(total)
    row_bytes = BATCH * LAYERS * 2 * HIDDEN * model.embed.weight.element_size()  # of K and V
    gathered = (mesh.size() - 1) * 2 * CLEAN * row_bytes
    if mesh.get_rank() == 0:
        print(" ".join(f"{loss:.4f}" for loss in losses[::8]))
        print(
            f"K and V that all ranks send in a forward: {total:,} bytes; to gather all {2 * CLEAN} rows: {gathered:,}"
        )
    torch.distributed.destroy_process_group()
