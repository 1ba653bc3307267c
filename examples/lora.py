"""Train a LoRA adapter on a long text in a plain accelerate loop. All ranks share each sequence.

    torchrun --nproc-per-node 2 examples/lora.py --text LICENSE --length 513
    python examples/lora.py --text LICENSE --length 513                # one process, the same losses

Without --model it adapts a small Llama with random weights, whose tokens are bytes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, default_data_collator

import seqpar
import seqpar.hf


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file")
    parser.add_argument("--model", help="a model's name on the Hub, or its folder")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence, all ranks together")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    return parser.parse_args()


def small_model() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    args = arguments()
    mesh = seqpar.init_mesh(ring=-1)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    text = Path(args.text).read_bytes()
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokens = AutoTokenizer.from_pretrained(args.model)(text.decode(), return_tensors="pt").input_ids[0]
    else:
        model = small_model()
        tokens = torch.tensor(list(text))
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    sequences: Any = [{"input_ids": x, "labels": x} for x in tokens.split(args.length) if len(x) == args.length]
    if not sequences:
        raise SystemExit(f"--text {args.text}: it has {len(tokens)} tokens, fewer than --length {args.length}")
    order = torch.Generator().manual_seed(0)  # the same on every rank, because all ranks share the sequences
    loader = DataLoader(sequences, batch_size=1, shuffle=True, generator=order, collate_fn=default_data_collator)

    seqpar.hf.parallelize(model, mesh=mesh)
    batches = seqpar.hf.ShardedLoader(loader, mesh=mesh)  # instead of accelerator.prepare(loader)

    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses: list[float] = []
    while len(losses) < args.steps:
        for batch in batches:
            batch = {name: x.to(accelerator.device) if torch.is_tensor(x) else x for name, x in batch.items()}
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == args.steps:
                break
    accelerator.print(json.dumps({"losses": losses}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
