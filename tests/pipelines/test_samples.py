import numpy as np
import pytest

from helpers.pipelines import decoders
from helpers.pipelines.samples import CROPS, example_jpegs, image_samples, token_windows


def decode(data):
    return decoders.decode("Pillow", data.tobytes())


@pytest.fixture(scope="module")
def images():
    return image_samples(130, seed=1, size=(32, 40))


def test_images_are_jpegs_of_the_size_asked_for_and_no_two_are_alike(images):
    assert all(decode(sample.data).shape == (40, 32, 3) for sample in images)
    assert len({sample.data.tobytes() for sample in images}) == len({sample.key for sample in images}) == 130
    first, again = (decode(images[at].data).astype(int) for at in (0, 64))  # two cuts of one drawing
    assert images[0].label == images[64].label and np.abs(first - again).mean() > 1


def test_all_garments_are_among_them_and_keys_name_theirs(images):
    assert {sample.label for sample in images} == set(range(10))
    assert len({(sample.label, sample.key.rpartition("-")[0]) for sample in images}) == 10


def test_a_seed_is_the_same_images_and_another_seed_others(images):
    again = image_samples(130, seed=1, size=(32, 40))
    assert all(one.data.tobytes() == other.data.tobytes() for one, other in zip(images, again, strict=True))
    assert image_samples(1, seed=2, size=(32, 40))[0].data.tobytes() != images[0].data.tobytes()


def test_repeated_crops_differ_in_their_comment_only(monkeypatch):
    monkeypatch.setattr("helpers.pipelines.samples.CROPS", 4)
    images = image_samples(8, size=(32, 40))
    assert len({sample.data.tobytes() for sample in images}) == 8 < CROPS
    assert all(np.array_equal(decode(images[at].data), decode(images[at + 4].data)) for at in range(4))


def test_windows_have_a_length_and_no_two_are_alike():
    windows = token_windows(50, length=64)
    assert {len(sample.data) for sample in windows} == {64} and windows[0].data.dtype == np.int32
    assert len({sample.data.tobytes() for sample in windows}) == len({sample.key for sample in windows}) == 50


def test_examples_are_the_same_for_a_seed():
    assert example_jpegs(2, (64, 48)) == example_jpegs(3, (64, 48))[:2]
    assert example_jpegs(1, (64, 48), seed=1) != example_jpegs(1, (64, 48))
