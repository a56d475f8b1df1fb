"""Draw a few people of a folder: a reference, two pictures of each relation to it, and under each head its aligned face.

The picture in the README, and the quickest way to see whether your landmarks are right.

    python tests/draw_relations.py --data PATH [--out FILE]     # without --data: the toy world
"""
import os
import sys

import numpy as np
import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from data import HeadDataset, Parser, command_line, data_options, open_data
from evaluate import framed, grid_of, relation_of


def relation_sheet(index, path, *, people=3, side=96):
    """Draw a few people of an index: a reference, two pictures of each relation to it; under each head its aligned face."""
    dataset, rng, cells = HeadDataset(index, head_size=side, face_size=side), np.random.default_rng(0), []
    titles = {None: "reference", "R1": "same look", "R2": "other look", "R3": "other person"}
    for person in rng.permutation(len(index.names))[:people]:
        rows = rng.permutation(len(index.paths))
        own = rows[index.identity[rows] == person]
        chosen = {None: own[:1]}
        for wanted, among in (("R1", own[1:]), ("R2", own), ("R3", rows[:1000])):
            chosen[wanted] = [row for row in among if relation_of(index, own[0], row) == wanted][:2] + [None, None]
        shown = [(wanted, row if row is None else dataset[row]) for wanted in titles for row in chosen[wanted][:2]]
        blank = torch.full((3, side, side), 255, dtype=torch.uint8)
        heads = [sample[1] if isinstance(sample, tuple) else blank for _, sample in shown]
        faces = [sample[2] if isinstance(sample, tuple) and sample[3] else blank for _, sample in shown]
        cells.append([framed(head, wanted, titles[wanted]) for head, (wanted, _) in zip(heads, shown)])
        cells.append([framed(face, wanted, "no face" if face is blank else "aligned face") for face, (wanted, _) in zip(faces, shown)])
    grid_of(cells, 7).save(path)


def main(argv=None):
    parser = Parser("Draw a few people of a folder with the three relations and their aligned faces.")
    data_options(parser)
    parser.add_argument("--out", metavar="FILE", default=os.path.join("runs", "relations.png"), help="where the picture goes")
    parser.add_argument("--people", type=int, default=3, help="how many")
    settings = parser.parse_args(argv)
    if settings.people < 1:
        raise ValueError(f"--people must be at least 1; got {settings.people}")
    index = open_data(settings)
    os.makedirs(os.path.dirname(settings.out) or ".", exist_ok=True)
    relation_sheet(index, settings.out, people=settings.people)
    print(f"picture: {settings.out}")


if __name__ == "__main__":
    command_line(main)
