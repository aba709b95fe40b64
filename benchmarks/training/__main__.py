"""Trains small models in float32 and in mixed precision, and compares where they end.

    python benchmarks/training                             # all models, half an hour on two cores
    python benchmarks/training --models GRU PINN
    python benchmarks/training --seeds 10 --first-seed 5   # other seeds than those of the table
    python benchmarks/training --quick                     # two seeds, a few steps
    python benchmarks/training --markdown --machine "2-core CPU"

A model starts from the same parameters and sees the same batches in every precision, so that
differences are paired: one per seed. All seeds of a model run as one program. The loss scale of
float16 is dynamic; gradients are clipped and the learning rate warms up.
"""

import os
import pathlib
import sys

if __name__ == "__main__":
    # `python benchmarks/training` puts this folder on the path; the packages beside it are meant.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    # XLA on a CPU may leave out casts to 16 bits and back, and so compute in float32.
    flag = "--xla_allow_excess_precision=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    from training.command_line import main

    main()
