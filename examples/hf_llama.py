"""Trains a Hugging Face causal language model under simple_fsdp, one bucket of collectives per decoder layer.

    torchrun --nproc-per-node 2 examples/hf_llama.py [NAME]     # default: a tiny random Llama

Needs transformers, and simple_fsdp.py, overlap.py and gloo.py: copied beside this file, or this project installed."""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from gloo import one_worker_thread
from overlap import compile_options
from simple_fsdp import MixedPrecisionPolicy, data_parallel


def tiny_llama() -> torch.nn.Module:
    shape = dict(hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, num_hidden_layers=3, **shape))


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    torch.manual_seed(0), one_worker_thread()  # gloo's, on CPUs
    mesh = dist.init_device_mesh(device.type, (int(os.environ.get("WORLD_SIZE") or sys.exit("start it by torchrun")),))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32) if sys.argv[1:] else tiny_llama()
    policy = MixedPrecisionPolicy(torch.bfloat16 if cuda else None, torch.float32)  # the masters stay fp32
    model = data_parallel(model.to(device), mesh, mp_policy=policy)
    loss_of = torch.compile(lambda x: model(x, labels=x, use_cache=False).loss, options=compile_options(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(5):
        tokens = torch.randint(256, (4, 64), device=device)  # your batches, another on each rank
        (loss := loss_of(tokens)).backward()
        optimizer.step(), optimizer.zero_grad()
        print(f"rank {dist.get_rank()}  step {step + 1}  loss {loss.item():.6f}", flush=True)
    torch._dynamo.reset(), dist.barrier(), dist.destroy_process_group()  # compiled code holds the group
