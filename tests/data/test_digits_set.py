import torch

from shoal.data import digits


def test_shapes_and_ranges():
    images, labels = digits()
    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert labels.dtype == torch.int64
    assert sorted(set(labels.tolist())) == list(range(10))


def test_the_split_is_whole_and_has_nothing_twice():
    (train, train_labels), (test, test_labels) = digits(), digits(train=False)
    assert len(test) == len(test_labels) == 360
    counts = torch.cat([train_labels, test_labels]).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    seen = {image.numpy().tobytes() for image in train}
    assert not any(image.numpy().tobytes() in seen for image in test)


def test_a_line_can_tell_ones_from_zeros():
    """Images and labels belong together: a nearest mean of the training images knows most test images."""
    (train, labels), (test, expected) = digits(), digits(train=False)
    means = torch.stack([train[labels == digit].mean(0) for digit in range(10)])
    found = torch.cdist(test.flatten(1), means.flatten(1)).argmin(1)
    assert (found == expected).float().mean() > 0.85
