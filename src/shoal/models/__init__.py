"""The networks of the benchmarks."""

from shoal.models.dense import mlp
from shoal.models.densenet import DenseNet, densenet121
from shoal.models.gpt import Gpt, gpt_nano, gpt_small
from shoal.models.inception import InceptionV3, inception_v3
from shoal.models.mobilenet import MobileNetV2, mobilenet_v2
from shoal.models.plain import Vgg16, lenet, vgg16
from shoal.models.registry import MODELS, ModelEntry, loss_of, model_named
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
    "DenseNet",
    "Gpt",
    "InceptionV3",
    "MobileNetV2",
    "ModelEntry",
    "ResNet",
    "Vgg16",
    "densenet121",
    "gpt_nano",
    "gpt_small",
    "inception_v3",
    "lenet",
    "loss_of",
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
