"""The fine-tuning experiment of arXiv 2507.11372 in the toy world: does a teacher become invariant to what it is shown varied?

    python tests/finetune_table.py --teacher runs/toy-dual-cls/teacher.pt [--attributes NAME ...] [--epochs N] [--people N]

For each attribute a toy world is drawn in which every frame draws it anew (data.py --vary), and the teacher goes on in it
(teacher.py --init). The table: how the invariance energy of each attribute (a column) changed, against a teacher that went on for as
long in the plain toy world. The diagonal is bold, a row's highest change starred.
"""
import os
import sys
import tempfile

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import evaluate
import teacher
from data import FRAME, MOVES, Parser, command_line, make_toy, scan_heads, split_identities


def main(argv=None):
    parser = Parser("Fine-tune a teacher with one attribute varied at a time; print how the invariance energies change.")
    parser.add_argument("--teacher", metavar="FILE", required=True, help="a teacher.pt of the toy world")
    parser.add_argument("--attributes", nargs="+", choices=[name for name in MOVES if name not in FRAME],
                        default=["hair_light", "glasses_tint", "hat_hue", "skin", "face_width"],
                        help="which are varied, each in a world of its own; attributes of a person or a look, since a frame's vary anyway")
    parser.add_argument("--epochs", type=int, default=5, help="times through the faces of each world")
    parser.add_argument("--people", type=int, default=450, help="in each world")
    settings = parser.parse_args(argv)
    teacher.check_numbers(settings, epochs=1, people=8)
    start = teacher.load_teacher(settings.teacher)
    if not isinstance(start, teacher.AdaFaceViT):
        raise ValueError(f"--teacher must be a ViT; {settings.teacher} is {start.description}")
    tuned, settings.attributes = {}, list(dict.fromkeys(settings.attributes))
    with tempfile.TemporaryDirectory() as folder:
        for name in [None, *settings.attributes]:
            root, path = os.path.join(folder, f"world-{name}"), os.path.join(folder, f"{name}.pt")
            make_toy(root, people=settings.people, vary=name)
            index = scan_heads(root)
            teacher.pretrain(index, ~split_identities(index.names), path, vit={**start.sizes, "embed_dim": start.embed_dim}, epochs=settings.epochs,
                             seed=0, workers=0, device=torch.device("cpu"), dtype=None, init=start)
            tuned[name or "plain"] = teacher.load_teacher(path)
        networks = [(name, network, network, True) for name, network in tuned.items()]
        energy = evaluate.microscale(networks, index, [], settings.attributes, k=evaluate.NEIGHBOURS, device="cpu")
    print("\n| varied in training | " + " | ".join(settings.attributes) + " |\n|---" + "|---:" * len(settings.attributes) + "|")
    print("| nothing: the energy itself | " + " | ".join(f"{energy[name]['plain']:.3f}" for name in settings.attributes) + " |")
    for row in settings.attributes:
        change = {name: energy[name][row] - energy[name]["plain"] for name in settings.attributes}
        star = max(change, key=change.get)
        cells = [f"{value:+.3f}{'*' * (name == star)}" for name, value in change.items()]
        print(f"| {row} | " + " | ".join(f"**{cell}**" if name == row else cell for name, cell in zip(change, cells)) + " |")


if __name__ == "__main__":
    command_line(main)
