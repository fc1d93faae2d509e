"""What a planner must know of a transformer: shapes, stored and active parameters, FLOPs. Imports no torch.

    a = reference(config)                 # of resolved flags of main.py
    a.parameters, a.active_parameters     # 973'234'176 at the reference setting, both

D width, H query heads, K key/value heads, d head dimension, F hidden width of the MLP, V vocabulary, E experts.
"""

from dataclasses import dataclass

from trainer import costs


@dataclass(frozen=True)
class Architecture:
    """A decoder of equal blocks: attention, then an MLP or E experts of which a token passes `active`. Widths in
    elements. gated: the MLP has a gate beside its up product (three weights). biases, norms: elements of one block
    outside the products. window, every: all but each `every`-th block attend to `window` keys (0: to all)."""

    name: str
    depth: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    gated: bool = False
    tied: bool = False
    biases: int = 0
    norms: int = 0
    final_norm: int = 0
    experts: int = 0
    active: int = 0
    dense_blocks: int = 0  # of a mixture of experts: blocks that have an MLP of width dense_hidden instead
    dense_hidden: int = 0
    window: int = 0
    every: int = 0
    note: str = ""

    @property
    def attention_parameters(self) -> int:
        """Of the four products of one block: q and o [D, H d], k and v [D, K d]."""
        return 2 * self.width * self.head_dim * (self.heads + self.kv_heads)

    def mlp_parameters(self, experts: int, hidden: int) -> int:
        """Of the products of one MLP, or of so many experts and their router [D, E]."""
        products = (2 + self.gated) * self.width * hidden
        return experts * products + self.experts * self.width if experts else products

    def _total(self, experts: int) -> int:
        ends = self.width * self.vocab * (1 if self.tied else 2) + self.final_norm
        each = self.attention_parameters + self.biases + self.norms
        sparse = self.depth - self.dense_blocks
        mlps = sparse * self.mlp_parameters(experts, self.hidden)
        if self.dense_blocks:
            mlps += self.dense_blocks * self.mlp_parameters(0, self.dense_hidden)
        return ends + self.depth * each + mlps

    @property
    def parameters(self) -> int:
        """All that is stored, a tied weight once."""
        return self._total(self.experts)

    @property
    def active_parameters(self) -> int:
        """Those that one token passes."""
        return self._total(self.active)

    @property
    def block_parameters(self) -> int:
        """Of the largest block, which is what one all-gather of a block brings."""
        return self.attention_parameters + self.biases + self.norms + self.mlp_parameters(self.experts, self.hidden)

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied with: without embedding look-up, norms and biases."""
        outside = self.final_norm + self.depth * (self.biases + self.norms)
        return self.active_parameters - outside - (0 if self.tied else self.width * self.vocab)

    def keys(self, seqlen: int, convention: str) -> float:
        """Mean number of keys of a query over all blocks: all of them ("palm"), or those that no mask hides."""
        whole = seqlen if convention == "palm" else costs.causal_keys(seqlen)
        if not self.window or self.window >= seqlen:
            return whole
        near = self.window * (1 - (self.window - 1) / (2 * seqlen))  # the first of a sequence see fewer
        full = self.depth // self.every if self.every else 0
        return (full * whole + (self.depth - full) * (self.window if convention == "palm" else near)) / self.depth

    def flops_per_token(self, seqlen: int, convention: str) -> float:
        """Of one token's training step: 6 per weight that it is multiplied with, and the attention core thrice.
        convention: "linear", "causal" or "palm", as in costs.flops_per_token, whose figure this is for the reference
        transformer."""
        if convention == "linear":
            return 6 * self.multiplied
        core = costs.attention_flops(self.heads, self.head_dim, self.keys(seqlen, convention))
        return 6 * self.multiplied + 3 * self.depth * core


def reference(c) -> Architecture:
    """The transformer of model.py at resolved flags."""
    heads = c.width // c.head_dim
    return Architecture(
        "reference", c.depth, c.width, heads, heads // c.grouping, c.head_dim, c.grow * c.width, c.vocab,
        biases=(c.grow + 1) * c.width, norms=4 * c.width, final_norm=2 * c.width,
    )  # fmt: skip
