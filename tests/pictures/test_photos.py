"""Photos: where they come from, how they are cut; a broken file is named."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from helpers.pictures import Photos, PictureError, clothing, decode_photos, photo_files
from helpers.pictures.clothing import read_photo
from helpers.pictures.datasets import EpochOrder
from helpers.pictures.transforms import (
    AREA,
    channel_constants,
    cut_image,
    cut_on_device,
    draw_cuts,
    middle_boxes,
    normalise,
    random_boxes,
    to_tensor,
)

SMALL = {"classes": 3, "samples": 12, "validation_samples": 6, "size": (40, 53)}


@pytest.fixture
def other_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def generated():
    return photo_files(**SMALL)[0]


def save(path, size=(40, 30), colour=(200, 10, 10)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def small_dataset(tmp_path):
    """`train/CLASS/*.jpg` with 6 hats and 4 skirts; 2 for validation."""
    folder = tmp_path / "clothing-small"
    for split, counts in {"train": {"hat": 6, "skirt": 4}, "validation": {"hat": 1, "skirt": 1}}.items():
        for name, count in counts.items():
            for at in range(count):
                save(folder / split / name / f"{at}.jpg", colour=(40 * at, 100, 255 * (name == "hat")))
    (folder / "train" / "hat" / "notes.txt").write_text("no photo at all")
    return folder


# Files


def test_generated_photos_are_drawn_once_and_found_again(monkeypatch):
    first = photo_files(**SMALL)
    monkeypatch.setattr(clothing, "_draw", None)  # drawing again would fail
    again = photo_files(**SMALL)
    assert [split.files for split in first] == [split.files for split in again]
    assert [len(split) for split in again] == [12, 6]
    assert again[0].classes == ["pants", "shoes", "t-shirt"]
    assert np.bincount(again[0].labels).tolist() == [4, 4, 4]
    assert again[0].source == "generated garments 40×53, 3 classes, seed 0"
    assert all(Image.open(file).size == (40, 53) for file in again[0].files)


def pixels(split):
    return [Image.open(file).tobytes() for file in split.files]


def test_generated_photos_follow_from_the_seed_and_differ_between_the_splits(generated, other_cache):
    here, (there, validation), (other, _) = pixels(generated), photo_files(**SMALL), photo_files(**SMALL, seed=1)
    assert here == pixels(there)
    assert not set(here) & {*pixels(validation), *pixels(other)}


def test_a_drawing_that_fails_leaves_nothing_behind(other_cache, tmp_path, monkeypatch):
    def fail(folder, names, size, seed, photo):
        if photo == (0, 7):
            raise OSError("No space left on device")

    monkeypatch.setattr(clothing, "_draw", fail)
    with pytest.raises(PictureError, match="cannot be written"):
        photo_files(**SMALL)
    assert list((tmp_path / "photos").iterdir()) == []


def test_a_cache_that_lost_photos_is_named(other_cache):
    train, _ = photo_files(**SMALL)
    os.remove(train.files[3])
    with pytest.raises(PictureError, match="not the 18 photos that were drawn; delete the folder"):
        photo_files(**SMALL)


def test_the_small_dataset_comes_with_its_splits(small_dataset):
    train, validation = photo_files(small_dataset)
    assert (train.classes, len(train), len(validation)) == (["hat", "skirt"], 10, 2)
    assert train.labels.tolist() == [0] * 6 + [1] * 4
    assert train.source == validation.source == "clothing photos, clothing-small"


def test_a_folder_without_photos_says_what_is_expected(tmp_path):
    with pytest.raises(PictureError, match=r"no photos; expected train/CLASS/"):
        photo_files(tmp_path)
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
    with pytest.raises(PictureError, match=r"train: no photos; expected train/CLASS/\*\.jpg"):
        photo_files(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 0}, "classes is 0; it must be an integer of at least 1"),
        ({"validation_samples": 1.5}, r"validation_samples is 1\.5"),
    ],
)
def test_wrong_settings_of_generated_photos_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        photo_files(**arguments)


# Cuts

sides = st.integers(20, 4000)


@settings(max_examples=20, deadline=None)
@given(width=sides, height=sides, seed=st.integers(0, 2**32))
def test_random_boxes_lie_within_the_photo_and_have_the_area_they_say(width, height, seed):
    cuts, size = draw_cuts(200, seed, 0), np.array([width, height])
    boxes = random_boxes(cuts, np.broadcast_to(size, (200, 2)))
    assert boxes.min() >= 0
    assert boxes.max() <= 1 + 1e-12
    across, down = (boxes[:, 2:] - boxes[:, :2]).T
    whole = (across < 1) & (down < 1)  # neither side was cut short
    np.testing.assert_allclose((across * down)[whole], cuts[whole, 0])
    ratio = (across * width / (down * height))[whole]
    np.testing.assert_allclose(ratio, np.exp(cuts[whole, 1]))
    assert ((across * down) <= cuts[:, 0] + 1e-12).all()
    assert AREA[0] <= cuts[:, 0].min()


@settings(max_examples=20, deadline=None)
@given(width=sides, height=sides)
def test_the_middle_is_a_square_of_seven_eighths_of_the_shorter_side(width, height):
    left, top, right, bottom = middle_boxes([width, height]) * [width, height, width, height]
    assert right - left == pytest.approx(min(width, height) * 7 / 8)
    assert bottom - top == pytest.approx(min(width, height) * 7 / 8)
    assert left + right == pytest.approx(width)
    assert top + bottom == pytest.approx(height)


def test_cutting_agrees_with_torchs_resize_of_a_slice():
    photo = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    cut = to_tensor(cut_image(Image.fromarray(photo), np.array([0.25, 0.5, 0.75, 1.0]), 16))
    part = torch.from_numpy(photo[20:, 15:45]).permute(2, 0, 1)[None].float()
    expected = torch.nn.functional.interpolate(part, (16, 16), mode="bilinear", antialias=True)[0]
    assert (cut - expected)[:, 1:-1, 1:-1].abs().max() <= 1  # PIL rounds twice, and at the rim looks beyond the box


def smooth(width, height):
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return (255 * np.stack([x, y, (x + y) / 2], axis=-1)).round().astype(np.uint8)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_device_cuts_what_pil_cuts(seed):
    photo = smooth(48, 48)
    cuts = draw_cuts(4, seed, 0)
    boxes, mirrored = random_boxes(cuts, np.ones((4, 2))), cuts[:, 4] > 0
    images = torch.from_numpy(photo).permute(2, 0, 1).expand(4, -1, -1, -1)
    there = cut_on_device(images, torch.from_numpy(boxes).float(), torch.from_numpy(mirrored), 32)
    for box, flip, result in zip(boxes, mirrored, there, strict=True):
        expected = to_tensor(cut_image(Image.fromarray(photo), box, 32)).float()
        inside = (slice(None), slice(1, -1), slice(1, -1))  # at the rim PIL looks beyond the box
        torch.testing.assert_close(result[inside], (expected.flip(2) if flip else expected)[inside], atol=1.5, rtol=0)


def test_chance_differs_by_photo_epoch_and_seed_and_half_is_mirrored():
    cuts = draw_cuts(2000, 0, 0)
    assert len(np.unique(cuts[:, 0])) == 2000
    assert np.array_equal(cuts, draw_cuts(2000, 0, 0))
    assert not np.isclose(cuts[:, :4], draw_cuts(2000, 0, 1)[:, :4]).any(axis=1).all()
    assert not np.isclose(cuts[:, :4], draw_cuts(2000, 1, 0)[:, :4]).any(axis=1).all()
    assert set(cuts[:, 4]) == {0.0, 1.0}
    assert 0.45 < cuts[:, 4].mean() < 0.55


def test_normalising_bytes_is_normalising_shares():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(3, -1, -1)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    torch.testing.assert_close(normalise(pixels, *channel_constants()), (pixels / 255 - mean) / std)


# Data sets


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 40), passes=st.integers(1, 4), seed=st.integers(0, 99))
def test_an_epoch_of_several_passes_has_every_photo_once_in_each(count, passes, seed):
    indices = [index for index, _ in EpochOrder(count, seed, passes=passes)]
    assert len(indices) == len(EpochOrder(count, seed, passes=passes)) == passes * count
    for start in range(0, passes * count, count):
        assert sorted(indices[start : start + count]) == list(range(count))


def batches(photos, epoch=0, workers=0, size=4):
    order = EpochOrder(len(photos), seed=3)
    order.epoch = epoch
    return list(DataLoader(photos, size, sampler=order, num_workers=workers))


def test_workers_give_the_same_pictures_and_epochs_give_others(generated):
    photos = Photos(generated, 16)
    here, there, later = batches(photos), batches(photos, workers=2), batches(photos, epoch=1)
    for a, b in zip(here, there, strict=True):
        assert all(map(torch.equal, a, b))
    seen = torch.cat([images for images, _ in here + later]).flatten(1)
    assert len(torch.unique(seen, dim=0)) == 2 * len(generated)
    assert len({tuple(labels.tolist()) for _, labels in here + later}) > 1


def test_the_middle_first_hides_the_rim_of_a_photo(tmp_path):
    photo = np.zeros((96, 64, 3), dtype=np.uint8)
    photo[16:80] = 255  # white but for the top and bottom sixth
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.fromarray(photo).save(tmp_path / "train" / "a" / "0.png")
    save(tmp_path / "validation" / "a" / "0.jpg")
    train, _ = photo_files(tmp_path)
    whole, middle = Photos(train, 32), Photos(train, 32, middle_first=True)
    dark = [[photos[0, cut][0].min() < 100 for cut in draw_cuts(50, 0, 0)] for photos in (whole, middle)]
    assert sum(dark[0]) > 10
    assert not any(dark[1])


def test_a_kept_photo_is_cut_like_the_file(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.fromarray(smooth(80, 60)).save(tmp_path / "train" / "a" / "0.png")
    save(tmp_path / "validation" / "a" / "0.jpg")
    train, _ = photo_files(tmp_path)
    kept = decode_photos(train, 64)
    assert kept.pixels.shape == (1, 64, 64, 3)
    assert kept.sizes.tolist() == [[80, 60]]
    for cut in [None, *draw_cuts(10, 0, 0)]:
        once, again = (photos[0, cut][0].float() for photos in (Photos(train, 24), Photos(train, 24, decoded=kept)))
        assert (once - again).abs().max() <= 4


def test_photos_stand_upright_and_in_rgb(tmp_path):
    image = Image.new("L", (20, 10), 90)
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "grey.jpg", exif=exif)
    read = read_photo(tmp_path / "grey.jpg")
    assert (read.mode, read.size) == ("RGB", (10, 20))


def test_a_large_photo_is_decoded_no_finer_than_asked(tmp_path):
    save(tmp_path / "large.jpg", (800, 1200))
    assert read_photo(tmp_path / "large.jpg", least=90).size == (100, 150)
    assert read_photo(tmp_path / "large.jpg").size == (800, 1200)


# Broken files


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_is_named(small_dataset, workers):
    train, _ = photo_files(small_dataset)
    (small_dataset / "train" / "hat" / "2.jpg").write_bytes(b"this is no image")
    for read in (lambda: batches(Photos(train, 16), workers=workers), lambda: decode_photos(train, 16)):
        with pytest.raises(PictureError, match=r"hat/2\.jpg: not a readable image"):
            read()


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 600))
def test_whatever_is_wrong_with_a_file_it_is_an_image_or_named(tmp_path_factory, damage, at):
    file = tmp_path_factory.mktemp("damaged") / "photo.jpg"
    save(file, (16, 16))
    whole = file.read_bytes()
    file.write_bytes(whole[:at] + damage + whole[at + len(damage) :])
    try:
        assert read_photo(file).mode == "RGB"
    except PictureError as error:
        assert str(error).startswith(f"{file}: not a readable image")
