"""Train an EAGLE-style draft model on packed rows: it predicts the next token from the target model's previous state.

python examples/draft.py                                 # one process
torchrun --nproc-per-node 4 examples/draft.py            # four ranks, the same losses

A draft token at position p reads the token at p and the target's last hidden state at p - 1. It learns the target's
state at p and the token at p + 1. ``seqpar.shift`` fetches both neighbours, over the ranks and inside each document.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh

import seqpar

SEQ_LEN, HIDDEN, HEADS, VOCAB = 192, 32, 4, 64


class Decoder(nn.Module):
    """Layers of attention, around which nothing mixes tokens."""

    def __init__(self, layers: int, inputs: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, HIDDEN)
        attention = (seqpar.ParallelAttention("ring", HIDDEN, HEADS, mesh=mesh) for _ in range(layers))
        self.attention = nn.ModuleList(attention)

    def forward(self, x: Tensor, mask: seqpar.Mask, sharding: seqpar.Sharding) -> Tensor:
        x = self.project(x)  # [b, s, hidden]
        for layer in self.attention:
            x = x + layer(F.rms_norm(x, x.shape[-1:]), mask=mask, sharding=sharding)
        return F.rms_norm(x, x.shape[-1:])


def train(mesh: DeviceMesh, steps: int = 8) -> list[float]:
    """The loss of each step, the same for any number of ranks."""
    torch.manual_seed(0)
    embed, head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)  # of the target, frozen
    target, draft = Decoder(2, HIDDEN, mesh), Decoder(1, 2 * HIDDEN, mesh)
    for module in (embed, head, target):
        module.requires_grad_(False)
    optimizer, losses = torch.optim.AdamW(draft.parameters(), lr=3e-3), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ends = torch.randint(1, SEQ_LEN, (4,), generator=generator).unique().tolist()
        mask = seqpar.Mask.causal() & seqpar.Mask.documents([0, *ends, SEQ_LEN])
        sharding = seqpar.Sharding(SEQ_LEN, "zigzag", mesh=mesh)
        ids = sharding.shard(torch.randint(VOCAB, (2, SEQ_LEN), generator=generator))  # [b, s]
        states = target(embed(ids), mask, sharding)  # [b, s, hidden]
        before = seqpar.shift(states, -1, sharding=sharding, mask=mask)
        labels = seqpar.shift(ids, 1, sharding=sharding, mask=mask, fill=-100)
        found = draft(torch.cat([embed(ids), before], -1), mask, sharding)
        each = F.cross_entropy(head(found).transpose(1, 2), labels, reduction="none")  # [b, s]
        each = each + F.smooth_l1_loss(found, states, reduction="none").mean(-1)
        loss = seqpar.token_loss(each, labels, mesh=mesh)
        loss.backward()
        seqpar.sync_gradients(draft, mesh=mesh)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    mesh = seqpar.init_mesh(ring=-1, device_type="cpu")
    losses = train(mesh)
    if mesh.get_rank() == 0:
        print(" ".join(f"{loss:.6f}" for loss in losses))
