"""Small models trained to convergence in mixed precision, against the same training in float32.

programs.py      what a model is to the training loop, and the ways to compute it
layers.py        dense layers with a compute dtype threaded by hand
data.py          digits, text and curves
sequences.py     character transformer with RoPE, LSTM, GRU, CTC
images.py        ResNet with BatchNorm, VAE, contrastive pairs, mixture of experts
generative.py    GAN, DDPM, normalizing flow
equations.py     neural ODE, PINN, MAML
graphs.py        a graph network with segment_sum
tasks.py         the table of models
loop.py          the training loop, one for all
report.py        paired differences and their table
command_line.py  options
"""
