"""Fine-tune with TRL's SFTTrainer on packed documents. All ranks share each row of documents.

    torchrun --nproc-per-node 2 examples/sft.py --text LICENSE --length 512
    python examples/sft.py --text LICENSE --length 512                 # one process, the same losses

Only one argument is needed for sequence parallelism: parallelism_config. The documents are the paragraphs of the text,
and no token sees the tokens of another document. Without --model, the script trains a small Mistral with random weights
and sliding-window attention, whose tokens are bytes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, MistralConfig
from trl import SFTConfig, SFTTrainer

import seqpar.hf


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file")
    parser.add_argument("--model", help="a model's name on the Hub, or its folder")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a row, all ranks together")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--output", default="output", help="the Trainer's folder")
    return parser.parse_args(argv)


def small_model() -> tuple[Any, Any]:
    config = MistralConfig(
        vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=128, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="seqpar"), ByT5Tokenizer(extra_ids=0)


def main(argv: list[str] | None = None) -> list[float]:
    args = arguments(argv)
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="seqpar")
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = small_model()
    paragraphs = [x.strip() for x in Path(args.text).read_text().split("\n\n") if x.strip()]

    settings = SFTConfig(
        parallelism_config=seqpar.hf.ParallelismConfig(cp_size=-1),
        packing=True,
        max_length=args.length,
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = SFTTrainer(
        model, settings, train_dataset=Dataset.from_dict({"text": paragraphs}), processing_class=tokenizer
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": losses}))
    return losses


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()
