"""Trains with Hugging Face's Trainer under simple_fsdp: clips, logs, evaluates, and saves what from_pretrained() opens.

    torchrun --nproc-per-node 2 examples/hf_trainer.py FOLDER     # a tiny random Llama, saved in FOLDER

The Trainer would put DistributedDataParallel around a model that is sharded already. It has a way for models that
from_pretrained() has sharded, which `ShardedTrainer` takes; with it checkpoints hold the model alone, for which
TrainingArguments must have save_only_model=True. It is private to transformers: this is for 5.23.

Needs transformers, accelerate, and simple_fsdp.py and gloo.py: copied beside this file, or this project installed."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gloo import one_worker_thread
from simple_fsdp import data_parallel


def whole(value):
    """Of a shard. A collective: every rank has to call it."""
    return value.detach().full_tensor() if isinstance(value, DTensor) else value


class ShardedTrainer(Trainer):
    """For a model that data_parallel() has wrapped. Cannot resume, nor load the best model at the end."""

    is_distributed_loading_by_transformers = property(lambda self: True, lambda self, value: None)

    def _get_grad_norm(self, model, grad_norm=None):
        return whole(super()._get_grad_norm(model, grad_norm))

    def _save(self, output_dir=None, state_dict=None):
        state_dict = {
            name: whole(value).cpu()
            for name, value in (state_dict or self.model.state_dict()).items()
        }
        super()._save(output_dir, state_dict)


def tiny_llama() -> torch.nn.Module:
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **shape))


# Your data set; here each token is the one before plus one.
def samples(number: int, seed: int) -> list[dict]:
    first = torch.randint(256, (number, 1), generator=torch.Generator().manual_seed(seed))
    return [dict(input_ids=row, labels=row) for row in (first + torch.arange(16)) % 256]


if __name__ == "__main__":
    one_worker_thread()  # gloo's, on CPUs
    on_cpu = dict() if torch.cuda.is_available() else dict(use_cpu=True, ddp_backend="gloo")
    args = TrainingArguments(  # also starts torch.distributed
        sys.argv[1], max_steps=6, per_device_train_batch_size=4, train_sampling_strategy="sequential",
        learning_rate=3e-3, lr_scheduler_type="constant", max_grad_norm=0.5, logging_steps=1, eval_strategy="steps",
        eval_steps=3, save_steps=6, save_only_model=True, disable_tqdm=True, report_to="none", **on_cpu)  # fmt: skip
    mesh = dist.init_device_mesh(args.device.type, (args.world_size,))
    model = data_parallel(tiny_llama().to(args.device), mesh)
    trainer = ShardedTrainer(
        model, args, train_dataset=samples(64, seed=1), eval_dataset=samples(16, seed=2)
    )
    trainer.train()
    if dist.get_rank() == 0:
        print(*map(json.dumps, trainer.state.log_history), sep="\n")
    dist.barrier(), dist.destroy_process_group()
