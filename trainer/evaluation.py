"""What the model makes of data that it never trains on: its loss there (--eval-every), what it writes (--sample).

    found = evaluate(config, step, batches, device, check_for_stop)  # {"eval_loss": .., "eval_bpb": ..}, on every rank
    lines = sample(config, step, batches, device, check_for_stop)    # for people

Collectives over all ranks. Both run the module itself, without gradients and without the compiler, in every --wrapper
and --compile mode: no other graph is compiled for them, and the graphs of training do not change.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from model import IGNORE
from trainer.config import Config
from trainer.data import Batches
from trainer.step import Step

TEMPERATURE = 0.8  # of --sample: below 1, likely tokens are drawn more often than the model says


@contextmanager
def _inference(config: Config, step: Step, device: torch.device) -> Iterator[None]:
    before, step.phase = step.phase, "eval"  # for the message when memory runs out
    dtype = getattr(step, "autocast", None)  # of --wrapper ddp
    # FlexAttention without its kernel would make all scores at once.
    stance = torch.compiler.set_stance("default" if config.attn == "flex" else "force_eager")
    with stance, torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype is not None):
        yield
    for module in step.model.modules():
        if isinstance(module, FSDPModule):  # without a backward the root stays gathered
            module.reshard()
    step.phase = before


def evaluate(
    config: Config,
    step: Step,
    batches: Batches,
    device: torch.device,
    check_for_stop: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """eval_loss, nats per token of --eval-every's held-out batches, with eval_bpb, bits per byte, of data that
    is bytes and eval_ppl, perplexity, of other data. The same on every rank, and but for rounding on any number of
    ranks. check_for_stop: called at every batch."""
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed losses, tokens
    with _inference(config, step, device):
        for tokens, targets, *extra in batches.held_out(config.eval_batches):
            check_for_stop()
            inputs = {name: t for batch_inputs in extra for name, t in batch_inputs.items()}
            for x, y, micro_inputs in step.micro_batches(tokens, targets, inputs):
                # [B, T] each.
                x = x.to(device)
                y = y.to(device)
                micro_inputs = {name: t.to(device) for name, t in micro_inputs.items()}
                total += torch.stack(
                    (
                        step.model(x, y, config.loss_chunk, **micro_inputs).double(),
                        (y != IGNORE).sum(),
                    )
                )
        if batches.error:  # the next boundary ends the run
            total[0] = math.nan
        loss, count = step.all_reduce(total, "sum").tolist()
    figures = dict(eval_loss=loss / count, eval_examples=batches.held_examples(config.eval_batches))
    if batches.bytes:
        return figures | dict(eval_bpb=figures["eval_loss"] / math.log(2))
    return figures | dict(eval_ppl=math.exp(min(figures["eval_loss"], 700)))


def sample(
    config: Config,
    step: Step,
    batches: Batches,
    device: torch.device,
    check_for_stop: Callable[[], None] = lambda: None,
) -> list[str]:
    """Lines with --sample tokens that the model writes after a prompt, of held-out data where there is some, without
    those after one that ends an answer. Each costs a forward of --seqlen tokens. check_for_stop: called before each."""
    T = config.seqlen
    generator = torch.Generator(device="cpu").manual_seed(config.seed)
    ids = batches.prompt(max(1, T // 2))
    prompt_length = len(ids)
    vocab = 256 if batches.bytes else config.vocab
    with _inference(config, step, device):
        for _ in range(config.sample):
            check_for_stop()
            seen = torch.tensor([ids[-T:]], device="cpu")  # [1, up to T]
            # No token sees what follows it.
            window = torch.nn.functional.pad(seen, (0, T - seen.shape[1]))
            logits: Tensor = step.model(window.to(device))[0, seen.shape[1] - 1, :vocab]
            chances = (logits.float().cpu().nan_to_num() / TEMPERATURE).softmax(0)
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
    # All are written first: ranks that stopped at different ones would wait for each other.
    ends = [i for i in range(prompt_length, len(ids)) if ids[i] in batches.ends]
    written = ids[prompt_length : ends[0] + 1 if ends else None]
    before, after = batches.readable(ids[:prompt_length]), batches.readable(written)
    if batches.bytes:  # a line, though text has several, and their indentation
        before, after = (text.replace("\n", "⏎") for text in (before, after))
        before = " " * 9 + (before if len(before) < 30 else f"..{before[-24:]}")
    of = "held-out" if batches.held else "training"
    return [
        f"sample   {prompt_length} {batches.unit} of {of} data, then after | {len(written)} that the model wrote:",
        f"{before}|{after}",
    ]
