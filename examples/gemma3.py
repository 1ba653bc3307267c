"""Fine-tune Gemma 3, whose layers alternate sliding windows and full attention, on packed documents with the Trainer.

    torchrun --nproc-per-node 2 examples/gemma3.py --text LICENSE --documents 8
    python examples/gemma3.py --text LICENSE --documents 8             # one process, the same losses

Only one argument is needed for sequence parallelism: parallelism_config. The documents are the paragraphs of the text.
Without --model, the script trains a small Gemma 3 with random weights, whose tokens are bytes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorWithFlattening,
    Gemma3TextConfig,
    Trainer,
    TrainingArguments,
)

import seqpar.hf


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file")
    parser.add_argument("--model", help="a model's name on the Hub (google/gemma-3-1b-it), or its folder")
    parser.add_argument("--documents", type=int, default=32, help="paragraphs in a row, all ranks together")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--output", default="output", help="the Trainer's folder")
    return parser.parse_args(argv)


def small_model() -> tuple[Any, Any]:
    config = Gemma3TextConfig(
        vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=64, layer_types=["sliding_attention", "full_attention"],
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
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
    paragraphs = [x.strip() for x in Path(args.text).read_text().split("\n\n") if x.strip()]
    documents = [{"input_ids": tokenizer(x).input_ids} for x in paragraphs]

    settings = TrainingArguments(
        parallelism_config=seqpar.hf.ParallelismConfig(cp_size=-1),
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.documents,  # the collator packs them into one row
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, settings, train_dataset=documents, data_collator=DataCollatorWithFlattening())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": losses}))
    return losses


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()
