"""The code that a GPU would run, generated and compiled without one: any setting, any number of ranks, in one process.

    python -m lab.profiling.gpu_code --arch sm_90 --world 8 --remat both      # the flags of main.py
    python -m lab.profiling.gpu_code --model my_file:build --world 8          # your model, see collectives

One step runs on tensors without values. Whatever torch.compile is given on the way, Inductor generates for the GPU that
is named, and each Triton kernel is compiled for it by Triton's own ptxas: registers, bytes of stack (of these a thread
spills or indexes), shared memory. Exit code 1 if a kernel does not compile or needs more than the GPU has. Nothing is
loaded or run: cuBLAS, cuDNN and flash are names in the code, and speed is not told.

Needs `pip install triton` (the extra `gpucode`) and, for torch's CPU build, g++.
"""

import argparse
import ctypes
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

from lab.profiling.command import parse_tool, tool
from trainer import config as flags
from trainer.terminal.output import fail, put

if __name__ == "__main__":  # before torch is imported, as in main.py
    _parser = tool("lab.profiling.gpu_code", __doc__)
    _parser.add_argument(
        "--arch", choices=("sm_80", "sm_90", "sm_100"), default="sm_90", help="GPU (default: sm_90)"
    )
    _parser.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="your model (default: the trainer's)"
    )
    _parser.add_argument(
        "--save", metavar="DIR", help="folder for the generated code, a file per graph and kernel"
    )
    _parser.add_argument(
        "--no-kernels", action="store_true", help="generate code only; compile no kernel"
    )
    OWN, CONFIG = parse_tool(_parser, gpu=True)

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import partitioners
from torch._inductor import async_compile, codecache, compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.testing._internal.distributed.fake_pg import FakeStore

import lean
import model as model_file
from lab.profiling import collectives
from trainer.parallelize import build
from trainer.step import Step

# Facts of the GPUs that Inductor and Triton ask for: name, multiprocessors, MiB of memory, bytes of shared memory that
# one block may have, MiB of L2 cache. Source: the CUDA programming guide's table of compute capabilities, data sheets.
ARCHS = {
    "sm_80": ("NVIDIA A100-SXM4-80GB", 108, 81920, 166912, 40),
    "sm_90": ("NVIDIA H100 80GB HBM3", 132, 81920, 232448, 50),
    "sm_100": ("NVIDIA B200", 148, 183359, 232448, 126),
}

# A CUDA device that does nothing. torch's CPU build has none, and even tensors without memory ask for it; its CUDA
# build takes this one by itself where there is no GPU.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


@dataclass
class Kernel:
    """A kernel that generated code launches. It does nothing; `launched` sees its arguments."""

    name: str
    source: str

    def run(self, *args, **kwargs) -> None:
        self.launched(args)

    __call__ = run

    def launched(self, args: tuple) -> None:
        pass


@dataclass
class Code:
    """One generated graph. origins: name of a buffer -> (the module that it comes from, its operation)."""

    name: str
    module: types.ModuleType
    source: str
    kernels: dict[str, Kernel]
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)


def no_triton() -> str | None:
    """Why no GPU code can be generated here, or None."""
    try:
        import triton
    except ImportError:
        return "GPU code needs Triton: pip install -e '.[gpucode]', or ./launch.sh install"
    return (
        None
        if triton.__version__ >= "3"
        else f"GPU code needs Triton 3 or newer, this is {triton.__version__}"
    )


def pretend(arch: str) -> None:
    """Lets torch.cuda and Triton answer as one idle GPU of this architecture, until the process ends."""
    name, processors, mib, shared, cache = ARCHS[arch]
    capability = divmod(int(arch.removeprefix("sm_")), 10)
    about = types.SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=processors,
        warp_size=32,
        total_memory=mib * 2**20,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024,
        L2_cache_size=cache * 2**20,
        gcnArchName="",
    )
    answers = dict(
        is_available=True,
        device_count=1,
        current_device=0,
        init=None,
        _lazy_init=None,
        is_initialized=False,
        get_device_properties=about,
        get_device_capability=capability,
        get_device_name=name,
        is_bf16_supported=True,
        synchronize=None,
        set_device=None,
        mem_get_info=(about.total_memory,) * 2,
        get_arch_list=[arch],
        _exchange_device=0,
        _maybe_exchange_device=0,
        is_current_stream_capturing=False,
        get_rng_state=torch.zeros(16, dtype=torch.uint8),
        set_rng_state=None,
    )
    for question, answer in answers.items():
        replies = staticmethod(lambda *_, answer=answer, **__: answer)
        for asked in (torch.cuda, CudaInterface, CudaInterface.Worker):
            if hasattr(asked, question):
                setattr(asked, question, replies.__func__ if asked is torch.cuda else replies)
    if torch.version.cuda is None:
        torch.version.cuda = "12.8"
        _load_guard()
    else:
        # FakeTensorMode would, but believes in the GPU; with a real one, no-op.
        torch._C._ensureCUDADeviceGuardSet()
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        torch._C._cuda_getCurrentRawStream = lambda *_: 0

    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    asked = dict(
        max_shared_mem=shared, multiprocessor_count=processors, warpSize=32, max_num_regs=65536
    )

    class Driver(CudaDriver):
        def __init__(self):
            self.utils = types.SimpleNamespace(get_device_properties=lambda *_: asked)

        def get_current_target(self):
            return GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

        def get_current_device(self):
            return 0

        def get_device_capability(self, *_):
            return capability

        def get_current_stream(self, *_):
            return 0

        @staticmethod
        def is_active():
            return True

    driver.set_active(Driver())


def _load_guard() -> None:
    """Compiles GUARD and loads it into this process. RuntimeError, one line, without a compiler."""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "g++",
            "-shared",
            "-fPIC",
            "-std=c++20",
            f"-I{root}/include",
            "-xc++",
            "-",
            f"-L{root}/lib",
            "-lc10",
        ]
        try:
            subprocess.run(
                [*command, "-o", f"{folder}/guard.so"], input=GUARD, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as e:
            raise RuntimeError(f"torch's CPU build needs g++ to generate GPU code: {e}") from e
        ctypes.CDLL(f"{folder}/guard.so")


def retarget(gm: torch.fx.GraphModule, inputs: list) -> list:
    """Moves a graph that was traced on a CPU to fake tensors of a GPU, in place. Returns its new inputs."""
    gpu = torch.device("cuda", 0)
    mode = torch._guards.detect_fake_mode(inputs)

    def moved(value):
        if isinstance(value, torch.device):
            return gpu
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=gpu)

    for part in gm.modules():
        for n in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            n.args = map_aggregate(n.args, moved)
            n.kwargs = map_aggregate(n.kwargs, moved)
            if n.op in ("placeholder", "get_attr"):
                for key in {"val", "example_value"} & n.meta.keys():
                    n.meta[key] = map_aggregate(n.meta[key], moved)
        if isinstance(part, torch.fx.GraphModule):
            part.recompile()
    inputs = [moved(t) for t in inputs]
    FakeTensorProp(gm, mode=mode).propagate_dont_convert_inputs(*inputs)
    return inputs


def _loaded(name: str, module: types.ModuleType, graph) -> Code:
    """Generated code that can be called with tensors of a CPU that have no values. graph: Inductor's, for origins."""

    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype)

    def view(t, size, stride, offset=0):
        return torch.as_strided(t, size, stride, t.storage_offset() + offset)

    vars(module).update(
        empty_strided_cuda=empty,
        empty_strided_cpu=empty,
        reinterpret_tensor=view,
        get_raw_stream=lambda _: 0,
        assert_size_stride=lambda *_: None,
        assert_alignment=lambda *_: None,
        copy_if_misaligned=lambda t: t,
        device=lambda *_, **__: torch.device("cpu"),
    )
    origins = {}
    for buffer in graph.buffers:
        nodes = [*getattr(buffer, "origins", ())]
        path = next(
            filter(None, map(collectives.module_of, nodes)), ""
        )  # L['self'].run_model.blocks.0.mlp.up
        origins[buffer.get_name()] = (
            re.sub(r"^.*?\brun_model\.?", "", path),
            str(nodes[0].target) if nodes else "",
        )
    kernels = {k.name: k for k in vars(module).values() if isinstance(k, Kernel)}
    return Code(name, module, Path(module.__file__).read_text(), kernels, origins)


@contextmanager
def generated(gpu: bool, name: Callable[[bool], str], run: bool = True) -> Iterator[list[Code]]:
    """Inside it whatever torch.compile is given becomes Code, which the compiled function then runs on tensors without
    values; or, without `run`, raises collectives.Found when it is called. gpu: for the GPU of `pretend`; otherwise for
    this CPU. name(is_backward): of what is being compiled."""
    codes = []
    lower = compile_fx.compile_fx
    load = GraphLowering.compile_to_module

    def inner(gm, inputs, **kwargs):
        def loaded(graph):
            code = _loaded(name(kwargs.get("is_backward", False)), load(graph), graph)
            codes.append(code)
            return code.module

        with (
            unset_fake_temporarily(),
            mock.patch.object(GraphLowering, "compile_to_module", loaded),
        ):
            inputs = retarget(gm, inputs) if gpu else inputs
            compile_fx.compile_fx_inner(gm, inputs, **kwargs)
        module = codes[-1].module

        def call(args):
            if not run:
                raise collectives.Found
            return (module.runner.call if hasattr(module, "runner") else module.call)(args)

        call._boxed_call = True
        return call

    def triton(self, kernel, source, device_str="cuda"):
        return Kernel(kernel, source)

    def cpp(self, argtypes, source):
        return Kernel(re.search(r"void\s+(\w+)\(", source)[1], source)

    how = dict(inner_compile=inner)
    with (
        collectives.tracing(),
        mock.patch.object(
            compile_fx, "compile_fx", lambda *args, **kwargs: lower(*args, **(kwargs | how))
        ),
        mock.patch.multiple(
            async_compile.AsyncCompile, triton=triton, cpp_pybinding=cpp, wait=lambda *_: None
        ),
        # Attention counts as random. Made again, it would get the state of a CPU's generator where a GPU's takes none.
        mock.patch.object(partitioners, "has_recomputable_rng_ops", lambda gm: False),
        # torch 2.11 would fill a tensor of the GPU, believing that it is there.
        mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None),
    ):
        yield codes


def sdpa_kernel(kernel: str, q, k, v, plain: Callable = model_file.sdpa_kernel) -> torch.Tensor:
    """model.sdpa_kernel for a trace on a CPU of what a GPU will run: only "flash" is another operation there."""
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
    return plain(kernel, q, k, v)


def add_product(total, a, b) -> None:
    """lean.add_product likewise: on a GPU no product is a tensor of its own."""
    torch.addmm(total, a, b, out=total)


@contextmanager
def simulated(
    config: flags.Config, world: int, arch: str | None
) -> Iterator[tuple[Step, torch.Tensor, list[Code]]]:
    """(step, tokens, codes): a step of resolved flags that has run once, on tensors without values, and the code that
    was generated for it; inside the block it may run again. Needs a process group of `world` fake ranks. arch: the GPU
    of `pretend`; None: this CPU. ValueError, one line, for what cannot be simulated."""
    for flag, is_given, why in (
        (
            "--wrapper ddp",
            config.wrapper == "ddp",
            "its reducer needs memory; use --mode replicate",
        ),
        (
            "--wrapper none",
            config.wrapper == "none",
            "a bare model is not simulated; use --mode replicate",
        ),
        ("--deterministic", config.deterministic, "is not simulated; leave it out"),
        (
            "--optimizer adamw8bit",
            config.optimizer == "adamw8bit",
            "its update reads a value, which nothing has here; use adamw",
        ),
        (
            f"--attn {config.attn}",
            arch and config.param_dtype == "fp32" and config.attn in ("cudnn", "flash"),
            "needs bf16 or fp16",
        ),
    ):
        if is_given:
            raise ValueError(f"{flag}: {why}")
    mesh = dist.init_device_mesh
    cpu = torch.device("cpu")

    def real_mesh(*args, **kwargs):
        with unset_fake_temporarily():
            return mesh(*args, **kwargs)

    def name(is_backward):
        return (
            "backward"
            if is_backward
            else dict(fwd="forward", step="update").get(step.phase, step.phase)
        )

    if arch and config.attn == "auto":  # the first that main.py would try there
        kernel = (
            "efficient"
            if config.param_dtype == "fp32"
            else "flash"
            if arch < "sm_90" and len(arch) == 5
            else "cudnn"
        )
        config = replace(config, system=replace(config.system, attn=kernel))
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(dist, "init_device_mesh", real_mesh),
        mock.patch.dict(vars(model_file), dict(sdpa_kernel=sdpa_kernel) if arch else {}),
        mock.patch.dict(vars(lean), dict(add_product=add_product) if arch else {}),
        generated(arch is not None, name) as codes,
    ):
        step = build(config, cpu, world, init=False, compiled_update=arch is not None)
        tokens = torch.zeros(config.batch * config.grad_accum, config.seqlen, dtype=torch.long)
        step(tokens, tokens)
        yield step, tokens, codes


def of_module(target: str, config: flags.Config, world: int) -> list[Code]:
    """The code of forward and backward of the model that MODULE:FUNCTION names, see collectives.of_module."""
    _, function, args, options = collectives.own_model(target, config, world)
    with generated(
        True, lambda is_backward: "backward" if is_backward else "forward", False
    ) as codes:
        with suppress(collectives.Found):
            torch.compile(function, fullgraph=True, options=options)(*args)
    return codes


def resources(kernel: Kernel) -> list[dict]:
    """What each configuration of a Triton kernel takes of the GPU of `pretend`: registers of a thread, bytes of its
    stack, bytes of shared memory of a block; or `error`, why it does not compile. Runs in a process of its own."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    kernels = []
    with (
        inductor_config.patch(use_static_cuda_launcher=False),
        tempfile.NamedTemporaryFile(suffix=".cubin") as file,
    ):
        tuner = getattr(codecache.PyCodeCache.load(kernel.source), kernel.name)
        for i, how in enumerate(tuner.configs):
            row = dict(name=kernel.name, config=i, warps=how.num_warps, stages=how.num_stages)
            try:
                binary = tuner._precompile_config(how).kernel
                Path(file.name).write_bytes(binary.asm["cubin"])
                says = subprocess.run(
                    [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
                )
                used = {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", says.stdout)}
                row |= dict(
                    registers=used["REG"], stack=used["STACK"], shared=binary.metadata.shared
                )
            except Exception as e:  # whatever Triton and ptxas raise
                row["error"] = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            kernels.append(row)
    return kernels


def compiled(codes: list[Code], arch: str) -> list[dict]:
    """The rows of `resources` of every kernel of `codes`, each source once, by as many processes as there are cores.
    What needs more shared memory than the GPU has gets an `error`, too."""
    kernels = {k.source: k for code in codes for k in code.kernels.values()}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        rows = [row for part in pool.map(resources, kernels.values()) for row in part]
    shared = ARCHS[arch][3]
    for row in rows:
        if row.get("shared", 0) > shared:
            row["error"] = f"needs {row['shared']} bytes of shared memory, {arch} has {shared}"
    return rows


def table(rows: list[dict]) -> list[str]:
    """A line per kernel: the most that one of its configurations takes."""
    width = max((len(row["name"]) for row in rows), default=0)
    text = [
        f"{'kernel':<{width}} {'configurations':>14} {'registers':>9} {'stack':>6} {'shared':>7}"
    ]
    for name, group in itertools.groupby(rows, key=lambda row: row["name"]):
        group = list(group)
        most = [max(row.get(what, 0) for row in group) for what in ("registers", "stack", "shared")]
        errors = [f"  {row['error']}" for row in group if "error" in row][:1]
        text.append(
            f"{name:<{width}} {len(group):>14} {most[0]:>9} {most[1]:>6} {most[2]:>7}{''.join(errors)}"
        )
    return text


def main(arguments: argparse.Namespace, config: flags.Config) -> int:
    """Prints the table; returns 1 if a kernel does not fit, else 0. Bad flags: SystemExit(2)."""
    if reason := no_triton():
        fail(reason, 0)
    pretend(arguments.arch)
    dist.init_process_group("fake", rank=0, world_size=arguments.world, store=FakeStore())
    try:
        config = flags.resolve(config, "cuda", arguments.world)
        if config.compile == "none" and not arguments.model:
            raise ValueError("--compile none: no code is generated; use another mode")
        if arguments.save:
            Path(arguments.save).mkdir(parents=True, exist_ok=True)
        if arguments.model:
            codes = of_module(arguments.model, config, arguments.world)
        else:
            with simulated(config, arguments.world, arguments.arch) as (_, _, codes):
                pass
    except OSError as e:
        fail(f"--save {arguments.save}: {e.strerror}; name a folder that can be written", 0)
    except ValueError as e:
        fail(str(e), 0)
    dist.destroy_process_group()
    for code in codes:
        put(
            f"{code.name}: {len(code.kernels)} kernels, {len(code.source.splitlines())} lines of code"
        )
    if arguments.save:
        for i, code in enumerate(codes):
            (Path(arguments.save) / f"{i}_{code.name}.py").write_text(code.source)
            for kernel in code.kernels.values():
                (Path(arguments.save) / f"{i}_{code.name}_{kernel.name}.py").write_text(
                    kernel.source
                )
    rows = [] if arguments.no_kernels else compiled(codes, arguments.arch)
    put(*table(rows) if rows else [], sep="\n")
    failed = [row for row in rows if "error" in row]
    put(
        f"{arguments.arch}, {len(rows)} configurations compiled, {len(failed)} failed; nothing was run"
    )
    return int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main(OWN, CONFIG))
