"""A choice of the planner as code: a training loop, the config of a Trainer, and the command that measures it."""

from __future__ import annotations

from ..mask import Mask
from .hardware import Hardware
from .model import ModelShape
from .setting import WEIGHTS
from .step import Choice

# The names of ``seqpar.attention``'s backends, where they differ from the names of kernels in ``hardware.json``.
_BACKENDS = {"flash2": "flash_attn", "flash3": "flash_attn_3", "flash4": "flash_attn_4"}
_RECOMPUTE = {
    "none": [],
    "keep_attention": ['{"use_reentrant": False, "context_fn": seqpar.keep_attention}'],
    "full": ['{"use_reentrant": False}'],
}


def code(
    choice: Choice, model: ModelShape, hardware: Hardware, seq_len: int, batch: int, kernel: str, mask: Mask
) -> str:
    """A training loop for a choice. The arguments after it are the plan's.

    Raises:
        ValueError: the choice needs a switch that the package lacks.
    """
    if choice.needs:
        raise ValueError(f"the choice needs what the package lacks: {', '.join(choice.needs)}")
    degrees = {name: size for name, size in choice.degrees.items() if size > 1}
    sizes = ", ".join(f"{name}={size}" for name, size in degrees.items())
    ranks = sequence = 1
    for name, size in choice.degrees.items():
        ranks *= size
        sequence *= 1 if name == "dp" else size
    per_host = min(ranks, hardware.gpus_per_host)
    start = f"torchrun --nnodes {-(-ranks // per_host)} --nproc-per-node {per_host}"
    backend = _BACKENDS.get(kernel, kernel)
    is_tensor = choice.degrees["tp"] > 1
    lines = [
        f"# {start} train.py",
        f"# A step has {choice.tokens_per_step:,} tokens: {choice.accumulation} x {batch} sequences of {seq_len:,} tokens on each of "
        f"{choice.degrees['dp']} dp ranks.",
        "import torch",
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
        "",
        "import seqpar",
        "",
        f"mesh = seqpar.init_mesh({sizes or 'dp=1'})",
    ]
    body = _tensor_parallel if is_tensor else _transformers
    lines += body(choice, model, seq_len, backend, mask)
    lines += [
        f"accumulation = {choice.accumulation}",
        "for part in range(accumulation):",
        *(["    last = part == accumulation - 1", *_once_a_step("last")] if choice.weights == "zero1" else []),
        "    loss = loss_of(next(batches)) / accumulation",
        "    loss.backward()",
        *(["seqpar.sync_gradients(model, mesh=mesh)"] if is_tensor else []),
        "optimizer.step()",
        "optimizer.zero_grad()",
        "",
    ]
    if not is_tensor:
        lines += ["# The same for the Trainer, TRL or accelerate:", f"# {_config(choice, sequence, backend)}"]
    return "\n".join([*lines, f"# Measure its attention: {_bench(choice, model, seq_len, batch, sequence, per_host, mask)}"])


def _options(choice: Choice) -> str:
    """The arguments that name the strategy of attention."""
    comm = f', comm="{choice.comm}"' if choice.comm else ""
    return f'strategy="{choice.context}", layout="{choice.layout}"{comm}'


def _transformers(choice: Choice, model: ModelShape, seq_len: int, backend: str, mask: Mask) -> list[str]:
    """A model of transformers, named ``model``, whose layers are ``model.model.layers``."""
    how = "".join(f"model.gradient_checkpointing_enable({x})\n" for x in _RECOMPUTE[choice.switches.recompute])
    return [
        f'sharding = seqpar.Sharding({seq_len}, "{choice.layout}", mesh=mesh)  # which tokens each rank holds',
        "# model: of transformers; batches: of dicts with input_ids and labels, the same on the ranks of a sequence",
        f'seqpar.hf.parallelize(model, mesh=mesh, {_options(choice)}, backend="{backend}")',
        *how.splitlines(),
        *_wrapping(choice, "model.model.layers"),
        "",
        "",
        "def loss_of(batch):",
        "    return model(**seqpar.hf.shard_batch(batch, mesh=mesh, " + f'layout="{choice.layout}")).loss',
        "",
        "",
    ]


def _tensor_parallel(choice: Choice, model: ModelShape, seq_len: int, backend: str, mask: Mask) -> list[str]:
    """A model of the package's layers."""
    m = model
    checkpoint = {
        "none": "x = block(x, sharding)",
        "keep_attention": "x = checkpoint(block, x, sharding, use_reentrant=False, context_fn=seqpar.keep_attention)",
        "full": "x = checkpoint(block, x, sharding, use_reentrant=False)",
    }[choice.switches.recompute]
    comm = f', comm="{choice.comm}"' if choice.comm else ""
    return [
        "from torch import nn",
        "from torch.utils.checkpoint import checkpoint",
        "",
        f'sharding = seqpar.Sharding({seq_len}, "{choice.layout}", mesh=mesh, strategy="tp_sp")',
        f"hidden, vocab = {m.hidden}, {m.vocab}",
        "",
        "",
        "class Block(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        rope = seqpar.RotaryEmbedding({m.head_dim})",
        "        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)",
        "        self.attention = seqpar.ParallelAttention(",
        f'            "tp_sp", hidden, {m.heads}, {m.kv_heads}, {m.head_dim}, mesh=mesh, rope=rope, layout="{choice.layout}", backend="{backend}"{comm}',
        "        )",
        f"        self.mlp = seqpar.MegatronMLP(hidden, {m.intermediate}, mesh=mesh)",
        "",
        "    def forward(self, x, sharding):",
        "        x = x + self.attention(self.norm1(x), sharding=sharding)",
        "        return x + self.mlp(self.norm2(x), sharding=sharding)",
        "",
        "",
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.embedding = seqpar.VocabParallelEmbedding(vocab, hidden, mesh=mesh)",
        f"        self.blocks = nn.ModuleList(Block() for _ in range({m.layers}))",
        "        self.head = seqpar.VocabParallelHead(hidden, vocab, mesh=mesh)",
        "",
        "    def forward(self, tokens, labels):",
        "        x = self.embedding(tokens, sharding)",
        "        for block in self.blocks:",
        f"            {checkpoint}",
        "        return self.head(x, labels, sharding)  # the loss of each token",
        "",
        "",
        "model = Model()",
        *_wrapping(choice, "model.blocks", ', mesh=mesh["dp"]'),
        "",
        "",
        "def loss_of(batch):  # the same batch on the ranks of a sequence",
        '    ids, labels = (sharding.shard(batch[name]) for name in ("input_ids", "labels"))',
        "    return seqpar.token_loss(model(ids, labels), labels, sharding=sharding)",
        "",
        "",
    ]


def _wrapping(choice: Choice, layers: str, where: str = "") -> list[str]:
    """``fully_shard`` over all ranks, or as ``choice.weights`` says."""
    if choice.weights == "hsdp":
        where = ", mesh=hosts"
    keeps = ", reshard_after_forward=False" if choice.weights in ("zero1", "zero2") else ""
    return [
        f"# {WEIGHTS[choice.weights]}",
        *(
            [
                "per_host = torch.accelerator.device_count() or 1",
                'hosts = torch.distributed.init_device_mesh(mesh.device_type, (mesh.size() // per_host, per_host), mesh_dim_names=("copies", "shards"))',
            ]
            if choice.weights == "hsdp"
            else []
        ),
        "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
        f"for layer in {layers}:",
        f"    fully_shard(layer, mp_policy=policy{where}{keeps})",
        f"fully_shard(model, mp_policy=policy{where}{keeps})",
        "optimizer = torch.optim.AdamW(model.parameters())",
    ]


def _once_a_step(last: str) -> list[str]:
    """Keep weights and gradients whole until the last backward of a step."""
    return [f"    model.set_requires_gradient_sync({last})", f"    model.set_reshard_after_backward({last})"]


def _config(choice: Choice, sequence: int, backend: str) -> str:
    """The arguments of ``ParallelismConfig``."""
    ulysses = f", ulysses_size={choice.degrees['ulysses']}" if choice.context == "hybrid" else ""
    return f'seqpar.hf.ParallelismConfig(cp_size={sequence}, {_options(choice)}{ulysses}, backend="{backend}")'


def _bench(
    choice: Choice, model: ModelShape, seq_len: int, batch: int, sequence: int, per_host: int, mask: Mask
) -> str:
    """The command that measures the attention of a choice, on the ranks of one sequence without tensor parallelism."""
    tensor = choice.degrees["tp"]
    ranks = sequence // tensor
    start = f"seqpar bench --nproc {ranks}"
    if ranks > per_host:
        start = f"torchrun --nnodes {-(-ranks // per_host)} --nproc-per-node {per_host} -m seqpar bench"
    strategy = {"context_parallel": choice.comm, "local": "ring"}.get(choice.context, choice.context)
    heads = max(1, model.heads // tensor)
    kv_heads = max(1, min(heads, model.kv_heads // tensor))
    shown = {Mask.causal(): " --mask causal", Mask.full(): " --mask full"}.get(mask, "")
    return (
        f"{start} --strategy {strategy} --layout {choice.layout} --seq-len {seq_len} --batch {batch} --heads {heads} "
        f"--kv-heads {kv_heads} --head-dim {model.v_head_dim or model.head_dim}{shown} --no-peers"
    )
