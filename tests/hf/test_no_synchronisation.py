"""A Hugging Face model and its loss do not make the host wait for the GPU, which fake CUDA tensors show without one."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

import seqpar
import seqpar.hf
from seqpar.hf.batch import BatchCut, shard_for_rank
from seqpar.hf.calls import forward
from seqpar.hf.losses import loss as loss_of_ranks

from ..fake_cuda import fake_cuda
from ..strategies.test_no_synchronisation import HostToDevice, without_a_gpu


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_model_and_its_loss_read_nothing_back(strategy: str) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8
    )
    with without_a_gpu(8):
        sizes = {"ring": 8} if strategy == "ring" else {"ulysses": 8}
        mesh = seqpar.init_mesh(**sizes, device_type="cpu")
        ids = torch.arange(131)[None]
        batch = {"input_ids": ids % 64, "labels": ids % 64, "position_ids": ids % 50}  # documents of 50 tokens
        local = shard_for_rank(batch, BatchCut(8, "zigzag"), dist.get_rank())
        # Fake tensors have no subclasses for missing logits and for reduced losses.
        unread = mock.patch.multiple(forward, check_loss=mock.DEFAULT, MissingLogits=mock.DEFAULT)
        unmarked = mock.patch.object(loss_of_ranks, "_note", lambda loss, _: loss)
        with fake_cuda(), torch.no_grad(), unread, unmarked:
            with torch.device("cuda"):
                model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
            with unset_fake_temporarily():  # the trial run reads values, once
                seqpar.hf.parallelize(model, strategy=strategy, mesh=mesh, layout="zigzag")
            on_gpu = {
                name: torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x
                for name, x in local.items()
            }
            model(**on_gpu)
            with HostToDevice() as second:  # as the next step
                loss = model(**on_gpu).loss
    assert loss.shape == () and loss.is_cuda and not second.copies
