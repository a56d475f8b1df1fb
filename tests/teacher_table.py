"""Teachers of several kinds side by side, one Markdown table: the margins of arXiv 2507.11372, or ViT-HarDis.

    python tests/teacher_table.py margin [--seeds 0] [--data PATH]
    python tests/teacher_table.py decorrelate [--seeds 0 1 2] [--decorrelate-blocks K] [--decorrelate-weight W]

Columns: identity VR@1e-3 and AUC on the aligned faces of the held-out people; Spearman's coefficient of KS statistics and
intra-entropies; mean squared correlation of two attention heads in the last K blocks; cosine to the nearest wrong class centre, mean
of the tenth of the training faces that are nearest to one. --json FILE holds all of it a seed, with the KS statistics.
"""
import os
import sys
import tempfile

import numpy as np
import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import evaluate
import teacher
from data import Parser, command_line, data_options, open_data, split_identities
from losses import head_correlation, nearest_wrong_centre

COLUMNS = ("identity VR@0.001", "AUC", "Spearman", "inter-head similarity", "hard faces: nearest wrong centre")
KINDS = {"margin": list(teacher.MARGINS), "decorrelate": ["none", "uniform", "hard"]}


def heads_and_centres(modules, index, faces, blocks):
    """-> (mean head correlation, mean cosine of the hard faces to the nearest wrong centre, or None without centres)."""
    network, labels = modules["network"], np.unique(index.identity[faces], return_inverse=True)[1]

    def with_maps(pictures):
        maps = []
        z = network(pictures, maps, blocks)
        return torch.cat([torch.stack([head_correlation(part) for part in maps]).mean(dim=0)[:, None], z], dim=1)  # (B, 1 + E)

    found, kept, _ = evaluate.embed_rows(with_maps, index, faces, size=network.image_size, faces=True)
    wrong = None
    if "head" in modules:
        label = torch.from_numpy(labels[np.searchsorted(faces, kept)])
        wrong = nearest_wrong_centre(found[:, 1:], modules["head"].kernel.detach(), label)
        wrong = wrong.topk(max(1, len(wrong) // 10)).values.mean().item()
    return found[:, 0].mean().item(), wrong


def measure(modules, index, held_out, blocks):
    """Trained network and margin head -> {name of COLUMNS: value}, and its KS statistics."""
    network, faces = modules["network"].eval(), np.flatnonzero(index.has_face)
    train, test = (faces[part[index.identity[faces]]] for part in (~held_out, held_out))
    z, kept, _ = evaluate.embed_rows(network, index, test, size=network.image_size, faces=True)
    scores = evaluate.score_embeddings(z, index.identity[kept], index.state[kept], [1e-3])["identity"]
    macro = evaluate.macroscale([("teacher", network, network, True)], index, test, [], "cpu")
    figures = (scores["vr"][1e-3], scores["auc"], macro["spearman"]["teacher"], *heads_and_centres(modules, index, train, blocks))
    return {**dict(zip(COLUMNS, figures)), "ks": macro["ks"]["teacher"], "entropy": macro["entropy"]}


def main(argv=None):
    parser = Parser("Train teachers of several kinds, and compare them.")
    parser.add_argument("compare", choices=list(KINDS), help="what differs between them")
    data_options(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a teacher of each kind for each of them")
    parser.add_argument("--epochs", type=int, default=9, help="times through the faces")
    parser.add_argument("--decorrelate-blocks", type=int, default=1, help="in the last so many blocks")
    parser.add_argument("--decorrelate-weight", type=float, default=1.0, help="weight of the decorrelation")
    parser.add_argument("--json", metavar="FILE", help="write the numbers as JSON too; none: do not")
    settings = parser.parse_args(argv)
    teacher.check_numbers(settings, epochs=1, decorrelate_blocks=1, decorrelate_weight=0)
    index, table = open_data(settings), {kind: [] for kind in KINDS[settings.compare]}
    held_out = split_identities(index.names)
    for kind, seed in [(kind, seed) for kind in table for seed in settings.seeds]:
        method = {**teacher.DEFAULT_METHOD, "decorrelate_blocks": settings.decorrelate_blocks, "decorrelate_weight": settings.decorrelate_weight,
                  settings.compare: kind}
        with tempfile.TemporaryDirectory() as folder:
            modules = teacher.pretrain(index, ~held_out, os.path.join(folder, "teacher.pt"), epochs=settings.epochs, seed=seed, method=method,
                                       vit=dict(image_size=48, patch_size=8, dim=96, depth=3, heads=4), workers=0,
                                       device=torch.device("cpu"), dtype=None)
        table[kind].append(measure(modules, index, held_out, settings.decorrelate_blocks))
        print(f"{kind}, seed {seed}: " + "  ".join(f"{name} {evaluate.show(table[kind][-1][name])}" for name in COLUMNS), flush=True)
    print("\n| | " + " | ".join(COLUMNS) + " |\n|---" + "|---:" * len(COLUMNS) + "|")
    for kind, rows in table.items():
        columns = [[row[name] for row in rows if row[name] is not None] for name in COLUMNS]
        spread = lambda values: f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
        print(f"| {kind} | " + " | ".join(f"{np.mean(values):.3f}{spread(values)}" if values else "n/a" for values in columns) + " |")
    if settings.json:
        evaluate.write_json(settings.json, table)


if __name__ == "__main__":
    command_line(main)
