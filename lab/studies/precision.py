"""What low precision loses, and where: sums, what autocast and our policy make of a model, the norm, gradients.

    python -m lab.studies.precision --small

Every line is run, nothing is looked up: a thousand times 0.01 summed in each dtype, plainly, with Kahan's compensation
and with stochastic rounding; the dtype of each tensor of a toy model (linear, ReLU, LayerNorm, linear, cross-entropy)
under autocast and under MixedPrecisionPolicy of simple_fsdp.py; the variance that a norm takes, in each dtype; the norm
of a gradient summed over micro-batches in each dtype. CUDA's autocast is run on tensors without values where no GPU is.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lab.studies.study import curves, main, published, section
from simple_fsdp import MixedPrecisionPolicy, data_parallel
from trainer.attention_kernel import DTYPES

SHORT = {dtype: name for name, dtype in DTYPES.items()} | {torch.float16: "fp16"}
KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TERM = 0.01


def settings(args) -> list[dict]:
    """A row per part. At full size the sums and the gradients are longer, since low precision loses with length."""
    most = 64 if args.small else 1024
    counts = [n for n in (1, 4, 16, 64, 256, 1024) if n <= most]
    norm = [
        dict(part="norm", mean=mean, scale=scale) for mean, scale in ((0, 1), (0, 300), (100, 1))
    ]
    return [
        dict(part="sums", terms=1000),
        dict(part="dtypes"),
        *norm,
        *(dict(part="gradients", micro_batches=n) for n in counts),
    ]


def measure(setting: dict, args) -> dict:
    """{"lines": [(what, {"fp32": found, ..})]}"""
    torch.manual_seed(0)
    part, *options = setting.values()
    return dict(
        lines=dict(sums=sums, dtypes=dtypes, norm=norm, gradients=gradients)[part](
            args.device, *options
        )
    )


def by_dtype(work) -> dict:
    return {name: work(dtype) for name, dtype in KINDS.items()}


def kahan(term: float, terms: int, dtype: torch.dtype) -> float:
    """The sum, every operation rounded to `dtype`, with what each addition lost added to the next (Kahan 1965)."""
    total = lost = torch.zeros((), dtype=dtype)
    for _ in range(terms):
        addend = torch.tensor(term, dtype=dtype) - lost
        new = total + addend
        lost = (new - total) - addend
        total = new
    return total.item()


def stochastic(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, fp64, rounded to one of its two neighbours in `dtype`, to the nearer with the larger probability, so that the
    mean is x. For x in the dtype's normal range."""
    _, exponent = torch.frexp(x)
    ulp = torch.finfo(dtype).eps * 2.0 ** (exponent - 1)
    return ((x / ulp + torch.rand_like(x)).floor() * ulp).to(dtype)


def plain(term: float, terms: int, dtype: torch.dtype, of: torch.dtype | None = None) -> float:
    """The sum in `dtype` of a term that was rounded to `of` before."""
    total = torch.zeros((), dtype=dtype)
    addend = torch.tensor(term, dtype=of or dtype)
    for _ in range(terms):
        total += addend
    return total.item()


def sums(device: str, terms: int) -> list:
    """Of `terms` times 0.01, on a CPU."""

    def rounded(dtype: torch.dtype) -> float:
        total = torch.zeros(100, dtype=torch.float64)  # a hundred sums
        for _ in range(terms):
            total = stochastic(total + TERM, dtype).double()
        return total.mean().item()

    return [
        (f"sum of {terms} x 0.01", by_dtype(lambda dtype: plain(TERM, terms, dtype))),
        (
            "sum in fp32 of terms in the dtype",
            by_dtype(lambda dtype: plain(TERM, terms, torch.float32, dtype)),
        ),
        ("sum with Kahan's compensation", by_dtype(lambda dtype: kahan(TERM, terms, dtype))),
        ("sum with stochastic rounding, mean of 100", by_dtype(rounded)),
    ]


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """What there is of tensors, by its name in the table."""
        outputs = {"parameters": self.first.weight, "first layer": self.first(x)}
        outputs["norm"] = self.norm(outputs["first layer"].relu())
        outputs["logits"] = self.head(outputs["norm"])
        return outputs | {"loss": F.cross_entropy(outputs["logits"], targets)}


class autocast:
    """torch.autocast, which turns itself off for CUDA on a machine that has none; not to be nested."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype

    def __enter__(self):
        self.before = torch.get_autocast_dtype(self.device)
        torch.set_autocast_dtype(self.device, self.dtype)
        torch.set_autocast_enabled(self.device, True)

    def __exit__(self, *_):
        torch.set_autocast_enabled(self.device, False)
        torch.set_autocast_dtype(self.device, self.before)
        torch.clear_autocast_cache()


def under_autocast(device: str, dtype: torch.dtype) -> dict[str, str]:
    """Name -> dtype of the toy model's tensors, and of gradients where there are values."""
    real = device == "cpu" or torch.cuda.is_available()
    model = Toy()
    with nullcontext() if real else FakeTensorMode(), nullcontext() if real else torch.no_grad():
        # Without CUDA its fake tensors can be made and used, but neither copied nor differentiated.
        weights = {
            name: torch.empty(p.shape, device=device, requires_grad=real)
            for name, p in model.named_parameters()
        }
        x = torch.empty(4, 16, device=device)
        targets = torch.zeros(4, dtype=torch.long, device=device)
        with autocast(device, dtype):
            outputs = torch.func.functional_call(model, weights, (x, targets))
        if real:
            outputs["gradients"] = torch.autograd.grad(outputs["loss"], weights["first.weight"])[0]
        return {name: SHORT[t.dtype] for name, t in outputs.items()}


def under_policy(dtype: torch.dtype, device: str) -> dict[str, str]:
    """The same under our policy: parameters gathered in `dtype`, gradients reduced in fp32. Inputs are the caller's."""
    mesh = dist.init_device_mesh(device, (1,))
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    model = data_parallel(Toy().to(device), mesh, mp_policy=policy)
    x = torch.ones(4, 16, dtype=dtype, device=device)
    targets = torch.zeros(4, dtype=torch.long, device=device)
    outputs = model(x, targets)
    outputs["loss"].backward()
    stored = next(model.parameters())
    outputs |= {
        "parameters, gathered": outputs["parameters"],
        "parameters": stored,
        "gradients": stored.grad,
    }
    return {name: SHORT[t.dtype] for name, t in outputs.items()}


def dtypes(device: str) -> list:
    """A line per tensor and way: autocast by CUDA's rules, by a CPU's, our policy."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    try:
        ways = {
            "autocast, CUDA": lambda dtype: under_autocast("cuda", dtype),
            "autocast, CPU": lambda dtype: under_autocast("cpu", dtype),
            "MixedPrecisionPolicy": lambda dtype: under_policy(dtype, device),
        }
        row = {
            way: {name: run(KINDS[name]) for name in ("fp16", "bf16")} for way, run in ways.items()
        }
    finally:
        if alone:
            dist.destroy_process_group()
    return [
        (f"{way}: {what}", {name: kinds[what] for name, kinds in both.items()})
        for way, both in row.items()
        for what in both["fp16"]
    ]


def norm(device: str, mean: float, scale: float) -> list:
    """The variance of 4096 values around `mean`: each operation in the dtype, beside the same in fp32 of values that
    were rounded to the dtype, which is what the kernel of a norm does."""
    x = mean + scale * torch.randn(4096, device=device)

    def inside(dtype: torch.dtype) -> float:
        cast = x.to(dtype)
        return (cast.square().mean() - cast.mean().square()).item()

    words = f"{'' if scale == 1 else f'{scale} x '}N({mean}, 1)"
    return [
        (f"variance of {words}, in the dtype", by_dtype(inside)),
        (
            f"variance of {words}, in fp32",
            by_dtype(lambda dtype: x.to(dtype).float().var(unbiased=False).item()),
        ),
    ]


def gradients(device: str, micro_batches: int) -> list:
    """The norm of a gradient summed over micro-batches in each dtype, over that of the sum in fp64, less one. Terms
    have a mean, as gradients have; their deviation is four times as large."""
    terms = 0.25 * torch.randn(4096, device=device) + torch.randn(
        micro_batches, 4096, device=device
    )
    right = terms.double().sum(0)

    def summed(dtype: torch.dtype) -> Tensor:
        total = torch.zeros(4096, dtype=dtype, device=device)
        for term in terms:
            total += term.to(dtype)
        return total.double()

    errors = by_dtype(summed)
    where = f"gradient of {micro_batches} micro-batches"
    drift = {name: abs(total.norm() / right.norm() - 1).item() for name, total in errors.items()}
    error = {name: ((total - right).norm() / right.norm()).item() for name, total in errors.items()}
    return [(f"{where}: drift of the norm", drift), (f"{where}: relative error", error)]


def number(value: object) -> str:
    """A figure of a row, in which inf is a word."""
    if value is None or (isinstance(value, str) and value not in ("inf", "nan")):
        return value or ""
    value = float(value)
    return f"{value:.4f}" if abs(value) >= 0.1 and math.isfinite(value) else f"{value:.2g}"


COLUMNS = {
    "what": "{what}",
    **{name: f"{{{name}}}" for name in KINDS},
    "published, fp16": "{published}",
    "the published one is": "{wrong}",
}


def table(rows: list[dict]) -> tuple[str, str]:
    text = "The sum of 1000 x 0.01 should be 10; under autocast and the policy, the dtype that each tensor has."
    return section(rows, text, COLUMNS, entries(rows))


def entries(rows: list[dict]) -> Iterator[dict]:
    """A line each; the published figures are of fp16, of autocast on a GPU."""
    theirs = {line["what"]: line["fp16"] for line in published("precision")}
    for row in rows:
        for what, value in row.get("lines", []):
            line = dict(what=what) | {name: number(value.get(name)) for name in KINDS}
            if other := theirs.get(what.removeprefix("autocast, CUDA: ")):
                line |= dict(published=other, wrong="wrong" * (other != line["fp16"]))
            yield line
        if row["outcome"] != "ok":
            yield row | dict(what=str(row["setting"]))


def figure(rows: list[dict], folder) -> list:
    """Relative error of an accumulated gradient over the micro-batches, by the dtype of the sum."""
    with_gradients = [row for row in rows if row["setting"]["part"] == "gradients"]
    made = {
        f"summed in {name}": [
            (row["setting"]["micro_batches"], row["lines"][1][1][name]) for row in with_gradients
        ]
        for name in KINDS
    }
    return curves(folder, "precision", made, "micro-batches", "relative error of the gradient")


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
