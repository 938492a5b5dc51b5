"""Compile all kernels for a GPU, which need not be there: for Hopper, in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from agentscope_tuner.engine import gpu_kernels, gpu_learner_kernels

given, wide, numbers, absent = "*bf16", "*fp32", "*i64", "constexpr"


def compile_kernel(kernel: Any, types: Sequence[str], **constants: Any) -> None:
    """A kernel whose other arguments have these types; those that are absent are None."""
    left = iter(types)
    signature = {name: absent if name in constants else next(left) for name in kernel.arg_names}
    values = {name: constants.get(name) for name, kind in signature.items() if kind == absent}
    triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32))


def main() -> None:
    """Of the forms that models of common families need."""
    sampling, learning = gpu_kernels, gpu_learner_kernels
    for add in (True, False):
        types = [wide, given if add else absent, given, given, "fp32"]
        compile_kernel(sampling._add_norm, types, WIDTH=896, ADD=add, BLOCK=1024)
        types = [given, given if add else absent, given, given, given, wide, "fp32"]
        compile_kernel(learning._rms_norm, types, WIDTH=64, ADD=add, BLOCK=64)
        types = [given, wide if add else absent, wide, given, wide, wide, wide, "i32"]
        compile_kernel(learning._rms_norm_backward, types, WIDTH=896, ADD=add, BLOCK=1024, PROGRAMS=512)
    compile_kernel(sampling._gate, [given, given], WIDTH=4864, BLOCK=1024)
    for normed in (True, False):
        norms = [given if normed else absent] * 2
        types = [given, *norms, wide, wide, numbers, numbers, numbers, given, given, given, "fp32", "fp32", "i32"]
        sizes = {"HEADS": 14, "KV": 2, "SIZE": 64, "TOGETHER": 32, "HALF": 32}
        compile_kernel(sampling._split_heads, types, **sizes, NORMED=normed)
    for rows, parts in ((1, 1), (1, 4), (16, 1)):
        types = [given, given, given, numbers, numbers, numbers if rows > 1 else absent]
        types += [given, absent, "i32"] if parts == 1 else [wide, wide, "i32"]
        sizes = {"HEADS": 14, "KV": 2, "SIZE": 64, "SIZE2": 64, "GROUP2": 8, "KEYS": 64, "SPAN": 512}
        compile_kernel(sampling._attend, types, **sizes, ROWS=rows, PARTS=parts)
    compile_kernel(sampling._join_parts, [wide, wide, given], SIZE=64, SIZE2=64, PARTS=5, PARTS2=8)
    blocks = {"WORDS": 151936, "BLOCKS": 38, "BLOCK": 4096}
    compile_kernel(sampling._sum_blocks, [given, wide, wide, wide], **blocks)
    compile_kernel(sampling._choose, [given, wide, "*fp64", wide, wide, numbers, wide], **blocks, BLOCKS2=64)
    types = [given, wide, wide, numbers, given, "fp32"]
    compile_kernel(learning._rotate, types, HEADS=14, SIZE=64, TOGETHER=16, HALF=32)
    compile_kernel(learning._swiglu, [given, given, given, "i32"], BLOCK=1024)
    compile_kernel(learning._swiglu_backward, [given] * 5 + ["i32"], BLOCK=1024)
    words = {"VOCABULARY": 151936, "BLOCK": 4096}
    compile_kernel(learning._choose, [given, numbers, wide, wide, wide, wide], **words)
    compile_kernel(learning._choose_backward, [wide, wide, given, numbers, wide, wide, wide], **words)


if __name__ == "__main__":
    main()
