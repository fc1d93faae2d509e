"""The weights of a step on a Tape: gathered, cast, cut up; their gradients bucketed and reduced; and what a rank holds
beside a step's own buffers. Imports no torch.

`schedule.PlannedStep` adds what the model computes. Names end with the number of the block. n tokens of a micro-batch,
D width, H heads, K key/value heads, d head dimension, F hidden width, V vocabulary.
"""

from lab.planning.liveness import GRADIENTS, WEIGHTS, Make, Tape
from trainer.step_costs import Architecture, moment_size, muon

# Torch's, of two threads.
CUBLAS_MIB = {"cpu": 0.0, "sm_80": 2 * 8.125, "sm_90": 2 * 32.0, "sm_100": 2 * 32.0}
PARAMETERS = "parameters"
FROZEN = "frozen parameters"
MOMENTS = "Adam's moments"
ALLOWANCE = "workspaces of cuBLAS, an allowance"
SIZE = {"fp32": 4, "bf16": 2}
# Bytes of an element of [B, T, D]: rotations in fp32, and the gate activated and multiplied apart.
IN_FP32 = 40


def remat_of(config, block: int) -> str:
    """The policy of one block of resolved flags, as model.ModelConfig.remat_of."""
    n = round(config.remat_ratio * config.depth)
    return config.remat if (block + 1) * n // config.depth > block * n // config.depth else "none"


def fp32_logits(config) -> bool:
    """Whether logits and their gradient exist in fp32: in eager steps, as cross_entropy makes them, or if asked."""
    kind = getattr(config, "logits", "auto")
    return kind == "fp32" or (kind == "auto" and config.compile == "none")


def shard_group(config, ranks: int) -> int:
    """Ranks over which one copy of the parameters is spread."""
    if config.mode == "replicate" or config.wrapper == "none":
        return 1
    return ranks // config.replicas if config.mode == "hybrid_shard" else ranks


def trained(config, a: Architecture) -> int:
    """Parameters that are trained: all; with LoRA two matrices [in, r] and [r, out] beside each product of a block,
    experts apart."""
    rank = getattr(config, "lora", 0)
    return (
        rank * sum((m + n) * count for (m, n), count in a.adapted.items()) if rank else a.parameters
    )


def before_step(config, a: Architecture, ranks: int, arch: str) -> dict[str, float]:
    """{piece: bytes} of what the last micro-batch finds."""
    shards = shard_group(config, ranks)
    stored = SIZE[getattr(config, "master_dtype", "fp32")]
    trained_count = trained(config, a)
    frozen = a.parameters if trained_count < a.parameters else 0
    base = {
        PARAMETERS: stored * trained_count / shards,
        FROZEN: min(stored, a.stored) * frozen / shards,
        MOMENTS: moment_bytes(config, a) / shards,
        ALLOWANCE: CUBLAS_MIB[arch] * 2**20,
    }
    if config.accum_sync == "last":
        # What the gather filled stays beside the weights that are cut from it.
        base |= {WEIGHTS: SIZE[config.param_dtype] * a.parameters * (1 + (shards > 1))}
        shards = 1
    return base | ({GRADIENTS: stored * trained_count / shards} if config.grad_accum > 1 else {})


def moment_bytes(config, a: Architecture) -> float:
    """Of the optimizer's state on all ranks of a shard group: two moments of what is trained, one of Muon's."""
    return moment_size(config) * (2 * trained(config, a) - muon(config) * a.hidden_parameters)


def update_bytes(config, a: Architecture, ranks: int) -> float:
    """Read and written by the norm of the gradients and by AdamW: parameter, gradient and moments read, parameter and
    moments written. Muon also writes and reads what is sent."""
    stored = SIZE[getattr(config, "master_dtype", "fp32")] * trained(config, a)
    sent = 4 * SIZE[config.muon_dtype] * a.hidden_parameters if muon(config) else 0
    return (4 * stored + 2 * moment_bytes(config, a) + sent) / shard_group(config, ranks)


class Weights:
    """Of one micro-batch of resolved flags `config`. whole: gradients stay on the rank and weights are there already
    (--accum-sync last)."""

    def __init__(self, config, a: Architecture, ranks: int):
        self.config = config
        self.a = a
        self.ranks = ranks
        self.whole = config.accum_sync == "last"
        self.shards = 1 if self.whole else shard_group(config, ranks)
        # FSDP2 copies a single rank's weights as if they came from others.
        self.gathers = self.shards > 1 or (config.wrapper == "fsdp2" and not self.whole)
        self.reduces = ranks > self.shards and config.accum_sync == "every"
        self.eager = config.compile == "none"
        # Each block is a graph of its own; embedding, last norm, head and all collectives stand outside.
        self.by_blocks = config.compile == "blocks"
        # FSDP2's blocks are compiled with Inductor's own options: norms are kept, and no order saves memory.
        self.plain = self.by_blocks and config.wrapper == "fsdp2"
        self.tape = Tape()
        self.p = SIZE[config.param_dtype]
        self.r = SIZE[config.reduce_dtype] if ranks > 1 else 4
        self.reduced = "fp32" if self.r == 4 else "bf16"
        self.m = SIZE[getattr(config, "master_dtype", "fp32")]
        self.lora = getattr(config, "lora", 0)
        # Name of a result that is made again -> that of the one that was kept.
        self.kept_products = {}
        n = self.n = config.batch * config.seqlen
        self.U = n * self.p * a.width
        self.logits = n * self.p * a.vocab
        self.Q = n * self.p * a.heads * a.head_dim
        self.KV = n * self.p * a.kv_heads * a.head_dim
        self.fan = a.hidden * max(a.active, 1)  # hidden elements of a token
        self.F = n * self.p * self.fan
        q = a.heads * a.head_dim
        kv = a.kv_heads * a.head_dim
        self.outs = dict(q=q, k=kv, v=kv)
        mlp = a.width * a.hidden * max(a.experts, 1)
        self.ups = ("gate", "up") if a.gated else ("up",)
        self.weights = dict(q=a.width * q, k=a.width * kv, v=a.width * kv, o=a.width * q)
        self.weights |= dict.fromkeys((*self.ups, "down"), mlp)
        self.block = a.block_parameters
        self.head = a.width * a.vocab
        # FSDP2's root group: embedding, last norm and head, gathered together for the whole step, reduced together last
        self.root = config.wrapper == "fsdp2" and self.gathers
        self.ends = 2 * self.head + a.final_norm if self.root else self.head
        self.root_grads = []
        self.lean = config.mlp == "lean"
        self.policies = [remat_of(config, i) for i in range(a.depth)]
        if self.by_blocks:  # what stands between the two recomputed halves is recomputed as well
            self.policies = ["block" if kind == "both" else kind for kind in self.policies]
        self.to_cast = []  # (gradient, what it is cast into)
        self.sums_made = 0
        self.casts = 0
        self.again_made = set()
        self.buckets_made = set()
        self.at = ""  # where the operations stand that follow, in words
        self.waiting, self.crossing = (), ()  # (name, elements) of the reduction under way

    # Small things

    def make(self, name: str, nbytes: float, piece: str = "workspace", dtype: str = "") -> Make:
        return Make(name, nbytes, piece, dtype or self.config.param_dtype)

    def op(self, where: str, reads, *makes: Make, over: bool = False, **more) -> None:
        reads = [self.kept_products.get(name, name) for name in reads]
        self.tape.op(f"{self.at}{where}", reads, makes, over=over and not self.eager, **more)

    def taken(self, name: str) -> str:
        """A result is taken out of those of an operation: a step of its own for the compiler."""
        self.op("taken", [name], self.make(f"{name} taken", 0), work=(("bytes", 0),))
        return f"{name} taken"

    def product(
        self,
        where: str,
        reads,
        out: str,
        rows: int,
        inner: int,
        cols: int,
        piece: str = "workspace",
    ) -> None:
        """out [rows, cols] = [rows, inner] @ [inner, cols]"""
        self.op(
            where,
            reads,
            self.make(out, rows * cols * self.p, piece),
            work=(("mm", rows, inner, cols),),
        )

    def sums(self) -> Make:
        """Partial sums of the two gradients of a norm, fp32: 16 rows in one where one kernel also computes the rows, as
        the compiler has it for many and large ones; else 32 in all."""
        self.sums_made += 1
        n = self.n
        D = self.a.width
        rows = n // 16 if n >= max(2 * D, 4096) and n * D >= 5 * 2**20 else 32
        return self.make(f"sums{self.sums_made}", 8 * D * rows, dtype="fp32")

    def hidden(self, name: str) -> list[str]:
        """What holds the MLP's hidden tensor before its activation: that of a gate, too."""
        return [f"{part} {name}" for part in self.ups]

    def inputs(self, i: int) -> list[str]:
        """What holds the input of block i."""
        return self.x0 if i == 0 else [f"x{i}"]

    # What recomputed and eager blocks do otherwise

    def keeps(self, what: str, to: str) -> bool:
        """Whether a recomputed block keeps a product: --remat-keep names them, --remat-ops means every second one."""
        kept = {"qkv": ("q", "k", "v")}.get(getattr(self.config, "remat_keep", "none"), ())
        if getattr(self.config, "remat_ops", False):
            kept += ("q", "v", "gate h")
        if to[0] != "'" or what not in kept:
            return False
        self.kept_products[what + to] = what + to[1:]
        return True

    def moved_in_fp32(self, times: int) -> None:
        """What eager RMSNorms and rotations of a block move more than one kernel each would: both take their input to
        fp32 and back, step by step."""
        if self.eager and self.a.gated:
            self.op(
                "norms and rotations",
                [],
                work=(("bytes", times * IN_FP32 * self.n * self.a.width),),
            )

    def eager_keeps(self, i: int) -> None:
        """What an eager block keeps for backward and a compiled one makes again: the activated gate, and the inputs of
        the norms in fp32."""
        if self.eager and self.a.gated:
            self.op(
                "what it keeps",
                [],
                self.make(f"eager{i}", self.F + 4 * self.U),
                work=(("bytes", 0),),
            )

    # Weights and their gradients

    def still_gathered(self, name: str) -> bool:
        """Whether weights were gathered before, and stayed."""
        return (not self.config.reshard and name[0] == "b") or (self.root and name[1:] == "head")

    def gather(self, name: str, elements: int) -> None:
        """Starts an all-gather: the shard in the dtype that is sent, and room for the whole."""
        if not self.gathers or self.still_gathered(name):
            return
        sent = 0 if self.plain else elements * self.p / self.shards  # FSDP2 frees it
        self.op(f"gather of {name}", [], self.make(f"{name} sent", sent, WEIGHTS))
        work = (("start", name, "all_gather", elements * self.p),)
        self.op(
            f"gather of {name}",
            [f"{name} sent"],
            self.make(f"{name} bucket", elements * self.p, WEIGHTS),
            work=work,
        )

    def arrive(self, name: str, parts: dict[str, int]) -> None:
        """Waits for it, and cuts the bucket into weights, unless it is the head's alone."""
        if not self.gathers or self.still_gathered(name):
            return
        self.op(f"gather of {name}", [f"{name} sent", f"{name} bucket"], work=(("wait", name),))
        made = [self.make(f"{name} {part}", size * self.p, WEIGHTS) for part, size in parts.items()]
        self.op(f"weights of {name}", [f"{name} bucket"], *made)

    def weight(self, name: str, part: str) -> str:
        """The name of a weight where it is used. Where nothing is gathered it is cast there: once in
        a graph, in compiled backward of a single rank for each product."""
        if self.root and part == "head":
            return "emb bucket"
        if self.gathers:
            where = name if self.config.reshard else f"f{name[1:]}"
            return f"{where} {'bucket' if part == 'head' else part}"
        if self.p < 4 and not self.whole:
            cast = f"{name} {part}"
            if name[0] == "b" and not self.eager and not self.reduces:
                self.casts += 1
                cast += f" {self.casts}"
            if cast not in self.again_made:
                self.again_made.add(cast)
                size = self.head if part == "head" else self.weights[part]
                self.op(f"cast of {name} {part}", [], self.make(cast, size * self.p, WEIGHTS))
            return cast
        return f"{name} {part}"

    def wgrad(self, part: str, reads, i: int, grads: list[str]) -> None:
        """The gradient of a block's weight, [out, n] @ [n, in]."""
        name = f"w{part}{i}"
        D = self.a.width
        if self.lora and self.a.experts and part in (*self.ups, "down"):
            return  # frozen, without an adapter
        cols = {"o": self.outs["q"], "down": self.fan}.get(part, D)
        rows = {"o": D, "down": D}.get(part) or self.outs.get(part, self.fan)
        if self.lora:  # the adapter: forward, and backward to its input and both of its matrices
            made = self.make(name, self.lora * (rows + cols) * self.p)
            work = tuple(("mm", self.n, self.lora, size) for size in (rows, cols) for _ in range(3))
            self.op(f"adapter of {part}", reads, made, work=work)
        else:
            made = self.make(name, self.weights[part] * self.p)
            self.op(f"gradient of {part}'s weight", reads, made, work=(("mm", rows, self.n, cols),))
        if self.gathers or self.reduces:
            grads.append(name)
        else:
            self.keep_local_gradient(name, self.weights[part])

    def keep_until_update(self, *names: str) -> None:
        """Gradients live until the update. An eager step adds each to that of the micro-batches before at once."""
        if not (self.eager and self.config.grad_accum > 1):
            self.tape.keep(*names)

    def keep_local_gradient(self, name: str, elements: int, at_once: bool = False) -> None:
        """A gradient that stays on the rank until the update, in fp32, or until it is summed. at_once: what makes it is
        no product of the graph."""
        if self.p == self.m or self.whole or self.lora:
            self.keep_until_update(name)
            return
        made = self.make(f"{name} fp32", elements * 4, GRADIENTS, dtype="fp32")
        self.to_cast.append((name, made))
        self.keep_until_update(made.name)
        if self.eager or at_once:
            self.cast_gradients()

    def cast_gradients(self) -> None:
        """Of a single rank: compiled, behind the last product."""
        for name, made in self.to_cast:
            self.op("gradients in fp32", [name], made)
        self.to_cast.clear()

    def start(self, name: str, elements: int) -> None:
        """Starts the reduction of a bucket, and waits for the one before."""
        work = ("start", f"G {name}", "all_reduce", elements * self.r)
        made = []
        if self.gathers:
            work = ("start", f"G {name}", "reduce_scatter", elements * self.r)
            size = elements * self.r / self.shards
            made = [self.make(f"gradient {name}", size, GRADIENTS, self.reduced)]
        self.op(f"reduction of {name}", [f"G {name}"], *made, work=(work,))
        self.wait_for_reduction()
        self.waiting = name, elements

    def wait_for_reduction(self) -> None:
        """Waits for the reduction under way. With hybrid_shard the shards go into a bucket of their own, whose
        reduction across replicas starts, and the one before it is waited for."""
        if not self.waiting:
            return
        name, elements = self.waiting
        self.waiting = ()
        self.op(
            f"reduction of {name}",
            [f"G {name}", f"G {name} sources"],
            work=(("wait", f"G {name}"),),
        )
        if not (self.gathers and self.reduces):
            self.keep_reduced_bucket(f"gradient {name}" if self.gathers else f"G {name}", elements)
            return
        size = elements * self.r / self.shards
        made = self.make(f"A {name}", size, GRADIENTS, dtype=self.reduced)
        self.op(f"bucket of {name} across", [f"gradient {name}"], made, tied=True)
        work = ("start", f"A {name}", "all_reduce across", size)
        self.op(f"reduction of {name} across", [f"A {name}"], work=(work,), tied=True)
        self.wait_for_reduction_across()
        self.crossing = name, elements

    def wait_for_reduction_across(self) -> None:
        """Waits for the reduction across replicas under way."""
        if self.crossing:
            name, elements = self.crossing
            self.crossing = ()
            self.op(f"reduction of {name} across", [f"A {name}"], work=(("wait", f"A {name}"),))
            self.keep_reduced_bucket(f"A {name}", elements)

    def keep_reduced_bucket(self, source: str, elements: int) -> None:
        """A reduced bucket stays until the update, in fp32: if it came in bf16, each of its gradients by itself."""
        if self.r == self.m or self.lora:
            self.keep_until_update(source)
            return
        name = source.rpartition(" ")[2]
        large = self.weights if name[0] == "b" else {name: self.head}
        sizes = large | {"rest": elements - sum(large.values())}
        stored = {4: "fp32", 2: "bf16"}[self.m]
        made = [
            self.make(
                f"{source} {part} {stored}", size * self.m / self.shards, GRADIENTS, dtype=stored
            )
            for part, size in sizes.items()
        ]
        self.op(f"{source} as it is stored", [source], *made, tied=True)
        self.keep_until_update(*(m.name for m in made))

    def bucket(self, name: str, elements: int, grads: list[str]) -> None:
        """Gradients copied into one buffer, whose reduction starts."""
        if self.lora:
            elements = trained(self.config, self.a) // self.a.depth
        if self.root and name in ("head", "emb"):
            self.root_grads += grads
            elements = self.ends
            grads = self.root_grads * (name == "emb")
        if (self.gathers or self.reduces) and grads:
            late = name in self.buckets_made
            sources = []
            if self.by_blocks and not self.root and name != "head":
                # The gradients that are copied live as long as their bucket.
                sources = [self.make(f"G {name} sources", elements * self.r, GRADIENTS, "fp32")]
            self.op(
                f"bucket of {name}",
                [*grads, *[f"G {name}"] * late],
                *[] if late else [self.bucket_of(name, elements)],
                *sources,
                over=name == "head",  # alone, and computed once: its own bucket
            )
            self.start(name, elements)

    def make_bucket(self, name: str, elements: int) -> None:
        """Makes the buffer of a bucket."""
        if self.lora:
            elements = trained(self.config, self.a) // self.a.depth
        if self.gathers or self.reduces:
            self.buckets_made.add(name)
            self.op(f"bucket of {name}", [], self.bucket_of(name, elements))

    def bucket_of(self, name: str, elements: int) -> Make:
        return Make(f"G {name}", elements * self.r, GRADIENTS, dtype=self.reduced)
