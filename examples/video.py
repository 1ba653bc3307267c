"""Fine-tune a video model of diffusers. All ranks share each video. The lines marked "# seqpar" are the change.

    torchrun --nproc-per-node 2 examples/video.py --lora 4
    python examples/video.py --lora 4                           # one process, the same losses

Without --model, the script trains a small Wan with random weights. The videos and texts are random latents; a script of
your own loads those that its VAE and text encoder have computed.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from torch import Tensor

import seqpar  # seqpar
import seqpar.diffusers  # seqpar


def small_model() -> Any:
    return WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=10, freq_dim=8,
        ffn_dim=16, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip


def video_and_text(step: int, config: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Latents ``[b, channels, frames, height, width]``, whose size changes, and texts ``[b, tokens, channels]``."""
    shape = 2, config.in_channels, 3 + step % 2, 6, 10
    return torch.randn(shape, generator=generator), torch.randn(2, 5 + step, config.text_dim, generator=generator)


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Wan transformer's name on the Hub, or its folder")
    parser.add_argument("--lora", type=int, default=0, help="the rank of LoRA; 0 trains all weights")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dp", type=int, default=1, help="videos that are computed at a time")
    parser.add_argument("--strategy", default="ring", choices=["ring", "ulysses", "context_parallel"])
    args = parser.parse_args(argv)
    mesh = seqpar.init_mesh(dp=args.dp, ring=-1)  # seqpar: which ranks share a video
    dp_rank, device = mesh["dp"].get_local_rank(), mesh.device_type
    torch.manual_seed(0)
    model = (WanTransformer3DModel.from_pretrained(args.model) if args.model else small_model()).to(device)
    if args.lora:
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=args.lora, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    model.enable_gradient_checkpointing()
    seqpar.diffusers.parallelize(model, mesh=mesh, strategy=args.strategy)  # seqpar
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)

    generator = torch.Generator().manual_seed(1 + dp_rank)  # ranks of one video draw the same noise and time
    losses = []
    for step in range(args.steps):
        video, text = (x.to(device) for x in video_and_text(step, model.config, generator))
        noise = torch.randn(video.shape, generator=generator).to(device)
        time = torch.rand(len(video), generator=generator).to(device)  # [b], from video to noise
        noisy = torch.lerp(video, noise, time[:, None, None, None, None])
        (velocity,) = model(noisy, time * 1000, text, return_dict=False)
        loss = (velocity - (noise - video)).square().mean()
        loss.backward()
        seqpar.sync_gradients(model, mesh=mesh)  # seqpar: the mean over all ranks
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {losses[-1]:.6f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
