"""What the TPU and the GPU compiler make of a training step, measured without a TPU or a GPU.

targets.py       the compilers, the devices that are not there
models.py        GPT in Linen and in NNX, ResNet-50
programs.py      training steps, with the shapes of their arguments
sharding.py      training steps on a mesh
optimizers.py    optimizer steps, with each way to skip a bad one
traffic.py       the bytes that kernels move
collectives.py   what devices exchange
measure.py       compiles a program and reads what it costs
report.py        tables
command.py       what the commands do
command_line.py  their options

The optimized programs are read by `jmp_autocast.inspect.compiled`.
"""
