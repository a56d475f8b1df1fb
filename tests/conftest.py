"""Shared by the tests: the scripts on the path, pictures of one colour, TINY, and one small toy world a session."""
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
import data

torch.set_num_threads(2)


def paint(path, colour=(200, 50, 30), size=(40, 40), **save):
    """Write a picture of one colour, and the folders above it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Image.new("RGB", size, colour).save(path, **save)


def write_landmarks(root, rows):
    """rows: {relative path: (5, 2) points} -> root/landmarks.csv."""
    data.write_csv(os.path.join(root, "landmarks.csv"), data.LANDMARK_HEADER, [[path, *np.ravel(points)] for path, points in rows.items()])


@pytest.fixture
def tiny(tmp_path):
    """Identity A with segments of 2 and 1 frames, B with one of 2, C with one of 1: 2 R1, 2 R2 and 11 R3 pairs."""
    root = tmp_path / "tiny"
    for i, name in enumerate(("A/s0/0.jpg", "A/s0/1.jpg", "A/s1/2.jpg", "B/s0/0.jpg", "B/s0/1.jpg", "C/s0/0.jpg")):
        paint(f"{root}/{name}", colour=(40 * i, 250 - 40 * i, 90))
    return str(root)


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A toy world of 48 people with 3 looks of 4 frames."""
    root = str(tmp_path_factory.mktemp("world") / "toy")
    data.make_toy(root, people=48, looks=3, frames=4)
    return root
