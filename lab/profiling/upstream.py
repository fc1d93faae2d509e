"""Torch's own schedulers of collectives in place of overlap.py's pass, in another benchmark.

    python -m lab.profiling.upstream manual lab.benchmarks.collectives --device cuda --world 8 --results FILE
    python -m lab.profiling.upstream automatic lab.benchmarks.exposed simple:fwdbwd --results FILE -- --depth 4

manual: torch._inductor.fx_passes.overlap_manual_scheduling, told our units. automatic: Inductor's options
enable_overlap_scheduling and collective_bucketing, with times by formula. Both ask what the GPU can do: they are told
an H100's datasheet. They are the same graphs otherwise: a unit's parameters come by one collective. Torch 2.13.
"""

import argparse
import runpy
import sys

import overlap

GB_S, TFLOP_S = 3350, 989  # of memory, of bf16 products
OPTIONS = "aten_distributed_optimizations."
AUTOMATIC = {
    f"{OPTIONS}enable_overlap_scheduling": True,
    f"{OPTIONS}collective_bucketing": True,
    f"{OPTIONS}insert_overlap_deps": False,
    f"{OPTIONS}compute_estimator": "analytical",
}


def path_of(note: str) -> str:
    """A module's path, as Dynamo notes it, as its name in the model."""
    words = note.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").split(".")
    return ".".join(
        word for word in words if word not in ("L", "G", "self", "m", "_modules", "model", "")
    )


def stack_of(node) -> list[tuple[str, type]]:
    """(name, class) of the modules that a node lies in, from the outermost on."""
    if "bucket" in node.meta:
        return [(path_of(node.meta["unit"] or node.meta["bucket"][0][0]), object)]
    noted = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [(path_of(path), object) for path, _ in noted.values()]


def manual(self, g) -> None:
    """Takes the place of overlap.Overlap.__call__."""
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    gm = getattr(g, "owning_module", g)
    ours = [n for n in gm.graph.nodes if overlap.is_ours(n)]
    plans = list(dict.fromkeys(stack_of(n)[0][0] for n in ours))
    if plans:
        manual_overlap_bucketing(gm, plans, module_stack_fn=stack_of)


def automatic(model, *args, **kwargs) -> dict:
    """Takes the place of overlap.compile_options."""
    return AUTOMATIC | {"reorder_for_peak_memory": False}


def without_a_gpu() -> None:
    """Both ask what the GPU can do."""
    import torch._inductor.utils as inductor
    import torch.utils._runtime_estimation as estimation

    for module in (inductor, estimation):
        module.get_gpu_dram_gbps = lambda *args: GB_S
        module.get_device_tflops = lambda *args: TFLOP_S


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "python -m lab.profiling.upstream",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("how", choices=("manual", "automatic"))
    parser.add_argument("program", help="such as lab.benchmarks.collectives; its flags follow")
    own = parser.parse_args(sys.argv[1:3])
    sys.argv[1:3] = []
    without_a_gpu()
    if own.how == "manual":
        overlap.Overlap.__call__ = manual
    else:
        overlap.compile_options = automatic
    runpy.run_module(own.program, run_name="__main__", alter_sys=True)
