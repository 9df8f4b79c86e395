"""Pictures: drawn cars and clothes, photo files and their splits, data sets, and what happens to pixels before a model.

shapes, drawing    outlines of cars and clothes; a picture of one, with its mask
clothing           which photos there are, with classes and splits: the clothing dataset's, or drawn ones
datasets           photos as batches, a broken one left out; cars with their masks
transforms         a part is cut out, made square, perhaps mirrored, normalised
"""

from .clothing import PictureError, cores, local_photos, photo_files, read_photo
from .datasets import Carvana, DrawnCars, Photos, decode_photos, preload, segmentation
from .drawing import draw_garment
from .shapes import GARMENTS

__all__ = [
    "GARMENTS",
    "Carvana",
    "DrawnCars",
    "Photos",
    "PictureError",
    "cores",
    "decode_photos",
    "draw_garment",
    "local_photos",
    "photo_files",
    "preload",
    "read_photo",
    "segmentation",
]
