"""Which attention kernel a run uses: --attn is resolved and put to torch.

    sdpa, text = choose_kernel(config, device)      # ("cudnn", "sdpa cudnn (auto)")

A kernel that is named must run or be an error, and `auto` names the one that it takes: torch by itself would silently
fall back to a slower one. Torch is asked whether a kernel can run the shapes and dtype of the run; nothing is computed.
"""

import warnings
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer import config as flags

DTYPES = dict(fp32=torch.float32, bf16=torch.bfloat16)
BACKENDS = dict(
    cudnn=SDPBackend.CUDNN_ATTENTION,
    flash=SDPBackend.FLASH_ATTENTION,
    efficient=SDPBackend.EFFICIENT_ATTENTION,
    math=SDPBackend.MATH,
)
CHOICE = torch._fused_sdp_choice  # private: what scaled_dot_product_attention would dispatch to
# Older versions read out of bounds where 128 does not divide the length (pytorch#169849).
CUDNN_ANY_LENGTH = 91501


class Shape(NamedTuple):
    """Shapes of causal attention: q [batch, heads, seqlen, head_dim], k and v [batch, kv_heads, seqlen, head_dim]."""

    batch: int
    heads: int
    kv_heads: int
    seqlen: int
    head_dim: int
    dtype: str  # "fp32" or "bf16"

    def __str__(self) -> str:
        return f"{self.dtype} q [{self.batch}, {self.heads}, {self.seqlen}, {self.head_dim}], {self.kv_heads} kv heads"

    def empty(
        self, device: torch.device, kv_heads: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(q, k) for asking torch what it would run: one row of memory, expanded. kv_heads: of k, if not the own."""
        row = torch.empty(
            self.head_dim, dtype=DTYPES[self.dtype], device=device, requires_grad=True
        )
        heads = self.heads, kv_heads or self.kv_heads
        return tuple(row.expand(self.batch, n, self.seqlen, self.head_dim) for n in heads)


def shape_of(config: flags.Config) -> Shape:
    """The shapes of one micro-batch on one rank, of resolved flags."""
    heads = config.width // config.head_dim
    return Shape(
        config.batch,
        heads,
        heads // config.grouping,
        config.seqlen,
        config.head_dim,
        config.param_dtype,
    )


def refusal(kernel: str, shape: Shape, device: torch.device) -> str | None:
    """Why model.sdpa_kernel must not run `kernel` (a key of BACKENDS) on tensors of this shape, or None."""
    if device.type == "cpu" and kernel in ("cudnn", "efficient"):
        return "it needs CUDA"
    if device.type == "cuda" and kernel == "flash" and shape.head_dim % 8:
        return f"head dimension {shape.head_dim}: must be a multiple of 8"
    version = torch.backends.cudnn.version() or 0
    if kernel == "cudnn" and shape.seqlen % 128 and version < CUDNN_ANY_LENGTH:
        return f"cuDNN {version} is wrong where 128 does not divide the length, {shape.seqlen}"
    # model.py repeats k and v for this one.
    q, k = shape.empty(device, shape.heads if kernel == "efficient" else None)
    with sdpa_kernel(BACKENDS[kernel]), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            chosen = CHOICE(q, k, k, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        except RuntimeError as e:
            chosen = None
            error = str(e).splitlines()[0]
    if chosen == int(BACKENDS[kernel]):
        return None
    # But of the others, switched off to ask for this:
    reasons = [str(w.message).split(" (Triggered")[0] for w in warned]
    reasons = [r for r in reasons if "not used because" not in r and "runtime disabled" not in r]
    return " ".join(
        (reasons or [error if chosen is None else f"torch would take {chosen}"])[0].split()
    )


def sdpa(asked: str, shape: Shape, device: torch.device) -> tuple[str, str]:
    """(ModelConfig.sdpa, what to print) for the value of --attn on this device. Raises ValueError, one line with the
    reason and the fix, for a kernel that cannot run; "auto" takes the first that can."""
    if asked != "auto":
        if reason := refusal(asked, shape, device):
            raise ValueError(f"--attn {asked}: cannot run on {shape}: {reason}; use --attn auto")
        return asked, f"sdpa {asked}"
    if device.type == "cpu":
        q, k = shape.empty(device)
        chosen = CHOICE(q, k, k, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)
        return (
            "default",
            f"sdpa {next(name for name, backend in BACKENDS.items() if int(backend) == chosen)} (auto)",
        )
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    refused = []
    for kernel in ("cudnn",) * hopper + ("flash", "efficient", "math"):
        reason = refusal(kernel, shape, device)
        if reason is None:
            return kernel, f"sdpa {kernel} (auto{''.join(f'; not {r}' for r in refused)})"
        refused.append(f"{kernel}: {reason}")
    raise ValueError(f"--attn auto: no kernel runs on {shape}: {'; '.join(refused)}")


def choose_kernel(config: flags.Config, device: torch.device) -> tuple[str, str]:
    """(ModelConfig.sdpa, what to print). ValueError, one line: the kernel cannot run."""
    if config.attn == "flex":
        return "default", "flex"
    # Graphs can be compiled for a device that is absent.
    if device.type != config.device and config.attn != "auto":
        return config.attn, f"sdpa {config.attn}"
    return sdpa(config.attn, shape_of(config), device)
