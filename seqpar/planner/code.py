"""A choice of the planner as code: a training loop, the config of a Trainer, and the command that measures it."""

from __future__ import annotations

from ..masks.mask import Mask
from .hardware import Hardware
from .memory import TILE_TOKENS, Switches
from .setting import WEIGHTS
from .shape import ModelShape
from .step import Choice

# The names of ``seqpar.attention``'s backends, where they differ from the names of kernels in ``hardware.json``.
_BACKENDS = {"flash2": "flash_attn", "flash3": "flash_attn_3", "flash4": "flash_attn_4"}
_CHECKPOINT = {"keep_attention": "attention", "full": "full"}


def code(
    choice: Choice, model: ModelShape, hardware: Hardware, seq_len: int, batch: int, kernel: str, mask: Mask
) -> str:
    """A training loop for a choice. The arguments after it are the plan's.

    Raises:
        ValueError: the choice needs a switch that the package lacks, or it is for a model of diffusers.
    """
    if model.diffusion:
        raise ValueError(f"model: no loop is printed for {model.name} of diffusers; examples/video.py is one")
    if choice.needs:
        raise ValueError(f"the choice needs what the package lacks: {', '.join(choice.needs)}")
    dp, ring, ulysses, tensor = (choice.degrees[name] for name in ("dp", "ring", "ulysses", "tp"))
    ranks, per_host, parts = dp * ring * ulysses * tensor, hardware.gpus_per_host, choice.accumulation
    layout, backend = choice.layout, _BACKENDS.get(kernel, kernel)
    memory = "" if model.mixer else _memory(choice.switches)
    made_for = f'({seq_len}, "{layout}", mesh=mesh'
    if layout == "balanced":
        made_for = f".balanced(mask, {seq_len}, mesh=mesh"
        made_for += f", ranks_per_host={per_host}" if tensor > 1 and ring * ulysses * tensor > per_host else ""
        made_for += f", ulysses={ulysses * tensor}" if ulysses * tensor > 1 else ""
    masked = "mask=mask, " if tensor > 1 and mask != Mask.causal() else ""
    needs_mask = "# mask: the seqpar.Mask of a batch\n" if masked or layout == "balanced" else ""
    sizes = ", ".join(f"{name}={size}" for name, size in choice.degrees.items() if size > 1) or "dp=1"
    how = ", reshard_after_forward=False" if choice.weights in ("zero1", "zero2") else ""
    how += ", mesh=shards" if tensor > 1 else ""
    how += ", mesh=hosts" if choice.weights == "hsdp" else ""
    hosts = f"""\
shape = {ranks // per_host}, {per_host}
hosts = torch.distributed.init_device_mesh(mesh.device_type, shape, mesh_dim_names=("copies", "shards"))
"""
    once = """\
    model.set_requires_gradient_sync(part == accumulation - 1)
    model.set_reshard_after_backward(part == accumulation - 1)
"""
    if tensor > 1:  # a model of the package's tensor-parallel layers
        imports, sync = "from torch import nn\n", "seqpar.sync_gradients(model, mesh=mesh)\n"
        comm = f', "comm": "{choice.comm}"' if choice.comm else ""
        shape = f"{model.heads}, {model.kv_heads}, {model.head_dim}"
        made = f"""\
sharding = seqpar.Sharding{made_for}, strategy="tp_sp")
hidden, vocab = {model.hidden}, {model.vocab}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        rope = seqpar.RotaryEmbedding({model.head_dim})
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        options = {{"mesh": mesh, "rope": rope, "backend": "{backend}"{comm}}}
        self.attention = seqpar.ParallelAttention("tp_sp", hidden, {shape}, **options)
        self.mlp = seqpar.MegatronMLP(hidden, {model.intermediate}, mesh=mesh)

    def forward(self, x, sharding):
        x = x + self.attention(self.norm1(x), {masked}sharding=sharding)
        return x + self.mlp(self.norm2(x), sharding=sharding)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = seqpar.VocabParallelEmbedding(vocab, hidden, mesh=mesh)
        self.blocks = nn.ModuleList(Block() for _ in range({model.layers}))
        self.head = seqpar.VocabParallelHead(hidden, vocab, mesh=mesh)

    def forward(self, tokens, labels):
        x = self.embedding(tokens, sharding)
        for block in self.blocks:
            x = block(x, sharding)
        return self.head(x, labels, sharding)  # the loss of each token


model = Model()
shards = mesh["dp", "ring", "ulysses"]._flatten("shards")
"""
        made += f"{memory}.apply(model, layers=model.blocks)\n" if memory else ""
        layers, config = "model.blocks", ""
        loss = """\
def loss_of(batch):  # the same on the ranks of a sequence
    ids, labels = (sharding.shard(batch[name]) for name in ("input_ids", "labels"))
    return seqpar.token_loss(model(ids, labels), labels, sharding=sharding)
"""
    else:  # a model of transformers
        imports = sync = ""
        comm = f', comm="{choice.comm}"' if choice.comm else ""
        options = f'strategy="{choice.context}", layout="{layout}"{comm}, backend="{backend}"'
        options += f", memory={memory}" if memory else ""
        made = f"""\
sharding = seqpar.Sharding{made_for})  # for tensors of your own
# model: of transformers; batches: of dicts with input_ids and labels, the same on the ranks of a sequence
seqpar.hf.parallelize(model, mesh=mesh, {options})
"""
        if model.mixer and choice.switches.recompute == "full":  # Memory changes layers with attention only
            made += "model.gradient_checkpointing_enable()\n"
        layers = "model.model.layers"
        loss = """\
def loss_of(batch):
    return model(**batch).loss  # the model shards the batch
"""
        size = f", ulysses_size={ulysses}" if choice.context == "hybrid" else ""
        config = f"""\

# The same for the Trainer, TRL or accelerate:
# seqpar.hf.ParallelismConfig(cp_size={ring * ulysses}, {options}{size})
"""
    start = f"seqpar bench --nproc {ring * ulysses}"
    if ring * ulysses > per_host:
        start = f"{_torchrun(ring * ulysses, per_host)} -m seqpar bench"
    strategy = {"context_parallel": choice.comm, "local": "ring"}.get(choice.context, choice.context)
    heads, kv_heads = (max(1, n // tensor) for n in (model.heads, model.kv_heads))
    head_dim = model.v_head_dim or model.head_dim
    seen = {Mask.causal(): " --mask causal", Mask.full(): " --mask full"}.get(mask, "")
    measure = "Measure its attention" if seen else "Measure its attention, with the --mask that is most like yours"
    return f"""\
# {_torchrun(ranks, per_host)} train.py
# A step has {choice.tokens_per_step:,} tokens: {parts} x {batch} sequences of {seq_len:,} on each of {dp} dp ranks.
import torch
{imports}from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import seqpar

mesh = seqpar.init_mesh({sizes})
{needs_mask}{made}{hosts if choice.weights == "hsdp" else ""}# {WEIGHTS[choice.weights]}
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
for layer in {layers}:
    fully_shard(layer, mp_policy=policy{how})
fully_shard(model, mp_policy=policy{how})
optimizer = torch.optim.AdamW(model.parameters())


{loss}

accumulation = {parts}
for part in range(accumulation):
{once if choice.weights == "zero1" else ""}    loss = loss_of(next(batches)) / accumulation
    loss.backward()
{sync}optimizer.step()
optimizer.zero_grad()
{config}
# {measure}:
# {start} --strategy {strategy} --layout {layout} --seq-len {seq_len} \\
#     --batch {batch} --heads {heads} --kv-heads {kv_heads} --head-dim {head_dim}{seen} --no-peers
"""


def _memory(switches: Switches) -> str:
    values = {
        "tiled_mlp": TILE_TOKENS if switches.tiled_mlp else 0,
        "head_groups": switches.head_groups if switches.head_groups > 1 else 0,
        "checkpoint": _CHECKPOINT.get(switches.recompute),
        "offload": switches.offload,
    }
    words = ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in values.items() if value)
    return f"seqpar.Memory({words})" if words else ""


def _torchrun(ranks: int, per_host: int) -> str:
    return f"torchrun --nnodes {-(-ranks // per_host)} --nproc-per-node {min(ranks, per_host)}"
