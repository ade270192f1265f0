"""The networks of the benchmarks."""

from shoal.models.dense import mlp
from shoal.models.registry import MODELS, ModelEntry
from shoal.models.resnet import ResNet18, resnet18
from shoal.models.small import small_cnn, small_mlp

__all__ = ["MODELS", "ModelEntry", "ResNet18", "mlp", "resnet18", "small_cnn", "small_mlp"]
