"""Small networks to start from; Partita samples any other `nn.Module` as well."""

from .cnn import convnet
from .mlp import mlp
from .resnet import resnet

__all__ = ["convnet", "mlp", "resnet"]
