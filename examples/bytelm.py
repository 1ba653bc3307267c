"""Train a small language model on the bytes of a text. All ranks share each sequence.

    python examples/bytelm.py                                                       # one process
    torchrun --nproc-per-node 4 examples/bytelm.py --strategy ring --layout zigzag  # four ranks, the same losses
    torchrun --nproc-per-node 2 examples/bytelm.py --strategy tp_sp --resume checkpoints/100 --steps 200

The model is a small Llama. Only its attention communicates; under tp_sp, which shards the weights too, the MLP as well.
A checkpoint can be resumed under every strategy and on any number of ranks. `seqpar demo` runs this file under every
strategy and compares the losses.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import seqpar

IGNORED = -100  # the label of a token whose next token belongs to another document
# The dimensions of the mesh, by strategy: -1 stands for all ranks that remain.
MESHES = {
    "ring": {"ring": -1},
    "ulysses": {"ulysses": -1},
    "context_parallel": {"ring": -1},
    "hybrid": {"ring": -1, "ulysses": 2},
    "tp_sp": {"tp": -1},
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ring", choices=MESHES)
    parser.add_argument("--layout", default="zigzag", choices=["contiguous", "zigzag", "striped"])
    parser.add_argument("--text", help="a text file; by default the source files of seqpar")
    parser.add_argument("--mask", default="causal", type=parse_mask, help="causal, window:N, documents, or joined by +")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens in a sequence, all ranks together")
    parser.add_argument("--batch", type=int, default=2, help="sequences in a step")
    parser.add_argument("--steps", type=int, default=100, help="steps in all, with the steps before --resume")
    parser.add_argument("--lr", type=float, default=1e-3, help="the learning rate after ten steps of warm-up")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; the weights stay float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default cuda if there is one")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="save checkpoints as FOLDER/STEP")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints; the last is saved too")
    parser.add_argument("--resume", metavar="FOLDER", help="a checkpoint to go on from")
    return parser.parse_args(argv)


# Data: b batch, s tokens of the full sequence, n bytes of the text


def read_text(path: str | None) -> bytes:
    """The text. Its documents end with form feeds or, in a text without any, with empty lines."""
    if path is not None:
        return Path(path).read_bytes()
    return b"\f".join(file.read_bytes() for file in sorted(Path(seqpar.__file__).parent.rglob("*.py")))


def document_starts(text: bytes) -> Tensor:
    """Whether a document starts at a byte: bool [n]."""
    end = b"\f" if b"\f" in text else b"\n\n"
    starts = torch.zeros(len(text) + 1, dtype=torch.bool)
    starts[[0, *itertools.accumulate(len(document) + len(end) for document in text.split(end)[:-1])]] = True
    return starts[:-1]


def parse_mask(text: str) -> tuple[seqpar.Mask, bool]:
    """The mask of every step, and whether it also separates a step's documents."""
    mask, documents = seqpar.Mask.causal(), False
    for name in text.split("+"):
        kind, _, number = name.partition(":")
        if kind == "window" and number.isdecimal() and int(number):
            mask = mask & seqpar.Mask.sliding_window(int(number) - 1)  # the last N tokens, itself included
        elif name == "documents":
            documents = True
        elif name != "causal":
            raise ValueError(f"mask={text!r}: expected causal, window:N, documents, or several joined by +")
    return mask, documents


def make_batch(data: Tensor, starts: Tensor, step: int, args: argparse.Namespace) -> tuple[Tensor, Tensor, seqpar.Mask]:
    """Tokens and labels [b, s] of a step, and their mask: the same on every rank, and again after --resume."""
    generator = torch.Generator().manual_seed(1_000_003 * args.seed + step)
    first = torch.randint(len(data), (args.batch, 1), generator=generator)
    index = (first + torch.arange(args.seq_len + 1)) % len(data)  # [b, s + 1], a circle
    tokens, labels = data[index[:, :-1]].long(), data[index[:, 1:]].long()
    mask, documents = args.mask
    if documents:
        labels[starts[index[:, 1:]]] = IGNORED
        inner = [(row.nonzero().flatten() + 1).tolist() for row in starts[index[:, 1:-1]]]
        mask = mask & seqpar.Mask.documents([[0, *row, args.seq_len] for row in inner])
    return tokens, labels, mask


# Model: b batch, s tokens of this rank, h hidden


class MLP(nn.Module):
    """Llama's. A token's output depends on that token alone, so nothing is sent."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, mesh: Any) -> None:
        super().__init__()
        hidden, inner = args.hidden, -(-8 * args.hidden // 96) * 32  # 8/3 of the hidden size
        rope = seqpar.RotaryEmbedding(hidden // args.heads)
        attention = seqpar.ParallelAttention(args.strategy, hidden, args.heads, args.kv_heads, mesh=mesh, rope=rope)
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = seqpar.MegatronMLP(hidden, inner, mesh=mesh) if args.strategy == "tp_sp" else MLP(hidden, inner)

    def forward(self, x: Tensor, mask: seqpar.Mask, sharding: seqpar.Sharding) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask=mask, sharding=sharding)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class ByteLM(nn.Module):
    """Tokens [b, s] -> logits [b, s, 256]."""

    def __init__(self, args: argparse.Namespace, mesh: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(256, args.hidden)
        self.layers = nn.ModuleList(Block(args, mesh) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.hidden, eps=1e-5)
        self.lm_head = nn.Linear(args.hidden, 256, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        # Every rank draws the full weights. Under tp_sp, load_state_dict keeps the rank's shards of them.
        generator = torch.Generator().manual_seed(args.seed)
        state = self.state_dict()
        for name, weight in state.items():
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))  # as in GPT-2
            std = 0.02 / (2 * args.layers) ** 0.5 if residual else 0.02
            full = torch.ones(weight.shape)
            state[name] = full if full.dim() == 1 else full.normal_(0, std, generator=generator)
        self.load_state_dict(state)

    def forward(self, tokens: Tensor, mask: seqpar.Mask, sharding: seqpar.Sharding) -> Tensor:
        x = self.embed_tokens(tokens)  # [b, s, h]
        for layer in self.layers:
            x = layer(x, mask, sharding)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def peak_memory(device: str) -> int:
    """Bytes: of tensors on CUDA, of the whole process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts KiB


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, and return the losses of the steps and what was measured on this rank."""
    args = arguments(argv)
    mesh = seqpar.init_mesh(**MESHES[args.strategy], device_type=args.device)
    device, memory = mesh.device_type, peak_memory(mesh.device_type)
    sharding = seqpar.Sharding(args.seq_len, args.layout, mesh=mesh, strategy=args.strategy)
    text = read_text(args.text)
    data, starts = torch.frombuffer(bytearray(text), dtype=torch.uint8), document_starts(text)
    model = ByteLM(args, mesh).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def checkpoint(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    first = 0
    if args.resume:
        state = checkpoint(0)
        dcp.load(state, checkpoint_id=args.resume)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"]
    if first >= args.steps:
        raise ValueError(f"--steps {args.steps}: the checkpoint has {first} steps already; choose more")

    losses: list[float] = []
    seconds: list[float] = []
    sent_by_attention = sent_of_gradients = 0
    for step in range(first, args.steps):
        start = time.perf_counter()
        full_tokens, full_labels, mask = make_batch(data, starts, step, args)
        tokens, labels = sharding.shard(full_tokens).to(device), sharding.shard(full_labels).to(device)  # [b, s]
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 10)
        with seqpar.trace() as attention:
            with torch.autocast(device, torch.bfloat16, enabled=args.bf16):
                logits = model(tokens, mask, sharding)  # [b, s, 256]
            token_losses = F.cross_entropy(logits.float().mT, labels, reduction="none", ignore_index=IGNORED)
            loss = seqpar.token_loss(token_losses, labels, sharding=sharding, ignore_index=IGNORED)  # one device's
            loss.backward()
        with seqpar.trace() as gradients:
            seqpar.sync_gradients(model, mesh=mesh)
        seqpar.clip_grad_norm_(model, 1.0, mesh=mesh)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        sent_by_attention += attention.bytes_sent
        sent_of_gradients += gradients.bytes_sent
        if mesh.get_rank() == 0 and (step % max(1, args.steps // 10) == 0 or step + 1 == args.steps):
            rate = args.batch * args.seq_len / seconds[-1]
            print(f"step {step + 1}/{args.steps}: loss {losses[-1]:.4f}, {rate:,.0f} tokens/s", flush=True)
        if args.checkpoints and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            dcp.save(checkpoint(step + 1), checkpoint_id=f"{args.checkpoints}/{step + 1}")
    return {
        "losses": losses,
        "tokens_per_second": args.batch * args.seq_len / statistics.median(seconds[1:] or seconds),
        "peak_memory": peak_memory(device) - memory,
        "attention_bytes": sent_by_attention,
        "gradient_bytes": sent_of_gradients,
    }


if __name__ == "__main__":
    measured = main()
    print(f"rank {dist.get_rank()}: peak memory {measured['peak_memory'] / 2**20:.0f} MiB")
    dist.destroy_process_group()
