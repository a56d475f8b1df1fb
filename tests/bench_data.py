"""How fast does one worker read pictures? Beside a bare Pillow loop over the same JPEGs: decode in draft mode, resize, to an array.

    python tests/bench_data.py [--size 112] [--pictures 200]          # a minute

A worker's picture is more than the bare one: whole head and aligned face from one decode, upright, checked, stacked into batches. The two
take turns. Frames of 1920 x 1080 and crops of 256 x 256 are drawn first, into a temporary folder.
"""
import os
import statistics
import sys
import tempfile
import time

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from data import FRAME, LANDMARK_HEADER, LOOK, PERSON, HeadDataset, Parser, collate, command_line, draw_from, draw_head, scan_heads, write_csv

KINDS = {"1920 x 1080": (1920, 1080, 900), "256 x 256": (256, 256, 256)}  # width, height, side of the head in it
BATCH = 20


def draw(root, width, height, side, count):
    """Write JPEGs of drawn heads, with some noise as cameras have it, and their landmarks."""
    rng, rows = np.random.default_rng(0), []
    os.makedirs(f"{root}/someone/look")
    for number in range(count):
        head = {**draw_from(PERSON, rng), **draw_from(LOOK, rng), **draw_from(FRAME, rng), "rear": 0.0, "noise": 3.0}
        picture, points = draw_head(head, side)
        frame = Image.fromarray(rng.integers(0, 255, (height // 20, width // 20, 3), dtype=np.uint8)).resize((width, height))
        place = ((width - side) // 2, (height - side) // 2)
        frame.paste(picture, place)
        frame.save(f"{root}/someone/look/{number:04d}.jpg", quality=92)
        rows.append([f"someone/look/{number:04d}.jpg", *(points + place).ravel()])
    write_csv(f"{root}/landmarks.csv", LANDMARK_HEADER, rows)


def bare(files, size):
    """The least that anybody does: pictures at draft scale, resized."""
    for file in files:
        with Image.open(file) as image:
            image.draft("RGB", (size, size))
            np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))


def worker(dataset):
    """What a worker process does: samples and batches of them, and it keeps none."""
    dataset.kept = [pictures[:0] for pictures in dataset.kept]
    for start in range(0, len(dataset), BATCH):
        collate([dataset[row] for row in range(start, min(start + BATCH, len(dataset)))])


def main(argv=None):
    parser = Parser("Time the reading of pictures beside a bare Pillow loop.")
    parser.add_argument("--size", type=int, default=112, help="side of head and face, pixels")
    parser.add_argument("--pictures", type=int, default=200, help="pictures of each kind")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    settings = parser.parse_args(argv)
    torch.set_num_threads(1)  # as in every worker
    for kind, shape in KINDS.items():
        with tempfile.TemporaryDirectory() as root:
            draw(root, *shape, settings.pictures)
            index, times = scan_heads(root), {"bare": [], "head and face": [], "head": []}
            files = [os.path.join(root, index.path(row)) for row in range(len(index.paths))]
            for turn in range(1 + settings.rounds):  # the first warms up
                for name, face in (("bare", None), ("head and face", settings.size), ("head", 0)):
                    dataset = None if face is None else HeadDataset(index, head_size=settings.size, face_size=face)
                    started = time.perf_counter()
                    bare(files, settings.size) if dataset is None else worker(dataset)
                    times[name] += [time.perf_counter() - started] if turn else []
        for name, seconds in times.items():
            ratio = statistics.median(b / s for b, s in zip(times["bare"], seconds))
            print(f"{kind:12} {name:14} {settings.pictures / statistics.median(seconds):7.0f} pictures/s  {ratio:.2f} of the bare loop", flush=True)


if __name__ == "__main__":
    command_line(main)
