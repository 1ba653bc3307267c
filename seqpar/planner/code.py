"""A choice of the planner as a file that trains: with ``parallelize`` or with tensor-parallel layers of the package.

The file has a small model and random tokens of its own, so it runs as it is printed, on a CPU too. A line that ends in
``#?`` and some facts is printed if all of them hold, such as ``packed``, or ``!packed`` for the contrary.
"""

from __future__ import annotations

import re
import textwrap

from ..masks.mask import Mask
from .mlp import TILE_TOKENS
from .setting import WEIGHTS, Setting
from .split import INVARIANT, Switches
from .step import Choice

_WIDTH = 100  # columns
_MOST_EDGES = 10  # of documents that are written one by one
# The names of ``seqpar.attention``'s backends, where they differ from the names of kernels in ``hardware.json``.
_BACKENDS = {"flash2": "flash_attn", "flash3": "flash_attn_3", "flash4": "flash_attn_4"}
# The kernels of these backends, and of ``flash``, the FlashAttention-2 inside PyTorch.
KERNELS = {"flash": "flash2", **{backend: kernel for kernel, backend in _BACKENDS.items()}}

_START = """\
{torchrun}
{step}
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
 #? positions
from itertools import pairwise  #? positions
from transformers import {kind}Config, {model_class}  #? !tp

import seqpar
import seqpar.hf  #? !tp

{small}
vocab, layers, hidden, width, heads, kv_heads, head_dim = 512, 2, 64, 128, {heads}, {kv_heads}, 8
batch, seq_len = {batch}, {seq_len}
documents = {documents}  # their boundaries  #? packed


def batches(replica):  # the same on all ranks of a sequence; the labels are the tokens, not shifted
    random = torch.Generator().manual_seed(replica)
    while True:
        tokens = torch.randint(vocab, (batch, seq_len), generator=random)
        labels = tokens.clone()
        labels[:, documents[:-1]] = -100  # no document predicts the next one  #? packed
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(documents)])  #? positions
        positions = positions.expand(batch, -1)  # by these the model tells documents apart  #? positions
        yield {{"input_ids": tokens, "labels": labels, "position_ids": positions}}  #? positions
        yield {{"input_ids": tokens, "labels": labels}}  #? !positions


mesh = seqpar.init_mesh({sizes})
torch.manual_seed(0)  # the same weights on all ranks
"""

_HUGGING_FACE = """\
# Planned for {mask!r}. A model of transformers has the masks of its own layers.  #? other_mask
config = {kind}Config(
    vocab_size=vocab, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=width,
    num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
    max_position_embeddings=seq_len, pad_token_id=None,
)
model = {model_class}(config).to(mesh.device_type)
{parallelize}
model.activation_checkpointing_enable()  #? checkpoint
blocks = max((x for x in model.modules() if isinstance(x, torch.nn.ModuleList)), key=len)


def loss_of(row):
    return model(**row).loss  # the model shards the row and shifts the labels
"""

_TENSOR_PARALLEL = """\
mask = {mask_code}  #? mask
sharding = seqpar.Sharding.balanced(mask, seq_len, mesh=mesh, strategy="tp_sp")  #? balanced
sharding = seqpar.Sharding(seq_len, "{layout}", mesh=mesh, strategy="tp_sp")  #? !balanced


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        rope = seqpar.RotaryEmbedding(head_dim)
        self.norm1, self.norm2 = torch.nn.RMSNorm(hidden), torch.nn.RMSNorm(hidden)
        self.attention = seqpar.ParallelAttention(
            "tp_sp", hidden, heads, kv_heads, head_dim, mesh=mesh, rope=rope{of_attention}
        )
        self.mlp = seqpar.MegatronMLP(hidden, width, mesh=mesh)

    def forward(self, x):
        x = x + self.attention(self.norm1(x), mask=mask, sharding=sharding)  #? masked
        x = x + self.attention(self.norm1(x), sharding=sharding)  #? !masked
        return x + self.mlp(self.norm2(x), sharding=sharding)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = seqpar.VocabParallelEmbedding(vocab, hidden, mesh=mesh)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
        self.head = seqpar.VocabParallelHead(hidden, vocab, mesh=mesh)

    def forward(self, tokens, labels):
        x = self.embedding(tokens, sharding)
        for block in self.blocks:
            x = block(x)
        return self.head(x, labels, sharding)  # the loss of each token


model = Model().to(mesh.device_type)
blocks = model.blocks
{memory}.apply(model, layers=blocks)  #? memory
shards = mesh["dp", "ring", "ulysses"]._flatten("shards")


def loss_of(row):
    labels = torch.nn.functional.pad(row["labels"][:, 1:], (0, 1), value=-100)  # the next tokens
    tokens, labels = sharding.shard(row["input_ids"]), sharding.shard(labels)
    return seqpar.token_loss(model(tokens, labels), labels, sharding=sharding)
"""

_END = """\
 #? hsdp
hosts = torch.distributed.init_device_mesh(  #? hsdp
    mesh.device_type, ({hosts}, {per_host}), mesh_dim_names=("copies", "shards")  #? hsdp
)  #? hsdp

# {weights}
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
options = {{"mp_policy": policy{of_shards}}}
for block in blocks:
    fully_shard(block, **options)
fully_shard(model, **options)
optimizer = torch.optim.AdamW(model.parameters())

accumulation = {parts}
data = batches(mesh.get_local_rank("dp"))
for step in range(3):
    for part in range(accumulation):
        model.set_requires_gradient_sync(part == accumulation - 1)  #? zero1
        model.set_reshard_after_backward(part == accumulation - 1)  #? zero1
        loss = loss_of({{name: x.to(mesh.device_type) for name, x in next(data).items()}})
        (loss / accumulation).backward()
    seqpar.sync_gradients(model, mesh=mesh)  #? tp
    optimizer.step()
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"step {{step}}: {{loss.item():.4f}}")
torch.distributed.destroy_process_group()

# The same for the Trainer, TRL or accelerate, as parallelism_config=:  #? !tp
{config}  #? !tp
 #? !tp !invariant
# Measure its attention{mask_like}:  #? !invariant
{bench}  #? !invariant
"""


def code(choice: Choice, setting: Setting) -> str:
    """A file that trains with a choice.

    Args:
        choice: the choice.
        setting: the model, the cluster, the mask, the sequences and the kernel of the plan.

    Raises:
        ValueError: the choice needs a switch that the package lacks, or it is for a model of diffusers.
    """
    s, model, attention = setting, setting.model, setting.model.attention
    if model.diffusion:
        raise ValueError(f"model: no loop is printed for {model.name} of diffusers; examples/video.py is one")
    if choice.needs:
        raise ValueError(f"the choice needs what the package lacks: {', '.join(choice.needs)}")
    dp, ring, ulysses, tensor = (choice.degrees[name] for name in ("dp", "ring", "ulysses", "tp"))
    ranks, per_host, parts = dp * ring * ulysses * tensor, s.hardware.gpus_per_host, choice.accumulation
    kernel = s.hardware.kernel_name(s.kernel)
    # "auto" takes the first kernel of the hardware, if it is installed.
    backend = "" if kernel in (s.hardware.kernel_name(None), INVARIANT) else _BACKENDS.get(kernel, kernel)
    starts = () if s.mask.branches else s.mask.starts[0]
    edges = [*(x for x in starts if x < s.seq_len), s.seq_len]
    length = -(-s.seq_len // max(1, len(edges) - 1))
    of_memory = _memory(choice.switches) if model.takes_memory else ""
    of_attention = _keywords(comm=choice.comm, backend=backend, deterministic=INVARIANT if s.is_invariant else None)
    words = [*_keywords(strategy=choice.context, layout=choice.layout), *of_attention]
    words += [f"memory={of_memory}"] if of_memory else []
    of_config = [f"cp_size={ring * ulysses}", *words]
    of_config += [f"ulysses_size={ulysses}"] if choice.context == "hybrid" else []
    seen = {Mask.causal(): " --mask causal", Mask.full(): " --mask full"}.get(s.mask, "")
    packed, masked, hsdp = len(starts) > 1, s.mask != Mask.causal(), choice.weights == "hsdp"
    facts = {
        "tp": tensor > 1,
        "packed": packed,
        "positions": packed and tensor == 1,
        "other_mask": not packed and s.mask != (Mask.causal() if model.causal else Mask.full()),
        "checkpoint": choice.switches.recompute == "full" and not model.takes_memory,
        "mask": masked or choice.layout == "balanced",
        "masked": masked,
        "balanced": choice.layout == "balanced",
        "memory": bool(of_memory),
        "hsdp": hsdp,
        "invariant": s.is_invariant,
        "zero1": choice.weights == "zero1",
    }
    mesh_of_shards = ', "mesh": hosts' if hsdp else ', "mesh": shards' if tensor > 1 else ""
    return _printed(_START + (_TENSOR_PARALLEL if tensor > 1 else _HUGGING_FACE) + _END, facts).format(
        torchrun=_command(f"{_torchrun(ranks, per_host)} train.py"),
        step=_comment(
            f"A step has {choice.tokens_per_step:,} tokens: {parts} x {s.batch} sequences of {s.seq_len:,} on each of "
            f"{dp} dp ranks. Planned for the attention kernel {kernel}."
        ),
        small=_comment(
            f"A small model and random tokens, to try this file; put your own here. {model.name} has {model.depth} "
            f"layers of hidden size {model.hidden}, width {model.mlp.width if model.mlp else 0} and head_dim "
            f"{attention.head_dim}, and {model.vocab} words."
        ),
        kind="Llama" if model.causal else "EuroBert",
        model_class="LlamaForCausalLM" if model.causal else "EuroBertForMaskedLM",
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        batch=s.batch,
        seq_len=s.seq_len,
        # Many boundaries are replaced by as many of equal length.
        documents=edges if len(edges) <= _MOST_EDGES else f"[*range(0, seq_len, {length}), seq_len]",
        sizes=", ".join(_keywords(**{name: n for name, n in choice.degrees.items() if n > 1})) or "dp=1",
        mask=s.mask,
        mask_code="seqpar.Mask.documents(documents)" if packed else repr(s.mask).replace("Mask.", "seqpar.Mask."),
        layout=choice.layout,
        of_attention="".join(f", {word}" for word in of_attention),
        memory=of_memory,
        parallelize=_call("seqpar.hf.parallelize", ["model", "mesh=mesh", *words], _WIDTH),
        config=textwrap.indent(_call("seqpar.hf.ParallelismConfig", of_config, _WIDTH - 2), "# "),
        hosts=ranks // per_host,
        per_host=per_host,
        weights=WEIGHTS[choice.weights],
        of_shards=(', "reshard_after_forward": False' if choice.weights in ("zero1", "zero2") else "") + mesh_of_shards,
        parts=parts,
        mask_like="" if seen else ", with the --mask that is most like yours",
        bench=_bench(choice, s, f"{seen}{f' --backend {backend}' if backend else ''}"),
    )


def _printed(text: str, facts: dict[str, bool]) -> str:
    """The lines of a text whose facts hold."""
    lines = [line.partition("#?") for line in text.splitlines()]
    holds = facts | {f"!{name}": not value for name, value in facts.items()}
    return "".join(f"{line.rstrip()}\n" for line, _, needed in lines if all(holds[x] for x in needed.split()))


def _memory(switches: Switches) -> str:
    words = _keywords(
        tiled_mlp=TILE_TOKENS if switches.tiled_mlp else 0,
        head_groups=switches.head_groups if switches.head_groups > 1 else 0,
        checkpoint={"keep_attention": "attention", "full": "full"}.get(switches.recompute),
        offload=switches.offload,
    )
    return f"seqpar.Memory({', '.join(words)})" if words else ""


def _bench(choice: Choice, setting: Setting, options: str) -> str:
    """The command that measures the attention of a choice, as a comment."""
    s, x, tensor = setting, setting.model.attention, choice.degrees["tp"]
    ranks = choice.degrees["ring"] * choice.degrees["ulysses"]
    start = f"seqpar bench --nproc {ranks}"
    if ranks > s.hardware.gpus_per_host:
        start = f"{_torchrun(ranks, s.hardware.gpus_per_host)} -m\0seqpar\0bench"
    strategy = {"context_parallel": choice.comm, "local": "ring"}.get(choice.context, choice.context)
    return _command(
        f"{start} --strategy {strategy} --layout {choice.layout} --seq-len {s.seq_len} --batch {s.batch} "
        f"--heads {max(1, x.heads // tensor)} --kv-heads {max(1, x.kv_heads // tensor)} --head-dim {x.dims[1]}"
        f"{options} --no-peers"
    )


def _keywords(**values: str | int | None) -> list[str]:
    """The keyword arguments whose values are not empty."""
    return [f"{name}={value!r}".replace("'", '"') for name, value in values.items() if value]


def _call(function: str, words: list[str], width: int) -> str:
    """A call on one line, or with its arguments in lines of their own."""
    line = f"{function}({', '.join(words)})"
    return line if len(line) <= width else "\n".join([f"{function}(", *(f"    {word}," for word in words), ")"])


def _comment(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False)


def _command(text: str) -> str:
    """A command as a comment, of lines of whole options that end with a backslash."""
    options = re.sub(r"(--[\w-]+) (?!-)", "\\1\0", text)
    lines = textwrap.wrap(options, _WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    return " \\\n#     ".join(["# " + lines[0], *lines[1:]]).replace("\0", " ")


def _torchrun(ranks: int, per_host: int) -> str:
    """The start of the command that each host runs."""
    hosts = -(-ranks // per_host)
    several = f"--nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500"
    return f"torchrun {several if hosts > 1 else '--standalone'} --nproc-per-node {min(ranks, per_host)}"
