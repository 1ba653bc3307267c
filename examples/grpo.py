"""Train a language model with TRL's GRPOTrainer, with each sequence sharded over several ranks.

    torchrun --nproc-per-node 2 examples/grpo.py --text LICENSE --cp-size 2
    torchrun --nproc-per-node 2 examples/grpo.py --text LICENSE --cp-size 1    # data-parallel, for comparison

Only parallelism_config is added to a script of TRL. Each rank samples completions of its own prompts, and stores a
prompt once for them. Without --model, it trains a small random Llama on bytes to write lower-case letters.
"""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig
from trl import GRPOConfig, GRPOTrainer

import seqpar.hf


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file, whose lines are the prompts")
    parser.add_argument("--model", help="a model's name on the Hub, or its folder")
    parser.add_argument("--cp-size", type=int, default=-1, help="ranks that share each sequence; -1: all")
    parser.add_argument("--length", type=int, default=32, help="tokens of a completion, at most")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--output", default="output", help="the Trainer's folder")
    return parser.parse_args()


def lower_case(completions: list[str], **kwargs: object) -> list[float]:
    """The reward of a completion: its share of lower-case letters."""
    return [sum(map(str.islower, text)) / max(1, len(text)) for text in completions]


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        tokenizer = ByT5Tokenizer(padding_side="left")
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
    prompts = [line.strip() for line in Path(args.text).read_text().splitlines() if len(line) > 20]
    trainer = GRPOTrainer(
        model,
        reward_funcs=lower_case,
        args=GRPOConfig(
            output_dir=args.output,
            parallelism_config=seqpar.hf.ParallelismConfig(args.cp_size, strategy="ring", share_prompts=True),
            max_steps=args.steps,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=args.length,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        steps = [entry for entry in trainer.state.log_history if "reward" in entry]
        print(json.dumps({name: [entry[name] for entry in steps] for name in ("reward", "grad_norm")}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
