"""The operations of a training step in the order of its compiled graphs (--compile fwdbwd), on a Tape: what each reads,
makes and computes. Peak memory (`step_peak`) and time (step_time.py) are read off the same tape.

    step_peak(config, ranks=8)                # of resolved flags; Peak(nbytes, moment, pieces)
    Step(config, architecture, 8).tape        # what it is read off

The order is that of the code which Inductor generates with the options of overlap.py: the weights of a block are
gathered while the block before computes, its gradients are reduced while the next one computes, and those of the
weights lie in memory until the end of the block, when they are copied into one bucket. Names end with the number of
the block; a quote marks what backward makes again. n tokens of a micro-batch, D width, H heads, K key/value heads, d
head dimension, F hidden width, V vocabulary, L depth. Imports no torch.
"""

from lab.planning.liveness import GRADIENTS, LOGITS, WORKSPACE, Make, Peak, Tape
from lab.planning.weights import SIZE, Weights, before_step, fp32_logits, shard_group, trained
from trainer.costs import Architecture, muon, reference

AGAIN = {"attn": ("attn", "both", "block"), "mlp": ("mlp", "both", "block", "pointwise")}


class Step(Weights):
    """Forward and backward of one micro-batch, on `tape`."""

    def __init__(self, c, a: Architecture, ranks: int):
        super().__init__(c, a, ranks)
        self.forward()
        self.backward()
        if c.ahead < 1 and (self.gathers or self.reduces):
            self.tape.hurry(c.ahead)
        for late, early in self.together:
            self.tape.pull(late, early)

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
        sin = self.make("positions", self.c.seqlen * a.width * self.p)
        self.op("positions", [], sin)
        self.arrive("f0", self.weights)
        table = ["emb bucket"] * self.gathers
        if self.lean or self.c.batch < 3:
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
        # A kernel of the compiler's own writes where it is told.
        a = self.a
        own = self.c.attn != "flex"
        out = self.make(f"a{to}", self.Q, own=own)
        stats = self.make(f"s{to}", 4 * self.n * a.heads, own=own, key="fp32")
        work = (("attention", "forward", 4 * self.n * self.c.seqlen * a.heads * a.head_dim),)
        self.op("attention", ["q" + to, "k" + to, "v" + to], out, stats, work=work)
        if own:
            self.taken(out.name)

    def rows(self) -> float:
        """The part of the tokens that the lean MLP computes at a time."""
        return min(self.c.mlp_chunk or self.n, self.n) / self.n

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
            self.make(f"x{i + 1}", self.U, own=True),
            inside=self.rows() * (2 * self.U + self.F),
            work=work,
        )

    def loss(self) -> None:
        """The head and the loss: all logits at once, or one operation that makes its gradients as well."""
        head = self.weight("fhead", "head")
        V = self.a.vocab
        D = self.a.width
        if self.c.loss == "full":
            self.product("head", ["nf", head], "z", self.n, D, V, LOGITS)
            wide = fp32_logits(self.c)
            self.op("loss", ["z"], *[self.in_fp32("zf")] * wide)
            if self.eager and wide:
                self.op("loss, log_softmax", ["zf"], self.in_fp32("zs"))
            return
        rows = min(self.c.loss_chunk, self.n)
        inside = max(rows * V * (4 + self.p) + (4 - self.p) * self.head, 4 * self.head)
        made = [self.make("gx", self.U, own=True)]
        made += [self.make("gw", self.head * self.p, own=True)] * (not self.lora)
        work = (
            ("mm", self.n, D, V),
            ("mm", self.n, V, D),
            *[("mm", V, self.n, D)] * (not self.lora),
            ("bytes", self.n * V * 10 * 4 + 8 * self.head * self.n / rows),
        )
        self.op("chunked loss", ["nf", head], *made, inside=inside, work=work)

    def in_fp32(self, name: str) -> Make:
        """Logits, or a gradient of them, in fp32."""
        return self.make(name, 4 * self.n * self.a.vocab, LOGITS, key="fp32")

    # Backward

    def backward(self) -> None:
        """From the loss to the embedding, block by block."""
        L = self.a.depth
        last = f"b{self.a.depth - 1}"
        self.tape.graph()
        if self.c.loss == "full":
            V = self.a.vocab
            D = self.a.width
            self.gather("bhead", self.head)
            made = self.make("dz", self.logits, LOGITS)
            at = "gradient of the logits"
            wide = fp32_logits(self.c)
            if self.eager and wide:  # of the negative log-likelihood, then of log_softmax
                self.op(at, [], self.in_fp32("dzs"))
                self.op(at, ["zs", "dzs"], self.in_fp32("dzf"))
                self.op(at, ["dzf"], made)
            else:
                self.op(at, ["z", *["zf"] * wide], made, over=not wide)
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
        grad, go = ("whead", "go") if self.c.loss == "full" else ("gw", "gx")
        local = not (self.gathers or self.reduces or self.lora)
        if local and self.c.loss == "full":
            self.landed(grad, self.head)
        before = self.input_again(L - 1)
        if self.policies[-1] in ("pointwise", "block"):
            self.op("final norm again, in fp32", before, self.wide(f"normed {L}"))
            before = [f"normed {L}"]
        self.op(
            "gradient of the final norm", [go, *before], self.make(f"gr{L}", self.U), self.sums()
        )
        if local and self.c.loss != "full":
            self.landed(grad, self.head)
        self.bucket("head", self.head, [grad] * (not self.lora))
        if last not in self.again_made:
            self.arrive(last, self.weights)
        for i in reversed(range(L)):
            self.backward_block(i)
        self.at = ""
        if self.whole and self.p < 4 and not self.lora:
            self.op("gradient of the embedding", ["ge"], self.make("wemb", self.head * self.p))
            self.stays("wemb")
        elif local:
            self.landed("ge", self.head)
        self.bucket("emb", self.head, ["ge"] * (not self.lora))
        self.arrived()
        self.crossed()
        if self.whole and self.c.grad_accum > 1 and not self.eager:
            self.op(
                "gradients to be added",
                [],
                self.make("sum", self.m * trained(self.c, self.a), GRADIENTS, key="fp32"),
            )

    def input_again(self, i: int) -> list[str]:
        """What holds the input of the norm behind block i. Of a wholly recomputed block it is made again, unless the
        next block is as well, whose input is kept."""
        if self.lean or self.policies[i] != "block" or "block" in self.policies[i + 1 : i + 2]:
            return self.inputs(i + 1)
        w = f"b{i}"
        before = self.at
        self.at = f"backward, block {i}, "
        self.again_made.add(w)
        self.arrive(w, self.weights)
        if i:
            self.gather(f"b{i - 1}", self.block)
        self.half_again(i, w)
        self.op("activation again", self.hidden(f"h'{i}"), self.make(f"g'{i}", self.F))
        self.down(w, f"g'{i}", f"d'{i}")
        self.at = before
        return [f"d'{i}", *self.inputs(i), f"o'{i}"]

    def o_again(self, i: int, w: str) -> None:
        a = f"a'{i}" if self.c.remat_core else f"a{i}"
        self.product(
            "o again", [a, self.weight(w, "o")], f"o'{i}", self.n, self.outs["q"], self.a.width
        )

    def half_again(self, i: int, w: str) -> None:
        """o, the norm and up of a wholly recomputed block."""
        if self.c.remat_core:
            self.attention_again(i, w)
        self.o_again(i, w)
        made = [self.make(f"nn'{i}", self.U)]
        if self.parted(i):
            made.append(self.wide("normed0"))
            if f"n'{i}" not in self.again_made:
                self.again_made.add(f"n'{i}")
                made.append(self.make(f"n'{i}", self.U))
        self.op("norm again", [*self.inputs(i), f"o'{i}"], *made)
        self.up(w, f"nn'{i}", f"h'{i}")

    def backward_block(self, i: int) -> None:
        """The MLP, then attention; the block's bucket, and the weights of the block before."""
        w = f"b{i}"
        grads = []
        self.at = f"backward, block {i}, "
        again = self.policies[i] in AGAIN["mlp"]
        self.moved_in_fp32(2 + again)
        if again:
            self.eager_keeps(i)
        if i and w not in self.again_made:
            self.gather(f"b{i - 1}", self.block)
        (self.lean_backward if self.lean else self.mlp_backward)(i, w, grads)
        self.attention_backward(i, w, grads)
        if self.eager:
            self.op("what it kept", [f"eager{i}"], work=(("bytes", 0),))
        self.bucket(w, self.block, grads)
        if i and f"b{i - 1}" not in self.again_made:
            self.arrive(f"b{i - 1}", self.weights)

    def mlp_backward(self, i: int, w: str, grads: list[str]) -> None:
        """Gradients through the MLP, which may be made again first."""
        policy = self.policies[i]
        gr = f"gr{i + 1}"
        D = self.a.width
        again = policy in AGAIN["mlp"]
        early = w in self.again_made
        mid = [f"m{i}"]
        self.product(
            "gradient of the hidden tensor",
            [gr, self.weight(w, "down")],
            f"dg{i}",
            self.n,
            D,
            self.fan,
        )
        h = f"h{i}"
        nn = f"nn{i}"
        g = f"g{i}"
        dh = [self.make(name, self.F) for name in self.hidden(f"dh{i}")]
        if policy == "pointwise":
            mid = [*self.inputs(i), f"o{i}"]
        if policy == "block":
            mid = [*self.inputs(i), f"o'{i}"]
            h = f"h'{i}"
            nn = f"nn'{i}"
            g = f"g'{i}"
            if not early:
                self.half_again(i, w)
        elif again:
            g = f"g'{i}"
            if policy == "pointwise":
                nn = f"nn'{i}"
            else:
                if self.c.remat_norm:
                    nn = f"nn'{i}"
                    self.op("norm again", mid, self.make(nn, self.U))
                h = f"h'{i}"
                self.up(w, nn, h)
        if again and not early:
            made = [*dh, self.make(g, self.F)]
            self.op("activation again", [f"dg{i}", *self.hidden(h)], *made, over=not self.a.gated)
            self.wgrad("down", [gr, g], i, grads)
        else:
            self.wgrad("down", [gr, g], i, grads)
            self.op("gradient of the activation", [f"dg{i}", *self.hidden(h)], *dh, over=True)
        late = self.late(i)
        if not late:
            self.room(w, self.block)
        for part, name, dn in zip(
            self.ups, self.hidden(f"dh{i}"), self.hidden(f"dn{i}"), strict=True
        ):
            self.product(
                f"gradient through {part}", [name, self.weight(w, part)], dn, self.n, self.fan, D
            )
        if policy == "pointwise" and not late:
            self.op("norm again", mid, self.make(nn, self.U), self.wide("normed0"))
        if self.parted(i):
            mid = ["normed0"]
        if not late:
            self.wgrad_up(i, nn, grads)
        made = [self.make(f"gm{i}", self.U), self.sums(0.5 if late else 1)]
        if late and policy == "pointwise":  # one kernel also makes that norm again
            made.append(self.make(nn, self.U))
        elif late and f"n'{i}" not in self.again_made:  # or that of attention
            self.again_made.add(f"n'{i}")
            made.append(self.make(f"n'{i}", self.U))
            mid += self.inputs(i)
        self.op(
            "gradient of the MLP's norm", [gr, *self.hidden(f"dn{i}"), *mid], *made, over=not late
        )
        if late:
            self.room(w, self.block)
            self.wgrad_up(i, nn, grads)

    def wgrad_up(self, i: int, nn: str, grads: list[str]) -> None:
        for part, name in zip(self.ups, self.hidden(f"dh{i}"), strict=True):
            self.wgrad(part, [name, nn], i, grads)

    def late(self, i: int) -> bool:
        """Whether one kernel sums up the gradients of both norms of a block: so the compiler fuses them in a region
        that holds both branches. What leads to it then comes before the gradients of attention's weights."""
        return self.policies[i] in ("block", "pointwise") and not self.lean and not self.parted(i)

    def parted(self, i: int) -> bool:
        """Whether a wholly recomputed block's input lies in two buffers: then its norms are made from the sum at once,
        one of them in fp32 for backward."""
        return self.policies[i] in ("block", "pointwise") and len(self.inputs(i)) > 1

    def wide(self, name: str) -> Make:
        """[B, T, D] in fp32."""
        return self.make(name, 4 * self.n * self.a.width, key="fp32")

    def lean_backward(self, i: int, w: str, grads: list[str]) -> None:
        """One operation, after o and what leads to it have been made again."""
        o = f"o{i}"
        D = self.a.width
        rows = self.rows()
        if self.policies[i] in AGAIN["attn"]:
            o = f"o'{i}"
            if self.c.remat_core:
                self.attention_again(i, w)
            self.o_again(i, w)
        reads = [f"gr{i + 1}", *self.inputs(i), o, self.weight(w, "up"), self.weight(w, "down")]
        mlp = 2 * self.weights["up"]
        # Those of several chunks are fp32 until they are cast.
        sums = (4 - self.p) * mlp if rows < 1 else 0
        made = [self.make(f"gm{i}", self.U, own=True)]
        made += [
            self.make(f"w{part}{i}", self.weights[part] * self.p, own=True)
            for part in ("up", "down")
        ]
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
            self.landed(f"wup{i}", self.weights["up"])
            self.landed(f"wdown{i}", self.weights["down"])

    def attention_backward(self, i: int, w: str, grads: list[str]) -> None:
        """Gradients through attention, which may be made again first."""
        policy = self.policies[i]
        gm = f"gm{i}"
        a = f"a{i}"
        D = self.a.width
        again = policy in AGAIN["attn"]
        core = again and self.c.remat_core
        n1 = f"n{i}"
        to = f"'{i}" if again else str(i)
        a = f"a'{i}" if core else a
        if core and f"a'{i}" not in self.again_made:
            self.attention_again(i, w)
        self.wgrad("o", [gm, a], i, grads)
        self.product(
            "gradient of attention", [gm, self.weight(w, "o")], f"da{i}", self.n, D, self.outs["q"]
        )
        if not core:
            self.attention_again(i, w)
        if f"n'{i}" in self.again_made or policy == "pointwise":
            n1 = f"n'{i}"
        stats = f"s{to}" if core else f"s{i}"
        made = [
            self.make(f"d{part}{i}", size, own=self.c.attn != "flex")
            for part, size in zip("qkv", (self.Q, self.KV, self.KV), strict=True)
        ]
        work = (("attention", "backward", 10 * self.n * self.c.seqlen * self.outs["q"]),)
        reads = [f"da{i}", *(part + to for part in "qkv"), stats]
        fused = self.c.attn == "flex"
        if fused:  # a kernel of its own sums up what the gradient needs of the output
            delta = self.make(f"delta{i}", 4 * self.n * self.a.heads, key="fp32")
            self.op("sums of attention", [f"da{i}", a], delta)
        reads.append(f"delta{i}" if fused else a)
        self.op("attention", reads, *made, inside=self.scratch(), work=work)
        parts = []
        for part in "vkq":
            self.wgrad(part, [f"d{part}{i}", n1], i, grads)
            made = f"dx{part}{i}"
            reads = [f"d{part}{i}", self.weight(w, part)]
            if not fused:
                reads.append(self.taken(f"d{part}{i}"))
            self.product(f"gradient through {part}", reads, made, self.n, self.outs[part], D)
            parts.append(made)
        x = self.input_again(i - 1) if i and policy != "block" else self.inputs(i)
        if len(x) > 1 and i:
            self.op("norm again, in fp32", x, self.wide(f"normed {i}"))
            x = [f"normed {i}"]
        summed = [gm, *parts, *x]
        late = self.late(i)
        sums = self.sums({"block": 2, "pointwise": 512 / self.n}[policy] if late else 1)
        reads = summed
        gr = self.make(f"gr{i}", self.U)
        if policy == "pointwise":  # one kernel makes the norm again and the gradient
            self.op("gradient of the norm", summed, self.make(n1, self.U), *[gr] * (i > 0))
            reads = [*summed, n1]
        if late:
            reads = [*reads, *self.hidden(f"dn{i}"), f"o'{i}" if policy == "block" else f"o{i}"]
        if late or policy == "pointwise":
            self.together.append((sums.name, f"wo{i}" if late else f"wv{i}"))
        self.op("gradient of the norm", reads, sums)
        if not i and self.lora:
            return
        if not i:  # one kernel with the sums of rows
            size = self.p if self.eager else 4
            self.op(
                "gradient of the embedding",
                summed,
                self.make("ge", self.head * size, GRADIENTS, key="fp32"),
            )
        elif policy != "pointwise":
            self.op("gradient of the norm", summed, gr, over=True)

    def attention_again(self, i: int, w: str) -> None:
        """What backward makes again of the attention branch: the norm, q, k and v, attention itself."""
        policy = self.policies[i]
        n1 = f"n{i}"
        if policy in AGAIN["attn"] and (self.c.remat_norm or policy == "block"):
            n1 = f"n'{i}"
            if n1 not in self.again_made:
                self.again_made.add(n1)
                self.op("norm again", self.inputs(i), self.make(n1, self.U))
        if policy in AGAIN["attn"]:
            self.qkv(w, n1, f"'{i}")
            if self.c.remat_core:
                self.again_made.add(f"a'{i}")
                self.core(f"'{i}")

    def scratch(self) -> float:
        """Of a fused attention's backward: the gradient of q in fp32, and of grouped k and v for every head."""
        grouped = self.a.heads != self.a.kv_heads
        return (
            0.0 if self.c.attn == "flex" else self.n * self.outs["q"] * (4 + 2 * self.p * grouped)
        )


def step_peak(
    c, ranks: int, a: Architecture | None = None, arch: str = "sm_90", tape: Tape | None = None
) -> Peak:
    """The highest level of a step of resolved flags on one of `ranks`, allowances included. tape: of that step, if it
    is there already."""
    a = a or reference(c)
    peak = (tape or Step(c, a, ranks).tape).peak(before_step(c, a, ranks, arch))
    return (
        max(peak, muon_peak(c, ranks, a, arch), key=lambda each: each.nbytes) if muon(c) else peak
    )


def muon_peak(c, ranks: int, a: Architecture, arch: str) -> Peak:
    """Muon's update: every gradient is there; of all matrices what was sent and has come; of the shape that takes most,
    the owner's matrices, the product with itself twice, the result and its norm."""
    pieces = before_step(c, a, ranks, arch)
    shards = shard_group(c, ranks)
    sent = SIZE[c.muon_dtype] * a.hidden_parameters * (1 / shards + 1 / ranks)
    batches = (
        -(-count // ranks) * (2 * m * n + 2 * min(m, n) ** 2)
        for (m, n), count in a.hidden_matrices.items()
    )
    pieces[GRADIENTS] = SIZE[getattr(c, "master_dtype", "fp32")] * a.parameters / shards
    pieces[WORKSPACE] = sent + SIZE[c.muon_dtype] * max(batches)
    return Peak(
        sum(pieces.values()),
        "Muon's update",
        dict(sorted(pieces.items(), key=lambda each: -each[1])),
    )
