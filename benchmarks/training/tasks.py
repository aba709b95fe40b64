"""The table of models."""

from __future__ import annotations

from . import equations, generative, graphs, images, reinforcement, sequences
from .programs import Task

TASKS = (
    Task("transformer with RoPE", sequences.transformer, 500, 1e-2),
    Task("LSTM", sequences.lstm, 400, 1e-2),
    Task("GRU scan", sequences.gru, 400, 1e-2),
    Task("CTC", sequences.ctc, 400, 1e-2),
    Task("ResNet with BatchNorm", images.resnet, 300, 1e-2, "test loss", together=False),
    Task("mixture of experts", images.moe, 500, 5e-3),
    Task("VAE", images.vae, 800, 5e-3),
    Task("contrastive", images.contrastive, 600, 5e-3),
    Task("GAN", generative.gan, 1000, 2e-3, "energy distance"),
    Task("DDPM", generative.ddpm, 800, 5e-3),
    Task("normalizing flow", generative.flow, 800, 5e-3),
    Task("neural ODE", equations.neural_ode, 500, 1e-2),
    Task("PINN", equations.pinn, 1000, 5e-3, "relative error of the solution"),
    Task("PPO", reinforcement.ppo, 400, 1e-2, "share of the time that poles are down"),
    Task("MAML", equations.maml, 800, 5e-3),
    Task("graph network", graphs.communities, 500, 5e-3),
)
"""The rows, in order."""
