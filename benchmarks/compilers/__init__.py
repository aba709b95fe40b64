"""What the TPU and the GPU compiler make of a training step, measured without a TPU or a GPU.

hlo.py           reads the text of an optimized module
loops.py         how often a loop runs
traffic.py       the bytes that kernels read and write
counts.py        matrix products, converts, collectives
targets.py       the chips, and the compilers for them
models.py        GPT in Linen and in NNX, ResNet-50
programs.py      training steps, with the shapes of their arguments
sharding.py      training steps on a mesh
optimizers.py    optimizer steps, with each way to skip a bad one
measure.py       compiles a program and reads what it costs
report.py        tables
command.py       what the commands do
command_line.py  their options
"""
