"""Small networks to start from; Partita samples any other `nn.Module` as well."""

from .cnn import convnet
from .mlp import mlp

__all__ = ["convnet", "mlp"]
