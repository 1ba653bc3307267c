"""Fine-tune a language model on a long text with transformers' Trainer. All ranks share each sequence.

    torchrun --nproc-per-node 2 examples/finetune.py --text LICENSE --length 513
    python examples/finetune.py --text LICENSE --length 513            # one process, the same losses

Only one argument is needed for sequence parallelism: parallelism_config. Without --model, the script trains a small
Llama with random weights, whose tokens are bytes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, Trainer, TrainingArguments

import seqpar.hf


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file")
    parser.add_argument("--model", help="a model's name on the Hub, or its folder")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence, all ranks together")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=1, help="sequences in each optimizer step")
    strategies = ["ring", "ulysses", "context_parallel", "hybrid"]
    parser.add_argument("--strategy", default="ring", choices=strategies)
    parser.add_argument("--output", default="output", help="the Trainer's folder")
    return parser.parse_args(argv)


def small_model() -> tuple[Any, Any]:
    config = LlamaConfig(
        vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config), ByT5Tokenizer(extra_ids=0)


def main(argv: list[str] | None = None) -> list[float]:
    args = arguments(argv)
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = small_model()
    tokens = torch.tensor(tokenizer(Path(args.text).read_text()).input_ids)
    sequences = [{"input_ids": x, "labels": x} for x in tokens.split(args.length) if len(x) == args.length]
    if not sequences:
        raise SystemExit(f"--text {args.text}: it has {len(tokens)} tokens, fewer than --length {args.length}")

    settings = TrainingArguments(
        parallelism_config=seqpar.hf.ParallelismConfig(cp_size=-1, strategy=args.strategy),
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, settings, train_dataset=sequences)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": losses}))
    return losses


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()
