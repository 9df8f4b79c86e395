"""Cars with masks: drawn ones, Carvana's folder, and that fp16 loses gradients on it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from helpers.models import UNet
from helpers.pictures import PictureError, preload, segmentation
from helpers.pictures.datasets import CAR_MEAN as MEAN
from helpers.pictures.datasets import CAR_STD as STD
from helpers.pictures.datasets import Carvana, DrawnCars


@pytest.fixture(scope="module")
def pictures():
    return preload(DrawnCars(64, size=64))


@pytest.fixture
def folder(tmp_path):
    """Carvana as Kaggle has it, with 9 cars of 2 small photos; a mask covers the left half."""
    for part in ("train", "train_masks"):
        (tmp_path / part).mkdir()
    mask = np.zeros((40, 60), dtype=np.uint8)
    mask[:, :30] = 255
    for car in range(9):
        for view in ("01", "02"):
            colour = (20 * car, 100, 250 if view == "01" else 0)
            Image.new("RGB", (60, 40), colour).save(tmp_path / "train" / f"car{car}_{view}.jpg", quality=95)
            Image.fromarray(mask).save(tmp_path / "train_masks" / f"car{car}_{view}_mask.gif")
    return tmp_path


def test_items_are_normalised_images_and_masks_of_0_and_1():
    image, mask = DrawnCars(3, size=48)[1]
    assert (image.shape, mask.shape) == ((3, 48, 48), (1, 48, 48))
    assert image.dtype == mask.dtype == torch.float32
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert (image * STD + MEAN).min() >= 0 and (image * STD + MEAN).max() <= 1
    assert image.std() > 0.2


def test_a_picture_follows_from_seed_split_and_index_alone():
    one, other = DrawnCars(50, size=32), DrawnCars(9, size=32)
    other[3]
    for index in (0, 4, 8):
        assert all(torch.equal(a, b) for a, b in zip(one[index], other[index], strict=True))
    seen = [one[0][0], one[1][0], DrawnCars(9, 32, seed=1)[0][0], DrawnCars(9, 32, split="validation")[0][0]]
    assert all(not torch.equal(a, b) for at, a in enumerate(seen) for b in seen[:at])


def test_worker_processes_draw_the_same_pictures():
    data = DrawnCars(4, size=32)
    here, there = preload(data), preload(data, workers=2)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_indices_are_those_of_a_sequence():
    data = DrawnCars(4, size=32)
    assert torch.equal(data[-1][0], data[3][0])
    assert len(list(data)) == len(data) == 4
    with pytest.raises(IndexError):
        data[4]


def test_about_a_fifth_of_the_pixels_is_car_in_every_picture_some(pictures):
    share = pictures[1].mean(dim=(1, 2, 3))
    assert 0.16 < share.mean() < 0.25
    assert share.min() > 0.05
    assert share.max() < 0.65


def test_neither_place_nor_colour_alone_tells_the_car(pictures):
    """The best linear guess from a pixel's place and colour stays far from the 0.985 that a network must reach."""
    images, masks = pictures
    place = torch.linspace(-1, 1, 64)
    y, x = torch.meshgrid(place, place, indexing="ij")
    colours = torch.cat([images, images.square()], dim=1)
    places = torch.stack([x, y, x * x, y * y, x * y, torch.ones_like(x)]).expand(len(images), -1, -1, -1)
    features = torch.cat([colours, places], dim=1).transpose(0, 1).flatten(1).T  # (pixels, 12)
    answers = masks.flatten()[:, None]
    weights = torch.linalg.lstsq(features, answers).solution
    right = ((features @ weights > 0.5) == (answers > 0.5)).float().mean().item()
    average = ((masks.mean(dim=0) > 0.5) == (masks > 0.5)).float().mean().item()
    assert max(right, average) < 0.9


def test_fp16_loses_gradients_that_loss_scaling_keeps():
    """The mean over 128 pictures of 256×256 pixels makes gradients smaller than fp16 can hold."""
    torch.manual_seed(0)
    images, masks = preload(DrawnCars(4, size=32))
    network, zeros = UNet(width=4, depth=2), []

    def count(gradient):
        zeros.append((gradient.dtype, (gradient == 0).float().mean().item()))

    def watch(module, inputs, output):
        output.register_hook(count)

    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(watch)
    shares = {}
    for scale in (1.0, 2.0**12):
        zeros.clear()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = network(images)
        loss = F.binary_cross_entropy_with_logits(logits.float(), masks, reduction="sum") / (128 * 256 * 256)
        (loss * scale).backward()
        assert {dtype for dtype, _ in zeros} == {torch.float16}
        shares[scale] = sum(share for _, share in zeros) / len(zeros)
    assert shares[1.0] > 0.5
    assert shares[2.0**12] < 0.05


def test_segmentation_takes_carvana_where_there_is_a_folder(folder):
    train, validation = segmentation(folder, size=16)
    assert train.source == validation.source == "Carvana"
    train, validation = segmentation(size=16, samples=5, validation_samples=2)
    assert train.source == validation.source == "generated silhouettes"
    assert (len(train), len(validation)) == (5, 2)


def test_carvana_pairs_each_photo_with_its_mask(folder):
    data = Carvana(folder, size=20)
    image, mask = data[1]
    assert data.photos[1].name == "car0_02.jpg"
    expected = torch.tensor([0.0, 100, 0]) / 255
    torch.testing.assert_close((image * STD + MEAN).mean(dim=(1, 2)), expected, atol=0.02, rtol=0)
    assert torch.equal(mask[0], (torch.arange(20) < 10).float().expand(20, 20))


def test_all_photos_of_a_car_are_in_one_split(folder):
    train, validation = (Carvana(folder, split=split) for split in ("train", "validation"))
    cars = [{photo.name[:4] for photo in data.photos} for data in (train, validation)]
    assert not cars[0] & cars[1]
    assert len(cars[0] | cars[1]) == 9
    assert (len(train), len(validation)) == (16, 2)


def test_a_folder_that_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(PictureError, match=r"nowhere: no folders 'train' and 'train_masks'.*: unpack .* from https"):
        segmentation(tmp_path / "nowhere")
    for part in ("train", "train_masks"):
        (tmp_path / part).mkdir()
    with pytest.raises(PictureError, match=r"train: 0 photos"):
        Carvana(tmp_path)


@pytest.mark.parametrize("name", ["train/car0_01.jpg", "train_masks/car0_01_mask.gif"])
@pytest.mark.parametrize("damage", ["cut off", "missing"])
def test_a_broken_file_is_named(folder, name, damage):
    path = folder / name
    data = Carvana(folder)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(PictureError, match=rf"{path.name}: not a readable image"):
        data[0]
