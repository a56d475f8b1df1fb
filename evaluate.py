"""How well does a trained student order whole heads? VR@FAR, AUC, ordering, and a picture sheet.

Three relations (arXiv 2605.07766): R1 same identity and look, R2 same identity, another look, R3 other identities.

    identity verification   genuine R1 and R2, impostor R3
    head similarity         genuine R1, impostor R2 and R3
    ordering                P(s(R1) > s(R2)), P(s(R2) > s(R3)), and the mean s of each relation

    python evaluate.py --ckpt runs/NAME/best.pt [--data PATH] [--json FILE] [--sheet FILE]
    python evaluate.py --ckpt ours_vit2cls.ckpt --data PATH    # the authors' checkpoint, as it is
"""
import json
import os
import re

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from data import HeadDataset, Parser, command_line, data_options, loader, open_data
from model import HeadSimilarity, build, read_checkpoint, to_unit, unit_rows
from teacher import autocast, check_numbers, choose_device, load_teacher, machine_options, teacher_options

FARS = (1e-3, 1e-2)


# ---------------------------------------------------------------- metrics

def verification(genuine, impostor, fars=FARS):
    """Cosine scores of genuine and of impostor pairs -> VR@FAR, thresholds, AUC.

    A pair is accepted if its score is strictly above the (k + 1)-th largest impostor score, k = floor(FAR * n),
    n impostor pairs; VR is the accepted share of the genuine pairs, 1 where k >= n. No interpolation.
    AUC = P(genuine > impostor) + half P(equal). -> {"auc", "vr": {far: v}, "threshold": {far: v}, "resolvable_far": 1 / n,
    "genuine", "impostor": counts}; a value is None where there are no genuine or no impostor pairs, a threshold is -inf
    where every pair is accepted."""
    check_fars(fars)
    genuine, impostor = (np.sort(np.asarray(scores).ravel()) for scores in (genuine, impostor))
    g, n = len(genuine), len(impostor)
    result = {"auc": auc(genuine, impostor), "vr": {}, "threshold": {}, "resolvable_far": 1 / n if n else None,
              "genuine": g, "impostor": n}
    for far in fars:
        k = int(np.floor(far * n + 1e-9))
        threshold = None if not n else float(impostor[n - 1 - k]) if k < n else -np.inf
        result["threshold"][far] = threshold
        result["vr"][far] = float((genuine > threshold).mean()) if g and n else None
    return result


def check_fars(fars):
    """ValueError for a false accept rate that is none."""
    for far in fars:
        if not 0 <= far <= 1:
            raise ValueError(f"a false accept rate must lie in [0, 1]; got {far}")


def auc(higher, lower):
    """P(a score of `higher` > one of `lower`) + half P(equal); both sorted. None where one is empty."""
    if not len(higher) or not len(lower):
        return None
    below = np.searchsorted(lower, higher, side="left").astype(np.int64).sum()
    up_to = np.searchsorted(lower, higher, side="right").astype(np.int64).sum()
    return float((below + up_to) / 2 / (len(higher) * len(lower)))


def pair_scores(z, identity, state, block=1024):
    """Embeddings (N, E), labels (N,) -> {"R1": scores, "R2": .., "R3": ..}: cosines of all unordered pairs i < j, once."""
    z = unit_rows(torch.as_tensor(z))
    identity, state = torch.as_tensor(identity), torch.as_tensor(state)
    scores = {"R1": [], "R2": [], "R3": []}
    for start in range(0, len(z), block):
        stop = min(start + block, len(z))
        s = (z[start:stop] @ z[start:].T).clamp(-1, 1)                         # (stop - start, N - start)
        once = torch.ones_like(s, dtype=torch.bool).triu(diagonal=1)           # i < j, since both count from start
        person = identity[start:stop, None] == identity[start:]
        look = state[start:stop, None] == state[start:]
        for name, relation in (("R1", person & look), ("R2", person & ~look), ("R3", ~person)):
            scores[name].append(s[relation & once].numpy())
    return {name: np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.float32) for name, parts in scores.items()}


def score_embeddings(z, identity, state, fars=FARS):
    """Embeddings (N, E), labels (N,) -> {"identity": verification, "head": verification, "ordering": .., "pairs": ..}."""
    s = pair_scores(z, identity, state)
    return {
        "identity": verification(np.concatenate([s["R1"], s["R2"]]), s["R3"], fars),
        "head": verification(s["R1"], np.concatenate([s["R2"], s["R3"]]), fars),
        "ordering": {"R1>R2": auc(s["R1"], s["R2"]), "R2>R3": auc(s["R2"], s["R3"]),
                     "mean": {name: float(r.mean(dtype=np.float64)) if len(r) else None for name, r in s.items()}},
        "pairs": {name: len(scores) for name, scores in s.items()}}


# ---------------------------------------------------------------- embeddings of a folder

@torch.inference_mode()
def embed_rows(network, index, rows, *, size, faces=False, batch_size=256, workers=0, device="cpu", dtype=None):
    """Embed pictures of an index, in order: whole heads (or, with faces, the aligned faces), `size` pixels a side.

    network: float pictures (B, 3, S, S) in [-1, 1] -> (B, E). -> (z (n, E) float32 on the CPU, the n rows that
    could be read, messages of the others)."""
    batches = [rows[start:start + batch_size].tolist() for start in range(0, len(rows), batch_size)]
    dataset = HeadDataset(index, head_size=0 if faces else size, face_size=size if faces else 0)
    z, kept, unreadable = [], [], []
    for batch in loader(dataset, batches, workers):
        unreadable += batch.unreadable
        if len(batch.row):
            pixels = to_unit((batch.face if faces else batch.head).to(device))
            with autocast(torch.device(device), dtype):
                z.append(network(pixels).float().cpu())
            kept += batch.row.tolist()
    return torch.cat(z) if z else torch.zeros(0, 1), np.array(kept, dtype=np.int64), unreadable


def evaluate(student, teacher, index, rows, *, which="id", fars=FARS, flip_sum=False, **how):
    """Score teacher (or None) and student on rows of an index -> (table rows, the student's z, its rows, unreadable).

    flip_sum: the teacher's embedding of a picture is that of the picture plus that of its mirror image, neither
    normalised, as in published figures of face recognisers; the names of its table rows say so."""
    networks = [("student, whole heads", lambda heads: getattr(student(heads), "z_" + which), student.image_size, False)]
    if teacher is not None:
        embed = (lambda pictures: teacher(pictures) + teacher(pictures.flip(3))) if flip_sum else teacher
        networks = [(f"teacher{'+mirror' * flip_sum}, {what}", embed, teacher.image_size, what == "aligned faces")
                    for what in ("aligned faces", "whole heads")] + networks
    table, unreadable = [], set()
    for name, network, size, faces in networks:
        chosen = rows[index.has_face[rows]] if faces else rows
        z, kept, left_out = embed_rows(network, index, chosen, size=size, faces=faces, **how)
        unreadable |= set(left_out)
        if len(kept):
            scores = score_embeddings(z, index.identity[kept], index.state[kept], fars)
            table.append({"name": name, "pictures": len(kept), **scores})
    return table, z, kept, sorted(unreadable)


def show(value, mark=""):
    """A number of a table, or n/a for None."""
    return "n/a" if value is None else f"{value:.3f}{mark}"


def print_table(table, fars):
    """Print a row a network, then the pairs behind it. A starred VR has a FAR below 1 / impostor pairs."""
    columns = [f"VR@{far:g}" for far in fars] + ["AUC"]
    block, wide = 9 * len(columns), 2 + max([22, *(len(row["name"]) for row in table)])
    print(f"\n{'':{wide}}{'identity verification':>{block}} |{'head similarity':>{block}} |{'mean s':>21} |{'ordering':>16}")
    print(" " * wide + 2 * ("".join(f"{name:>9}" for name in columns) + " |") + "     R1     R2     R3 |   R1>R2   R2>R3")
    unresolved = {}
    for row in table:
        line = row["name"].ljust(wide)
        for task in ("identity", "head"):
            result = row[task]
            starred = [far for far in fars if result["impostor"] and far * result["impostor"] < 1 - 1e-9]
            if starred:
                unresolved[task] = f"{task} 1/{result['impostor']} = {result['resolvable_far']:.2g}"
            line += "".join(f"{show(result['vr'][far], '*' * (far in starred)):>9}" for far in fars)
            line += f"{show(result['auc']):>9} |"
        mean, order = row["ordering"]["mean"], row["ordering"]
        line += "".join(f"{show(mean[name]):>7}" for name in ("R1", "R2", "R3"))
        print(line + f" |{show(order['R1>R2']):>8}{show(order['R2>R3']):>8}")
    if unresolved:
        print(f"* too few impostor pairs for this FAR; the smallest that these resolve: {', '.join(unresolved.values())}")
    for row in table:
        pairs = row["pairs"]
        counts = ", ".join(f"{count} {name}" for name, count in pairs.items())
        missing = " and ".join(name for name, count in pairs.items() if not count)
        print(f"{row['name']}: {row['pictures']} pictures, {sum(pairs.values())} pairs: {counts}"
              + (f"; n/a: no pairs of {missing}" if missing else ""))


def write_json(path, content):
    """Write what any JSON reader accepts: UTF-8, and null for minus infinity."""
    with open(path, "w", encoding="utf-8") as file:  # a threshold of -inf (every pair accepted) has no JSON number
        file.write(re.sub('(?<=": )-Infinity', "null", json.dumps(content, indent=1)))


# ---------------------------------------------------------------- the picture sheet

COLOURS = {"R1": (30, 150, 60), "R2": (235, 160, 0), "R3": (205, 40, 40), None: (120, 120, 120)}  # green, amber, red


def framed(pixels, relation, text):
    """(3, S, S) uint8 tensor -> (3, S + 24, S + 8) uint8: framed in the colour of its relation, a line of text below."""
    side = pixels.shape[1]
    cell = Image.new("RGB", (side + 8, side + 24), "white")
    cell.paste(COLOURS[relation], (1, 1, side + 7, side + 7))
    cell.paste(Image.fromarray(pixels.permute(1, 2, 0).numpy()), (4, 4))
    ImageDraw.Draw(cell).text((cell.width / 2, side + 15), text, fill="black", anchor="mm", font=ImageFont.load_default(11))
    return torch.from_numpy(np.array(cell)).permute(2, 0, 1)


def save_sheet(cells, columns, path):
    """Draw cells of equal size, `columns` a row, into a picture file."""
    from torchvision.utils import make_grid  # here, since importing torchvision takes as long as all the rest
    Image.fromarray(make_grid(cells, nrow=columns, padding=2, pad_value=255).permute(1, 2, 0).numpy()).save(path)


def relation_of(index, a, b):
    """"R1", "R2" or "R3": the relation of two rows of an index."""
    if index.identity[a] != index.identity[b]:
        return "R3"
    return "R1" if index.state[a] == index.state[b] else "R2"


def gallery_sheet(z, index, rows, path, *, queries=6, columns=10, side=80):
    """Draw ranked galleries: one query a row, then the gallery pictures most similar to it, best first, framed green
    (R1), amber (R2), red (R3), the score below.

    z (n, E) belongs to rows (n,). Queries are spread over the identities. The gallery holds two pictures of each
    appearance state, so that a row gets past the query's own clip."""
    z, rows = unit_rows(z), np.asarray(rows)
    order = np.lexsort((rows, index.state[rows]))
    states = index.state[rows[order]]
    place = np.empty(len(rows), dtype=np.int64)                     # place of a picture within its state
    place[order] = np.arange(len(rows)) - np.searchsorted(states, states)
    people, first = np.unique(index.identity[rows], return_index=True)
    dataset, cells = HeadDataset(index, head_size=side, face_size=0), []
    for query in first[np.linspace(0, len(people) - 1, min(queries, len(people))).round().astype(int)]:
        gallery = np.flatnonzero((place < 2) & (np.arange(len(rows)) != query))
        s = (z[gallery] @ z[query]).numpy()
        best = np.argsort(-s, kind="stable")[:columns]
        cells.append(framed(dataset[rows[query]][1], None, "query"))
        for row, score in zip(rows[gallery[best]], s[best]):
            cells.append(framed(dataset[row][1], relation_of(index, rows[query], row), f"{score:.2f}"))
        cells += [torch.full_like(cells[0], 255)] * (columns - len(best))
    save_sheet(cells, columns + 1, path)


# ---------------------------------------------------------------- the command line

def held_out_rows(index, checkpoint, own_data):
    """Rows to evaluate: of the student's own data the identities it was not trained on, of other data all."""
    trained = np.isin(index.names, checkpoint["trained"])
    if own_data:
        return np.flatnonzero(~trained[index.identity])
    if trained.any():
        print(f"notice: {int(trained.sum())} of {len(index.names)} identities have names that this student was trained on; "
              "if they are the same people, these scores are too good")
    return np.arange(len(index.paths))


def teacher_of(path, checkpoint):
    """File of the teacher of a checkpoint's run: beside the checkpoint, or where --teacher named it. None where there is none
    or it is gone (said on screen)."""
    if checkpoint["teacher"] is None:
        return None
    beside, named = os.path.join(os.path.dirname(path), "teacher.pt"), checkpoint["teacher"]
    for file in (beside, named) if checkpoint["settings"]["teacher"] is None else (named, beside):
        if os.path.isfile(file):
            return file
    print(f"notice: the teacher {named} is gone")
    return None


def report(path, checkpoint, teacher, index, rows, *, which="id", fars=FARS, json_file=None, sheet=None, device="cpu", **how):
    """Evaluate the checkpoint, read from path, and teacher (or None) on rows of an index: print the table, write the JSON
    and the picture sheet."""
    if not len(rows):
        print("nobody is held out (the split needs 4 identities): nothing to evaluate; give --data with other people")
        return []
    student, teacher = build(HeadSimilarity, checkpoint, path).to(device), teacher and teacher.to(device)
    table, z, kept, unreadable = evaluate(student, teacher, index, rows, which=which, fars=fars, device=device, **how)
    if not len(kept):
        raise ValueError(f"{index.root}: not one of {len(rows)} pictures could be read ({unreadable[0]})")
    people = len(np.unique(index.identity[kept]))
    print(f"\n{path}: {'epoch {}, '.format(checkpoint['epoch']) if 'epoch' in checkpoint else ''}design {student.design}, "
          f"embedding z_{which}, {people} identities")
    print_table(table, fars)
    for message in unreadable:
        print(f"left out: {message}")
    if sheet and len(kept) > 1:
        gallery_sheet(z, index, kept, sheet)
        print(f"picture sheet: {sheet}")
    if json_file:
        write_json(json_file, {"checkpoint": path, "embedding": which, "teacher": teacher and teacher.description, "fars": list(fars),
                               "data": index.root, "table": table, "unreadable": unreadable})
        print(f"numbers: {json_file}")
    return table


def main(argv=None):
    parser = Parser("Evaluate a Head Similarity checkpoint on held-out identities.")
    parser.add_argument("--ckpt", metavar="FILE", required=True, help="best.pt or last.pt of a run, or the authors' ours_vit2cls.ckpt")
    teacher_options(parser, none="that of the checkpoint's run")
    parser.add_argument("--flip-sum", action="store_true", help="teacher: add the embedding of the mirror image, as in published figures")
    data_options(parser, none="the held-out identities of the checkpoint's own data")
    machine_options(parser)
    parser.add_argument("--embedding", choices=["id", "head"], default="id", help="z_id, the paper's choice, or z_head")
    parser.add_argument("--fars", type=float, nargs="+", default=list(FARS), help="false accept rates")
    parser.add_argument("--batch-size", type=int, default=256, help="pictures at a time")
    parser.add_argument("--json", metavar="FILE", help="write the numbers as JSON too; none: do not")
    parser.add_argument("--sheet", metavar="FILE", help="draw ranked galleries into this PNG; none: do not")
    settings = parser.parse_args(argv)
    check_fars(settings.fars)
    check_numbers(settings, batch_size=1, workers=0)
    if settings.sheet and not settings.sheet.lower().endswith((".png", ".jpg")):
        raise ValueError(f"--sheet must name a .png or .jpg file; got {settings.sheet}")
    for file in (settings.json, settings.sheet):
        if file and not os.path.isdir(os.path.dirname(file) or "."):
            raise ValueError(f"{file}: there is no such folder to write it to")
    if settings.data is None and (settings.faces or settings.segment_frames or settings.segment_gap):
        raise ValueError("--faces, --segment-frames and --segment-gap go with --data")
    device, dtype = choose_device(settings.device, settings.amp)
    checkpoint = read_checkpoint(settings.ckpt)
    own_data = settings.data is None
    if own_data and checkpoint["settings"] is None:
        raise ValueError(f"{settings.ckpt} comes without data of its own: add --data PATH (python data.py --toy PATH draws some)")
    teacher, colour = settings.teacher, settings.colour
    if teacher is None:
        teacher, colour = teacher_of(settings.ckpt, checkpoint), colour or (checkpoint["settings"] or {}).get("colour")
    if teacher is not None:
        file, teacher = teacher, load_teacher(teacher, colour)
        print(f"teacher: {teacher.description} ({file})", flush=True)
    elif settings.flip_sum or colour:
        raise ValueError("--flip-sum and --colour are for a teacher, and none is known here: add --teacher FILE")
    if own_data:
        for name in ("data", "faces", "segment_frames", "segment_gap"):
            setattr(settings, name, checkpoint["settings"][name])
        if settings.data is None and os.path.isdir(checkpoint["root"]):
            settings.data = checkpoint["root"]  # the toy world that it was trained on, not one in this folder
    index = open_data(settings)
    rows = held_out_rows(index, checkpoint, own_data)
    report(settings.ckpt, checkpoint, teacher, index, rows, which=settings.embedding, fars=settings.fars, json_file=settings.json,
           sheet=settings.sheet, flip_sum=settings.flip_sum, device=device, dtype=dtype, batch_size=settings.batch_size,
           workers=settings.workers)


if __name__ == "__main__":
    command_line(main)
