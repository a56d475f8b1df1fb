"""How well does a trained student order whole heads? VR@FAR with intervals, AUC, ordering, pictures; and: compare a clip.

Three relations (arXiv 2605.07766): R1 same identity and look, R2 same identity, another look, R3 other identities.

    identity verification   genuine R1 and R2, impostor R3
    head similarity         genuine R1, impostor R2 and R3
    ordering                P(s(R1) > s(R2)), P(s(R2) > s(R3)), and the mean s of each relation

Reading order: metrics of two lists of scores, all pairs of a set of embeddings, intervals, the table, pictures, comparing, attributes.

    python evaluate.py --ckpt runs/NAME/best.pt [MORE ...] [--data PATH] [--md] [--json FILE] [--sheet FILE]
    python evaluate.py --ckpt ours_vit2cls.ckpt --data PATH         # the authors' checkpoint, as it is
    python evaluate.py --ckpt FILE --compare REFERENCE CLIP ...     # pictures or folders of frames
    python evaluate.py --ckpt FILE --attributes --energy            # how attributes shape the embedding
"""
import itertools
import json
import math
import os
import re
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps

from data import (MOVES, HeadDataset, HeadIndex, Parser, check_outputs, collate, command_line, data_options, is_toy, list_folder, loader,
                  move_person, open_data, processes, read_attributes)
from model import build, new_student, read_checkpoint, to_unit, unit_rows
from teacher import Progress, autocast, check_numbers, choose_device, from_all, load_teacher, machine_options, rank_and_count, teacher_options

FARS = (1e-3, 1e-2)
SAMPLE = 2000     # pictures that tell where thresholds will lie
RESAMPLES = 1000  # draws of identities behind a 95 % interval
FEW = 10          # with fewer identities to draw from there is no interval
BINS = 100        # of the histogram of s


# ---------------------------------------------------------------- metrics of two lists of scores

def verification(genuine, impostor, fars=FARS):
    """Scores of genuine and of impostor pairs -> {"auc", "vr": {far: v}, "threshold": {far: v}, "resolvable_far": 1 / n, "genuine",
    "impostor": numbers of pairs g and n}; None without genuine or impostor pairs, threshold -inf where every pair is accepted.

    A pair is accepted if its score is strictly above the (k + 1)-th largest impostor score, k = floor(FAR * n); VR is the accepted
    share of the genuine pairs, 1 where k >= n. No interpolation. AUC = P(genuine > impostor) + half P(equal)."""
    genuine, impostor = np.ravel(genuine), np.ravel(impostor)
    scores, place = np.unique(np.concatenate([genuine, impostor]), return_inverse=True)
    if np.isnan(scores).any():
        raise ValueError("a score is not a number (NaN)")
    counts = (np.bincount(places, minlength=len(scores)) for places in np.split(place, [len(genuine)]))
    return verification_of_counts(scores, *counts, fars)


def verification_of_counts(scores, genuine, impostor, fars):
    """The same from distinct scores (V,), ascending, and how many genuine and impostor pairs have each, (V,) int64."""
    check_fars(fars)
    g, n = int(genuine.sum()), int(impostor.sum())
    thresholds, rates = operating_points(scores, genuine, impostor, fars)
    return {"auc": auc(genuine, impostor),
            "vr": {far: float(rate) if g and n else None for far, rate in zip(fars, rates)},
            "threshold": {far: float(threshold) if n else None for far, threshold in zip(fars, thresholds)},
            "resolvable_far": 1 / n if n else None, "genuine": g, "impostor": n}


def operating_points(scores, genuine, impostor, fars):
    """Counts a distinct score -> (threshold, VR) arrays, one entry a FAR; VR is NaN without genuine pairs."""
    impostors_from, genuine_from = (np.append(counts[::-1].cumsum()[::-1], 0) for counts in (impostor, genuine))  # of this score and more
    n, g = impostors_from[0], genuine_from[0]
    k = np.floor(np.asarray(fars, dtype=float) * n + 1e-9).astype(np.int64)
    above = np.searchsorted(-impostors_from[:-1], -k)  # the first score that fewer than k + 1 impostors reach
    thresholds = np.where(above > 0, np.append(-np.inf, scores)[above], -np.inf)
    return thresholds, genuine_from[above] / g if g else np.full(len(k), np.nan)


def auc(higher, lower):
    """Counts of two kinds of pairs by ascending score -> P(higher > lower) + half P(equal); None where one is empty."""
    h, l = int(higher.sum()), int(lower.sum())
    return float(np.dot(higher, lower.cumsum() - lower / 2) / h / l) if h and l else None


def check_fars(fars):
    """ValueError for a false accept rate that is none."""
    for far in fars:
        if not 0 <= far <= 1:
            raise ValueError(f"a false accept rate must lie in [0, 1]; got {far}")


# ---------------------------------------------------------------- all pairs of a set of embeddings

STEPS = 2 ** 21   # scores are counted in steps of 1 / STEPS = 4.8e-7, about the error of a float32 cosine of 512 numbers
SAME = 2          # scores this many steps from 1 are 1, so that equal pictures tie, whatever their embedding
SMALL_COUNTER = 2 ** 31 - 1  # pairs that the 32-bit counters take, a third faster than 64-bit ones, before those are added to
RELATIONS = ("R1", "R2", "R3")
TASKS = {"identity": ([0, 1], [2]), "head": ([0], [1, 2])}  # task -> places in RELATIONS of genuine and of impostor pairs


class PairCounts(NamedTuple):
    scores: np.ndarray  # (V,) float64, the distinct scores, ascending
    counts: np.ndarray  # (3, V) int64, pairs of each relation by score
    above: np.ndarray   # (W, 3, I) int64, pairs above each watched threshold, by relation and identity; R3 in both identities
    pairs: np.ndarray   # (3, I) int64, all pairs, likewise


def count_by_score(z, identity, state, *, one_of=None, watch=(), tile=1024):
    """Embeddings (N, E), labels (N,) -> PairCounts of the cosines of all unordered pairs, each once.

    one_of: (N,) bool; only pairs with at least one of these. watch: thresholds above which pairs are counted by identity.
    Works through the N x N matrix in tiles and keeps counters only (150 MB), whatever the labels; on the device of z."""
    z, N = unit_rows(torch.as_tensor(z)), len(z)
    identity, state = (np.unique(labels, return_inverse=True)[1] for labels in (identity, state))
    look = np.unique(identity * N + state, return_inverse=True)[1]  # no look of two identities, and sorted by identity
    chosen = np.ones(N, dtype=bool) if one_of is None else np.asarray(one_of)
    order = np.lexsort((look, ~chosen))  # the chosen first; sorted, since most tiles are then of R3 only
    tile = math.ceil(N / max(1, math.ceil(N / tile))) or 1  # tiles of nearly one size, so that all scores are rounded alike
    counts, above = count_tiles(z[order], identity[order], look[order], int(chosen.sum()), watch, tile)
    for end, near in ((-1, slice(-1 - SAME, -1)), (0, slice(1, 1 + SAME))):
        counts[:, end] += counts[:, near].sum(dim=1)
        counts[:, near] = 0
    scores = counts.sum(dim=0).nonzero().flatten()
    above[:, :2] //= 2                   # both pictures of an R1 or R2 pair are of its one identity
    everyone, others = (pairs_of_people(identity[some], look[some], above.shape[2]) for some in (slice(None), ~chosen))
    return PairCounts(scores.cpu().numpy() / STEPS - 1, counts[:, scores].cpu().numpy(), above.cpu().numpy(), everyone - others)


def count_tiles(z, identity, look, rows, watch, tile):
    """The loop of count_by_score over the pairs (i, j), i < j and i < rows -> counts (3, 2 * STEPS + 1), above (W, 3, I)."""
    people, looks = (torch.as_tensor(labels, device=z.device) for labels in (identity, look))
    counts, total = (z.new_zeros(3 * (2 * STEPS + 1), dtype=dtype) for dtype in (torch.int32, torch.int64))
    above, counted = z.new_zeros(len(watch), 3, int(identity.max(initial=0)) + 1, dtype=torch.int64), 0
    watch = [max(threshold * STEPS, -STEPS - 1) for threshold in watch]
    for i, j in ((i, j) for i in range(0, rows, tile) for j in range(i, len(z), tile)):
        a, b = slice(i, min(i + tile, rows)), slice(j, j + tile)
        score = (z[a] * STEPS @ z[b].T).round_().clamp_(-STEPS, STEPS).int()                         # (A, B) in steps
        relation = score.new_full((), 2)                                                             # 0, 1, 2 for R1, R2, R3; all R3
        if np.isin(identity[a], identity[b]).any():
            relation = 2 - (people[a, None] == people[b]).int() - (looks[a, None] == looks[b]).int()  # (A, B)
        if watch:
            tally(above, score, relation, people[a], people[b], watch, i == j)
        bins = score.add_(relation * (2 * STEPS + 1) + STEPS)
        bins = bins[torch.ones_like(bins, dtype=torch.bool).triu_(1)] if i == j else bins.flatten()  # each pair once
        if counted + len(bins) > SMALL_COUNTER:
            total.add_(counts)
            counted, counts = 0, counts.zero_()
        counts.index_add_(0, bins, counts.new_ones(1).expand(len(bins)))
        counted += len(bins)
    return total.add_(counts).view(3, -1), above


def tally(above, score, relation, people_a, people_b, thresholds, diagonal):
    """Add the pairs of a tile that score above each threshold to `above` (W, 3, I), for either picture's identity."""
    a, b = (score > min(thresholds)).nonzero().T                # few pairs, at the usual FARs
    if diagonal:
        a, b = a[b > a], b[b > a]
    place = relation.expand_as(score)[a, b].repeat(2) * above.shape[2] + torch.cat([people_a[a], people_b[b]])
    score = score[a, b].repeat(2)                               # every pair at both ends
    for count, threshold in zip(above, thresholds):
        count += torch.bincount(place[score > threshold], minlength=count.numel()).view_as(count)


def pairs_of_people(identity, look, I):
    """Labels (N,), below I and any -> (3, I) int64: pairs of each relation in which each identity takes part."""
    size, partners = np.bincount(identity, minlength=I), np.bincount(look)[look] - 1  # (I,) pictures; (N,) others of the same look
    r1 = np.bincount(identity, partners, I).astype(np.int64) // 2
    return np.stack([r1, size * (size - 1) // 2 - r1, size * (len(identity) - size)])


# ---------------------------------------------------------------- scores of a set of embeddings, with intervals

def score_embeddings(z, identity, state, fars=FARS, *, one_of=None, seed=0):
    """Embeddings (N, E), labels (N,) -> {"identity": .., "head": .., "ordering": .., "pairs": .., "histogram": ..}.

    identity and head: verification, with {"interval": {far: 95 % interval of the VR, or None}, "allowed_impostors": {far: pairs
    behind it}, "roc": {"far": .., "vr": ..}}; head also {"mistaken_looks": {far: share of R2 accepted}}, which a FAR over mostly
    R3 hides. one_of: (N,) bool; only pairs with at least one of these."""
    check_fars(fars)
    if not np.ndim(z) == 2 or not len(z) == len(identity) == len(state) == len(state if one_of is None else one_of):
        raise ValueError(f"embeddings (N, E) and labels (N,) must go together; got {tuple(np.shape(z))}, {len(identity)} and {len(state)} labels")
    watch = guess_thresholds(z, identity, state, fars, one_of, seed)
    scores, counts, *_ = counted = count_by_score(z, identity, state, one_of=one_of, watch=watch)
    resampled, result, total = resample(counted, seed), {}, counts.sum(axis=1)
    for place, task in enumerate(TASKS):
        genuine, impostor = sides(counts, task)
        result[task] = verification_of_counts(scores + 1 / STEPS, genuine, impostor, fars)  # rounding lets no impostor pass
        n = result[task]["impostor"]
        result[task]["allowed_impostors"] = {far: int(far * n + 1e-9) for far in fars}
        result[task]["interval"] = {far: interval(counted, resampled, task, far, place * len(fars) + w) for w, far in enumerate(fars)}
        axis = np.geomspace(min(1, 10 / max(n, 1)), 1, 61)  # fewer than ten impostor pairs say little
        rates = operating_points(scores, genuine, impostor, axis)[1]
        result[task]["roc"] = {"far": axis.tolist(), "vr": rates.tolist()} if n and genuine.any() else None
    taken = operating_points(scores, counts[1], sides(counts, "head")[1], fars)[1]
    result["head"]["mistaken_looks"] = {far: float(share) if total[1] else None for far, share in zip(fars, taken)}
    means = counts @ scores / np.maximum(total, 1)
    result["ordering"] = {"R1>R2": auc(counts[0], counts[1]), "R2>R3": auc(counts[1], counts[2]),
                          "mean": {name: float(mean) if n else None for name, mean, n in zip(RELATIONS, means, total)}}
    result["pairs"] = dict(zip(RELATIONS, total.tolist()))
    result["histogram"] = {name: np.histogram(scores, BINS, (-1, 1), weights=count)[0].astype(int).tolist()
                           for name, count in zip(RELATIONS, counts)}
    return result


def guess_thresholds(z, identity, state, fars, one_of, seed):
    """Thresholds on a sample of the pictures, of each task and FAR. The bootstrap needs counts by identity above a threshold near
    the right one, and that must be known before the one pass over all pairs."""
    shuffled = np.random.default_rng(seed).permutation(len(identity))
    chosen = np.ones(len(shuffled), dtype=bool) if one_of is None else np.asarray(one_of)
    some = np.concatenate([shuffled[part[shuffled]][:SAMPLE] for part in (chosen, ~chosen)])
    sample = count_by_score(torch.as_tensor(z)[some], np.asarray(identity)[some], np.asarray(state)[some],
                            one_of=chosen[some])
    thresholds = []
    for genuine, impostor in (sides(sample.counts, task) for task in TASKS):
        thresholds += operating_points(sample.scores, genuine, impostor, fars)[0].tolist() if impostor.any() else [np.inf] * len(fars)
    return thresholds


def sides(counts, task):
    """(3, ..) counts by relation -> those of the task's genuine and of its impostor pairs."""
    return tuple(counts[places].sum(axis=0) for places in TASKS[task])


def resample(counted, seed):
    """Draw the identities anew, with replacement: PairCounts -> (W + 1, 3, 1 + RESAMPLES) pairs above each watched threshold
    and, last, all pairs. The first draw is the data as it is.

    With identity a drawn w_a times, a pair within a counts w_a times, a pair of a and b w_a w_b times; of the latter the
    linear part, w_a + w_b - 1, which needs the pairs of each identity only and not of each two."""
    parts = np.concatenate([counted.above, counted.pairs[None]]).astype(float)              # (W + 1, 3, I)
    I, rng = parts.shape[2], np.random.default_rng(seed)
    w = np.stack([np.ones(I), *(np.bincount(rng.integers(0, I, I), minlength=I) for _ in range(RESAMPLES))], axis=1)
    drawn = parts @ w                                                                       # (W + 1, 3, 1 + RESAMPLES)
    drawn[:, 2] -= parts[:, 2].sum(axis=1, keepdims=True) / 2
    return drawn


def interval(counted, resampled, task, far, place):
    """95 % interval of the VR at a FAR, [low, high]; None without pairs, or with too few identities to draw from.

    A draw in which `ratio` times as many impostors pass the watched threshold has its own threshold where far / ratio of
    the data's impostors pass; its VR is the data's there, plus what its genuine pairs gain at the watched threshold."""
    (g, n), (all_g, all_n) = (sides(resampled[row], task) for row in (place, -1))           # (1 + RESAMPLES,) each
    if counted.pairs.shape[1] < FEW or not all_g[0] or not all_n[0]:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.maximum(n / all_n, 0) / (n[0] / all_n[0])
        shifted = np.where(ratio > 0, far / ratio, far).clip(0, 1)
        rates = operating_points(counted.scores, *sides(counted.counts, task), shifted)[1] + g / all_g - g[0] / all_g[0]
    return np.nanquantile(rates[1:].clip(0, 1), [0.025, 0.975]).tolist()


# ---------------------------------------------------------------- embeddings of a folder

@torch.inference_mode()
def embed_rows(network, index, rows, *, size, faces=False, what="pictures", batch_size=256, workers=0, device="cpu", dtype=None):
    """Embed pictures of an index, in order: whole heads (or, with faces, the aligned faces), `size` pixels a side.

    network: float pictures (B, 3, S, S) in [-1, 1] -> (B, ..). what: the name of this work on screen. -> (z (n, ..) float32
    on the CPU, the n rows that could be read, messages of the others). Of several processes each embeds a share of the rows."""
    rank, processes = rank_and_count()
    rows = np.array_split(rows, processes)[rank]
    batches = [rows[start:start + batch_size].tolist() for start in range(0, len(rows), batch_size)]
    dataset = HeadDataset(index, head_size=0 if faces else size, face_size=size if faces else 0)
    z, kept, unreadable, progress = [], [], [], Progress(what, len(batches))
    for step, batch in enumerate(progress.watch(loader(dataset, batches, workers)), 1):
        unreadable += batch.unreadable
        if len(batch.row):
            pixels = to_unit((batch.face if faces else batch.head).to(device, non_blocking=True))
            with autocast(torch.device(device), dtype):
                z.append(network(pixels).float().cpu())
            kept += batch.row.tolist()
        progress.show(step, {}, len(batch.row))
    progress.clear()
    z, kept, unreadable = zip(*from_all((torch.cat(z) if z else None, np.array(kept, dtype=np.int64), unreadable)))
    z = [part for part in z if part is not None]
    return torch.cat(z) if z else torch.zeros(0, 1), np.concatenate(kept), sum(unreadable, [])


def embed_all(networks, index, rows, device="cpu", **how):
    """Embed rows of an index by each network of rows_of_table -> ({name: (z, rows that could be read)}, messages of the others), told
    on screen."""
    embeddings, messages = {}, set()
    for name, network, embed, faces in networks:
        seen, size = rows[index.has_face[rows]] if faces else rows, network.to(device).image_size
        *embeddings[name], unreadable = embed_rows(embed, index, seen, size=size, faces=faces, what=name, device=device, **how)
        messages |= set(unreadable)
    for message in sorted(messages):
        print(f"left out: {message}")
    return embeddings, sorted(messages)


def rows_of_table(students, teachers, which, flip_sum=False):
    """{name: network} each -> [(name of the row, network, its embedding of pictures (B, 3, S, S), does it see aligned faces?)].

    A teacher has two rows. flip_sum: its embedding of a picture is that of the picture plus that of its mirror image, neither
    normalised, as in published figures of face recognisers; its rows say so. which: the student's embedding, "id" or "head"."""
    rows = []
    for name, teacher in teachers.items():
        embed = (lambda pictures, network=teacher: network(pictures) + network(pictures.flip(3))) if flip_sum else teacher
        name += "+mirror" * flip_sum
        rows += [(f"{name}, aligned faces", teacher, embed, True), (f"{name}, whole heads", teacher, embed, False)]
    for name, student in students.items():
        rows.append((f"{name}, whole heads", student, lambda heads, network=student: getattr(network(heads), "z_" + which), False))
    return rows


def evaluate(students, teachers, index, rows, *, which="id", fars=FARS, flip_sum=False, device="cpu", **how):
    """Score networks, {name: network}, on rows of an index -> (table rows, z of the first student, its rows, unreadable). A student has
    one row more for the pairs in which at least one picture has no face, where there are some."""
    networks, table = rows_of_table(students, teachers, which, flip_sum), []
    embeddings, unreadable = embed_all(networks, index, rows, device, **how)
    for name, network, _, _ in networks:
        z, kept = embeddings[name]
        people, trained = np.unique(index.identity[kept]), getattr(network, "trained", [])
        row = {"pictures": len(kept), "people": len(people), "trained_on": int(np.isin(np.array(index.names)[people], trained).sum())}
        behind, views = ~index.has_face[kept], {name: None} if len(kept) else {}
        if network in students.values() and 0 < behind.sum() < len(behind):
            views[name.replace(", whole heads", ", from behind")] = behind
        for view, one_of in views.items():
            scores = score_embeddings(z.to(device), index.identity[kept], index.state[kept], fars, one_of=one_of)
            table.append({"name": view, **row, **scores})
    return table, *embeddings[f"{next(iter(students))}, whole heads"], unreadable


# ---------------------------------------------------------------- the table

def show(value, mark=""):
    """A number of a table, or n/a for None."""
    return "n/a" if value is None else f"{value:.3f}{mark}"


def row_name(row):
    """The name of a row; with it, how many of the people the network was trained on."""
    return row["name"] + (f" [trained on {row['trained_on']} of {row['people']} people]" if row["trained_on"] else "")


def print_grid(grid, markdown):
    """Print a table: rows of cells, first the headings; the first cell of a row is its name. A cell may have line breaks."""
    if markdown:
        lines = ["| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |" for row in grid]
        print("", lines[0], "|---" + "|---:" * (len(grid[0]) - 1) + "|", *lines[1:], "", sep="\n")
        return
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*grid)]
    for row in grid:
        for name, *cells in itertools.zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            print((name.ljust(widths[0]) + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:]))).rstrip())


def table_cells(row, fars):
    """A row of the table -> {heading: cell}, each VR with its 95 % interval below."""
    cells = {}
    for task, title in (("identity", "identity\nverification"), ("head", "head\nsimilarity")):
        result = row[task]
        for far in fars:
            cell = show(result["vr"][far], "" if result["allowed_impostors"][far] else "*")
            ends = result["interval"][far]
            cells[f"{title}\nVR@{far:g}"] = cell + ("\n({:.3f}-{:.3f})".format(*ends) if ends else "")
        cells[f"{title}\nAUC"] = show(result["auc"])
    cells |= {f"\nmean s\n{name}": show(mean) for name, mean in row["ordering"]["mean"].items()}
    return cells | {f"\nordering\n{name}": show(row["ordering"][name]) for name in ("R1>R2", "R2>R3")}


def print_table(table, fars, markdown=False):
    """Print a row a network, then what stands behind the numbers: intervals, FARs that the data cannot resolve, numbers of pairs."""
    print_grid([["", *table_cells(table[0], fars)], *([row_name(row), *table_cells(row, fars).values()] for row in table)], markdown)
    print(f"with each VR: its 95 % interval, by {RESAMPLES} bootstrap draws of the people, if at least {FEW}; ordering: how often one score is higher")
    if any(row["name"].endswith("from behind") for row in table):
        print("from behind: pairs in which at least one picture has no face")
    same = {}
    for row in table:
        same.setdefault((row["pictures"], row["people"], *row["pairs"].values()), []).append(row)
    for (pictures, people, *counts), rows in same.items():
        tasks = {"identity": rows[0]["identity"], "head similarity": rows[0]["head"]}
        missing = " and ".join(name for name, count in zip(RELATIONS, counts) if not count)
        print(f"{'; '.join(row['name'] for row in rows)}: {pictures} pictures of {people} people, {sum(counts)} pairs: "
              + ", ".join(f"{count} {name}" for name, count in zip(RELATIONS, counts)) + (f"; n/a: no pairs of {missing}" if missing else ""))
        print("  impostor pairs allowed at FAR " + "; ".join(f"{far:g}: " + ", ".join(
            f"{result['allowed_impostors'][far]} ({name})" for name, result in tasks.items()) for far in fars))
        starred = [f"1/{result['impostor']} = {result['resolvable_far']:.2g} for {name}" for name, result in tasks.items()
                   if result["impostor"] and not all(result["allowed_impostors"].values())]
        if starred:
            print(f"  * too few impostor pairs for this FAR; the smallest that they resolve: {', '.join(starred)}")


def write_json(path, content):
    """Write what any JSON reader accepts: UTF-8, null for minus infinity, never half a file."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:  # a threshold of -inf (every pair accepted) has no JSON number
        file.write(re.sub('(?<=": )-Infinity', "null", json.dumps(content, indent=1)))
    os.replace(f"{path}.tmp", path)


# ---------------------------------------------------------------- pictures

MEANING = {"R1": "same look", "R2": "same person, other look", "R3": "another person", None: "unreadable"}
COLOURS = {"R1": (30, 150, 60), "R2": (235, 160, 0), "R3": (205, 40, 40), None: (120, 120, 120)}  # green, amber, red
CURVES = [(20, 90, 200), (0, 0, 0), (150, 60, 200), (0, 170, 190), (130, 130, 130), (240, 100, 180), (110, 70, 40), (90, 110, 240)]
RELATION_LEGEND = [(COLOURS[name], f"{name} {MEANING[name]}") for name in RELATIONS]
ImageDraw.ImageDraw.font = ImageFont.load_default(12)  # of all text in pictures


def framed(pixels, relation, text):
    """(3, S, S) uint8 tensor -> PIL picture (S + 8, S + 24): framed in the colour of its relation, a line of text below."""
    cell = ImageOps.expand(Image.fromarray(pixels.permute(1, 2, 0).numpy()), 3, COLOURS[relation])
    cell = ImageOps.expand(cell, (1, 1, 1, 17), "white")
    ImageDraw.Draw(cell).text((cell.width / 2, cell.height - 9), text, fill="black", anchor="mm")
    return cell


def grid_of(rows, columns, below=0):
    """Rows of pictures of equal size, up to `columns` each -> PIL picture with `below` white lines under them."""
    width, height = (side + 2 for side in rows[0][0].size)
    sheet = Image.new("RGB", (2 + columns * width, 2 + len(rows) * height + below), "white")
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            sheet.paste(cell, (2 + x * width, 2 + y * height))
    return sheet


def legend(draw, x, y, entries, step=0):
    """Draw (colour, text) entries as squares with text, in a row from (x, y), or with step one below the other."""
    for colour, text in entries:
        draw.rectangle((x, y - 5, x + 10, y + 5), fill=colour)
        draw.text((x + 15, y), text, fill="black", anchor="lm")
        x, y = (x, y + step) if step else (x + 35 + draw.textlength(text), y)


def axes(draw, box, x_ticks, y_ticks, x_label, y_label):
    """Draw axes into box (left, top, right, bottom); ticks are {value: text}, the outermost end the axis. -> function
    (x, y) -> place in pixels."""
    left, top, right, bottom = box
    (x0, x1), (y0, y1) = ((min(ticks), max(ticks)) for ticks in (x_ticks, y_ticks))

    def place(x, y):
        return left + (x - x0) / (x1 - x0) * (right - left), bottom - (y - y0) / (y1 - y0) * (bottom - top)

    for x, text in x_ticks.items():
        draw.line((place(x, y0), place(x, y1)), fill=(225, 225, 225))
        draw.text((place(x, y0)[0], bottom + 7), text, fill="black", anchor="mt")
    for y, text in y_ticks.items():
        draw.line((place(x0, y), place(x1, y)), fill=(225, 225, 225))
        draw.text((left - 5, place(x0, y)[1]), text, fill="black", anchor="rm")
    draw.rectangle(box, outline="black")
    draw.text(((left + right) / 2, bottom + 24), x_label, fill="black", anchor="mt")
    draw.text((left, top - 6), y_label, fill="black", anchor="lb")
    return place


def ticks(low, high, step, form="{:g}"):
    """{value: text} of evenly spaced ticks."""
    return {value: form.format(value) for value in np.arange(low, high + step / 2, step).round(6).tolist()}


def histogram_sheet(table, far, path):
    """Draw, a row of the table each, how s is distributed in each relation, with both thresholds at a FAR."""
    height = 320
    sheet = Image.new("RGB", (760, height * len(table)), "white")
    draw, centres = ImageDraw.Draw(sheet), (np.arange(BINS) + 0.5) / BINS * 2 - 1
    for top, row in zip(itertools.count(0, height), table):
        shares = {name: np.array(counts) / max(1, sum(counts)) for name, counts in row["histogram"].items()}
        highest = max(0.04, *(share.max() for share in shares.values()))
        step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.25) if highest <= 5 * step)
        draw.text((60, top + 14), row_name(row), fill="black", anchor="lm")
        legend(draw, 60, top + 36, RELATION_LEGEND)
        y_ticks = ticks(0, math.ceil(highest / step) * step, step, "{:.0%}")
        place = axes(draw, (60, top + 92, 740, top + height - 45), ticks(-1, 1, 0.25), y_ticks, "cosine similarity s",
                     f"share of the relation's pairs in a bin of {2 / BINS:g}")
        for name, share in shares.items():
            draw.line([place(x, y) for x, y in zip(centres, share)], fill=COLOURS[name], width=3, joint="curve")
        for task, title, lift in (("identity", "same person", 64), ("head", "same look", 48)):
            if (threshold := row[task]["threshold"][far]) is not None and threshold > -1:
                x, bottom = place(threshold, 0)
                draw.line((x, top + lift, x, bottom), fill=(60, 60, 60), width=1)
                draw.text((x - 4, top + lift + 4), f"{title} above {threshold:.3f} (FAR {far:g})", fill=(60, 60, 60), anchor="rm")
    sheet.save(path)


def roc_sheet(table, path):
    """Draw VR against FAR, on a logarithmic axis, of all rows of the table: identity verification, and head similarity."""
    sheet = Image.new("RGB", (960, 470 + 18 * len(table)), "white")
    draw, curves = ImageDraw.Draw(sheet), list(zip(table, itertools.cycle(CURVES)))
    for left, task, title in ((60, "identity", "identity verification"), (540, "head", "head similarity")):
        rocs = [(row[task]["roc"], colour) for row, colour in curves if row[task]["roc"]]
        lowest = min([-1, *(math.floor(math.log10(roc["far"][0])) for roc, _ in rocs)])
        place = axes(draw, (left, 50, left + 400, 410), {power: f"{10.0 ** power:g}" for power in range(lowest, 1)}, ticks(0, 1, 0.2),
                     "FAR: share of impostor pairs accepted", f"{title}, VR: share of genuine pairs accepted")
        for roc, colour in rocs:
            draw.line([place(math.log10(far), vr) for far, vr in zip(roc["far"], roc["vr"])], fill=colour, width=3, joint="curve")
    legend(draw, 60, 462, [(colour, row_name(row)) for row, colour in curves], step=18)
    sheet.save(path)


def relation_of(index, a, b):
    """"R1", "R2" or "R3": the relation of two rows of an index."""
    return RELATIONS[2 - int(index.identity[a] == index.identity[b]) - int(index.state[a] == index.state[b])]


def gallery_sheet(z, index, rows, path, *, queries=6, columns=10, side=80):
    """Draw ranked galleries: a query a row, then what is most similar to it, best first, the score below. z (n, E) belongs to rows (n,).

    Queries are spread over the identities. The gallery holds two pictures of each look, so that a row gets past the query's clip."""
    z, dataset, sheet, by_state = unit_rows(z), HeadDataset(index, head_size=side, face_size=0), [], {}
    for place, row in enumerate(rows):
        by_state.setdefault(index.state[row], []).append(place)
    gallery = np.sort(np.concatenate([places[:2] for places in by_state.values()]))
    people, first = np.unique(index.identity[rows], return_index=True)
    for query in first[np.linspace(0, len(people) - 1, min(queries, len(people))).round().astype(int)]:
        others = gallery[gallery != query]
        s = (z[others] @ z[query]).numpy()
        best = np.argsort(-s, kind="stable")[:columns]
        sheet.append([framed(dataset[rows[query]][1], None, "query")])
        for row, score in zip(rows[others[best]], s[best]):
            sheet[-1].append(framed(dataset[row][1], relation_of(index, rows[query], row), f"{score:.2f}"))
    sheet = grid_of(sheet, columns + 1, below=24)
    legend(ImageDraw.Draw(sheet), 8, sheet.height - 13, [*RELATION_LEGEND, ((255, 255, 255), "number: cosine similarity to the query")])
    sheet.save(path)


def sheet_files(path):
    """--sheet FILE -> the files that are drawn: FILE, and beside it FILE-scores and FILE-roc."""
    stem, ending = os.path.splitext(path)
    return [path, f"{stem}-scores{ending}", f"{stem}-roc{ending}"]


# ---------------------------------------------------------------- compare: the same person, looking the same?

THRESHOLDS = ("identity", "identity_vr", "head", "head_vr", "mistaken_looks", "far", "people", "resolvable_far")  # numbers, beside "data"


def calibrate(scores, far, people, data):
    """What score_embeddings gave on so many people of a folder -> thresholds to judge other pictures by, and what to expect
    of them; None where the pairs to set them are lacking."""
    identity, head = scores["identity"], scores["head"]
    found = {"identity": identity["threshold"][far], "identity_vr": identity["vr"][far],
             "head": head["threshold"][far], "head_vr": head["vr"][far], "mistaken_looks": head["mistaken_looks"][far]}
    if None in found.values():
        return None
    return {**found, "far": far, "people": people, "data": os.path.basename(os.path.abspath(data)),
            "resolvable_far": max(identity["resolvable_far"], head["resolvable_far"])}


def frames_of(clip, reference):
    """Pictures and folders of frames -> list of files; the frames of a folder in the order of the numbers in their names,
    without the reference, should it lie there."""
    if os.path.isdir(reference):
        raise ValueError(f"the reference must be one picture; {reference} is a folder")
    files = []
    for path in clip:
        if not os.path.isdir(path):
            files.append(path)
            continue
        folders, names = list_folder(path)
        names.sort(key=lambda name: [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))])
        frames = [os.path.join(path, name) for name in names]
        frames = [frame for frame in frames if os.path.realpath(frame) != os.path.realpath(reference)]
        if not frames:
            raise ValueError(f"{path}: no pictures to compare in this folder; it has {len(folders)} folders in it")
        files += frames
    return files


def compare(student, thresholds, reference, files, *, which="id", json_file=None, sheet=None, **how):
    """Judge each frame of a clip by its similarity to the reference picture; print it, write JSON and a sheet. -> exit status: 1 where
    some frames could not be read, else 0."""
    paths, none = np.array([os.fsencode(file) for file in (reference, *files)]), np.zeros(1 + len(files), dtype=np.int64)
    index = HeadIndex("", None, ["clip"], paths, none, none, np.zeros((len(none), 2), complex), none > 0, [])
    z, kept, unreadable = embed_rows(lambda heads: student.embed(heads, which), index, np.arange(len(paths)), size=student.image_size,
                                     what="frames", **how)
    if 0 not in kept or len(kept) == 1:
        raise ValueError(unreadable[0] if 0 not in kept else f"not one of {len(files)} frames could be read ({unreadable[0]})")
    scores = dict(zip(kept.tolist(), (unit_rows(z) @ unit_rows(z[:1])[0]).clamp(-1, 1).tolist()))
    print(f"reference: {reference}")
    print("thresholds of the cosine of z_{which}, at FAR {far:g} on {people} people of {data}:\n"
          "  same look above {head:.3f}: finds {head_vr:.0%} of such pairs, and takes {mistaken_looks:.0%} of the same person's other looks for it\n"
          "  same person above {identity:.3f}: finds {identity_vr:.0%} of such pairs; the others are called another person".format(which=which, **thresholds))
    if thresholds["far"] < thresholds["resolvable_far"]:
        print(f"notice: these people resolve no FAR below {thresholds['resolvable_far']:.2g}: the thresholds are the highest scores of their impostors")
    frames = []
    for row, file in enumerate(files, 1):
        s = scores.get(row)
        relation = None if s is None else "R1" if s > thresholds["head"] else "R2" if s > thresholds["identity"] else "R3"
        frames.append({"file": file, "score": s, "relation": relation})
        print(f"  {show(s):>6}  {MEANING[relation]:<24} {file}")
    summary = summarise(frames)
    print("\n".join([summary["text"], *(f"left out: {message}" for message in unreadable)]))
    if sheet:
        compare_sheet(index, frames, thresholds, sheet)
        print(f"picture: {sheet}")
    if json_file:
        write_json(json_file, {"reference": reference, "embedding": which, "thresholds": thresholds, "summary": summary, "frames": frames,
                               "unreadable": unreadable})
        print(f"numbers: {json_file}")
    return 1 if unreadable else 0


def summarise(frames):
    """Judged frames -> {"frames", "mean", "minimum", "at", each relation's count, "drift": runs of frames that no longer
    look the same, as [first file, last file, number], "text": all that in words}."""
    read = [frame for frame in frames if frame["relation"]]
    mean, lowest = sum(frame["score"] for frame in read) / len(read), min(read, key=lambda frame: frame["score"])
    runs = [list(run) for drifting, run in itertools.groupby(read, key=lambda frame: frame["relation"] != "R1") if drifting]
    drift = [[run[0]["file"], run[-1]["file"], len(run)] for run in runs]
    counts = {name: sum(frame["relation"] == name for frame in read) for name in RELATIONS}
    text = (f"{len(read)} of {len(frames)} frames scored: mean {mean:.3f}, minimum {lowest['score']:.3f} ({lowest['file']})\n"
            + "; ".join(f"{count} {MEANING[name]}" for name, count in counts.items()) + "\n")
    places = [first if number == 1 else f"{first} to {last} ({number} frames)" for first, last, number in drift]
    text += "drifts from the look of the reference at: " + ", ".join(places) if drift else "no drift: every frame has the look of the reference"
    return {"frames": len(read), "mean": mean, "minimum": lowest["score"], "at": lowest["file"], **counts, "drift": drift, "text": text}


def compare_sheet(index, frames, thresholds, path, *, shown=11, side=80):
    """Draw the reference and up to `shown` frames, evenly chosen and with the lowest score, framed in the colour of their
    relation; below, the score of every frame that could be read."""
    read = {number: frame for number, frame in enumerate(frames, 1) if frame["relation"]}
    dataset, lowest = HeadDataset(index, head_size=side, face_size=0), min(read, key=lambda number: read[number]["score"])
    cells = [framed(dataset[0][1], None, "reference")]
    for number in sorted({lowest, *np.array(list(read))[np.linspace(0, len(read) - 1, shown - 1).round().astype(int)].tolist()}):
        cells.append(framed(dataset[number][1], read[number]["relation"], f"{number}: {read[number]['score']:.2f}"))
    sheet = grid_of([cells], 1 + shown, below=330)
    draw, top, right, n = ImageDraw.Draw(sheet), sheet.height - 330, sheet.width - 130, len(frames)
    legend(draw, 60, top + 18, RELATION_LEGEND)
    low = min(0.0, math.floor(read[lowest]["score"] * 5) / 5)
    x_ticks = {n + 1: "", **{number: str(number) for number in range(1, n + 1, math.ceil(n / 20))}}
    place = axes(draw, (60, top + 60, right, sheet.height - 45), x_ticks, ticks(low, 1, 0.2), "frame: place in the clip",
                 "cosine similarity to the reference")
    for task, title, lift in (("head", "same look", -7), ("identity", "same person", 7)):
        if thresholds[task] > low:
            y = place(1, thresholds[task])[1]
            draw.line((60, y, right, y), fill=(60, 60, 60))
            draw.text((right + 5, y + lift), f"{title} > {thresholds[task]:.2f}", fill="black", anchor="lm")
    points = {number: place(number, frame["score"]) for number, frame in read.items()}
    for number, point in points.items():
        if number + 1 in points:  # the line has gaps where frames could not be read
            draw.line((point, points[number + 1]), fill=(90, 90, 90), width=2)
    for number, point in points.items():
        draw.circle(point, 4, fill=COLOURS[read[number]["relation"]])
    sheet.save(path)


# ---------------------------------------------------------------- how attributes shape the embedding (arXiv 2507.11372)

NEIGHBOURS = 10  # k of the invariance energy
MOST = 500       # people on each side of an attribute
PEOPLE, SETTINGS = 8, 64  # whose energies are averaged, and the points of each
PHOTO = {"brightness": (0.7, 1.0, 1.3), "contrast": (0.7, 1.0, 1.3), "hue": (-0.1, 0.0, 0.1)}  # what any picture can be moved in


def ks_statistic(a, b):
    """Kolmogorov-Smirnov statistic of two lists of numbers: largest difference of the shares that are at most x, over all x."""
    a, b = (np.sort(np.ravel(values)) for values in (a, b))
    if not len(a) or not len(b) or np.isnan(a[-1]) or np.isnan(b[-1]):
        raise ValueError(f"the KS statistic needs two lists of numbers; got {len(a)} and {len(b)}, or NaN among them")
    shares = [np.searchsorted(values, np.concatenate([a, b]), side="right") / len(values) for values in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def attribute_ks(z, identity, attribute, *, most=MOST, seed=0):
    """Does a binary attribute part the embeddings of people? Macroscale analysis: z (n, E), identity (n,), attribute (n,) 1, 0 or NaN
    for unknown -> {"with_attribute", "without_attribute", "mean", "people": number a side}.

    One picture an identity from those with it, one an identity from those without, equally many, at most `most` each; the cosine
    distances within each side (i < j) against those across (all), by the KS statistic. A person may stand on both sides."""
    z, rng, sides = np.asarray(z, dtype=np.float64), np.random.default_rng(seed), []
    for value in (1, 0):
        rows = rng.permutation(np.flatnonzero(np.asarray(attribute) == value))
        sides.append(rng.permutation(rows[np.unique(identity[rows], return_index=True)[1]]))  # one picture an identity
    people = min(most, *map(len, sides))
    if people < 2:
        raise ValueError(f"needs at least 2 people on each side; {len(sides[0])} people with it; {len(sides[1])} people without it")
    a, b = (z[side[:people]] / np.linalg.norm(z[side[:people]], axis=1, keepdims=True) for side in sides)
    across = 1 - a @ b.T                                                       # (people, people)
    ks_a, ks_b = (ks_statistic((1 - side @ side.T)[np.triu_indices(people, 1)], across) for side in (a, b))
    return {"with_attribute": ks_a, "without_attribute": ks_b, "mean": (ks_a + ks_b) / 2, "people": people}


def intra_entropy(identity, attribute):
    """Mean over identities of the entropy, in nats, of an attribute's values in their pictures; NaN values do not count."""
    known = ~np.isnan(attribute)
    if not known.any():
        raise ValueError("no value is known")
    values, value = np.unique(np.asarray(attribute)[known], return_inverse=True)
    people, person = np.unique(np.asarray(identity)[known], return_inverse=True)
    counts = np.bincount(person * len(values) + value, minlength=len(people) * len(values)).reshape(len(people), -1)
    shares = counts / counts.sum(axis=1, keepdims=True)                        # (people, values)
    return float(abs((shares * np.log(np.where(shares > 0, shares, 1))).sum(axis=1).mean()))


def spearman(x, y):
    """Spearman's rank correlation of two lists, equal values sharing their mean rank; None for fewer than 3, or all equal."""
    ranks = []
    for values in (x, y):
        _, place, count = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - (count - 1) / 2)[place])
    return float(np.corrcoef(*ranks)[0, 1]) if len(x) > 2 and all(np.ptp(rank) for rank in ranks) else None


def invariance_energy(e0, e1, e2, k=NEIGHBOURS):
    """How disordered an attribute's field is in the embedding space; high = the embedding is invariant to it. Microscale analysis.

    e0, e1, e2 (n, E): embeddings of n pictures with the attribute at steps 0, 1, 2. At point x = e1 stands v = e2 - e0, normalised;
    the energy is the mean cosine distance of v to the v of the k nearest points (cosine distance, the point itself excluded), in
    [0, 2], 1 for random directions. Points that do not move have no direction and are left out; None where not more than k are left."""
    e = np.stack([e0, e1, e2]).astype(np.float64)
    if e.ndim != 3 or k < 1 or len(e[0]) <= k or not np.isfinite(e).all():
        raise ValueError(f"the energy needs k >= 1 and three finite steps (n, E) of more than k pictures; got k {k} and shape {e.shape}")
    v, x = e[2] - e[0], e[1]
    moved = np.linalg.norm(v, axis=1) > 1e-5 * np.linalg.norm(x, axis=1)       # less is the error of float32
    v, x = (vectors[moved] / np.linalg.norm(vectors[moved], axis=1, keepdims=True) for vectors in (v, x))
    if len(v) <= k:
        return None
    s = x @ x.T                                                                # (n, n)
    np.fill_diagonal(s, -np.inf)
    nearest = np.argpartition(-s, k - 1, axis=1)[:, :k]                        # (n, k)
    return float(1 - (v[:, None] * v[nearest]).sum(axis=2).mean())


def macroscale(networks, index, rows, names, device, **how):
    """networks of rows_of_table, attributes `names` (empty: all) -> {"entropy": {attribute: intra_entropy}, "ks": {row of the table:
    {attribute: attribute_ks}}, "spearman": {row: of the two, or None}}. What cannot be computed is told, and the rest goes on."""
    attributes, messages = read_attributes(index)
    for message in messages + [f"unknown attribute: {name}; known here: {', '.join(attributes)}" for name in names if name not in attributes]:
        print(message)
    embeddings, _ = embed_all(networks, index, rows, device, **how)
    rows = np.unique(np.concatenate([kept for _, kept in embeddings.values()]))
    entropy, ks = {}, {what: {} for what in embeddings}
    for name in [name for name in attributes if not names or name in names]:
        values = attributes[name][rows]
        if len(np.unique(values[~np.isnan(values)])) < 2:
            print(f"{name}: left out, since it has one value only, or none, in the {len(rows)} pictures")
            continue
        entropy[name] = intra_entropy(index.identity[rows], values)
        for what, (z, kept) in embeddings.items():
            try:
                ks[what][name] = attribute_ks(z, index.identity[kept], attributes[name][kept])
            except ValueError as error:
                print(f"{name}: left out for {what}: {error}")
    if not entropy:
        raise ValueError(f"{index.root}: no attribute to report on in {len(rows)} pictures that could be read; known: {', '.join(attributes)}")
    rho = {what: spearman([entropy[name] for name in found], [value["mean"] for value in found.values()]) for what, found in ks.items()}
    return {"entropy": entropy, "ks": ks, "spearman": rho}


@torch.inference_mode()
def microscale(networks, index, rows, names, *, k, device, batch_size=256, dtype=None, **_):
    """Invariance energies: {attribute: {row of the table: mean over people, or None}} of the attributes `names`, empty: all. Pictures of
    any people move in PHOTO, people drawn for the toy world in data.MOVES too."""
    from torchvision.transforms import functional  # here, since importing torchvision takes as long as all the rest
    known = [*(MOVES if is_toy(index.root) else ()), *PHOTO]
    for name in [name for name in names if name not in known]:
        print(f"unknown attribute: {name}; known here: {', '.join(known)}")
    names = [name for name in known if not names or name in names]
    if not names:
        raise ValueError(f"{index.root}: no attribute to move; known: {', '.join(known)}")
    views = {("face" if faces else "head", network.image_size) for _, network, _, faces in networks}
    people = moving_people(index, rows, views, [name for name in names if name in MOVES], k)
    energies, done = {name: {what: [] for what, *_ in networks} for name in names}, 0
    for done, moved in enumerate(people, 1):
        for name, (what, network, embed, faces) in itertools.product(names, networks):
            view = "face" if faces else "head", network.image_size
            if name in PHOTO:
                move, pixels = getattr(functional, f"adjust_{name}"), torch.from_numpy(moved["still"][view])
                steps = torch.stack([move(pixels, step) for step in PHOTO[name]])  # (3, n, 3, S, S)
            else:
                steps = torch.from_numpy(moved[name][view])
            with autocast(torch.device(device), dtype):
                e = [unit_rows(embed(to_unit(batch.to(device))).float()).cpu() for batch in steps.flatten(0, 1).split(batch_size)]
            energy = invariance_energy(*torch.cat(e).unflatten(0, (3, -1)), k)
            energies[name][what] += [] if energy is None else [energy]
        print(f"energy: person {done}", flush=True)
    if not done:
        raise ValueError(f"{index.root}: nobody has more than {k} pictures that can be read, so that the energy has no {k} neighbours; "
                         "take a smaller --k")
    mean = lambda values: sum(values) / len(values) if values else None
    return {name: {what: mean(values) for what, values in rows.items()} for name, rows in energies.items()}


def moving_people(index, rows, views, names, k):
    """Yield {name: {view: (3, n, 3, side, side)}, "still": {view: (n, 3, side, side)}}, uint8 arrays, of up to PEOPLE people: what
    data.move_person draws in the toy world, else only "still", of those with the most pictures, up to SETTINGS of each, faces shown."""
    if is_toy(index.root):
        heads, faces = ([side for what, side in views if what == kind] for kind in ("head", "face"))
        with processes() as pool:
            yield from pool.imap(move_person, [(person, SETTINGS, names, heads, faces, 64) for person in range(PEOPLE)])
        return
    rows = rows[index.has_face[rows]] if any(kind == "face" for kind, _ in views) else rows
    people, counts = np.unique(index.identity[rows], return_counts=True)
    for person in people[np.argsort(-counts, kind="stable")][:PEOPLE]:
        mine, still = rows[index.identity[rows] == person][:SETTINGS].tolist(), {}
        for kind, side in views:
            dataset = HeadDataset(index, **{"head_size": 0, "face_size": 0, f"{kind}_size": side})
            still[kind, side] = getattr(collate([dataset[row] for row in mine]), kind).numpy()
        if all(len(pixels) > k for pixels in still.values()):
            yield {"still": still}


def analyse(settings, students, teachers, index, rows, **how):
    """--attributes and --energy: print tables, write the JSON and the scatter."""
    if not len(rows):
        raise ValueError(f"{index.root}: nobody is held out (the split needs 4 identities); give --data with other people")
    networks, content = rows_of_table(students, teachers, settings.embedding, settings.flip_sum), {"data": index.root}
    if not index.has_face[rows].any() and teachers:
        print("notice: no aligned faces here, so that the teacher sees whole heads only")
        networks = [row for row in networks if not row[3]]
    columns = [what for what, *_ in networks]
    if settings.attributes is not None:
        found = content["attributes"] = macroscale(networks, index, rows, settings.attributes, **how)
        cell = "{mean:.3f} ({with_attribute:.2f}, {without_attribute:.2f})".format_map
        print("\nKS statistic of each attribute: mean (with it, without it), against the distances across")
        print_grid([["attribute", "intra-entropy", *columns],
                    *([name, f"{entropy:.3f}", *(cell(found["ks"][what][name]) if name in found["ks"][what] else "n/a" for what in columns)]
                      for name, entropy in sorted(found["entropy"].items(), key=lambda item: item[1])),
                    ["Spearman", "", *(show(found["spearman"][what]) for what in columns)]], settings.md)
        if settings.sheet:
            scatter_sheet(found, settings.sheet)
            print(f"picture: {settings.sheet}")
    if settings.energy is not None:
        found = content["energy"] = microscale(networks, index, rows, settings.energy, k=settings.k, **how)
        print(f"\ninvariance energy, k = {settings.k}: low = the attribute moves the embedding in an orderly way, about 1 = in no direction of its own")
        print_grid([["attribute", *columns], *([name, *map(show, energies.values())] for name, energies in found.items())], settings.md)
    if settings.json:
        write_json(settings.json, content)
        print(f"numbers: {settings.json}")


def scatter_sheet(found, path):
    """Draw the KS statistic of each attribute against its intra-entropy, in a colour a network."""
    sheet = Image.new("RGB", (960, 560 + 18 * len(found["ks"])), "white")
    draw, colours = ImageDraw.Draw(sheet), dict(zip(found["ks"], itertools.cycle(CURVES)))
    points = [(name, what, value["mean"]) for what, ks in found["ks"].items() for name, value in ks.items()]
    highest = max([0.1, *(mean for _, _, mean in points)])
    place = axes(draw, (60, 40, 920, 480), ticks(0, 0.7, 0.1), ticks(0, math.ceil(highest * 10) / 10, 0.1),
                 "intra-entropy: how much the attribute varies within a person, nats", "KS statistic: how much it parts people")
    for name, what, mean in points:
        draw.circle(place(found["entropy"][name], mean), 4, fill=colours[what])
    named = []
    for name, entropy in found["entropy"].items():
        x, y = place(entropy, max([mean for other, _, mean in points if other == name], default=0))
        while any(abs(x - other_x) < 80 and abs(y - other_y) < 13 for other_x, other_y in named):
            y -= 1  # above the names that are there
        named.append((x, y))
        draw.text((x + 6 * (x < 90), y - 8), name, fill="black", anchor="lb" if x < 90 else "mb" if x < 860 else "rb")
    legend(draw, 60, 535, [(colours[what], f"{what}: Spearman {show(rho)}") for what, rho in found["spearman"].items()], step=18)
    sheet.save(path)


# ---------------------------------------------------------------- the command line

def teacher_of(path, checkpoint):
    """File of the teacher of a checkpoint's run: beside the checkpoint, or where --teacher named it; None where there is none."""
    named, beside = checkpoint["teacher"], os.path.join(os.path.dirname(path), "teacher.pt")
    if named is None:
        return None
    files = [named, beside] if (checkpoint["settings"] or {}).get("teacher") else [beside, named]
    found = next(filter(os.path.isfile, files), None)
    if found is None:
        print(f"notice: the teacher {named} is gone")
    return found


def short_names(paths, kind):
    """Paths -> {name in the table: path}: the kind alone where there is one, else the folder and the file."""
    if len(paths) == 1:
        return {kind: paths[0]}
    short = [os.path.join(*os.path.abspath(path).split(os.sep)[-2:]) for path in paths]
    return dict(zip(short if len(set(short)) == len(paths) else paths, paths))


def load_students(checkpoints):
    """{path: checkpoint} -> {name in the table: student}, told on screen."""
    students = {}
    for name, path in short_names(list(checkpoints), "student").items():
        checkpoint = checkpoints[path]
        student = students[name] = build(new_student, checkpoint, path)
        student.trained = checkpoint["trained"]
        student.description = f"{path}, design {student.design}" + (f", epoch {checkpoint['epoch']}" if "epoch" in checkpoint else "")
        print(f"{name}: {student.description}", flush=True)
    return students


def load_teachers(settings, checkpoints):
    """-> {name in the table: teacher}: that of --teacher, or those of the checkpoints' runs, each file once."""
    colours = {settings.teacher: settings.colour}
    if not settings.teacher:
        found = [(teacher_of(path, checkpoint), checkpoint["settings"] or {}) for path, checkpoint in checkpoints.items()]
        colours = {os.path.realpath(file): settings.colour or own.get("colour") for file, own in found if file}
    teachers = {}
    for name, file in short_names(list(colours), "teacher").items():
        teachers[name] = load_teacher(file, colours[file])
        print(f"{name}: {teachers[name].description} ({file})", flush=True)
    if not teachers and (settings.flip_sum or settings.colour):
        raise ValueError("--flip-sum and --colour are for a teacher, and none is known here: add --teacher FILE")
    return teachers


def open_own_data(settings, checkpoints):
    """-> (index, rows to evaluate): all of --data, or, of the data of the first checkpoint that knows its own, the identities that
    no student was trained on."""
    own_data = settings.data is None
    if own_data:
        own = next((checkpoint for checkpoint in checkpoints.values() if checkpoint["settings"] is not None), None)
        if own is None:
            raise ValueError(f"{settings.ckpt[0]} comes without data of its own: add --data PATH (python data.py --toy PATH draws some)")
        for name in ("data", "faces", "segment_frames", "segment_gap"):
            setattr(settings, name, own["settings"][name])
        if settings.data is None and os.path.isdir(own["root"]):
            settings.data = own["root"]  # the toy world that it was trained on, not one in this folder
    index = open_data(settings)
    trained = np.isin(index.names, [name for checkpoint in checkpoints.values() for name in checkpoint["trained"]])
    if trained.any() and not own_data:
        print(f"notice: {int(trained.sum())} of {len(index.names)} identities have names that a student was trained on; "
              "if they are the same people, its scores are too good")
    return index, np.flatnonzero(~(trained & own_data)[index.identity])


def report(students, teachers, index, rows, *, which="id", fars=FARS, markdown=False, json_file=None, sheet=None, **how):
    """Evaluate {name: network} on rows of an index: print the table, write the JSON and the pictures."""
    if not len(rows):
        print("nobody is held out (the split needs 4 identities): nothing to evaluate; give --data with other people")
        return
    table, z, kept, unreadable = evaluate(students, teachers, index, rows, which=which, fars=fars, **how)
    if not len(kept):
        raise ValueError(f"{index.root}: not one of {len(rows)} pictures could be read ({unreadable[0]})")
    print(f"\nembedding of the students: z_{which}")
    print_table(table, fars, markdown)
    if sheet and len(kept) == 1:
        print("no pictures are drawn of one head")
    elif sheet:
        galleries, scores, roc = sheet_files(sheet)
        gallery_sheet(z, index, kept, galleries)
        histogram_sheet(table, fars[0], scores)
        roc_sheet(table, roc)
        print(f"pictures: {galleries} (galleries by {next(iter(students))}), {scores}, {roc}")
    if json_file:
        describe = lambda networks: {name: network.description for name, network in networks.items()}
        write_json(json_file, {"students": describe(students), "teachers": describe(teachers), "embedding": which, "fars": list(fars),
                               "data": index.root, "table": table, "unreadable": unreadable})
        print(f"numbers: {json_file}")


def parse(argv):
    """Command line -> settings, checked before anything is read."""
    parser = Parser("Evaluate Head Similarity checkpoints on held-out identities, or compare a clip with a reference.")
    add = parser.add_argument
    add("--ckpt", metavar="FILE", nargs="+", required=True, help="best.pt or last.pt of a run, or the authors' ours_vit2cls.ckpt")
    add("--compare", metavar="PATH", nargs="+", help="a reference, then pictures or folders of frames to compare with it; none: evaluate")
    add("--attributes", metavar="NAME", nargs="*", help="KS statistics of attributes in attributes.csv, all without a NAME; none: evaluate")
    add("--energy", metavar="NAME", nargs="*", help="invariance energies of attributes that move, all without a NAME; none: evaluate")
    add("--k", type=int, default=NEIGHBOURS, help="neighbours in the invariance energy")
    teacher_options(parser, none="those of the checkpoints' runs")
    add("--flip-sum", action="store_true", help="teacher: add the embedding of the mirror image, as in published figures")
    data_options(parser, none="the held-out identities of the first checkpoint's own data")
    machine_options(parser)
    add("--embedding", choices=["id", "head"], default="id", help="z_id, the paper's choice, or z_head")
    add("--fars", type=float, nargs="+", default=list(FARS), help="false accept rates; the first sets the thresholds in pictures")
    add("--batch-size", type=int, default=256, help="pictures at a time")
    add("--md", action="store_true", help="print the table in Markdown")
    add("--json", metavar="FILE", help="write the numbers as JSON too; none: do not")
    add("--sheet", metavar="FILE", help="draw into this PNG or JPEG, and more beside it; none: do not")
    settings = parser.parse_args(argv)
    check_fars(settings.fars)
    check_numbers(settings, batch_size=1, workers=0, k=1)
    given = {name for name, value in vars(settings).items() if value != parser.get_default(name)}
    if "data" not in given and given & {"faces", "segment_frames", "segment_gap"}:
        raise ValueError("--faces, --segment-frames and --segment-gap go with --data")
    if "compare" in given and (len(settings.compare) < 2 or len(settings.ckpt) > 1):
        raise ValueError("--compare needs a reference, at least one picture or folder to compare with it, and one --ckpt")
    if "compare" in given and given & {"teacher", "colour", "flip_sum", "md", "attributes", "energy"}:
        raise ValueError("--teacher, --colour, --flip-sum, --md, --attributes and --energy do not go with --compare")
    if given & {"sheet", "energy", "attributes"} == {"sheet", "energy"}:
        raise ValueError("--sheet draws --attributes; --energy has no picture")
    if settings.k >= SETTINGS:
        raise ValueError(f"--k must be less than the {SETTINGS} points of a person; got {settings.k}")
    settings.frames = frames_of(settings.compare[1:], settings.compare[0]) if settings.compare else []
    if settings.sheet and os.path.splitext(settings.sheet)[1].lower() not in (".png", ".jpg", ".jpeg"):
        raise ValueError(f"--sheet must name a .png or .jpg file; got {settings.sheet}")
    check_outputs([settings.json, *(sheet_files(settings.sheet) if settings.sheet else [])],
                  [*settings.ckpt, settings.teacher, *(settings.compare or [])[:1], *settings.frames, settings.data, settings.faces])
    return settings


def thresholds_for(settings, checkpoint, student, machine):
    """Thresholds for --compare: those in the checkpoint, or, for other people or another FAR, or where it has none, new ones."""
    far = settings.fars[0]
    try:
        stored = checkpoint["thresholds"][settings.embedding]
        whole = all(math.isfinite(stored[name]) for name in THRESHOLDS) and "data" in stored
        if whole and stored["far"] == far and settings.data is None:
            return stored
    except (KeyError, TypeError):  # none there, or a damaged file
        pass
    index, rows = open_own_data(settings, {settings.ckpt[0]: checkpoint})
    table, _, kept, unreadable = evaluate({"student": student}, {}, index, rows, which=settings.embedding, fars=[far], **machine)
    found = calibrate(table[0], far, table[0]["people"], index.root) if table else None
    if found is None:
        raise ValueError(f"{index.root}: no thresholds from {len(kept)} pictures; they need pairs of one look, of two looks, of two people")
    return found


def main(argv=None):
    settings = parse(argv)
    device, dtype = choose_device(settings.device, settings.amp)
    machine = dict(device=device, dtype=dtype, batch_size=settings.batch_size, workers=settings.workers)
    checkpoints = {path: read_checkpoint(path) for path in settings.ckpt}
    if settings.compare:
        student, = load_students(checkpoints).values()
        thresholds = thresholds_for(settings, *checkpoints.values(), student.to(device), machine)
        return compare(student, thresholds, settings.compare[0], settings.frames, which=settings.embedding, json_file=settings.json,
                       sheet=settings.sheet, **machine)
    teachers = load_teachers(settings, checkpoints)
    index, rows = open_own_data(settings, checkpoints)
    students = load_students(checkpoints)
    if settings.attributes is not None or settings.energy is not None:
        return analyse(settings, students, teachers, index, rows, **machine)
    report(students, teachers, index, rows, which=settings.embedding, fars=settings.fars, markdown=settings.md, json_file=settings.json,
           sheet=settings.sheet, flip_sum=settings.flip_sum, **machine)


if __name__ == "__main__":
    command_line(main)
