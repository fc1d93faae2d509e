"""The operations of a training step in the order of its compiled graphs (--compile fwdbwd), on a Tape: what each reads,
makes and computes. Peak memory (`step_peak`) and time (step_time.py) are read off the same tape.

    step_peak(config, ranks=8)                # of resolved flags; Peak(nbytes, moment, pieces)
    PlannedStep(config, architecture, 8).tape        # what it is read off

The order is that of the code which Inductor generates with the options of overlap.py: the weights of a block are
gathered while the block before computes, its gradients are reduced while the next one computes, and those of the
weights lie in memory until the end of the block, when they are copied into one bucket. Names end with the number of
the block; a quote marks what backward makes again. n tokens of a micro-batch, D width, H heads, K key/value heads, d
head dimension, F hidden width, V vocabulary, L depth. Imports no torch.
"""

from lab.planning.liveness import GRADIENTS, LOGITS, WORKSPACE, Make, Peak, Tape
from lab.planning.weights import SIZE, Weights, before_step, fp32_logits, shard_group, trained
from trainer.step_costs import Architecture, muon, reference

AGAIN = {"attn": ("attn", "both", "block"), "mlp": ("mlp", "both", "block", "pointwise")}
FINAL_IN_FP32 = "last input in fp32", "last input normed"


class PlannedStep(Weights):
    """Forward and backward of one micro-batch, on `tape`."""

    def __init__(self, config, a: Architecture, ranks: int):
        super().__init__(config, a, ranks)
        self.forward()
        self.backward()
        if config.ahead < 1 and (self.gathers or self.reduces):
            self.tape.shorten_overlap(config.ahead)
        if not (self.eager or self.by_blocks):
            self.tape.give_way(self.m / self.p)

    # Forward

    def forward(self) -> None:
        """Embedding, blocks, final norm, loss."""
        L = self.a.depth
        a = self.a
        self.gather("emb", self.ends)
        self.tape.keep(*["emb bucket"] * self.root)
        self.gather("f0", self.block)
        if self.gathers:
            self.op("embedding", ["emb sent", "emb bucket"], work=(("wait", "emb"),))
        sin = self.make("positions", self.config.seqlen * a.width * self.p)
        self.op("positions", [], sin)
        self.arrive("f0", self.weights)
        table = ["emb bucket"] * self.gathers
        if self.lean or self.by_blocks or self.config.batch < 3:
            self.op("embedding", [*table, "positions"], self.make("x0", self.U))
            self.x0 = ["x0"]
        else:  # the partitioner takes a sum for twice its bytes, if all that read it can be fused
            self.op("embedding", table, self.make("e", self.U))
            self.x0 = ["e", "positions"]
        for i in range(L):
            self.forward_block(i)
        self.at = ""
        self.arrive("fhead", {})
        self.norm(L, "final norm", "nf")
        if self.by_blocks and self.a.gated:  # an RMSNorm of several kernels
            self.op("final norm in fp32", [], *map(self.wide, FINAL_IN_FP32))
        self.loss()

    def norm(self, i: int, where: str, out: str) -> None:
        """The norm of the input of block i; in it what the MLP before made is added to the residual."""
        if i and not self.lean:
            before = (
                [f"o{i - 1}", *self.inputs(i - 1)]
                if self.policies[i - 1] == "pointwise"
                else [f"m{i - 1}"]
            )
            self.op(
                where,
                [f"d{i - 1}", *before],
                self.make(f"x{i}", self.U),
                self.make(out, self.U),
                over=True,
            )
        else:
            self.op(where, self.inputs(i), self.make(out, self.U))

    def forward_block(self, i: int) -> None:
        """Attention, then the MLP; the next gather starts after the norm."""
        w = f"f{i}"
        D = self.a.width
        self.at = f"forward, block {i}, "
        self.norm(i, "norm", f"n{i}")
        last = (
            i + 1 == self.a.depth
        )  # the last norm is gathered beside the head: too small to count
        self.gather("fhead" if last else f"f{i + 1}", self.head if last else self.block)
        self.moved_in_fp32(1)
        if self.policies[i] not in AGAIN["mlp"]:
            self.eager_keeps(i)
        self.qkv(w, f"n{i}", str(i))
        self.core(str(i))
        self.product("o", [f"a{i}", self.weight(w, "o")], f"o{i}", self.n, self.outs["q"], D)
        if self.lean:
            self.lean_forward(i, w)
        else:
            added = self.make(f"m{i}", self.U)
            normed = self.make(f"nn{i}", self.U)
            if self.policies[i] == "pointwise":  # what is kept is o itself
                self.op("norm of the MLP", [f"o{i}", *self.inputs(i)], normed)
            else:
                self.op("norm of the MLP", [f"o{i}", *self.inputs(i)], added, normed, over=True)
            self.up(w, f"nn{i}", f"h{i}")
            self.op(
                "activation",
                self.hidden(f"h{i}"),
                self.make(f"g{i}", self.F),
                over=not self.a.gated,
            )
            self.down(w, f"g{i}", f"d{i}")
        if i + 1 < self.a.depth:
            self.arrive(f"f{i + 1}", self.weights)

    def up(self, w: str, x: str, out: str) -> None:
        for part, name in zip(self.ups, self.hidden(out), strict=True):
            if len(self.ups) > 1 and part == "gate" and self.keeps(f"{part} h", out[1:]):
                continue
            self.product(part, [x, self.weight(w, part)], name, self.n, self.a.width, self.fan)

    def down(self, w: str, g: str, out: str) -> None:
        self.product("down", [g, self.weight(w, "down")], out, self.n, self.fan, self.a.width)

    def qkv(self, w: str, x: str, to: str) -> None:
        for part in "qkv":
            if not self.keeps(part, to):
                self.product(
                    part,
                    [x, self.weight(w, part)],
                    part + to,
                    self.n,
                    self.a.width,
                    self.outs[part],
                )

    def core(self, to: str) -> None:
        a = self.a
        out = self.make(f"a{to}", self.Q)
        stats = self.make(f"s{to}", 4 * self.n * a.heads, dtype="fp32")
        work = (("attention", "forward", 4 * self.n * self.config.seqlen * a.heads * a.head_dim),)
        self.op("attention", ["q" + to, "k" + to, "v" + to], out, stats, work=work)
        if self.config.attn != "flex":
            self.taken(out.name)

    def rows(self) -> float:
        """The part of the tokens that the lean MLP computes at a time."""
        return min(self.config.mlp_chunk or self.n, self.n) / self.n

    def lean_forward(self, i: int, w: str) -> None:
        """The lean MLP of block `i`, whose weights are those of `w`."""
        D = self.a.width
        reads = [*self.inputs(i), f"o{i}", self.weight(w, "up"), self.weight(w, "down")]
        work = (
            ("mm", self.n, D, self.fan),
            ("mm", self.n, self.fan, D),
            ("bytes", 6 * self.U + 2 * self.F),
        )
        self.op(
            "lean MLP",
            reads,
            self.make(f"x{i + 1}", self.U),
            inside=self.rows() * (2 * self.U + self.F),
            work=work,
        )

    def loss(self) -> None:
        """The head and the loss: all logits at once, or one operation that makes its gradients as well."""
        head = self.weight("fhead", "head")
        V = self.a.vocab
        D = self.a.width
        if self.config.loss == "full":
            self.product("head", ["nf", head], "z", self.n, D, V, LOGITS)
            wide = fp32_logits(self.config)
            self.op("loss", ["z"], *[self.in_fp32("zf")] * wide)
            if self.eager and wide:
                self.op("loss, log_softmax", ["zf"], self.in_fp32("zs"))
            return
        rows = min(self.config.loss_chunk, self.n)
        inside = max(rows * V * (4 + self.p) + (4 - self.p) * self.head, 4 * self.head)
        made = [self.make("gx", self.U)]
        made += [self.make("gw", self.head * self.p)] * (not self.lora)
        work = (
            ("mm", self.n, D, V),
            ("mm", self.n, V, D),
            *[("mm", V, self.n, D)] * (not self.lora),
            ("bytes", self.n * V * 10 * 4 + 8 * self.head * self.n / rows),
        )
        self.op("chunked loss", ["nf", head], *made, inside=inside, work=work)

    def in_fp32(self, name: str) -> Make:
        """Logits, or a gradient of them, in fp32."""
        return self.make(name, 4 * self.n * self.a.vocab, LOGITS, dtype="fp32")

    # Backward

    def backward(self) -> None:
        """From the loss to the embedding, block by block."""
        L = self.a.depth
        last = f"b{self.a.depth - 1}"
        self.tape.graph()
        if self.config.loss == "full":
            V = self.a.vocab
            D = self.a.width
            if not self.by_blocks:
                self.gather("bhead", self.head)
            made = self.make("dz", self.logits, LOGITS)
            at = "gradient of the logits"
            wide = fp32_logits(self.config)
            if self.eager and wide:  # of the negative log-likelihood, then of log_softmax
                self.op(at, [], self.in_fp32("dzs"))
                self.op(at, ["zs", "dzs"], self.in_fp32("dzf"))
                self.op(at, ["dzf"], made)
            else:
                self.op(at, ["z", *["zf"] * wide], made, over=not (wide or self.by_blocks))
            if self.by_blocks:
                self.gather("bhead", self.head)
            if not self.lora:
                self.product("gradient of the head", ["dz", "nf"], "whead", V, self.n, D)
            self.arrive("bhead", {})
            self.gather(last, self.block)
            self.product(
                "gradient of the head's input",
                ["dz", self.weight("bhead", "head")],
                "go",
                self.n,
                V,
                D,
            )
        else:
            self.gather(last, self.block)
        grad, go = ("whead", "go") if self.config.loss == "full" else ("gw", "gx")
        local = not (self.gathers or self.reduces or self.lora)
        if local:
            self.keep_local_gradient(grad, self.head, self.config.loss != "full")
        before = self.input_again(L - 1)
        if self.policies[-1] in ("pointwise", "block") and not (self.lean or self.by_blocks):
            self.op("final norm again, in fp32", before, self.wide(f"normed {L}"))
            before = [f"normed {L}"]
        before = [*before, *FINAL_IN_FP32]
        self.op(
            "gradient of the final norm", [go, *before], self.make(f"gr{L}", self.U), self.sums()
        )
        self.bucket("head", self.head, [grad] * (not self.lora))
        for i in reversed(range(L)):
            self.backward_block(i)
        self.at = ""
        if self.whole and self.p < 4 and not self.lora:
            self.op("gradient of the embedding", ["ge"], self.make("wemb", self.head * self.p))
            self.keep_until_update("wemb")
        elif local:
            self.keep_local_gradient("ge", self.head, True)
        self.bucket("emb", self.head, ["ge"] * (not self.lora))
        self.wait_for_reduction()
        self.wait_for_reduction_across()
        if self.whole and self.config.grad_accum > 1 and not self.eager:
            self.op(
                "gradients to be added",
                [],
                self.make("sum", self.m * trained(self.config, self.a), GRADIENTS, dtype="fp32"),
            )

    def input_again(self, i: int) -> list[str]:
        """What holds the input of the norm behind block i. Of a wholly recomputed block it is made again, unless the
        next block is as well, whose input is kept."""
        after = self.policies[i + 1 : i + 2]
        if self.lean or self.by_blocks or self.policies[i] != "block" or "block" in after:
            return self.inputs(i + 1)
        before = self.at
        self.at = f"backward, block {i}, "
        self.arrive_in_backward(i)
        w = f"b{i}"
        self.half_again(i, w)
        self.again_made.add(f"g'{i}")
        self.op("activation again", self.hidden(f"h'{i}"), self.make(f"g'{i}", self.F))
        self.down(w, f"g'{i}", f"d'{i}")
        self.at = before
        return [f"d'{i}", *self.inputs(i), f"o'{i}"]

    def o_again(self, i: int, w: str) -> None:
        a = f"a'{i}" if self.config.remat_core else f"a{i}"
        self.product(
            "o again", [a, self.weight(w, "o")], f"o'{i}", self.n, self.outs["q"], self.a.width
        )

    def half_again(self, i: int, w: str) -> None:
        """o, the norm and up of a wholly recomputed block."""
        if self.config.remat_core:
            self.attention_again(i, w)
        self.o_again(i, w)
        self.again_made.add(f"nn'{i}")
        self.op("norm again", [*self.inputs(i), f"o'{i}"], self.make(f"nn'{i}", self.U))
        self.up(w, f"nn'{i}", f"h'{i}")

    def backward_block(self, i: int) -> None:
        """The MLP, then attention; the block's bucket."""
        w = f"b{i}"
        grads = []
        self.at = f"backward, block {i}, "
        recomputed = self.policies[i] in AGAIN["mlp"]
        self.moved_in_fp32(2 + recomputed)
        if recomputed:
            self.eager_keeps(i)
        (self.lean_backward if self.lean else self.mlp_backward)(i, w, grads)
        self.attention_backward(i, w, grads)
        if self.eager:  # an eager policy also keeps the seventh product, which nothing needs
            down = [f"d{i}"] * (recomputed and getattr(self.config, "remat_ops", False))
            self.op("what it kept", [f"eager{i}", *down], work=(("bytes", 0),))
        if self.by_blocks and not self.root:  # as long as the weights that are cut from it
            self.op("bucket of its weights", [f"{w} bucket", f"{w} sent"], work=(("bytes", 0),))
        self.bucket(w, self.block, grads)

    def arrive_in_backward(self, i: int) -> None:
        """The weights of a block, once; those of the block before it are then under way."""
        if f"b{i}" not in self.again_made:
            self.again_made.add(f"b{i}")
            self.arrive(f"b{i}", self.weights)
            if i:
                self.gather(f"b{i - 1}", self.block)

    def mlp_backward(self, i: int, w: str, grads: list[str]) -> None:
        """Gradients through the MLP, which may be made again first: that of each weight before that of its input."""
        policy = self.policies[i]
        recomputed = policy in AGAIN["mlp"]
        gr = f"gr{i + 1}"
        mid = {"pointwise": [*self.inputs(i), f"o{i}"], "block": [*self.inputs(i), f"o'{i}"]}.get(
            policy, [f"m{i}"]
        )
        h = f"h{i}"
        g = f"g{i}"
        nn = f"nn'{i}" if self.norm_again(i, "mlp") else f"nn{i}"
        if recomputed:
            if policy != "pointwise":
                self.arrive_in_backward(i)
                h = f"h'{i}"
            if policy == "block":
                if f"nn'{i}" not in self.again_made:
                    self.half_again(i, w)
            elif policy != "pointwise":
                if self.norm_again(i, "mlp"):
                    self.op("norm again", mid, self.make(nn, self.U))
                self.up(w, nn, h)
            g = f"g'{i}"
            if g not in self.again_made:
                self.op("activation again", self.hidden(h), self.make(g, self.F))
        if not self.plain:
            self.wgrad("down", [gr, g], i, grads)
        self.arrive_in_backward(i)
        held = [g] * self.eager  # autograd frees what a product kept when both gradients are there
        self.product(
            "gradient of the hidden tensor",
            [gr, self.weight(w, "down"), *held],
            f"dg{i}",
            self.n,
            self.a.width,
            self.fan,
        )
        dh = [self.make(name, self.F) for name in self.hidden(f"dh{i}")]
        recomputed = recomputed and policy != "pointwise"
        if self.norm_again(i, "mlp") and not recomputed and self.a.gated:
            self.op("norm again", mid, self.make(nn, self.U))
        over = not (self.plain and self.a.gated)
        self.op("gradient of the activation", [f"dg{i}", *self.hidden(h)], *dh, over=over)
        if self.plain:
            self.wgrad("down", [gr, g], i, grads)
        if self.norm_again(i, "mlp") and not recomputed and not self.a.gated:
            self.op("norm again", mid, self.make(nn, self.U))
        self.wgrad_up(i, nn, grads)
        held = [nn] * self.eager
        for part, name, dn in zip(
            self.ups, self.hidden(f"dh{i}"), self.hidden(f"dn{i}"), strict=True
        ):
            self.product(
                f"gradient through {part}",
                [name, self.weight(w, part), *held],
                dn,
                self.n,
                self.fan,
                self.a.width,
            )
        made = [self.make(f"gm{i}", self.U), self.sums()]
        self.op("gradient of the MLP's norm", [gr, *self.hidden(f"dn{i}"), *mid], *made, over=True)

    def wgrad_up(self, i: int, nn: str, grads: list[str]) -> None:
        for part, name in zip(self.ups, self.hidden(f"dh{i}"), strict=True):
            self.wgrad(part, [name, nn], i, grads)

    def wide(self, name: str) -> Make:
        """[B, T, D] in fp32."""
        return self.make(name, 4 * self.n * self.a.width, dtype="fp32")

    def lean_backward(self, i: int, w: str, grads: list[str]) -> None:
        """One operation, after o and what leads to it have been made again."""
        self.arrive_in_backward(i)
        o = f"o{i}"
        D = self.a.width
        rows = self.rows()
        if self.policies[i] in AGAIN["attn"]:
            o = f"o'{i}"
            if self.config.remat_core:
                self.attention_again(i, w)
            self.o_again(i, w)
        reads = [f"gr{i + 1}", *self.inputs(i), o, self.weight(w, "up"), self.weight(w, "down")]
        mlp = 2 * self.weights["up"]
        # Those of several chunks are fp32 until they are cast.
        sums = (4 - self.p) * mlp if rows < 1 else 0
        made = [self.make(f"gm{i}", self.U)]
        made += [self.make(f"w{part}{i}", self.weights[part] * self.p) for part in ("up", "down")]
        work = (
            ("mm", self.n, D, self.fan),
            ("mm", self.n, D, self.fan),
            ("mm", self.n, self.fan, D),
            ("mm", D, self.n, self.fan),
            ("mm", self.fan, self.n, D),
            ("bytes", 12 * self.U + 6 * self.F),
        )
        self.op("lean MLP", reads, *made, inside=rows * 2 * (self.U + self.F) + sums, work=work)
        if self.gathers or self.reduces:
            grads += [f"wup{i}", f"wdown{i}"]
        else:
            self.keep_local_gradient(f"wup{i}", self.weights["up"])
            self.keep_local_gradient(f"wdown{i}", self.weights["down"])

    def attention_backward(self, i: int, w: str, grads: list[str]) -> None:
        """Gradients through attention, which may be made again first."""
        policy = self.policies[i]
        gm = f"gm{i}"
        recomputed = policy in AGAIN["attn"]
        core = recomputed and self.config.remat_core
        a = f"a'{i}" if core else f"a{i}"
        to = f"'{i}" if recomputed else str(i)
        self.arrive_in_backward(i)
        if core and a not in self.again_made:
            self.attention_again(i, w)
        self.wgrad("o", [gm, a], i, grads)
        self.product(
            "gradient of attention",
            [gm, self.weight(w, "o")],
            f"da{i}",
            self.n,
            self.a.width,
            self.outs["q"],
        )
        if recomputed and not core:
            self.attention_again(i, w)
        stats = f"s{to}" if core else f"s{i}"
        made = [
            self.make(f"d{part}{i}", size)
            for part, size in zip("qkv", (self.Q, self.KV, self.KV), strict=True)
        ]
        work = (("attention", "backward", 10 * self.n * self.config.seqlen * self.outs["q"]),)
        reads = [f"da{i}", *(part + to for part in "qkv"), stats]
        fused = self.config.attn == "flex"
        if fused:  # a kernel of its own sums up what the gradient needs of the output
            delta = self.make(f"delta{i}", 4 * self.n * self.a.heads, dtype="fp32")
            self.op("sums of attention", [f"da{i}", a], delta)
        reads.append(f"delta{i}" if fused else a)
        self.op("attention", reads, *made, inside=self.scratch(), work=work)
        if i:
            self.wgrads_qkv(i, grads)
        parts = [f"dx{part}{i}" for part in "vkq"]
        for part, made in zip("vkq", parts, strict=True):
            reads = [f"d{part}{i}", self.weight(w, part)]
            if not fused:
                reads.append(self.taken(f"d{part}{i}"))
            self.product(
                f"gradient through {part}", reads, made, self.n, self.outs[part], self.a.width
            )
        x = self.input_again(i - 1) if i and policy != "block" else self.inputs(i)
        summed = [gm, *parts, *x]
        self.op("gradient of the norm", summed, self.sums())
        if i:
            self.make_bucket(w, self.block)
            self.op("gradient of the norm", summed, self.make(f"gr{i}", self.U), over=True)
            return
        local = not (self.gathers or self.reduces)
        if local:
            self.wgrads_qkv(i, grads)
            self.cast_gradients()
        if not self.lora:  # one kernel with the sums of rows
            size = self.p if self.eager else 4
            self.op(
                "gradient of the embedding",
                summed,
                self.make("ge", self.head * size, GRADIENTS, dtype="fp32"),
            )
        if not local:
            self.wgrads_qkv(i, grads)

    def wgrads_qkv(self, i: int, grads: list[str]) -> None:
        """The input of q, k and v is made again for them, unless it is there."""
        normed = self.normed_again(i)
        for part in "vkq":
            self.wgrad(part, [f"d{part}{i}", normed], i, grads)

    def norm_again(self, i: int, branch: str) -> bool:
        """Whether backward makes the norm of a branch again: compiled, always, unless a recomputed branch keeps it."""
        policy = self.policies[i]
        if policy == "pointwise" or policy in AGAIN[branch]:
            return self.config.remat_norm or policy in ("block", "pointwise")
        return not (self.eager or self.plain)

    def normed_again(self, i: int) -> str:
        """The input of q, k and v, which is made again if need be."""
        if not self.norm_again(i, "attn"):
            return f"n{i}"
        if f"n'{i}" not in self.again_made:
            self.again_made.add(f"n'{i}")
            self.op("norm again", self.inputs(i), self.make(f"n'{i}", self.U))
        return f"n'{i}"

    def attention_again(self, i: int, w: str) -> None:
        """What backward makes again of the attention branch: the norm, q, k and v, attention itself."""
        self.qkv(w, self.normed_again(i), f"'{i}")
        if self.config.remat_core:
            self.again_made.add(f"a'{i}")
            self.core(f"'{i}")

    def scratch(self) -> float:
        """Of a fused attention's backward: the gradient of q in fp32, and of grouped k and v for every head."""
        grouped = self.a.heads != self.a.kv_heads
        return (
            0.0
            if self.config.attn == "flex"
            else self.n * self.outs["q"] * (4 + 2 * self.p * grouped)
        )


def step_peak(
    config, ranks: int, a: Architecture | None = None, arch: str = "sm_90", tape: Tape | None = None
) -> Peak:
    """The highest level of a step of resolved flags on one of `ranks`, allowances included. tape: of that step, if it
    is there already."""
    a = a or reference(config)
    peaks = [(tape or PlannedStep(config, a, ranks).tape).peak(before_step(config, a, ranks, arch))]
    if muon(config):
        peaks.append(muon_peak(config, ranks, a, arch))
    elif config.compile in ("none", "blocks"):
        peaks.append(update_peak(config, ranks, a, arch))
    return max(peaks, key=lambda each: each.nbytes)


def reserved(config, ranks: int, a: Architecture, peak: Peak) -> float:
    """What torch's allocator holds at `peak` if no memory lies between blocks that is too small. FSDP2 gathers on a
    stream of its own and writes reduced gradients on another (torch 2.13, _fsdp_collectives.py): what was allocated
    there stays theirs when it is free."""
    shards = shard_group(config, ranks)
    if config.wrapper != "fsdp2" or shards == 1:
        return peak.nbytes
    gathered = max(2 * a.width * a.vocab + a.final_norm, 2 * a.block_parameters)
    gradients = SIZE[getattr(config, "master_dtype", "fp32")] * trained(config, a) / shards
    missing = max(gradients - peak.pieces.get(GRADIENTS, 0), 0)
    return peak.nbytes + SIZE[config.param_dtype] * gathered + missing


def update_peak(config, ranks: int, a: Architecture, arch: str) -> Peak:
    """AdamW's update where it is not compiled: all gradients, and what clipping makes of them."""
    pieces = before_step(config, a, ranks, arch)
    shards = shard_group(config, ranks)
    pieces[GRADIENTS] = (
        2 * SIZE[getattr(config, "master_dtype", "fp32")] * trained(config, a) / shards
    )
    ranked = sorted(pieces.items(), key=lambda piece: -piece[1])
    return Peak(sum(pieces.values()), "AdamW's update", dict(ranked))


def muon_peak(config, ranks: int, a: Architecture, arch: str) -> Peak:
    """Muon's update: every gradient is there; of all matrices what was sent and has come; of the shape that takes most,
    the owner's matrices, the product with itself twice, the result and its norm."""
    pieces = before_step(config, a, ranks, arch)
    shards = shard_group(config, ranks)
    sent = SIZE[config.muon_dtype] * a.hidden_parameters * (1 / shards + 1 / ranks)
    batches = (
        -(-count // ranks) * (2 * m * n + 2 * min(m, n) ** 2)
        for (m, n), count in a.hidden_matrices.items()
    )
    pieces[GRADIENTS] = SIZE[getattr(config, "master_dtype", "fp32")] * a.parameters / shards
    pieces[WORKSPACE] = sent + SIZE[config.muon_dtype] * max(batches)
    return Peak(
        sum(pieces.values()),
        "Muon's update",
        dict(sorted(pieces.items(), key=lambda each: -each[1])),
    )
