"""Run cases of `kernel_cases` and `int4_cases` in this process and print one JSON object: case -> "" or what failed.

Usage: run_cases.py [--device cuda] [case ...]        default: all cases, Triton's interpreter
"""

import json
import os
import sys
import time
import traceback

if __name__ == "__main__":
    names = sys.argv[1:]
    device = "cpu"
    if names[:1] == ["--device"]:
        device, names = names[1], names[2:]
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from int4_cases import INT4_CASES, INT4_GPU_ONLY
    from kernel_cases import CASES, GPU_ONLY, check_graph_break_free

    torch.set_num_threads(1)
    cases = {
        **CASES,
        **INT4_CASES,
        "compile-aot-eager": lambda d: check_graph_break_free(d, "aot_eager"),
        "int4-compile-aot-eager": lambda d: check_graph_break_free(d, "aot_eager", "group_int"),
    }
    if device != "cpu":
        cases |= GPU_ONLY | INT4_GPU_ONLY
    result = {}
    for name in names or cases:
        begin = time.perf_counter()
        try:
            cases[name](device)
            result[name] = ""
        except Exception:
            result[name] = traceback.format_exc()
        print(f"{time.perf_counter() - begin:6.2f} s  {name}", file=sys.stderr)
    print(json.dumps(result))
