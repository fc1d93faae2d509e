"""GPUs by name, from hardware.toml, and what other people's steps reach on them, from field.toml. Imports no torch.

gpu("h100").products                    # FLOP/s that large products reach
field(gpu("h100"), eager=False)         # the same GPU, by constants fitted to published runs
"""

import tomllib
from pathlib import Path

from lab.planning.step_time import Gpu
from trainer.terminal.text import did_you_mean

DATA, FIELD = (Path(__file__).with_name(name) for name in ("hardware.toml", "field.toml"))
# Of a GPU: CUDA's context, NCCL's buffers, what the allocator cannot give out again.
RESERVE_GIB = 3.0


def names() -> list[str]:
    return list(tomllib.loads(DATA.read_text()))


def gpu(name: str, watts: float = 0.0) -> Gpu:
    """watts: its power limit, if it is lower than stated. ValueError, one line, for a name that hardware.toml does not
    have, or more watts than the GPU takes."""
    data = tomllib.loads(DATA.read_text())
    if name not in data:
        raise ValueError(
            f"--gpu {name}: must be one of {', '.join(data)}{did_you_mean(name, data)}"
        )
    entry = data[name]
    if watts > entry["watts"]:
        raise ValueError(f"--watts {watts:g}: {name} takes at most {entry['watts']}; leave it out")
    like = data[entry.get("like", name)]
    reached = like["reached"]
    flops = entry["tflops"] / like["tflops"]
    memory = entry["tb_per_s"] / like["tb_per_s"]
    watts = watts or entry["watts"]  # the clock goes about as the square root of the power
    flops *= min(1.0, watts / like["watts"] / (entry["tflops"] / like["tflops"])) ** 0.5
    rates = {k: tuple(1e12 * flops * v for v in pair) for k, pair in reached["attention"].items()}
    limited = watts < entry["watts"]
    scaled = "" if like is entry else f"rates scaled from {entry.get('like', name)}, not measured"
    scaled = (
        f"rates scaled to {watts:g} of {entry['watts']} W, at which no run is published"
        if limited
        else scaled
    )
    return Gpu(
        name,
        1e12 * entry["tflops"],
        1e12 * flops * reached["products"],
        1e12 * memory * reached["tb_per_s"],
        2**20 * entry["memory_mib"],
        entry["sms"],
        rates,
        1e-6 * reached["floor_us"],
        scaled,
        entry["arch"],
        entry["link"],
        "" if scaled else reached.get("serial_link", ""),
        tuple(reached["error"]),
        reached["source"],
        entry.get("like", name),
        limited=limited,
    )


def field_data() -> dict[str, dict]:
    """field.toml: {"constants": .., "bars": {kind: (rows, error)}, "ran": {"beyond_limit": (planned so, rows)},
    "reserved": {"runs": .., "sources": .., "most": times the planned bytes, "above": runs, "below": runs}}."""
    return tomllib.loads(FIELD.read_text())


def field(gpu: Gpu, eager: bool, constants: dict[str, float] | None = None) -> Gpu:
    """What other people's steps reach on a GPU (field.toml); `gpu` has the rates of this program's own steps on a card
    that did nothing else. eager: without a compiler, which takes kernels one by one."""
    constants = constants or field_data()["constants"]

    def of(what: str) -> float:
        return constants.get(f"{gpu.like} {what}", 1.0)

    return gpu._replace(
        products=of("products") * gpu.products,
        bandwidth=of("memory") * gpu.bandwidth,
        floor=1e-6 * constants["eager floor_us"] if eager else gpu.floor,
        passes=constants["eager passes"] if eager else 1.0,
        straggling=constants["straggling"],
    )
