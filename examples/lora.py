"""Train a LoRA adapter on a long text in a plain accelerate loop. All ranks share each sequence.

    torchrun --nproc-per-node 2 examples/lora.py --text LICENSE --length 513
    python examples/lora.py --text LICENSE --length 513                # one process, the same losses

Only one argument is needed for sequence parallelism: parallelism_config. Without --model, the script adapts a small
Llama with random weights, whose tokens are bytes.
"""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
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
        vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config), ByT5Tokenizer(extra_ids=0)


def main(argv: list[str] | None = None) -> list[float]:
    args = arguments(argv)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), parallelism_config=seqpar.hf.ParallelismConfig(cp_size=-1)
    )
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = small_model()
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    tokens = torch.tensor(tokenizer(Path(args.text).read_text()).input_ids)
    sequences: Any = [{"input_ids": x, "labels": x} for x in tokens.split(args.length) if len(x) == args.length]
    loader = DataLoader(sequences, batch_size=1, shuffle=True, collate_fn=default_data_collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

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
