"""A choice of the planner as a file that trains: with ``parallelize`` or with tensor-parallel layers of the package.

The file has a small model and random tokens of its own, so it runs as it is printed, on a CPU too.
"""

from __future__ import annotations

import re
import textwrap

from ..masks.mask import Mask
from .mlp import TILE_TOKENS
from .setting import WEIGHTS, Setting
from .step import Choice

_WIDTH = 100  # columns
_MOST_EDGES = 10  # of documents that are written one by one
# The names of ``seqpar.attention``'s backends, where they differ from the names of kernels in ``hardware.json``.
_BACKENDS = {"flash2": "flash_attn", "flash3": "flash_attn_3", "flash4": "flash_attn_4"}

_FILE = """\
{head}
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
{imports}
{what}
vocab, layers, hidden, width, heads, kv_heads, head_dim = 512, 2, 64, 128, {heads}, {kv_heads}, 8
batch, seq_len = {batch}, {seq_len}
{documents}

def batches(replica):  # the same on all ranks of a sequence; the labels are the tokens, not shifted
    random = torch.Generator().manual_seed(replica)
    while True:
        tokens = torch.randint(vocab, (batch, seq_len), generator=random)
{row}

mesh = seqpar.init_mesh({sizes})
torch.manual_seed(0)  # the same weights on all ranks
{model}

# {weights}
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
options = {{{options}}}
for block in blocks:
    fully_shard(block, **options)
fully_shard(model, **options)
optimizer = torch.optim.AdamW(model.parameters())

accumulation = {parts}
data = batches(mesh.get_local_rank("dp"))
for step in range(3):
    for part in range(accumulation):
{once}        loss = loss_of({{name: x.to(mesh.device_type) for name, x in next(data).items()}})
        (loss / accumulation).backward()
{sync}    optimizer.step()
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"step {{step}}: {{loss.item():.4f}}")
torch.distributed.destroy_process_group()
{rest}"""

_HUGGING_FACE = """\
config = {kind}Config(
    vocab_size=vocab, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=width,
    num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
    max_position_embeddings=seq_len, pad_token_id=None,
)
model = {model_class}(config).to(mesh.device_type)
{parallelize}
{checkpoint}blocks = max((x for x in model.modules() if isinstance(x, torch.nn.ModuleList)), key=len)


def loss_of(row):
    return model(**row).loss  # the model shards the row and shifts the labels
"""

_TENSOR_PARALLEL = """\
{sharding}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        rope = seqpar.RotaryEmbedding(head_dim)
        self.norm1, self.norm2 = torch.nn.RMSNorm(hidden), torch.nn.RMSNorm(hidden)
        self.attention = seqpar.ParallelAttention(
            "tp_sp", hidden, heads, kv_heads, head_dim, mesh=mesh, rope=rope{attention}
        )
        self.mlp = seqpar.MegatronMLP(hidden, width, mesh=mesh)

    def forward(self, x):
        x = x + self.attention(self.norm1(x), {masked}sharding=sharding)
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
{memory}shards = mesh["dp", "ring", "ulysses"]._flatten("shards")


def loss_of(row):
    labels = torch.nn.functional.pad(row["labels"][:, 1:], (0, 1), value=-100)  # the next tokens
    tokens, labels = sharding.shard(row["input_ids"]), sharding.shard(labels)
    return seqpar.token_loss(model(tokens, labels), labels, sharding=sharding)
"""


_HOSTS = """\

hosts = torch.distributed.init_device_mesh(
    mesh.device_type, ({hosts}, {per_host}), mesh_dim_names=("copies", "shards")
)
"""

_ONCE = """\
        model.set_requires_gradient_sync(part == accumulation - 1)
        model.set_reshard_after_backward(part == accumulation - 1)
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
    backend = "" if kernel == s.hardware.kernel_name(None) else _BACKENDS.get(kernel, kernel)
    packed = s.mask.starts[0] if s.mask.starts and len(s.mask.starts[0]) > 1 else ()
    words = (
        f"A step has {choice.tokens_per_step:,} tokens: {parts} x {s.batch} sequences of {s.seq_len:,} on each of {dp} "
        f"dp ranks. Planned for the attention kernel {kernel}."
    )
    width = model.mlp.width if model.mlp else 0
    small = (
        f"A small model and random tokens, to try this file; put your own here. {model.name} has {model.depth} layers "
        f"of hidden size {model.hidden}, width {width} and head_dim {attention.head_dim}, and {model.vocab} words."
    )
    make = _tensor_parallel if tensor > 1 else _hugging_face
    imports, made, rest = make(choice, s, _keywords(comm=choice.comm, backend=backend), bool(packed))
    options, row, lines = ['"mp_policy": policy'], ['"input_ids": tokens', '"labels": labels'], []
    if choice.weights in ("zero1", "zero2"):
        options.append('"reshard_after_forward": False')
    if choice.weights == "hsdp":
        made += _HOSTS.format(hosts=ranks // per_host, per_host=per_host)
        options.append('"mesh": hosts')
    elif tensor > 1:
        options.append('"mesh": shards')
    if packed:
        lines.append("labels[:, documents[:-1]] = -100  # no document predicts the next one")
    if packed and tensor == 1:
        row.append('"position_ids": positions')
        lines.append("positions = torch.cat([torch.arange(b - a) for a, b in pairwise(documents)])")
        lines.append("positions = positions.expand(batch, -1)  # by these the model tells documents apart")
        imports = "\nfrom itertools import pairwise\n" + imports
    lines = ["labels = tokens.clone()", *lines, f"yield {{{', '.join(row)}}}"]
    return _FILE.format(
        head="\n".join([_command(f"{_torchrun(ranks, per_host)} train.py"), _comment(words)]),
        imports=imports,
        what=_comment(small),
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        batch=s.batch,
        seq_len=s.seq_len,
        documents=_documents(packed, s.seq_len),
        row=textwrap.indent("\n".join(lines) + "\n", " " * 8),
        sizes=", ".join(_keywords(**{name: n for name, n in choice.degrees.items() if n > 1})) or "dp=1",
        model=made.rstrip("\n"),
        weights=WEIGHTS[choice.weights],
        options=", ".join(options),
        parts=parts,
        once=_ONCE if choice.weights == "zero1" else "",
        sync="    seqpar.sync_gradients(model, mesh=mesh)\n" if tensor > 1 else "",
        rest=rest + _bench(choice, s, backend),
    )


def _hugging_face(choice: Choice, setting: Setting, options: list[str], packed: bool) -> tuple[str, str, str]:
    """The imports, the model of transformers, and the same as a comment for the Trainer."""
    model, mask, memory = setting.model, setting.mask, _memory(choice, setting)
    words = [
        *_keywords(strategy=choice.context, layout=choice.layout),
        *options,
        *([f"memory={memory}"] if memory else []),
    ]
    ulysses = choice.degrees["ulysses"]
    of_config = [f"cp_size={choice.degrees['ring'] * ulysses}", *words]
    of_config += [f"ulysses_size={ulysses}"] if choice.context == "hybrid" else []
    config = textwrap.indent(_call("seqpar.hf.ParallelismConfig", of_config, _WIDTH - 2), "# ")
    kind, model_class = ("Llama", "LlamaForCausalLM") if model.causal else ("EuroBert", "EuroBertForMaskedLM")
    full = choice.switches.recompute == "full" and not model.takes_memory
    made = _HUGGING_FACE.format(
        kind=kind,
        model_class=model_class,
        parallelize=_call("seqpar.hf.parallelize", ["model", "mesh=mesh", *words], _WIDTH),
        checkpoint="model.activation_checkpointing_enable()\n" if full else "",
    )
    if not packed and mask != (Mask.causal() if model.causal else Mask.full()):
        made = f"# Planned for {mask!r}. A model of transformers has the masks of its own layers.\n{made}"
    imports = f"from transformers import {kind}Config, {model_class}\n\nimport seqpar\nimport seqpar.hf\n"
    return imports, made, f"\n# The same for the Trainer, TRL or accelerate, as parallelism_config=:\n{config}\n"


def _tensor_parallel(choice: Choice, setting: Setting, options: list[str], packed: bool) -> tuple[str, str, str]:
    """The imports, and a model of the package's tensor-parallel layers."""
    mask, memory, masked = setting.mask, _memory(choice, setting), setting.mask != Mask.causal()
    sharding = f'seqpar.Sharding(seq_len, "{choice.layout}", mesh=mesh, strategy="tp_sp")'
    if choice.layout == "balanced":
        sharding = 'seqpar.Sharding.balanced(mask, seq_len, mesh=mesh, strategy="tp_sp")'
    text = "seqpar.Mask.documents(documents)" if packed else repr(mask).replace("Mask.", "seqpar.Mask.")
    made = _TENSOR_PARALLEL.format(
        sharding=(f"mask = {text}\n" if choice.layout == "balanced" or masked else "") + f"sharding = {sharding}",
        attention="".join(f", {word}" for word in options),
        masked="mask=mask, " if masked else "",
        memory=f"{memory}.apply(model, layers=blocks)\n" if memory else "",
    )
    return "\nimport seqpar\n", made, ""


def _documents(starts: tuple[int, ...], seq_len: int) -> str:
    """The line with the boundaries of packed documents; many are replaced by as many of equal length."""
    if not starts:
        return ""
    edges = [*(x for x in starts if x < seq_len), seq_len]
    if len(edges) > _MOST_EDGES:
        length = -(-seq_len // (len(edges) - 1))
        return f"documents = [*range(0, seq_len, {length}), seq_len]  # their boundaries\n"
    return f"documents = {edges}  # their boundaries\n"


def _bench(choice: Choice, setting: Setting, backend: str) -> str:
    """The command that measures the attention of a choice, as a comment."""
    s, x, tensor = setting, setting.model.attention, choice.degrees["tp"]
    ranks = choice.degrees["ring"] * choice.degrees["ulysses"]
    start = f"seqpar bench --nproc {ranks}"
    if ranks > s.hardware.gpus_per_host:
        start = f"{_torchrun(ranks, s.hardware.gpus_per_host)} -m\0seqpar\0bench"
    strategy = {"context_parallel": choice.comm, "local": "ring"}.get(choice.context, choice.context)
    seen = {Mask.causal(): " --mask causal", Mask.full(): " --mask full"}.get(s.mask, "")
    command = (
        f"{start} --strategy {strategy} --layout {choice.layout} --seq-len {s.seq_len} --batch {s.batch} "
        f"--heads {max(1, x.heads // tensor)} --kv-heads {max(1, x.kv_heads // tensor)} --head-dim {x.dims[1]}"
        f"{seen}{f' --backend {backend}' if backend else ''} --no-peers"
    )
    measure = "Measure its attention" if seen else "Measure its attention, with the --mask that is most like yours"
    return f"\n# {measure}:\n{_command(command)}\n"


def _memory(choice: Choice, setting: Setting) -> str:
    """The ``seqpar.Memory`` of a choice, which changes layers with attention only."""
    switches = choice.switches
    words = _keywords(
        tiled_mlp=TILE_TOKENS if switches.tiled_mlp else 0,
        head_groups=switches.head_groups if switches.head_groups > 1 else 0,
        checkpoint={"keep_attention": "attention", "full": "full"}.get(switches.recompute),
        offload=switches.offload,
    )
    return f"seqpar.Memory({', '.join(words)})" if words and setting.model.takes_memory else ""


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
