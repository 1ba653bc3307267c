"""A choice of the planner as code: a training loop, the config of a Trainer, and the command that measures it."""

from __future__ import annotations

from ..masks.mask import Mask
from .hardware import Hardware
from .memory import TILE_TOKENS, Switches
from .model import ModelShape
from .setting import WEIGHTS
from .step import Choice

# The names of ``seqpar.attention``'s backends, where they differ from the names of kernels in ``hardware.json``.
_BACKENDS = {"flash2": "flash_attn", "flash3": "flash_attn_3", "flash4": "flash_attn_4"}
_CHECKPOINT = {"keep_attention": "attention", "full": "full"}

_START = """\
# {start} train.py
# A step has {tokens:,} tokens: {accumulation} x {batch} sequences of {seq_len:,} on each of {dp} dp ranks.
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import seqpar

mesh = seqpar.init_mesh({sizes})
"""
# For a model of transformers.
_MODEL = """\
sharding = seqpar.Sharding({seq_len}, "{layout}", mesh=mesh)  # for tensors of your own
# model: of transformers; batches: of dicts with input_ids and labels, the same on the ranks of a sequence
seqpar.hf.parallelize(model, mesh=mesh, {options})
"""
_MODEL_LOSS = """\
def loss_of(batch):
    return model(**batch).loss  # the model shards the batch
"""
# For a model of the package's tensor-parallel layers.
_LAYERS = """\
sharding = seqpar.Sharding({seq_len}, "{layout}", mesh=mesh, strategy="tp_sp")
hidden, vocab = {hidden}, {vocab}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        rope = seqpar.RotaryEmbedding({head_dim})
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        options = {{"mesh": mesh, "rope": rope, "layout": "{layout}", "backend": "{backend}"{comm}}}
        self.attention = seqpar.ParallelAttention("tp_sp", hidden, {heads}, {kv_heads}, {head_dim}, **options)
        self.mlp = seqpar.MegatronMLP(hidden, {intermediate}, mesh=mesh)

    def forward(self, x, sharding):
        x = x + self.attention(self.norm1(x), sharding=sharding)
        return x + self.mlp(self.norm2(x), sharding=sharding)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = seqpar.VocabParallelEmbedding(vocab, hidden, mesh=mesh)
        self.blocks = nn.ModuleList(Block() for _ in range({layers}))
        self.head = seqpar.VocabParallelHead(hidden, vocab, mesh=mesh)

    def forward(self, tokens, labels):
        x = self.embedding(tokens, sharding)
        for block in self.blocks:
            x = block(x, sharding)
        return self.head(x, labels, sharding)  # the loss of each token


model = Model()
shards = mesh["dp", "ring", "ulysses"]._flatten("shards")
"""
_LAYERS_LOSS = """\
def loss_of(batch):  # the same on the ranks of a sequence
    ids, labels = (sharding.shard(batch[name]) for name in ("input_ids", "labels"))
    return seqpar.token_loss(model(ids, labels), labels, sharding=sharding)
"""
_HOSTS = """\
shape = {hosts}, {per_host}
hosts = torch.distributed.init_device_mesh(mesh.device_type, shape, mesh_dim_names=("copies", "shards"))
"""
_WRAP = """\
# {weights}
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
for layer in {layer_list}:
    fully_shard(layer, mp_policy=policy{how})
fully_shard(model, mp_policy=policy{how})
optimizer = torch.optim.AdamW(model.parameters())


{loss}

accumulation = {accumulation}
for part in range(accumulation):
{once}    loss = loss_of(next(batches)) / accumulation
    loss.backward()
{sync}optimizer.step()
optimizer.zero_grad()
"""
_ONCE = """\
    model.set_requires_gradient_sync(part == accumulation - 1)
    model.set_reshard_after_backward(part == accumulation - 1)
"""
_CONFIG = """\

# The same for the Trainer, TRL or accelerate:
# seqpar.hf.ParallelismConfig(cp_size={sequence}, {options}{ulysses})
"""
_BENCH = """\

# Measure its attention:
# {start} --strategy {strategy} --layout {layout} --seq-len {seq_len} \\
#     --batch {batch} --heads {heads} --kv-heads {kv_heads} --head-dim {head_dim}{mask} --no-peers
"""


def code(
    choice: Choice, model: ModelShape, hardware: Hardware, seq_len: int, batch: int, kernel: str, mask: Mask
) -> str:
    """A training loop for a choice. The arguments after it are the plan's.

    Raises:
        ValueError: the choice needs a switch that the package lacks.
    """
    if choice.needs:
        raise ValueError(f"the choice needs what the package lacks: {', '.join(choice.needs)}")
    dp, ring, ulysses, tensor = (choice.degrees[name] for name in ("dp", "ring", "ulysses", "tp"))
    ranks, per_host = dp * ring * ulysses * tensor, hardware.gpus_per_host
    backend, saving = _BACKENDS.get(kernel, kernel), _memory(choice.switches)
    comm = f', comm="{choice.comm}"' if choice.comm else ""
    options = f'strategy="{choice.context}", layout="{choice.layout}"{comm}, backend="{backend}"'
    options += f", memory={saving}" if saving else ""
    common = {"seq_len": seq_len, "layout": choice.layout, "options": options, "batch": batch}
    sizes = {name: size for name, size in choice.degrees.items() if size > 1}
    text = _START.format(
        start=_torchrun(ranks, per_host),
        tokens=choice.tokens_per_step,
        accumulation=choice.accumulation,
        dp=dp,
        sizes=", ".join(f"{name}={size}" for name, size in sizes.items()) or "dp=1",
        **common,
    )
    how = ", reshard_after_forward=False" if choice.weights in ("zero1", "zero2") else ""
    if tensor > 1:
        shape = {name: getattr(model, name) for name in ("hidden", "vocab", "heads", "kv_heads", "head_dim", "layers")}
        comm = f', "comm": "{choice.comm}"' if choice.comm else ""
        text += _LAYERS.format(**common, **shape, intermediate=model.intermediate, backend=backend, comm=comm)
        text += f"{saving}.apply(model, layers=model.blocks)\n" if saving else ""
        how += ", mesh=shards"
    else:
        text = text.replace("from torch import nn\n", "")
        text += _MODEL.format(**common)
    if choice.weights == "hsdp":
        text += _HOSTS.format(hosts=ranks // per_host, per_host=per_host)
        how += ", mesh=hosts"
    text += _WRAP.format(
        weights=WEIGHTS[choice.weights],
        layer_list="model.blocks" if tensor > 1 else "model.model.layers",
        how=how,
        loss=_LAYERS_LOSS if tensor > 1 else _MODEL_LOSS,
        accumulation=choice.accumulation,
        once=_ONCE if choice.weights == "zero1" else "",
        sync="seqpar.sync_gradients(model, mesh=mesh)\n" if tensor > 1 else "",
    )
    if tensor == 1:
        size = f", ulysses_size={ulysses}" if choice.context == "hybrid" else ""
        text += _CONFIG.format(sequence=ring * ulysses, options=options, ulysses=size)
    start = f"seqpar bench --nproc {ring * ulysses}"
    if ring * ulysses > per_host:
        start = f"{_torchrun(ring * ulysses, per_host)} -m seqpar bench"
    return text + _BENCH.format(
        **{**common, "options": None},
        start=start,
        strategy={"context_parallel": choice.comm, "local": "ring"}.get(choice.context, choice.context),
        heads=max(1, model.heads // tensor),
        kv_heads=max(1, model.kv_heads // tensor),
        head_dim=model.v_head_dim or model.head_dim,
        mask={Mask.causal(): " --mask causal", Mask.full(): " --mask full"}.get(mask, ""),
    )


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
