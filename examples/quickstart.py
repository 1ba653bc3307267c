"""Attention over one sequence that all ranks share, checked against PyTorch's own attention.

python examples/quickstart.py                                 # one process
torchrun --nproc-per-node 4 examples/quickstart.py            # four ranks
"""

import torch
import torch.nn.functional as F

import seqpar

mesh = seqpar.init_mesh(ring=-1)  # all ranks share one sequence
sharding = seqpar.Sharding(1024, "zigzag", mesh=mesh)  # which of its tokens each rank holds
torch.set_default_device(mesh.device_type)
torch.manual_seed(0)  # the same q, k, v on every rank
q, k, v = torch.randn(3, 1, 1024, 8, 64)  # [batch, seq, heads, head_dim]

q_local, k_local, v_local = (sharding.shard(x) for x in (q, k, v))
out_local = seqpar.ring_attention(q_local, k_local, v_local, sharding=sharding)
out = sharding.unshard(out_local)

qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))  # [batch, heads, seq, head_dim]
expected = F.scaled_dot_product_attention(qt, kt, vt, is_causal=True).transpose(1, 2)
rank, tokens, error = mesh.get_rank(), q_local.shape[1], (out - expected).abs().max()
print(f"rank {rank}: {tokens} of 1024 tokens, largest difference {error:.1e}")
