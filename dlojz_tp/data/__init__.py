"""The course's data sets. Nothing is downloaded; nothing heavy is imported until a set is loaded."""

from .cells import PhotoCells, photo_cells
from .cifar import cifar10
from .digits import digits
from .imagenet import imagenet
from .photos import image_set, photo_patches, verify
from .places import DataDamaged, DataMissing, ImageSet, TensorSet, TextSet, data_root
from .pretraining import Pretrained, pretrained, under_lights
from .searching import SearchTable, search_table
from .state import status
from .text import batch_of_text, code_text

__all__ = [
    "DataDamaged",
    "DataMissing",
    "ImageSet",
    "PhotoCells",
    "Pretrained",
    "SearchTable",
    "TensorSet",
    "TextSet",
    "batch_of_text",
    "cifar10",
    "code_text",
    "data_root",
    "digits",
    "image_set",
    "imagenet",
    "photo_cells",
    "photo_patches",
    "pretrained",
    "search_table",
    "status",
    "under_lights",
    "verify",
]
