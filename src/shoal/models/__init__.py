"""The networks of the benchmarks."""

from shoal.models.dense import mlp
from shoal.models.mobilenet import MobileNetV2, mobilenet_v2
from shoal.models.plain import Vgg16, lenet, vgg16
from shoal.models.registry import MODELS, ModelEntry, model_named
from shoal.models.resnet import (
    ResNet,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnext50_32x4d,
    resnext101_32x8d,
)
from shoal.models.small import small_cnn, small_mlp

__all__ = [
    "MODELS",
    "MobileNetV2",
    "ModelEntry",
    "ResNet",
    "Vgg16",
    "lenet",
    "mlp",
    "mobilenet_v2",
    "model_named",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "small_cnn",
    "small_mlp",
    "vgg16",
]
