"""Heads on disk -> batches (row, head, face, has_face, identity, state); and the toy world, a stand-in with known truth.

Reading order: one picture, its aligned face, a folder of heads, the split by identity, the sampler, the
dataset, augmentation, the toy world. Implements the paper's weak supervision: frames of one short video
segment share an appearance state.

    PATH/<identity>/<segment>/<frame>.jpg      one folder a person, one a short segment = one appearance state
    PATH/<identity>/<frame>.jpg                no segments: every picture its own state
    PATH/landmarks.csv                         path,x1,y1,...,x5,y5 in pixels of the upright picture

    python data.py --data PATH                 # what is in a folder, and what was skipped and why
    python data.py --toy DIR                   # write the toy world
"""
import argparse
import colorsys
import contextlib
import csv
import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import struct
import sys
import tempfile
import threading
import unicodedata
import zlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

from model import square_pixels, upright_rgb

LAYOUT = "PATH/<identity>/<segment>/<frame>.jpg or PATH/<identity>/<frame>.jpg"
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
PICTURE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, NotImplementedError, Image.DecompressionBombError)

# Where the five points belong in a 112x112 face, the picture's left one first in each pair (ArcFace's template).
TEMPLATE = np.array([[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]])
TOY_WORLD = os.path.join("runs", "toy-world")
MANY = 10_000  # pictures whose headers are worth several processes
MAX_ENLARGEMENT = 20  # a face of which one pixel becomes 20 is none: its landmarks are not in pixels
LANDMARK_HEADER = ["path"] + [axis + str(i) for i in range(1, 6) for axis in "xy"]
MAX_RESIDUAL = 10.0  # px in the 112x112 face; right points give 1 to 5, points in a wrong order 17 and more


# ---------------------------------------------------------------- one picture

def load_picture(path, *, short_side=0, scale=0.0):
    """Picture file -> (PIL RGB upright, shrink).

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size (Pillow's draft mode, much faster) where that leaves what is needed:
    `short_side` pixels on the shorter side and `scale` of the original. Both 0: full size. Of a face that is warped down this
    is also the better picture, since the warp takes single pixels and a reduced one holds the mean of several.
    shrink <= 1 is what was done. Raises ValueError with the path where the file is no readable picture."""
    try:
        with Image.open(path) as image:
            full = max(image.size)
            enough = max(short_side / min(image.size), scale)
            if 0 < enough < 1:
                image.draft(None, tuple(math.ceil(side * enough) for side in image.size))
            picture = upright_rgb(image)
            return picture, 2.0 ** round(math.log2(max(picture.size) / full))  # 1/2, 1/4, 1/8: the reduced size is rounded up
    except PICTURE_ERRORS as error:
        raise ValueError(f"{path}: not a readable picture ({error})") from error


# ---------------------------------------------------------------- its aligned face

def face_transform(points):
    """Least-squares similarity (Umeyama) from landmarks to the 112x112 template.

    points (..., 5, 2) -> complex factor a (...), complex offset b (...), root-mean-square residual (...) in
    template pixels. With points as complex numbers p, the similarity is a * p + b, and rotation and scale are
    one linear regression. Equal or missing points give a NaN residual."""
    p = points[..., 0] + 1j * points[..., 1]                  # (..., 5)
    q = TEMPLATE[:, 0] + 1j * TEMPLATE[:, 1]                  # (5,)
    centred = p - p.mean(-1, keepdims=True)
    with np.errstate(all="ignore"):
        a = (centred.conj() * (q - q.mean())).sum(-1) / (np.abs(centred) ** 2).sum(-1)
        b = q.mean() - a * p.mean(-1)
        residual = np.sqrt((np.abs(a[..., None] * p + b[..., None] - q) ** 2).mean(-1))
    return a, b, residual


def align_face(image, points, size=112):
    """PIL picture and five landmarks (5, 2), x and y in its pixels -> aligned face (size, size), PIL.

    One bilinear warp straight from the picture's own pixels, zero outside. Landmarks count pixel centres from 0;
    order: left eye, right eye, nose, left and right mouth corner, as seen in the picture.
    Raises ValueError for another shape, NaN, or points that do not look like a face in this order."""
    points = np.asarray(points, dtype=np.float64)
    if points.shape != (5, 2) or not np.isfinite(points).all():
        raise ValueError(f"landmarks must be 5 finite points of x and y, shape (5, 2); got shape {points.shape}: "
                         f"{points.tolist()}")
    a, b, residual = face_transform(points)
    if not residual <= MAX_RESIDUAL:
        raise ValueError(f"landmarks do not fit a face (residual {residual:.1f} of at most {MAX_RESIDUAL:.0f} px; order: left "
                         f"eye, right eye, nose, left and right mouth corner, as seen in the picture): {points.tolist()}")
    return warp_face(image, a, b, size)


def warp_face(image, a, b, size):
    """The warp of align_face for a known similarity a * p + b to the template. Pillow wants the way back, and counts
    from the corner of a pixel, half a pixel before its centre: face corner f -> picture corner c * f + d."""
    half, c = 0.5 + 0.5j, 112 / size / a
    d = half - (half + b) / a
    coefficients = (c.real, -c.imag, d.real, c.imag, c.real, d.imag)
    return image.transform((size, size), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)


def far_outside(points, sizes):
    """Landmarks (N, 5, 2) in pictures of sizes (N, 2), width and height -> (N,) bool: is one of them farther outside than a quarter
    of the longer side?"""
    margin = sizes.max(axis=1, keepdims=True) / 4
    return ((points.min(axis=1) < -margin) | (points.max(axis=1) > sizes + margin)).any(axis=1)


def processes():
    """-> a pool of one process a core, which ends with the main process, however that ends."""
    return multiprocessing.Pool(initializer=follow_the_main_process)


def follow_the_main_process():
    """What a process of a pool does first. A signal to the whole group of the main one must not reach it: it could end while it
    holds a lock that the main process then waits for."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from the main process only
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def upright_size(path):
    """Picture file -> its upright (width, height), from the header only; infinite where it cannot be read, to be named when it is."""
    try:
        with Image.open(path) as image:
            turned = image.getexif().get(0x0112) in (5, 6, 7, 8) and image.format != "TIFF"  # whose size is that upright already
            return image.size[::-1] if turned else image.size
    except PICTURE_ERRORS:
        return math.inf, math.inf


# ---------------------------------------------------------------- a folder of heads

@dataclass
class HeadIndex:
    """All pictures of a folder, in arrays of one entry a picture."""
    root: str
    faces: str | None              # folder of aligned faces under the same relative paths, instead of landmarks
    names: list                    # identity number -> folder name
    paths: np.ndarray              # (N,) bytes: UTF-8, relative to root, "/" between parts
    identity: np.ndarray           # (N,) int64
    state: np.ndarray              # (N,) int64, numbered through all identities
    transform: np.ndarray          # (N, 2) complex: a, b of face_transform; 0 without a face
    has_face: np.ndarray           # (N,) bool
    notes: list                    # what was skipped and why, a line each

    def path(self, row):
        return os.fsdecode(self.paths[row])

    def summary(self):
        return (f"{self.root}: {len(np.unique(self.identity))} identities, {len(np.unique(self.state))} appearance states, "
                f"{len(self.paths)} pictures\nfaces: {int(self.has_face.sum())} of {len(self.paths)} pictures")


def scan_heads(root, *, faces=None, segment_frames=0, segment_gap=0):
    """Folder of heads -> HeadIndex, ordered by name.

    segment_frames N > 0 cuts each folder of numbered frames into windows of N frame numbers, each its own
    state; segment_gap M drops M numbers between windows, so that neighbours that look alike are not called
    different (our reading). Raises ValueError where no picture stands where the layout wants it."""
    if min(segment_frames, segment_gap) < 0 or segment_frames + segment_gap > 1e18 or (segment_gap and not segment_frames):
        raise ValueError("--segment-frames and --segment-gap must be 0 to 1e18 together, and a gap needs frames; "
                         f"got {segment_frames} and {segment_gap}")
    names, folders, notes = walk(root)
    identity, folder, paths = zip(*folders)
    sizes, paths = [len(part) for part in paths], np.concatenate(paths)                # (N,) from here on
    apart = np.repeat(["/" not in name for name in folder], sizes)                     # no segment: a state of its own
    place, dropped = np.where(apart, np.arange(len(paths)), 0), np.zeros(len(paths), dtype=bool)
    if segment_frames:
        place, dropped = frame_windows(paths, segment_frames, segment_gap)
        if dropped.all():
            raise ValueError(f"{root}: all {len(paths)} frames fall into the gaps of --segment-gap {segment_gap}")
    identity, folder, place = (part[~dropped] for part in (np.repeat(identity, sizes), np.repeat(np.arange(len(sizes)), sizes), place))
    state = np.unique(folder * (place.max() + 1) + place, return_inverse=True)[1]      # numbered in the order of the folders
    notes += note([os.fsdecode(path) for path in paths[dropped]], "frames in the gaps between segments")
    paths, N = paths[~dropped], len(identity)
    index = HeadIndex(root, faces, names, paths, identity, state, np.zeros((N, 2), complex), np.zeros(N, bool), notes)
    add_faces(index)
    return index


def walk(root):
    """Folder of heads -> (names of the identities, [(number of the identity, relative folder, relative paths (n,) bytes)], notes)."""
    if not os.path.isdir(root):
        what = "a file" if os.path.exists(root) else "no such folder"
        raise ValueError(f"{root}: {what}; expected a folder laid out as {LAYOUT}")
    (identities, stray), names, folders, empty, deep = list_folder(root), [], [], [], []
    for name in identities:
        segments, pictures = list_folder(os.path.join(root, name))
        of_person = [(name, pictures)]
        for segment in segments:
            below, pictures = list_folder(os.path.join(root, name, segment))
            deep += [f"{name}/{segment}/{folder}" for folder in below]
            empty += [] if pictures or below else [f"{name}/{segment}"]
            of_person.append((f"{name}/{segment}", pictures))
        of_person = [(len(names), folder, np.array([os.fsencode(f"{folder}/{picture}") for picture in pictures]))
                     for folder, pictures in of_person if pictures]
        folders += of_person
        names += [name] if of_person else []
        empty += [] if of_person or segments else [name]
    if not folders:
        raise ValueError(f"{root}: no pictures laid out as {LAYOUT}; found {len(stray)} pictures directly in the folder, "
                         f"{len(identities)} folders in it, {len(deep)} folders below the segments")
    return names, folders, [*note(stray, "pictures outside an identity folder"), *note(empty, "empty folders"),
                            *note(deep, "folders below a segment")]


def list_folder(path):
    """Names of (sub-folders, pictures) in a folder, sorted; what systems and tools leave behind is ignored."""
    folders, pictures = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith((".", "__MACOSX", "@eaDir")):
                continue
            picture = entry.name.lower().endswith(EXTENSIONS)
            try:
                if entry.is_dir():
                    folders.append(entry.name)
                elif picture and (entry.is_file() or entry.is_symlink()):
                    pictures.append(entry.name)
            except OSError:  # a link that leads round in circles
                pictures += [entry.name] if picture else []
    return sorted(folders), sorted(pictures)


def note(items, what, verb="skipped"):
    """A list of one line about some paths, or of none."""
    return [f"{verb}: {len(items)} {what} (first: {items[0]})"] if items else []


def frame_windows(paths, frames, gap):
    """Relative paths (N,) bytes of numbered frames -> window of frame numbers of each, (N,), and (N,) bool, True in a gap between two."""
    numbers = np.empty(len(paths), dtype=np.int64)
    for row, path in enumerate(paths):
        digits = re.search(rb"(\d{1,18})[^\d/]*$", os.path.splitext(path)[0])  # the last number in the file's name
        if digits is None:
            raise ValueError(f"{os.fsdecode(path)}: --segment-frames needs frame numbers in the file names")
        numbers[row] = int(digits.group(1))
    window, place = np.divmod(numbers - min(1, numbers.min()), frames + gap)  # counted from 0, or from 1 where no file is numbered 0
    return np.unique(window, return_inverse=True)[1], place >= frames


def add_faces(index):
    """Fill transform and has_face of an index from its --faces folder or its landmarks.csv; note what does not fit."""
    if index.faces is not None:
        if not os.path.isdir(index.faces):
            raise ValueError(f"--faces {index.faces}: not a folder")
        index.has_face[:] = [os.path.isfile(os.path.join(index.faces, index.path(row))) for row in range(len(index.paths))]
        return
    file = os.path.join(index.root, "landmarks.csv")
    if not os.path.isfile(file):
        return
    rows = {normal(index.path(row)): row for row in range(len(index.paths))}
    points, unknown, missing, repeated = np.full((len(index.paths), 5, 2), np.nan), [], [], []
    for path, numbers in read_landmarks(file):
        row = rows.get(normal(path))
        if row is None:
            unknown.append(path)
        elif not np.isfinite(numbers).all():
            missing.append(path)
        else:
            repeated += [path] if np.isfinite(points[row]).any() else []
            points[row] = numbers
    a, b, residual = face_transform(points)
    index.has_face[:] = (residual <= MAX_RESIDUAL) & (np.abs(a) < MAX_ENLARGEMENT)
    misfit = [index.path(row) for row in np.flatnonzero(np.isfinite(points).all(axis=(1, 2)) & ~index.has_face)]
    faces = np.flatnonzero(index.has_face)
    files = (os.path.join(index.root, index.path(row)) for row in faces)
    with processes() if len(faces) > MANY else contextlib.nullcontext() as pool:
        sizes = np.array(list(pool.imap(upright_size, files, 1000) if pool else map(upright_size, files))).reshape(-1, 2)
    outside = faces[far_outside(points[faces], sizes)]
    index.has_face[outside] = False
    index.transform[:] = np.where(index.has_face[:, None], np.stack([a, b], axis=1), 0)
    turned = [index.path(row) for row in np.flatnonzero(index.has_face & (np.abs(np.angle(a)) > math.pi / 3))]
    index.notes += [*note(missing, "landmark rows with missing or infinite numbers", "no face"),
                    *note(misfit, "pictures whose landmarks fit no face (wrong order? not in pixels?)", "no face"),
                    *note(turned, "faces turned by more than 60 degrees; look at them, the order may be wrong", "notice"),
                    *note(repeated, "pictures with several landmark rows; the last one counts", "notice"),
                    *note([index.path(row) for row in outside], "pictures whose landmarks lie far outside", "no face"),
                    *note(unknown, "landmark rows that name no picture in use", "ignored")]


def read_table(file):
    """Yield (number of the line, its fields) of a UTF-8 table of comma-separated values, without empty lines."""
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        table = csv.reader(lines)
        try:
            for fields in filter(None, table):
                yield table.line_num, fields
        except csv.Error as error:
            raise ValueError(f"{file}, line {table.line_num}: not to be read ({error})") from error


def read_landmarks(file):
    """Yield (path, (5, 2) array) of each row of a landmarks.csv; an empty field is NaN."""
    table = read_table(file)
    _, first = next(table, (0, ["nothing"]))
    if [name.strip().lower() for name in first] != LANDMARK_HEADER:
        raise ValueError(f"{file}: the first line must be {','.join(LANDMARK_HEADER)}; found {','.join(first)}")
    for line, (path, *numbers) in table:
        try:
            yield path, np.array([float(number or "nan") for number in numbers]).reshape(5, 2)
        except ValueError as error:
            raise ValueError(f"{file}, line {line}: expected a path and 10 numbers, shape (5, 2) ({error})") from error


ATTRIBUTE_VALUES = {"": np.nan, "0": 0, "-1": 0, "0.0": 0, "-1.0": 0, "1": 1, "1.0": 1}


def read_attributes(index):
    """The attributes.csv of an index's folder, path,NAME,... with 0/1 or -1/1 -> ({name: (N,) float64, 1, 0, or NaN where the
    file is silent}, what was left out and why). ValueError where there is no such file, or no attribute in it."""
    file = os.path.join(index.root, "attributes.csv")
    if not os.path.isfile(file):
        raise ValueError(f"{file}: no such file; --attributes needs one: path,NAME,... and a line a picture, with 0/1 or -1/1")
    table = read_table(file)
    first, *names = map(str.strip, next(table, (0, [""]))[1])
    if first.lower() != "path" or not names or len(set(names)) < len(names) or "" in names:
        raise ValueError(f"{file}: the first line must be path and then the attributes' names, each once")
    rows = {normal(index.path(row)): row for row in range(len(index.paths))}
    values, unknown, wrong = {name: np.full(len(index.paths), np.nan) for name in names}, [], {}
    for line, (path, *fields) in table:
        if len(fields) != len(names):
            raise ValueError(f"{file}, line {line}: expected a path and {len(names)} values, found {len(fields)}")
        row = rows.get(normal(path))
        if row is None:
            unknown.append(path)
            continue
        for name, value in zip(names, map(str.strip, fields)):
            if value in ATTRIBUTE_VALUES:
                values[name][row] = ATTRIBUTE_VALUES[value]
            else:
                wrong.setdefault(name, f"{value!r} at line {line}")
    messages = [f"{name}: left out, since its values must be 0/1 or -1/1; found {found}" for name, found in wrong.items()]
    messages += note(unknown, "lines of attributes.csv that name no picture in use", "ignored")
    return {name: column for name, column in values.items() if name not in wrong}, messages


def normal(path):
    """One spelling for a relative path: "/" between parts, composed letters (macOS writes them decomposed)."""
    return unicodedata.normalize("NFC", path.replace("\\", "/").removeprefix("./"))


# ---------------------------------------------------------------- the split by identity

def split_identities(names, held_out=0.25):
    """Identity names -> (len(names),) bool array, True = held out for evaluation.

    A hash of the name decides, so that adding a person moves nobody else. Of four and more, at least two are held
    out and two trained on, since one person makes no impostor pair; fewer than four are all trained on."""
    digests = [hashlib.sha256(os.fsencode(normal(name))).digest()[:4] for name in names]
    hashes = np.array([int.from_bytes(digest, "big") / 2 ** 32 for digest in digests])
    count = np.clip((hashes < held_out).sum(), 2, len(names) - 2) if len(names) >= 4 else 0
    return np.isin(np.arange(len(names)), np.argsort(hashes)[:count])


# ---------------------------------------------------------------- the sampler: P identities x S states x K frames

class IdentitySampler:
    """Batches of row numbers: P distinct identities, S states of each, K frames of each state.

    rows, identity, state: (N,) arrays. An identity with fewer states gives more frames of those it has, and one with
    fewer than S * K pictures gives all of them: no picture stands twice in a batch, so none is a genuine pair with
    itself. All epochs have len() = steps batches, by default as many as the pictures fill, at least 1;
    set_epoch(e) shuffles anew. Of `processes` that share each batch, number `rank` gets its share of the identities."""

    def __init__(self, rows, identity, state, *, P, S, K, seed=0, steps=None, rank=0, processes=1):
        if len(rows) == 0 or min(P, S, K) < 1:
            raise ValueError(f"a batch needs pictures and P, S, K >= 1; got {len(rows)} pictures, P {P}, S {S}, K {K}")
        order = np.lexsort((rows, state, identity))
        rows, identity, state = rows[order], identity[order], state[order]
        starts = np.flatnonzero(np.diff(state, prepend=-1))                  # of the states in rows, and of people among the states
        people = np.flatnonzero(np.diff(identity[starts], prepend=-1))
        self.rows, self.frames, self.states = rows, np.append(starts, len(rows)), np.append(people, len(starts))
        self.P, self.S, self.K, self.seed, self.epoch, self.skip = min(P, len(people)), S, K, seed, 0, 0
        self.rank, self.processes = rank, processes
        self.steps = steps or max(1, len(rows) // (self.P * S * K))
        self.notices = []
        if self.P < P:
            self.notices.append(f"only {self.P} training identities: batches of {self.P * S * K} pictures, not {P * S * K}")
        small = int((np.diff(self.frames[self.states]) < S * K).sum())
        if small:
            self.notices.append(f"{small} training identities have fewer than {S * K} pictures: their share of a batch is smaller")

    def __len__(self):
        return self.steps

    def set_epoch(self, epoch, *, skip=0):
        """The next batches are those of this epoch, but for the first `skip`."""
        self.epoch, self.skip = epoch, skip

    def __iter__(self):
        rng = np.random.default_rng([self.seed, self.epoch])
        queue = []
        for place in range(self.steps):
            if len(queue) < self.P:  # next round; who is left of this one comes first, nobody twice in a batch
                queue += [person for person in rng.permutation(len(self.states) - 1).tolist() if person not in queue]
            people, queue = queue[:self.P], queue[self.P:]
            groups = [self.draw(rng, person) for person in people]  # drawn by all alike, whoever gets them
            if place >= self.skip:
                yield [row for group in groups[self.rank::self.processes] for row in group]

    def draw(self, rng, person):
        """S * K rows of one identity: K of each of S of its states, then whatever else it has."""
        states, wanted = rng.permutation(np.arange(*self.states[person:person + 2])), self.S * self.K
        rows = [self.rows[slice(*self.frames[state:state + 2])] for state in states]
        piles = [rng.permutation(pile) for pile in rows[:self.S]]
        drawn = np.concatenate([pile[:self.K] for pile in piles])
        if len(drawn) < wanted:
            drawn = np.concatenate([drawn, *(pile[self.K:] for pile in piles), *rows[self.S:]])[:wanted]
        return drawn.tolist()


# ---------------------------------------------------------------- the dataset

class Batch(NamedTuple):
    row: torch.Tensor       # (B,) int64, place in the index
    head: torch.Tensor      # (B, 3, S, S) uint8
    face: torch.Tensor      # (B, 3, F, F) uint8, aligned; black where has_face is False
    has_face: torch.Tensor  # (B,) bool
    identity: torch.Tensor  # (B,) int64
    state: torch.Tensor     # (B,) int64
    unreadable: list        # messages of the pictures that were left out


class HeadDataset(torch.utils.data.Dataset):
    """index[row] -> (row, head, face, has_face, identity, state), one decode a picture; picklable.

    head_size, face_size: sides in pixels; 0 leaves that picture out (0 x 0 pixels). An unreadable picture becomes its error
    message, which `collate` sets apart. The pictures of a small folder are read once and kept, but not by workers, whose memory
    would add up."""

    def __init__(self, index, *, head_size, face_size):
        self.index, self.head_size, self.face_size, self.known = index, head_size, face_size, set()
        small = len(index.paths) * 3 * (head_size ** 2 + face_size ** 2) < 256 * 2 ** 20  # bytes; one block each, as many fragment memory
        self.kept = [torch.empty(len(index.paths) * small, 3, side, side, dtype=torch.uint8) for side in (head_size, face_size)]

    def __len__(self):
        return len(self.index.paths)

    def __getitem__(self, row):
        index = self.index
        if row in self.known:
            head, face = (pictures[row] for pictures in self.kept)
        else:
            try:
                head, face = self.read(row)
            except ValueError as error:
                return str(error)
            if len(self.kept[0]) and torch.utils.data.get_worker_info() is None:
                self.kept[0][row], self.kept[1][row] = head, face
                self.known.add(row)
        return row, head, face, bool(index.has_face[row]), int(index.identity[row]), int(index.state[row])

    def read(self, row):
        """Decode a picture -> its head and its aligned face, uint8 tensors; black without a face."""
        index, (a, b) = self.index, self.index.transform[row]                   # a = b = 0 where no landmarks tell of a face
        head, face = (torch.zeros(3, side, side, dtype=torch.uint8) for side in (self.head_size, self.face_size))
        scale = abs(a) * self.face_size / 112
        if self.head_size or scale:
            picture, shrink = load_picture(os.path.join(index.root, index.path(row)), short_side=self.head_size, scale=scale)
        if self.head_size:
            head = square_pixels(picture, self.head_size)
        if scale:
            b = b + a * (0.5 + 0.5j) * (1 / shrink - 1)                         # the centre of the shrunken first pixel
            face = square_pixels(warp_face(picture, a / shrink, b, self.face_size), self.face_size)
        elif self.face_size and index.has_face[row]:                            # of --faces
            face = square_pixels(load_picture(os.path.join(index.faces, index.path(row)))[0], self.face_size)
        return head, face


def collate(samples):
    """Samples of a HeadDataset -> Batch without the unreadable ones; their messages in Batch.unreadable."""
    good, nothing = [sample for sample in samples if not isinstance(sample, str)], torch.zeros(3, 0, 0, dtype=torch.uint8)
    parts = torch.utils.data.default_collate(good or [(0, nothing, nothing, False, 0, 0)])
    return Batch(*(part[:len(good)] for part in parts), [sample for sample in samples if isinstance(sample, str)])


def loader(dataset, batches, workers):
    """DataLoader over batches of row numbers (an IdentitySampler, or a list of lists)."""
    return torch.utils.data.DataLoader(
        dataset, batch_sampler=batches, num_workers=workers, collate_fn=collate, persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(), worker_init_fn=leave_signals_to_the_main_process,
        generator=torch.Generator())  # its own: seeding workers must not move the run's


def leave_signals_to_the_main_process(_):
    """Ctrl-C, or a scheduler's SIGTERM, reaches every process of a group; the main one says when the workers end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


# ---------------------------------------------------------------- augmentation: what must not matter

def augment(images, *, degrees=3.0, zoom=0.03, shift=0.03, light=0.1):
    """Float pictures (B, 3, S, S) in [-1, 1] -> the same, each moved and lit at random, on its own device.

    Flip, rotation (degrees), zoom and shift (shares of the side), light (share of brightness and contrast); what moves in at the
    border has one random colour. No hue change: the colours of hair and clothes are appearance and no nuisance. Mild, since the
    frames of a video move by themselves."""

    def random(*shape):
        return torch.rand(len(images), *shape, device=images.device) * 2 - 1  # in [-1, 1)

    angle, size, flip = random() * math.radians(degrees), 1 + zoom * random(), torch.sign(random())
    cos, sin, (x, y) = size * angle.cos(), size * angle.sin(), 2 * shift * random(2).T
    theta = torch.stack([cos * flip, -sin, x, sin * flip, cos, y], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)      # (B, S, S, 2)
    border = random(3, 1, 1)
    images = F.grid_sample(images - border, grid, align_corners=False) + border
    return (images * (1 + light * random(1, 1, 1)) + light * random(1, 1, 1)).clamp(-1, 1)


def cover_faces(heads, share):
    """Hide the middle of a share of the heads (B, 3, S, S) behind a box of one random colour; -> (heads, covered (B,) bool).

    Rear views are rare, but a look has to be recognised in them too: from hair, hat and clothes alone. Our addition."""
    B, S, device = len(heads), heads.shape[-1], heads.device
    covered = torch.rand(B, device=device) < share
    middle = torch.rand(B, 2, 1, device=device) * 0.4 - torch.tensor([[0.2], [0.3]], device=device)  # x and y, in [-1, 1]
    half = 0.4 + 0.3 * torch.rand(B, 2, 1, device=device)
    inside = (torch.linspace(-1, 1, S, device=device) - middle).abs() < half  # (B, 2, S)
    box = inside[:, 1, :, None] & inside[:, 0, None, :] & covered[:, None, None]                     # (B, S, S)
    return torch.where(box[:, None], torch.rand(B, 3, 1, 1, device=device) * 2 - 1, heads), covered


# ---------------------------------------------------------------- the toy world: drawn heads with known truth

# name -> range of a uniform number, or of a whole one that says which kind. A person, a look (appearance state) and a frame are
# one draw each. Lengths are in half head heights, angles in degrees, colours in [0, 1].
PERSON = dict(face_width=(0.62, 0.95), jaw=(0.0, 0.55), eye_gap=(0.22, 0.44), eye_size=(0.09, 0.18), eye_open=(0.5, 1.0),
              eye_y=(-0.2, 0.08), eye_slant=(-22.0, 22.0), iris=(0.0, 1.0), brow_gap=(0.15, 0.32), brow_width=(0.03, 0.1),
              brow_slant=(-25.0, 25.0), brow_dark=(0.0, 1.0), nose_length=(0.16, 0.42), nose_width=(0.05, 0.18), mouth_y=(0.48, 0.68),
              mouth_width=(0.14, 0.38), lips=(0.03, 0.11), lip_red=(0.0, 1.0), cheeks=(0.0, 1.0), skin=(0.0, 1.0), skin_red=(0.0, 1.0),
              ears=(0.08, 0.24), neck=(0.3, 0.55), mole=(0.03, 0.09), mole_x=(-0.5, 0.5), mole_y=(-0.45, 0.75))
LOOK = dict(hair_style=(0, 6), hair_hue=(0.0, 0.14), hair_dye=(0.0, 1.0), hair_light=(0.08, 0.95), hair_line=(-0.8, -0.5), hat=(0, 6),
            hat_hue=(0.0, 1.0), glasses=(0, 16), glasses_tint=(0.0, 1.0), beard=(0, 16), clothes_hue=(0.0, 1.0), clothes_light=(0.2, 1.0),
            collar=(0, 3))
FRAME = dict(yaw=(-20.0, 20.0), roll=(-10.0, 10.0), scale=(0.9, 1.1), x=(-0.05, 0.05), y=(-0.03, 0.03), light=(0.7, 1.2),
             side_light=(-0.25, 0.25), warmth=(-0.05, 0.05), background_hue=(0.0, 1.0), background_light=(0.1, 1.0),
             background_shape=(0.0, 1.0), noise=(0.0, 3.0), mouth_open=(0.0, 1.0), rear=(0.0, 1.0))
REAR = 0.99  # frames with rear >= REAR show the back of the head: no face, no landmarks


def draw_from(ranges, rng):
    """One setting of PERSON, LOOK or FRAME."""
    return {name: int(rng.integers(*r)) if isinstance(r[0], int) else float(rng.uniform(*r)) for name, r in ranges.items()}


def hsv(hue, saturation, value):
    """Colour with hue wrapped and value cut to [0, 1] -> (R, G, B) of 0 to 255."""
    return tuple(round(255 * channel) for channel in colorsys.hsv_to_rgb(hue % 1, saturation, min(value, 1)))


class Pen:
    """Draws on a head as it is turned, tilted, scaled and shifted. x and y in half head heights from the middle of
    the head, y down; depth toward the viewer, None: that of the head's surface."""

    def __init__(self, canvas, h):
        self.h, self.draw, self.side, self.unit = h, ImageDraw.Draw(canvas), canvas.width, 0.32 * canvas.width * h.scale

    def place(self, x, y, depth=None):
        """x and y of n points on the head -> (n, 2) pixels of the canvas."""
        h, x, y = self.h, np.asarray(x, dtype=float), np.asarray(y, dtype=float)
        yaw, roll = math.radians(h.yaw), math.radians(h.roll)
        if depth is None:
            depth = 0.8 * np.sqrt(np.maximum(0, 1 - (x / 0.95) ** 2 - (y / 1.1) ** 2))
        x = x * math.cos(yaw) + depth * math.sin(yaw)
        return np.stack([self.side * (0.5 + h.x) + self.unit * (x * math.cos(roll) - y * math.sin(roll)),
                         self.side * (0.44 + h.y) + self.unit * (x * math.sin(roll) + y * math.cos(roll))], axis=1)

    def shape(self, x, y, colour, depth=None, line=0.0):
        """A filled polygon, or with `line` its outline of that width."""
        corners = self.place(x, y, depth).ravel().tolist()
        if line:
            self.draw.line(corners, fill=colour, width=max(1, round(line * self.unit)))
        else:
            self.draw.polygon(corners, fill=colour)

    def ellipse(self, x, y, rx, ry, colour, slant=0.0, depth=None, arc=(0, 360), line=0.0):
        t, slant = np.radians(np.linspace(*arc, 21)), math.radians(slant)
        dx, dy = rx * np.cos(t), ry * np.sin(t)
        self.shape(x + dx * math.cos(slant) - dy * math.sin(slant), y + dx * math.sin(slant) + dy * math.cos(slant), colour, depth, line)


def draw_head(head, size=64):
    """A setting of PERSON, LOOK and FRAME in one dict -> (PIL RGB picture, landmarks (5, 2) or None for a rear view)."""
    h, rear = SimpleNamespace(**head), head["rear"] >= REAR
    canvas = Image.new("RGB", (2 * size, 2 * size), hsv(h.background_hue, 0.4, h.background_light))  # reduced at the end
    pen, x = Pen(canvas, h), h.background_shape * 2 * size
    pen.draw.ellipse((x - size / 2, size / 10, x + size / 2, 1.6 * size), hsv(h.background_hue + 0.4, 0.3, 0.3 + h.background_shape / 2))
    skin = np.array([92, 56, 38]) * (1 - h.skin) + np.array([255, 222, 196]) * h.skin + np.array([20, -14, -14]) * (h.skin_red - 0.5)
    skin, shade = (tuple(np.clip(skin * part, 0, 255).astype(int).tolist()) for part in (1, 0.8))
    hair = hsv(4 * h.hair_dye, 0.7, 0.4 + h.hair_light / 2) if h.hair_dye > 0.75 else hsv(h.hair_hue, 0.6, h.hair_light)
    draw_body(pen, h, skin, shade, hair)
    if not rear:
        draw_face(pen, h, skin, shade, hair)
    draw_top(pen, h, hair, rear)
    points = pen.place([-h.eye_gap, h.eye_gap, 0, -h.mouth_width, h.mouth_width],
                       [h.eye_y, h.eye_y, h.eye_y + h.nose_length, h.mouth_y, h.mouth_y]) / 2 - 0.5
    # Brightness, a light from one side, warmth and noise: what must not matter.
    pixels = np.asarray(canvas.reduce(2), dtype=np.float32)                           # (size, size, 3)
    ramp = h.light + h.side_light * np.linspace(-1, 1, size, dtype=np.float32)
    pixels = pixels * ramp[:, None] * np.array([1 + h.warmth, 1, 1 - h.warmth], dtype=np.float32)
    noise = np.random.default_rng(zlib.crc32(repr(sorted(head.items())).encode()))
    pixels += h.noise * noise.standard_normal((size, size, 1), dtype=np.float32)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), None if rear else points


def draw_body(pen, h, skin, shade, hair):
    """What stands behind the face, from back to front."""
    if h.hair_style in (3, 5):              # long hair falls behind the neck
        pen.ellipse(0, 0.35, h.face_width + 0.22, 1.25, hair, depth=-0.1)
    pen.shape([-h.neck, h.neck, h.neck, -h.neck], [0.5, 0.5, 1.6, 1.6], shade, depth=0.0)
    pen.ellipse(0, 2.05, 1.6, 1.05, hsv(h.clothes_hue, 0.75, h.clothes_light), depth=0.0)
    if h.collar:
        pen.ellipse(0, 1.14, h.neck + 0.12, 0.16, hsv(h.clothes_hue + 0.5, 0.6, h.clothes_light), depth=0.0)
    for side in (-1, 1):
        pen.ellipse(side * h.face_width, 0.02, h.ears * 0.7, h.ears * 1.3, shade, depth=0.0)
    t = np.radians(np.linspace(0, 360, 37))
    pen.shape(h.face_width * np.cos(t) * (1 - h.jaw * np.maximum(0, np.sin(t)) ** 2), np.sin(t), skin, depth=0.0)


def draw_face(pen, h, skin, shade, hair):
    """Beard, eyes, brows, nose, mouth, mole, and glasses over them."""
    if h.beard in (1, 2):                   # full beard, goatee
        pen.ellipse(0, 0.62, h.face_width * (1 - h.jaw / 2) * (0.8 if h.beard == 1 else 0.35), 0.36, hair)
    if h.beard in (1, 3):                   # moustache
        pen.ellipse(0, h.mouth_y - h.lips - 0.07, h.mouth_width, 0.06, hair)
    blush = tuple(int(c + h.cheeks * (red - c) / 2) for c, red in zip(skin, (230, 80, 80)))
    for side in (-1, 1):
        x, y, r = side * h.eye_gap, h.eye_y, h.eye_size
        pen.ellipse(side * 0.5 * h.face_width, 0.32, 0.17, 0.13, blush)
        pen.ellipse(x, y, r * 1.3, r * h.eye_open, (250, 250, 250), slant=side * h.eye_slant)
        pen.ellipse(x, y, r * 0.65, r * min(0.75, h.eye_open), hsv(0.05 + h.iris * 0.6, 0.7, 0.65))
        pen.ellipse(x, y, r * 0.28, r * 0.32, (10, 10, 10))
        pen.ellipse(x, y - h.brow_gap, r * 1.5, h.brow_width, hsv(0.06, 0.6, 0.75 - 0.65 * h.brow_dark), slant=side * h.brow_slant)
    tip = h.eye_y + h.nose_length
    pen.shape([-0.03, 0.03, h.nose_width, -h.nose_width], [h.eye_y, h.eye_y, tip, tip], shade)
    pen.ellipse(0, tip, h.nose_width, 0.05, shade)
    pen.ellipse(0, h.mouth_y, h.mouth_width, h.lips + 0.08 * h.mouth_open, hsv(0.98, 0.35 + 0.4 * h.lip_red, 0.8 - 0.35 * h.lip_red))
    pen.ellipse(0, h.mouth_y, h.mouth_width * 0.8, 0.01 + 0.08 * h.mouth_open, (60, 10, 20))
    pen.ellipse(h.mole_x, h.mole_y, h.mole, h.mole, (50, 28, 22))
    if h.glasses in (1, 2, 3):              # round, wide, dark
        frame, r = hsv(h.glasses_tint, 0.8, 0.5), h.eye_size * 1.25 + 0.08
        for x in (-h.eye_gap, h.eye_gap):
            pen.ellipse(x, h.eye_y, r * (1.25 if h.glasses == 2 else 1), r, frame, line=0.0 if h.glasses == 3 else 0.08)
        pen.shape([r - h.eye_gap, h.eye_gap - r], [h.eye_y, h.eye_y], frame, line=0.08)


def draw_top(pen, h, hair, rear):
    """Hair and hat, from the front or from behind."""
    width, line = h.face_width, -0.2 if rear else h.hair_line
    t = np.radians(np.linspace(180, 360, 19))
    if rear and h.hair_style:               # long or short, from behind
        y, length = (0.3, 1.35) if h.hair_style in (3, 5) else (-0.12, 0.95)
        pen.ellipse(0, y, width + 0.12, length, hair, depth=0.0)
    if h.hair_style == 4:                   # a round mop
        pen.ellipse(0, -0.75, width + 0.35, 0.62, hair, depth=0.0, arc=(170, 370))
    if h.hair_style == 5:                   # a bun
        pen.ellipse(0, -1.2, 0.32, 0.28, hair, depth=0.0)
    if h.hair_style:                        # 0 is bald
        pen.shape([-width - 0.05, *(1.05 * width * np.cos(t)), width + 0.05, 0.35 * width, -0.35 * width],
                  [line / 2, *(1.1 * np.sin(t)), line / 2, line, line], hair, depth=0.0)
    if h.hair_style == 2 and not rear:      # a fringe to one side
        pen.shape([-width, -0.1, width * 0.8, 0.3], [-0.75, -0.98, -0.4, -0.2 + line / 3], hair)
    if h.hat in (1, 2):                     # cap, beanie
        brim, forward = (0.22, 0.3 * (not rear)) if h.hat == 1 else (0.1, 0.0)
        pen.ellipse(0, h.hair_line, width + 0.1, 0.75, hsv(h.hat_hue, 0.85, 0.75), depth=0.0, arc=(180, 360))
        pen.ellipse(0, h.hair_line, width + brim, 0.1, hsv(h.hat_hue, 0.85, 0.56), depth=forward)


def attributes(head):
    """The binary attributes of a head: some belong to a person, some to a look, some to a frame."""
    h = SimpleNamespace(**head)
    return dict(wide_face=h.face_width > 0.785, pale_skin=h.skin > 0.5, big_eyes=h.eye_size > 0.135, hat=h.hat in (1, 2),
                glasses=h.glasses in (1, 2, 3), beard=h.beard in (1, 2, 3), long_hair=h.hair_style in (3, 5), light_hair=h.hair_light > 0.5,
                facing_right=h.yaw > 0, bright=h.light > 0.95, mouth_open=h.mouth_open > 0.5, rear=h.rear >= REAR)


# attribute -> its three steps, and what the head must wear for it to show. Steps of a look (hair, glasses), of a person (skin,
# the width of the face) and of a frame, for the invariance energy of evaluate.py.
MOVES = {"yaw": ((-15, 0, 15), {}), "roll": ((-8, 0, 8), {}), "scale": ((0.9, 1.0, 1.1), {}), "light": ((0.75, 0.95, 1.15), {}),
         "side_light": ((-0.2, 0.0, 0.2), {}), "background_light": ((0.2, 0.5, 0.8), {}), "mouth_open": ((0.0, 0.5, 1.0), {}),
         "hair_light": ((0.15, 0.5, 0.85), {"hair_style": 1, "hat": 0}), "glasses_tint": ((0.0, 0.3, 0.6), {"glasses": 2}),
         "hat_hue": ((0.0, 0.3, 0.6), {"hat": 2}), "clothes_hue": ((0.0, 0.3, 0.6), {}), "skin": ((0.2, 0.5, 0.8), {}),
         "face_width": ((0.68, 0.78, 0.88), {})}


def move_person(job):
    """Draw one person, whom no toy world holds, in n settings, and move one attribute at a time. No noise, nobody turns away.

    job: (person, n, names of MOVES, sides of heads, sides of aligned faces, picture size) -> {name: {("head" or "face", side):
    uint8 array (3, n, 3, side, side), a step each}} and, with nothing moved, {"still": {..: (n, 3, side, side)}}."""
    person, n, names, heads, faces, size = job
    rng = np.random.default_rng([person, 0, 1])  # make_toy's have two numbers
    who, moved = draw_from(PERSON, rng), {}
    settings = [{**who, **draw_from(LOOK, rng), **draw_from(FRAME, rng), "noise": 0.0, "rear": 0.0} for _ in range(n)]
    changes = {name: [{**MOVES[name][1], name: value} for value in MOVES[name][0]] for name in names}
    for name, steps in {"still": [{}], **changes}.items():
        drawn = [draw_head({**setting, **step}, size) for step in steps for setting in settings]
        views = {("head", side): [square_pixels(picture, side) for picture, _ in drawn] for side in heads}
        views |= {("face", side): [square_pixels(align_face(*one, side), side) for one in drawn] for side in faces}
        moved[name] = {view: torch.stack(pixels).unflatten(0, (-1, n)).numpy() for view, pixels in views.items()}
    moved["still"] = {view: pixels[0] for view, pixels in moved["still"].items()}
    return moved


def is_toy(root):
    """Did make_toy draw this folder? Its attributes.csv tells."""
    file, head = os.path.join(root, "attributes.csv"), draw_from({**PERSON, **LOOK, **FRAME}, np.random.default_rng(0))
    return os.path.isfile(file) and next(read_table(file), None) == (1, ["path", *attributes(head)])


def draw_person(job):
    """Write the pictures of one toy person; -> rows (path, landmarks or None, attributes)."""
    root, person, looks, frames, size, seed, vary = job
    rng = np.random.default_rng([seed, person])      # of its own, so that more people do not change the others
    anew = np.random.default_rng([seed, person, 0])  # what varies does not change the rest
    who, rows = draw_from(PERSON, rng), []
    for look in range(looks):
        worn, folder = draw_from(LOOK, rng), f"person_{person:04d}/look_{look}"
        os.makedirs(os.path.join(root, folder))
        for frame in range(frames):
            head, path = {**who, **worn, **draw_from(FRAME, rng)}, f"{folder}/{frame:03d}.jpg"
            if vary:
                steps, wearing = MOVES[vary]
                head |= {**wearing, vary: float(anew.uniform(steps[0], steps[-1]))}
            picture, points = draw_head(head, size)
            picture.save(os.path.join(root, path), quality=92)
            rows.append((path, points, attributes(head)))
    return rows


def make_toy(root, *, people=450, looks=4, frames=6, size=64, seed=0, vary=None):
    """Write the toy world, with landmarks.csv and attributes.csv, into the new folder root; the same for the same seed.

    vary: an attribute of MOVES that every frame draws anew, so that it tells nothing of the person (all wear what it needs to show).
    Drawn beside it and renamed at the end, so that a half-drawn world is never taken for a whole one."""
    if min(people, looks, frames, size) < 1 or people > 1e6 or seed < 0:
        raise ValueError("people, looks, frames and size must be at least 1, people at most a million, the seed at least 0; "
                         f"got {people}, {looks}, {frames}, {size}, {seed}")
    root = os.path.normpath(root)
    if os.path.exists(root):
        raise ValueError(f"{root}: exists already; the toy world needs a new folder")
    half, rows = f"{root}.half-drawn-{os.getpid()}", []
    os.makedirs(half)
    try:
        with processes() as pool:
            jobs = [(half, person, looks, frames, size, seed, vary) for person in range(people)]
            for done, some in enumerate(pool.imap(draw_person, jobs), 1):
                rows += some
                if done % 150 == 0 or done == people:
                    print(f"toy world: {done} of {people} people drawn", flush=True)
        write_csv(os.path.join(half, "landmarks.csv"), LANDMARK_HEADER,
                  [[path, *(f"{value:.2f}" for value in points.ravel())] for path, points, _ in rows if points is not None])
        write_csv(os.path.join(half, "attributes.csv"), ["path", *rows[0][2]],
                  [[path, *map(int, has.values())] for path, _, has in rows])
        os.replace(half, root)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def write_csv(path, header, rows):
    """Write a UTF-8 table, the same on every system."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


# ---------------------------------------------------------------- the command line

class Parser(argparse.ArgumentParser):
    """argparse with every default in --help; a wrong option is a ValueError, told in one line like all others."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)

    def format_help(self):
        return re.sub(r"\s+\(default:\s+None\)", "", super().format_help())  # what no value means is said in words

    def error(self, message):
        raise ValueError(f"{message} (see --help)")


NO_MEMORY = ("can't allocate memory", "out of memory", "DataLoader worker (pid")  # torch's words; the last was ended by the system


def command_line(main):
    """Run a script's main(argv); what the user can mend is one line on stderr and exit 2. A signal ends it with 130 or 143."""
    script = os.path.basename(sys.argv[0])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a file name that the terminal cannot show
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not at once: what is half done is taken away first
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except (ValueError, OSError) as error:
        line = "".join(letter if letter.isprintable() else " " for letter in str(error))  # one line, whatever a file's names hold
        print(f"{script}: {line[:1000]}", file=sys.stderr)
        status = 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(mark in str(error) for mark in NO_MEMORY):
            raise
        line = str(error).split("\n")[0]
        print(f"{script}: out of memory: smaller batches or pictures, or fewer --workers, need less ({line[:300]})", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)


def check_outputs(files, inputs):
    """Before anything is read: an error for a file that cannot be written, would replace an input or another of the files, or would stand
    among the pictures and tables of an input folder. None among them does not count."""
    taken = {os.path.realpath(path) for path in inputs if path}
    for file in filter(None, files):
        folder, real = os.path.dirname(file) or ".", os.path.realpath(file)
        if not os.path.isdir(folder) or os.path.isdir(file):
            raise ValueError(f"{file}: there is no such folder to write it to, or it is a folder itself")
        among = real.lower().endswith((*EXTENSIONS, ".csv")) and any(real.startswith(path + os.sep) for path in taken)
        if among or real in taken:
            raise ValueError(f"{file} would be written over an input or another output, or among the pictures of an input folder")
        taken.add(real)
        with tempfile.TemporaryFile(dir=folder):  # hear now, not after the work, that it cannot be written
            pass


def data_options(parser, none=f"the toy world in {TOY_WORLD}, drawn on first use"):
    """The options that say which pictures, shared by all scripts; none: what stands in for --data."""
    group = parser.add_argument_group("data")
    group.add_argument("--data", metavar="PATH", help=f"folder laid out as {LAYOUT}; none: {none}")
    group.add_argument("--faces", metavar="DIR", help="aligned faces under the same relative paths; none: PATH/landmarks.csv")
    group.add_argument("--segment-frames", type=int, default=0, metavar="N",
                       help="cut each folder into windows of N frame numbers, each its own state; 0: do not")
    group.add_argument("--segment-gap", type=int, default=0, metavar="M", help="drop M frame numbers between two windows")


def open_data(settings):
    """Parsed data options -> HeadIndex, told on screen; makes the toy world on first use."""
    root = TOY_WORLD if settings.data is None else settings.data
    if settings.data is None and not os.path.isdir(root):
        make_toy(root)
    index = scan_heads(root, faces=settings.faces, segment_frames=settings.segment_frames, segment_gap=settings.segment_gap)
    print("\n".join([index.summary(), *index.notes]), flush=True)
    return index


def count_pairs(labels):
    """The number of unordered pairs with the same label."""
    return sum(math.comb(count, 2) for count in np.unique_counts(labels).counts.tolist())


def main(argv=None):
    parser = Parser("Report on a folder of heads, or write the toy world.")
    data_options(parser)
    parser.add_argument("--toy", metavar="DIR", help="write the toy world into this new folder; none: report only")
    parser.add_argument("--people", type=int, default=450, help="toy world: number of identities")
    parser.add_argument("--seed", type=int, default=0, help="toy world: seed")
    parser.add_argument("--vary", choices=[name for name in MOVES if name not in FRAME],
                        help="toy world: each frame draws this attribute anew; none: as persons and looks have it")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON too; none: do not")
    settings = parser.parse_args(argv)
    if settings.vary and not settings.toy:
        raise ValueError("--vary is for a toy world that is drawn: add --toy DIR")
    check_outputs([settings.json], [settings.toy or settings.data or TOY_WORLD])
    if settings.toy:
        make_toy(settings.toy, people=settings.people, seed=settings.seed, vary=settings.vary)
        settings.data = settings.toy
    index = open_data(settings)
    samples = map(HeadDataset(index, head_size=8, face_size=8 if index.faces else 0).__getitem__, range(len(index.paths)))
    bad = {row: sample for row, sample in enumerate(samples) if isinstance(sample, str)}
    identity, state = (np.delete(labels, list(bad)) for labels in (index.identity, index.state))
    same_look, same_person, held_out = count_pairs(state), count_pairs(identity), int(split_identities(index.names).sum())
    pairs = {"R1": same_look, "R2": same_person - same_look, "R3": math.comb(len(identity), 2) - same_person}
    print("pairs: {R1} R1 (same look), {R2} R2 (same person, other look), {R3} R3 (other people)".format(**pairs))
    print(f"held out for evaluation: {held_out} identities")
    print("\n".join([f"unreadable pictures: {len(bad)}", *bad.values()]))
    if settings.json:
        report = {"data": index.root, "identities": len(index.names), "states": len(np.unique(index.state)), "pictures": len(index.paths),
                  "faces": int(index.has_face.sum()), "pairs": pairs, "held_out_identities": held_out,
                  "unreadable": list(bad.values()), "notes": index.notes}
        with open(settings.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    command_line(main)
