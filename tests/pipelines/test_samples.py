import io

import numpy as np
import pytest
from PIL import Image

from helpers.pipelines.formats import decode
from helpers.pipelines.samples import example_jpegs, image_samples, token_samples
from helpers.text import SyntheticText


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


@pytest.fixture
def photos(tmp_path):
    """Three JPEGs and a PNG for training, one for validation."""
    for split, kind, name in (
        ("train", "hat", "a.jpg"),
        ("train", "hat", "b.png"),
        ("train", "shoes", "c.jpeg"),
        ("train", "shoes", "d.jpg"),
        ("validation", "hat", "e.jpg"),
    ):
        file = tmp_path / split / kind / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (ord(name[0]), 0, 0)).save(file)
    return tmp_path


def test_photos_of_a_folder_are_its_training_jpegs_byte_for_byte(photos):
    samples = image_samples(folder=photos)
    assert {sample.key: sample.label for sample in samples} == {"a": 0, "c": 1, "d": 1}
    for sample in samples:
        (file,) = photos.glob(f"train/*/{sample.key}.*")
        assert sample.data.tobytes() == file.read_bytes()
        assert Image.open(io.BytesIO(sample.data)).size == (20, 20)
    assert len(image_samples(2, folder=photos)) == 2


def test_tokens_are_the_texts_and_their_label_is_a_length_class():
    text, samples = SyntheticText(40, seed=3), token_samples(40, seed=3)
    assert len({sample.key for sample in samples}) == 40
    for ids, sample in zip(text, samples, strict=True):
        assert np.array_equal(ids, sample.data)
        assert 2 ** (sample.label - 1) <= len(ids) < 2**sample.label


def test_what_cannot_be_had_is_named(photos):
    with pytest.raises(ValueError, match="count is 4; allowed: 1 to 3, the JPEGs"):
        image_samples(4, folder=photos)
    with pytest.raises(ValueError, match="count is 0"):
        image_samples(0)
    with pytest.raises(ValueError, match="size is"):
        image_samples(1, size=(8, 100))
    with pytest.raises(ValueError, match="0"):
        token_samples(0)


def test_examples_are_the_same_for_a_seed():
    assert example_jpegs(2, (64, 48)) == example_jpegs(3, (64, 48))[:2]
    assert example_jpegs(1, (64, 48), seed=1) != example_jpegs(1, (64, 48))
