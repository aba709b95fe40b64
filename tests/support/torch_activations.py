"""What hooks of a PyTorch model get, as it should be and with a layer broken on purpose.

PyTorch is no dependency of the tests: the arrays are in a file, which this writes.

    pip install torch && python -m tests.support.torch_activations
"""

import pathlib

import numpy as np

FILE = pathlib.Path(__file__).with_suffix(".npz")


def recorded(broken):
    """The weights, the input, and the activations by the names of the modules."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, given, made, padding):
            super().__init__()
            self.conv = nn.Conv2d(given, made, 3, padding=1, padding_mode=padding, bias=False)
            self.norm = nn.GroupNorm(1, made)

        def forward(self, x):
            return torch.relu(self.norm(self.conv(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            around = "circular" if broken else "zeros"
            self.features = nn.Sequential(Block(3, 8, "zeros"), Block(8, 8, around))
            self.classifier = nn.Linear(8, 5)

        def forward(self, x):
            return self.classifier(self.features(x).mean((2, 3)))

    torch.manual_seed(0)
    net, found = Net(), {}
    for name, module in net.named_modules():
        if name:
            keep = lambda module, args, out, name=name: found.update({name: out.detach()})
            module.register_forward_hook(keep)
    x = torch.randn(2, 3, 6, 6)
    net(x)
    return {"x": x, **net.state_dict()}, found


def read():
    """The weights with the input, the activations, and those of the broken model."""
    groups = {"weights": {}, "right": {}, "broken": {}}
    for name, value in np.load(FILE).items():
        group, _, rest = name.partition("/")
        groups[group][rest] = value
    return groups["weights"], groups["right"], groups["broken"]


if __name__ == "__main__":
    weights, right = recorded(False)
    groups = {"weights": weights, "right": right, "broken": recorded(True)[1]}
    arrays = {f"{g}/{n}": x.numpy() for g, values in groups.items() for n, x in values.items()}
    np.savez_compressed(FILE, **arrays)
