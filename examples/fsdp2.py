"""Train in an accelerate loop with FSDP2. The weights are sharded over all ranks, each sequence over some or all.

    torchrun --nproc-per-node 2 examples/fsdp2.py --text LICENSE --length 513
    python examples/fsdp2.py --text LICENSE --length 513               # one process, the same losses

Only one argument is needed for sequence parallelism: parallelism_config. It shards each sequence over --cp-size ranks.
The other ranks form data-parallel replicas. On CPUs, accelerate uses DDP instead of FSDP2. Without --model,
the script trains a small Qwen3 with random weights, whose tokens are bytes.
"""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, Qwen3Config, default_data_collator

import seqpar.hf


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file")
    parser.add_argument("--model", help="a model's name on the Hub, or its folder")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence, all its ranks together")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, at most one pass over the text")
    parser.add_argument("--cp-size", type=int, default=-1, help="ranks that share a sequence; -1: all")
    return parser.parse_args(argv)


def small_model() -> tuple[Any, Any]:
    config = Qwen3Config(
        vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1 << 20,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config), ByT5Tokenizer(extra_ids=0)


def main(argv: list[str] | None = None) -> list[float]:
    args = arguments(argv)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if torch.cuda.is_available() else "no",
        parallelism_config=seqpar.hf.ParallelismConfig(cp_size=args.cp_size),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        ),
    )
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = small_model()
    tokens = torch.tensor(tokenizer(Path(args.text).read_text()).input_ids)
    sequences: Any = [{"input_ids": x, "labels": x} for x in tokens.split(args.length) if len(x) == args.length]
    loader = DataLoader(sequences, batch_size=1, collate_fn=default_data_collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for batch in islice(loader, args.steps):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(json.dumps({"losses": losses}))
    return losses


if __name__ == "__main__":
    main()
    Accelerator().end_training()
