"""Train over two hosts: all-to-all inside a host (Ulysses), a ring between the hosts. All ranks share each sequence.

Run this on each host. --master-addr is an address of the first host that both hosts can reach:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr 10.0.0.1 --master-port 29500 \\
        examples/two_hosts.py --text LICENSE          # on the second host: --node-rank 1

Set NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs) to the network interface between the hosts if the ranks do not find
each other. To try it on one machine, run both commands there, with --master-addr 127.0.0.1 and --nproc-per-node 1.
"""

import argparse
import json
import os
import socket
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, default_data_collator

import seqpar.hf


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file")
    parser.add_argument("--model", help="a model's name on the Hub, or its folder")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence, all ranks together")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, at most one pass over the text")
    return parser.parse_args(argv)


def small_model() -> tuple[Any, Any]:
    config = LlamaConfig(
        vocab_size=259, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config), ByT5Tokenizer(extra_ids=0)


def main(argv: list[str] | None = None) -> list[float]:
    args = arguments(argv)
    torch.manual_seed(0)
    ranks_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
    config = seqpar.hf.ParallelismConfig(cp_size=-1, strategy="hybrid", ulysses_size=ranks_of_host)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), parallelism_config=config)
    accelerator.print("hosts of the ranks:", *gather_object([socket.gethostname()]))
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = small_model()
    tokens = torch.tensor(tokenizer(Path(args.text).read_text()).input_ids)
    sequences: Any = [{"input_ids": x, "labels": x} for x in tokens.split(args.length) if len(x) == args.length]
    loader = DataLoader(sequences, batch_size=1, shuffle=True, collate_fn=default_data_collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for batch in islice(loader, args.steps):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(json.dumps({"losses": losses}))
    return losses


if __name__ == "__main__":
    main()
    Accelerator().end_training()
