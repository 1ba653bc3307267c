"""Fine-tune a language model on a long text with transformers' Trainer. All ranks share each sequence.

    torchrun --nproc-per-node 2 examples/finetune.py --text LICENSE --length 513
    python examples/finetune.py --text LICENSE --length 513            # one process, the same losses

Without --model it trains a small Llama with random weights, whose tokens are bytes.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, TrainingArguments

import seqpar
import seqpar.hf


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file")
    parser.add_argument("--model", help="a model's name on the Hub, or its folder")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence, all ranks together")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=1, help="sequences in each optimizer step")
    strategies = ["ring", "ulysses", "context_parallel", "hybrid"]
    parser.add_argument("--strategy", default="ring", choices=strategies)
    parser.add_argument("--output", default="output", help="the Trainer's folder")
    return parser.parse_args()


def small_model() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    args = arguments()
    mesh = seqpar.init_mesh(ring=-1)  # before TrainingArguments, which else start a process group of their own
    torch.manual_seed(0)
    text = Path(args.text).read_bytes()
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokens = AutoTokenizer.from_pretrained(args.model)(text.decode(), return_tensors="pt").input_ids[0]
    else:
        model = small_model()
        tokens = torch.tensor(list(text))
    sequences = [{"input_ids": x, "labels": x} for x in tokens.split(args.length) if len(x) == args.length]
    if not sequences:
        raise SystemExit(f"--text {args.text}: it has {len(tokens)} tokens, fewer than --length {args.length}")

    seqpar.hf.parallelize(model, mesh=mesh, strategy=args.strategy)

    trainer = seqpar.hf.SequenceParallelTrainer(
        model,
        TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=sequences,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
