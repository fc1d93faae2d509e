"""A run of finetune.py: trainer.run.Run with a model, data and weights of Hugging Face, and a folder in the end."""

from copy import deepcopy

from trainer.attention import DTYPES
from trainer.checkpoint.load import say
from trainer.distributed.terminal import tell
from trainer.finetuning import checks
from trainer.finetuning.chat import ChatBatches
from trainer.finetuning.config import Config
from trainer.finetuning.export import export, files_of
from trainer.finetuning.load import load_weights
from trainer.finetuning.model import HuggingFaceModel, blank_model, tokenizer_of
from trainer.logging import Sinks
from trainer.run import Run

PREVIEW = 200  # characters of each part of the example that is shown before the first step


def open_data(c: Config, vocab: int, rank: int = 0, world: int = 1) -> ChatBatches:
    """The examples of --data, as resolved flags cut and pad them. DataError for bad ones, or a bad tokenizer."""
    rules = dict(bad_lines=c.bad_lines, unknown_keys=c.unknown_keys, seam=c.seam, template_args=c.arguments)
    return ChatBatches(c.data, tokenizer_of(c.model), global_batch=c.effective_batch, seqlen=c.seqlen, vocab=vocab,
                       seed=c.seed, rank=rank, world=world, pad=c.pad, hold_out=c.eval_every > 0,
                       eval_source=c.eval_data, **rules)  # fmt: skip


class FineTune(Run):
    """One run of resolved flags of finetune.py on one rank; raises as Run."""

    check = staticmethod(checks.check)

    def open(self, c: Config) -> tuple[Config, ChatBatches, HuggingFaceModel]:
        """Flags that lack nothing, the data, and the model on the meta device."""
        model = blank_model(c.model, c.remat_ratio, DTYPES[c.param_dtype])
        vocab = model.model.get_input_embeddings().num_embeddings
        data = open_data(c, vocab, self.rank, self.world)
        if c.export is not None:
            files_of(model.model, c.model)  # raises now, not after training
        most = getattr(model.model.config, "max_position_embeddings", None)
        if most is not None and c.seqlen > most:
            raise ValueError(f"--seqlen {c.seqlen}: the model knows {most} positions (max_position_embeddings of its "
                             "config.json); use as many at most")  # fmt: skip
        if "dynamic" in str(model.rotary.get("rope_type")) and c.compile not in ("none", "blocks"):
            raise ValueError(f"--compile {c.compile}: rope_type dynamic of config.json branches on values, which one "
                             "graph cannot; use --compile none")  # fmt: skip
        model.drawn, kernel = c.random, model.model.config._attn_implementation
        self.attention = f"{kernel} of transformers"
        if c.pad == "longest":
            self.step_tokens = None  # differs from step to step
        config = model.model.config
        return c.completed(config.num_hidden_layers, config.hidden_size, vocab, data.epoch_samples), data, model

    def count_flops(self) -> tuple[dict[str, float], str]:
        """As Run's, or none where rows have no one length."""
        if self.step_tokens is None:
            return {}, "FLOPs are not counted, MFU and tok/s are n/a: rows of --pad longest differ in length"
        blank, self.blank = self.blank, deepcopy(self.blank)  # longrope leaves a tensor on meta in what is run
        self.blank.model.set_experts_implementation("batched_mm")  # as many products, and it runs on meta
        try:
            return super().count_flops()
        finally:
            self.blank = blank

    def build(self) -> None:
        """As Run's, then looks at the model with the weights that it now has."""
        super().build()
        self.step.dynamic = self.c.pad == "longest"
        if not self.c.random:  # else it has been done
            self.step.model.look(self.device)
        if self.c.pad == "pack":
            self.step.model.check_packed(self.device)
        if self.blank.noise:
            say(f"noise is off: {self.blank.noise} of config.json")
        usual = self.blank.rotary.get("original_max_position_embeddings")
        if self.blank.rotary.get("rope_type") == "longrope" and self.c.seqlen > usual:
            say(f"longrope: rows of more than {usual} tokens have the long factors, also for shorter examples in them, "
                f"which inference gives the short ones; use --seqlen {usual} at most for these")  # fmt: skip
        passes = self.c.effective_batch / self.batches.epoch_samples
        if passes > 1:
            say(f"each step passes {passes:.1f} times over all {self.batches.epoch_samples} rows of --data; "
                "--effective-batch says how many rows it takes")  # fmt: skip

    def fill(self) -> None:
        """Loads the model's weights, unless they are drawn or a checkpoint has newer ones."""
        if not (self.c.random or self.found):
            self.told |= load_weights(self.c, self.step.model, self.group)

    def train(self, sinks: Sinks) -> None:
        """As Run's, after a look at one example and before --export."""
        if self.rank == 0:
            tell(f"the first example, with [[what is learned]]:\n{self.batches.preview(0, False, PREVIEW)}")
        super().train(sinks)
        if self.c.export is not None:
            with self.aside("export"):
                self.sampled.append(f"export   {self.exported()}")

    def after_done(self) -> None:
        """--export, of which the run that trained was kept."""
        if self.c.export is not None:
            self.build()
            with self.saver:
                line = self.exported()
            if self.rank == 0:
                tell(f"export   {line}")

    def exported(self) -> str:
        """Writes --export; returns the line to print. Raises CheckpointError."""
        return export(self.c, self.step.model, self.group, lambda: self.watchdog.beat(self.state.step, "export"))
