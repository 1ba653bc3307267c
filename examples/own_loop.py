"""A plain PyTorch training loop whose sequences are sharded over ranks. The lines marked "# seqpar" are the change.

python examples/own_loop.py                                                # one process
torchrun --nproc-per-node 4 examples/own_loop.py --dp 2 --wrapper fsdp2    # two sequences at a time, each on two ranks
python examples/own_loop.py --steps 12 --checkpoint FOLDER                 # saves, and resumes on any number of ranks
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import seqpar  # seqpar

IGNORED = -100


class Block(nn.Module):
    """nanoGPT's: it calls PyTorch's attention and knows nothing of ranks."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, h, s, d]
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, seq_len: int, hidden: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, hidden), nn.Embedding(seq_len, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 256)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(positions)  # [b, s, hidden]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rows(step: int, seq_len: int, count: int) -> tuple[Tensor, Tensor]:
    """Ids and labels ``[count, seq_len]`` of a step. Labels are shifted here; a space as a label does not count."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.arange(step * count, (step + 1) * count) * 997 % (len(text) - seq_len)
    ids = text[starts[:, None] + torch.arange(seq_len + 1)]
    return ids[:, :-1], ids[:, 1:].masked_fill(ids[:, 1:] == ord(" "), IGNORED)


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=1, help="sequences that are computed at a time")
    parser.add_argument("--wrapper", choices=["none", "ddp", "fsdp2"], default="none")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seq-len", type=int, default=257)
    parser.add_argument("--checkpoint", help="folder to save to, and to resume from")
    args = parser.parse_args(argv)
    mesh = seqpar.init_mesh(dp=args.dp, ring=-1)  # seqpar: which ranks share a sequence
    sharding = seqpar.Sharding(args.seq_len, "zigzag", mesh=mesh)  # seqpar: which of its tokens each of them holds
    dp_rank, device = mesh["dp"].get_local_rank(), mesh.device_type
    torch.manual_seed(0)
    model: nn.Module = GPT(args.seq_len).to(device)
    if args.wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif args.wrapper == "fsdp2":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state: dict[str, Any] = {"step": 0}
    if args.checkpoint and Path(args.checkpoint).exists():
        weights, moments = get_state_dict(model, optimizer)
        state |= {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    losses = []
    for step in range(state["step"], args.steps):
        ids, labels = rows(step, args.seq_len, 4)
        for part in range(2):  # accumulation: each part has two rows, divided over the dp ranks
            mine = slice(part * 2 + dp_rank * 2 // args.dp, part * 2 + (dp_rank + 1) * 2 // args.dp)
            ids_local = sharding.shard(ids[mine]).to(device)  # seqpar: this rank's tokens
            labels_local = sharding.shard(labels[mine]).to(device)  # seqpar
            positions = sharding.positions().to(device)  # seqpar: instead of arange
            with seqpar.replace_sdpa(sharding):  # seqpar: attention sees the tokens of all ranks
                logits = model(ids_local, positions)
            each = F.cross_entropy(logits.mT, labels_local, ignore_index=IGNORED, reduction="none")
            loss = seqpar.token_loss(each, labels_local, sharding=sharding)  # seqpar: the mean over all ranks' labels
            (loss / 2).backward()
            losses.append(loss.item())
        if args.wrapper == "none":
            seqpar.sync_gradients(model, mesh=mesh)  # seqpar: the mean over all ranks; DDP and FSDP do it themselves
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {sum(losses[-2:]) / 2:.6f}", flush=True)
    if args.checkpoint:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"step": args.steps, "model": weights, "optimizer": moments}, checkpoint_id=args.checkpoint)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
