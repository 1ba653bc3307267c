"""Fine-tune a language model on long texts with transformers' Trainer; all ranks share each sequence.

    torchrun --nproc-per-node 2 examples/finetune.py --text book.txt --length 4096
    python examples/finetune.py --text book.txt --length 4096          # the same losses, one process

Without --model: a small Llama with random weights, and bytes for tokens.
"""

import argparse
import json
import os

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, TrainingArguments

import seqpar
import seqpar.hf


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file")
    parser.add_argument("--model", help="a model's name or folder")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence, over all ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1, help="sequences in an optimizer step")
    parser.add_argument("--strategy", default="ring", help="ring, ulysses, context_parallel or hybrid")
    return parser.parse_args()


def small_model() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    args = arguments()
    mesh = seqpar.init_mesh(ring=-1)  # before the Trainer, which takes the process group it finds
    torch.manual_seed(0)
    with open(args.text, "rb") as file:
        text = file.read()
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokens = AutoTokenizer.from_pretrained(args.model)(text.decode(), return_tensors="pt").input_ids[0]
    else:
        model = small_model()
        tokens = torch.tensor(list(text))
    sequences = [{"input_ids": x, "labels": x} for x in tokens.split(args.length) if len(x) == args.length]

    seqpar.hf.parallelize(model, mesh=mesh, strategy=args.strategy)

    trainer = seqpar.hf.SequenceParallelTrainer(
        model,
        TrainingArguments(
            output_dir=os.environ.get("OUTPUT", "output"),
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
