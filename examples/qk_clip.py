"""Train with QK-clip, which bounds the attention scores of each head, as Kimi K2 was trained.

python examples/qk_clip.py                               # one process
torchrun --nproc-per-node 4 examples/qk_clip.py          # four ranks, the same losses and scores

``return_max_logit=True`` returns the largest score of each head in the whole sequence, the same on every rank.
Where it is above ``BOUND``, the weights of the head's queries and keys are scaled down after the optimizer's step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh

import seqpar

SEQ_LEN, HIDDEN, HEADS, VOCAB, BOUND = 96, 32, 4, 64, 1.0


class Layer(nn.Module):
    """Causal attention that keeps the largest scores of the last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.max_logit = torch.zeros(HEADS)

    def forward(self, x: Tensor, sharding: seqpar.Sharding) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).unbind(2)  # [b, s, heads, head_dim]
        y, self.max_logit = seqpar.attention(q, k, v, sharding=sharding, return_max_logit=True)
        return self.out(y.flatten(2))

    @torch.no_grad()
    def clip(self) -> None:
        """Scale the queries' and the keys' weights of a head so that its largest score would have been ``BOUND``."""
        factor = (BOUND / self.max_logit).clamp(max=1.0).where(self.max_logit > 0, 1.0).sqrt()  # [heads]
        self.qkv.weight.view(3, HEADS, -1, HIDDEN)[:2].mul_(factor[:, None, None])


def train(mesh: DeviceMesh, steps: int = 8) -> list[list[float]]:
    """The loss and the largest score of each step, the same for any number of ranks."""
    torch.manual_seed(0)
    embed, layer, head = nn.Embedding(VOCAB, HIDDEN), Layer(), nn.Linear(HIDDEN, VOCAB)
    model = nn.ModuleList([embed, layer, head])
    optimizer, history = torch.optim.AdamW(model.parameters(), lr=2e-2), []
    sharding = seqpar.Sharding(SEQ_LEN, "zigzag", mesh=mesh)
    for step in range(steps):
        ids = sharding.shard(torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(step)))
        labels = seqpar.shift(ids, 1, sharding=sharding, fill=-100)
        x = embed(ids)  # [b, s, hidden]
        each = F.cross_entropy(head(x + layer(x, sharding)).transpose(1, 2), labels, reduction="none")  # [b, s]
        loss = seqpar.token_loss(each, labels, mesh=mesh)
        loss.backward()
        seqpar.sync_gradients(model, mesh=mesh)
        optimizer.step()
        optimizer.zero_grad()
        layer.clip()
        history.append([loss.item(), layer.max_logit.max().item()])
    return history


if __name__ == "__main__":
    mesh = seqpar.init_mesh(ring=-1, device_type="cpu")
    history = train(mesh)
    if mesh.get_rank() == 0:
        for loss, largest in history:
            print(f"loss {loss:.6f}, largest score {largest:.6f}")
