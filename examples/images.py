"""Fine-tune Gemma 3 on images with captions, each sequence sharded over all ranks.

    torchrun --nproc-per-node 2 examples/images.py --text LICENSE
    python examples/images.py --text LICENSE                           # one process, the same losses

Only one argument is needed for sequence parallelism: parallelism_config. Every rank runs the vision tower. The merged
embeddings are sharded before the text model. The captions are the lines of the text, and the images are
random pixels. Without --model, the script trains a small Gemma 3 with random weights, whose tokens are bytes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from accelerate import PartialState

import seqpar.hf


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file")
    parser.add_argument("--model", help="a model's name on the Hub (google/gemma-3-4b-pt), or its folder")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--output", default="output", help="the Trainer's folder")
    return parser.parse_args(argv)


def small_model() -> tuple[Any, Any]:
    tokens = {f"{x}_token": f"<{x}>" for x in ("boi", "image", "eoi")}  # 259 to 261
    tokenizer = hf.ByT5Tokenizer(extra_ids=0, extra_special_tokens=tokens)
    image_processor = hf.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.Gemma3Config(
        text_config={**size, "vocab_size": len(tokenizer), "num_key_value_heads": 2, "head_dim": 16,
                     "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**size, "image_size": 56, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4, boi_token_index=259, image_token_index=260, eoi_token_index=261,
    )  # fmt: skip
    model = hf.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)  # zeros by default
    return model, hf.Gemma3Processor(image_processor, tokenizer, image_seq_length=4)


def main(argv: list[str] | None = None) -> list[float]:
    args = arguments(argv)
    torch.manual_seed(0)
    model, processor = small_model() if args.model is None else (
        hf.AutoModelForImageTextToText.from_pretrained(args.model), hf.AutoProcessor.from_pretrained(args.model)
    )  # fmt: skip
    captions = [x.strip() for x in Path(args.text).read_text().splitlines() if x.strip()]
    pixels = torch.randint(256, (len(captions), 3, 56, 56), dtype=torch.uint8)
    rows = [{"image": x, "text": f"{processor.boi_token} {y}"} for x, y in zip(pixels, captions, strict=True)]

    def collate(rows: list[dict[str, Any]]) -> Any:
        pictures = {"images": [[row["image"]] for row in rows], "text": [row["text"] for row in rows]}
        batch = processor(**pictures, padding=True, return_tensors="pt")
        counts = (batch["token_type_ids"] == 0) & (batch["attention_mask"] == 1)
        return {**batch, "labels": batch["input_ids"].masked_fill(~counts, -100)}

    settings = hf.TrainingArguments(
        parallelism_config=seqpar.hf.ParallelismConfig(cp_size=-1), output_dir=args.output, max_steps=args.steps,
        per_device_train_batch_size=4, logging_steps=1, save_strategy="no", report_to="none",
        remove_unused_columns=False, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = hf.Trainer(model, settings, train_dataset=rows, data_collator=collate)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": losses}))
    return losses


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()
