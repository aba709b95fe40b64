"""Compiles training steps for TPUs and GPUs on a machine that has none, and compares them.

    python benchmarks/compilers tpu                   # all models and variants for a v5e
    python benchmarks/compilers tpu --quick           # small models of one layer, as CI does
    python benchmarks/compilers tpu --targets v5e v6e v5p --models gpt_scan_remat
    python benchmarks/compilers gpu --targets h100 b200 a100
    python benchmarks/compilers optimizer             # loss scaling around adamw, v5e and h100
    python benchmarks/compilers batches               # the largest that 16, 40 and 80 GB hold
    python benchmarks/compilers sharded --size 1.3B --mesh 16
    python benchmarks/compilers sharded --size 7B --mesh 64x4

The compilers are libtpu's and the CUDA plugin's: pip install "jmp-autocast[bench-tpu,bench-gpu]".
Nothing runs on a device, so no time of a step is measured. The TPU compiler's estimate of cycles,
bytes, FLOPs and kernels are read from the optimized program, each with its ratio to the
hand-written one in brackets. The programs' texts are kept in benchmarks/compiled_texts.
"""

import pathlib
import sys

if __name__ == "__main__":
    # `python benchmarks/compilers` puts this folder on the path; the packages beside it are meant.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    from compilers.command_line import main

    sys.exit(main())
