"""Compile the kernels for GPUs that the machine does not have."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lazyrag.kernels.dispatch import FP8, Gpu, Shape, variants

H200 = Gpu((9, 0), 132, 232_448)
A100 = Gpu((8, 0), 108, 166_912)
RTX_4090 = Gpu((8, 9), 128, 101_376)
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8e4nv"}

LLAMA_8B = Shape(32, 8, 128, 16, torch.bfloat16, torch.bfloat16, 128)
SMOLLM = replace(LLAMA_8B, num_heads=9, kv_heads=3, head_size=64, rotary_dim=64, page=32)
GPT_J = replace(LLAMA_8B, rotary_dim=64, neox=False, dtype=torch.float16, kv_dtype=torch.float16, page=64)


@dataclass(frozen=True)
class Compiled:
    """`notes`: what ptxas says of spills and of wgmma that it had to run one after the other."""

    shared_bytes: int
    ptx: str
    notes: list[str]


def compile_variant(shape: Shape, name: str) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from lazyrag.kernels import hopper

    variant = variants(shape, H200)[name]
    assert isinstance(variant.launch, hopper.Launch)
    dtype = NAMES[shape.dtype]
    cache = f"tensordesc<{dtype}[1, {shape.page}, 64],{gl.NVMMASharedLayout(128, 16, rank=3)!r}>"
    lines = f"tensordesc<fp32[1, {shape.rotary_dim}],{gl.NVMMASharedLayout(0, 32, rank=2)!r}>"
    types = {
        "desc": cache,
        "turn_desc": lines if variant.launch.raw else cache,
        **dict.fromkeys(("q", "out"), f"*{dtype}"),
        **dict.fromkeys(("part", "stat", "turns"), "*fp32"),
        **dict.fromkeys(("work", "tiles", "pages", "seen"), "*i32"),
        "scale_log2": "fp32",
        **dict.fromkeys(("q_stride", "out_stride"), "i32"),
    }
    constants = hopper.constants(variant.tiling, shape.head_size, shape.rotary_dim, shape.neox, variant.launch)
    names = hopper._attend.arg_names
    assert set(names) == set(types) | set(constants)
    source = GluonASTSource(
        fn=hopper._attend,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if types.get(n, "").startswith("*") or n.endswith("stride")
        },
    )
    options = {"num_warps": 4, "maxnreg": variant.launch.max_registers, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return Compiled(kernel.metadata.shared, kernel.asm["ptx"], assemble(kernel.asm["ptx"]))


def assemble(ptx: str) -> list[str]:
    from triton.backends.nvidia.compiler import get_ptxas

    with TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [
            get_ptxas(90).path,
            "-v",
            "--gpu-name=sm_90a",
            source,
            "-o",
            Path(folder, "kernel.cubin"),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.strip() for line in run.stderr.splitlines() if "spill" in line or "serialized" in line]


def spilled_bytes(compiled: Compiled) -> int:
    """Of the stores: `.. bytes stack frame, N bytes spill stores, .. bytes spill loads`."""
    (line,) = (note for note in compiled.notes if "spill stores" in note)
    return int(line.split(",")[1].split()[0])


def compile_portable(shape: Shape, gpu: Gpu, name: str, alibi: bool = False) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lazyrag.kernels import portable

    variant = variants(shape, gpu)[name]
    assert isinstance(variant.launch, portable.Launch)
    constants = {
        "GROUP": shape.group,
        "BLOCK_M": variant.tiling.block_m,
        "TILE": variant.tiling.tile,
        "PAGE": shape.page,
        "D": shape.head_size,
        "BD": triton.next_power_of_2(shape.head_size),
        "R": shape.rotary_dim,
        "NEOX": shape.neox,
        "ALIBI": alibi,
        "FLOAT32": shape.dtype == torch.float32,
    }
    dtype = f"*{NAMES[shape.dtype]}"
    types = {
        "kv": f"*{NAMES[shape.kv_dtype]}",
        "q": f"*{NAMES[FP8]}" if shape.kv_dtype == FP8 else dtype,
        "out": dtype,
        **dict.fromkeys(("part", "stat", "turns", "slopes"), "*fp32"),
        **dict.fromkeys(("work", "tiles", "pages", "seen", "positions", "key_positions"), "*i32"),
        **dict.fromkeys(("scale_log2", "v_scale"), "fp32"),
    }
    names = portable._attend.arg_names
    aligned = [i for i, n in enumerate(names) if types.get(n, "").startswith("*") or n.endswith("stride")]
    source = ASTSource(
        fn=portable._attend,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    launch = variant.launch
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    major, minor = gpu.capability
    kernel = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    return Compiled(kernel.metadata.shared, kernel.asm["ptx"], [])
