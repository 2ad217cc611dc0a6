"""Image files listed in a CSV or JSON lines file; each row contains a file's labels or captions."""

import csv
import dataclasses
import io
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.fields import CAPTION_KEYS, TEXT, caption_keys, check_captions
from vit_jax.data.sources.base import Captioned, Example
from vit_jax.data.sources.folder import file_sizes, read_file
from vit_jax.data.sources.folder_rules import APPLE_DOUBLE, is_unsupported, split_name, why_left_out
from vit_jax.data.sources.kind import SourceKind, SourceOptions, last_folder
from vit_jax.data.sources.pairs import shortened
from vit_jax.data.sources.slices import groups_by_path, stratified
from vit_jax.errors import UserError, as_text

FILE_COLUMNS = {
    *("file", "filename", "file_name", "filepath", "file_path"),
    *("path", "image", "image_path", "img"),
}
LABEL_COLUMNS = {  # Columns with these names are captions only if `data.caption_key` names them.
    *("label", "labels", "class", "classes"),
    *("category", "categories", "target", "targets"),
}
LISTS = (".csv", ".jsonl")  # Suffixes of files that list images.
AGAIN = "rows of a file listed before with the same labels or captions"
LOOKED_AT = 100  # At least one of the first 100 listed files must exist.


class TooManyCells(UserError):
    """Error: a row of a CSV has more cells than the header."""


@dataclasses.dataclass(frozen=True)
class CsvList(Captioned):
    """Image files in the order of a CSV, with their labels.

    Paths are relative to the folder of the CSV.
    """

    root: str
    files: tuple[str, ...]
    table: np.ndarray  # int32 [images, max_labels], padded with -1.
    class_names: tuple[str, ...]
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Cells of the column with groups, by image file: `{column name: {file: cell}}`. Empty: there is
    # no such column.
    columns: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    captions: tuple[tuple[str, ...], ...] = ()  # Captions of each file; empty: not read.

    @property
    def max_labels(self):
        return max(1, self.table.shape[1])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return Example(read_file(self._path(index)), self.labels_of(index))

    def describe(self, index):
        return as_text(self._path(index))

    def labels_of(self, index):
        return tuple(label for label in self.table[index].tolist() if label >= 0)

    def known_labels(self):
        return self.table

    def stored_files(self, indices=None):
        files = self.files if indices is None else [self.files[index] for index in indices]
        paths = [os.path.join(self.root, file) for file in files]
        return zip(files, file_sizes(self.root, paths), strict=True)

    def groups(self, key):
        if (cells := self.columns.get(key.strip().lower())) is None:
            return groups_by_path(self.files, key)
        if lacking := [file for file in self.files if not cells[file]]:
            raise UserError(f"{as_text(lacking[0])} has an empty column {key!r} (data.groups)")
        return [cells[file] for file in self.files]

    def fair_order(self):
        strata = self.table[:, 0].tolist() if self.class_names else [0] * len(self)
        return stratified(strata, self.files)

    def _path(self, index: int) -> str:
        return os.path.join(self.root, self.files[index])


class _Columns(NamedTuple):
    """Indices of a CSV's columns with image paths, labels, splits and captions."""

    file: int
    labels: list[int]
    split: int | None
    rows: int  # Number of header rows before the first image.
    caption: int | None = None


class _Listed(NamedTuple):
    """Labels and captions of an image file, in the order of the CSV and without duplicates.

    The texts are the keys of two dictionaries, whose values are None.
    """

    labels: dict[str, None]
    captions: dict[str, None]

    def add(self, other: "_Listed") -> bool:
        """Adds another row of the same image file; returns True if a label or caption is new."""
        before = len(self.labels) + len(self.captions)
        self.labels.update(other.labels)
        self.captions.update(other.captions)
        return len(self.labels) + len(self.captions) > before


def open_csv(split: str, options: SourceOptions) -> CsvList:
    """Opens a split: the file `SPLIT.csv` in a folder, or the rows of a split in one CSV.

    Raises:
      UserError: the CSV does not exist, cannot be read or lacks required columns, or none of the
        first images in it exists.
    """
    path, whole = _file_of(options.path, split)
    rows = _read(path, caption_keys(options.caption_key) if TEXT in options.fields else ())
    columns = _columns(path, rows, options.label_key if options.labels else None)
    columns = columns._replace(caption=_caption_column(path, rows, columns, options))
    _check_cells(path, rows, columns)
    if not whole and columns.split is None:
        raise UserError(
            f"{path} is one list, without a column split: cut it, as with "
            "data.train_split='all[:80%]' and data.test_split='all[80%:]', or give a folder with "
            "train.csv and test.csv (data.path)"
        )
    listed, left_out = _listed(path, rows, columns, None if whole else split)
    if not listed:
        of_split = "" if whole else f" of the split {split!r}"
        raise UserError(f"{path} lists no image{of_split}: write a row FILE,LABEL for each image")
    captions = _captions(path, listed, columns)
    labels = [[*rows.labels] for rows in listed.values()]
    if options.labels:
        _check_names(path, labels)
    class_names = options.class_names or _class_names(labels)
    table = _table(path, [*listed], labels, class_names)
    columns = _group_columns(path, rows, columns, listed, options.groups)
    root = os.path.join(os.path.dirname(path), "")
    class_names = class_names if options.labels else ()
    source = CsvList(root, tuple(listed), table, class_names, dict(left_out), columns, captions)
    _check_there(path, source)
    return source


def _listed(
    path: str, rows: list[list[str]], columns: _Columns, split: str | None
) -> tuple[dict[str, _Listed], Counter[str]]:
    """Returns the labels and captions of each file of a split, and the skipped rows by reason.

    `split` None: all rows are read, whatever their split.

    Raises:
      UserError: a row has an empty file name.
    """
    listed, left_out = {}, Counter()
    for number, row in enumerate(rows[columns.rows :], columns.rows + 1):
        if not row or not _is_of_split(row, columns.split, split):
            continue
        if not (file := _file(row, columns)):
            raise UserError(f"{path}, row {number} names no file")
        reason = why_left_out(os.path.basename(file))
        if reason == APPLE_DOUBLE or (reason and is_unsupported(reason)):
            left_out[reason] += 1
            continue
        values = _values(row, columns)
        if file in listed and not listed[file].add(values):
            left_out[AGAIN] += 1
        listed.setdefault(file, values)
    return listed, left_out


def _values(row: list[str], columns: _Columns) -> _Listed:
    """Returns the labels and the caption of a row."""
    labels = {_cell(row, place): None for place in columns.labels if _cell(row, place)}
    captions = {} if columns.caption is None else {_cell(row, columns.caption): None}
    return _Listed(labels, captions)


def _captions(
    path: str, listed: Mapping[str, _Listed], columns: _Columns
) -> tuple[tuple[str, ...], ...]:
    if columns.caption is None:
        return ()
    return tuple(
        check_captions([*values.captions], f"{as_text(file)} in {path}")
        for file, values in listed.items()
    )


def _is_of_split(row: list[str], place: int | None, split: str | None) -> bool:
    """Returns True if a row belongs to a split. All rows do if the split or its column is None."""
    if split is None or place is None:
        return True
    cell = _cell(row, place)
    return split in (cell, split_name(cell))


def _file_of(path: str, split: str) -> tuple[str, bool]:
    """Returns the path of a split's CSV, and True if all rows of the CSV belong to the split."""
    if not path:
        raise UserError("data.path is empty: give a CSV, or a folder with train.csv and test.csv")
    if path.lower().endswith(LISTS):
        return path, split == "all"
    exact = os.path.join(path, f"{split}.csv")
    if "://" in path or os.path.exists(exact) or not os.path.isdir(path):
        return exact, True
    there = sorted(name for name in os.listdir(path) if name.lower().endswith(LISTS))
    named = [name for name in there if split_name(os.path.splitext(name)[0]) == split]
    if len(named) != 1:
        _refuse_archives(path)
        raise UserError(
            f"no file {exact} (data.path and the split's name); there are: {', '.join(there[:20])}"
        )
    return os.path.join(path, named[0]), True


def _refuse_archives(folder: str) -> None:
    if any(name.endswith((".tar", ".parquet")) for name in os.listdir(folder)):
        raise UserError(
            f"{folder} contains tars or Parquet files (data.path): convert them first with "
            f"python -m vit_jax.prepare {folder} --out=DIR, which prints the flags for training"
        )


def _read(path: str, texts: Sequence[str] = ()) -> list[list[str]]:
    """Returns the rows of a CSV, with commas, semicolons or tabs, or of a JSON lines file.

    In JSON lines, the values of the keys `texts` must be strings or lists of strings.
    """
    try:
        content = read_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error} (data.path)") from error
    if b"\0" in content:
        raise UserError(f"{path} is no text in UTF-8: save it as CSV in UTF-8")
    if path.lower().endswith(".jsonl"):
        return _read_json_lines(path, content, texts)
    text = content.decode("utf-8-sig", "surrogateescape")  # File names may be invalid UTF-8.
    first = text.partition("\n")[0]
    delimiter = next((mark for mark in ",;\t" if mark in first), ",")
    rows: list[list[str]] = []
    try:
        # With strict=False, an unclosed quote would add all later rows to its cell, without error.
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True):
            rows.append(row)
    except csv.Error as error:
        raise UserError(
            f"{path} cannot be read as CSV: {error}, in row {len(rows) + 1}; close each quote, and "
            'write a quote within a cell as two: "a 5"" pipe"'
        ) from error
    return rows


def _read_json_lines(path: str, content: bytes, texts: Sequence[str]) -> list[list[str]]:
    """Converts JSON lines to a header and rows of texts; a line with lists becomes several rows."""
    lines = content.decode("utf-8-sig", "surrogateescape").split("\n")
    examples = [
        _json_object(line, f"{path}, line {number}", texts)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    header = [*dict.fromkeys(key for example in examples for key in example)]
    rows = [header]
    for example in examples:
        values = [_items(example.get(key)) or [""] for key in header]
        # A value may be a list, such as several captions. A line then becomes a row for each item
        # of the longest list. Values that are not lists are repeated.
        for place in range(max(map(len, values))):
            cells = (items[min(place, len(items) - 1)] for items in values)
            rows.append(["" if cell is None else str(cell) for cell in cells])
    return rows


def _items(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _json_object(line: str, place: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parses a line as a JSON object.

    Raises:
      UserError: the line is not a JSON object, or the value of a key in `texts` is neither a text
        nor a list of texts.
    """
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(f"{place} is not a JSON object such as {{...}}")
    for key, value in content.items():
        wrong = any(isinstance(one, dict | list | bool) for one in _items(value))
        if key.strip().lower() in texts and wrong:
            raise UserError(f"{place}: {key!r} is {value!r:.60}, not a text or a list of texts")
    return content


def _caption_column(
    path: str, rows: list[list[str]], columns: _Columns, options: SourceOptions
) -> int | None:
    """Returns the index of the caption column; None if captions are not required.

    The column has the name `options.caption_key`. If this option has its default value, all names
    in `CAPTION_KEYS` are tried. If there is no such column either, and the CSV has only one column
    in addition to image paths and split names, this column is used, unless its name is in
    `LABEL_COLUMNS`.

    Raises:
      UserError: there is no caption column.
    """
    if TEXT not in options.fields:
        return None
    header = _header(rows) if columns.rows else []
    for name in map(str.lower, caption_keys(options.caption_key)):
        if name in header:
            return header.index(name)
    others = _other_columns(rows, columns)
    is_only = len(others) == 1 and options.caption_key == CAPTION_KEYS[0]
    if is_only and (not header or header[others[0]] not in LABEL_COLUMNS):
        return others[0]
    there = ", ".join(as_text(rows[0][place]) for place in others if place < len(rows[0])) or "none"
    raise UserError(
        f"{path} has no column {options.caption_key!r}: name the column of captions with "
        f"--config.data.caption_key=NAME; besides the files there are: {there}"
    )


def _other_columns(rows: list[list[str]], columns: _Columns) -> list[int]:
    """Returns the indices of all columns except those with image paths and with split names."""
    cells = len(rows[0]) if columns.rows else max(map(len, rows))
    return [place for place in range(cells) if place not in (columns.file, columns.split)]


def _check_cells(path: str, rows: list[list[str]], columns: _Columns) -> None:
    """Raises TooManyCells if a row with labels or captions has more cells than the header.

    Such a row contains an unquoted label or caption, which would be cut off at its comma, or more
    labels than the header has columns.
    """
    if not columns.rows or not (columns.labels or columns.caption is not None):
        return
    for number, row in enumerate(rows, 1):
        if any(cell.strip() for cell in row[len(rows[0]) :]):
            remedy = 'as in a.jpg,"a dog, running"'
            if columns.caption is None:
                remedy = (
                    'as in a.jpg,"dog, big"; if an image has several labels, the header needs a '
                    "column for each, such as label1,label2"
                )
            raise TooManyCells(
                f"{path}, row {number} has {len(row)} cells, and the header has {len(rows[0])}: "
                f"put cells with separators in quotes, without a space before them, {remedy}"
            )


def _columns(path: str, rows: list[list[str]], label_key: str | None) -> _Columns:
    """Finds the columns by the names in the header.

    Without a header, the first column contains the image paths, and all others contain labels.
    """
    if not rows:
        raise UserError(f"{path} is empty: write a row FILE,LABEL for each image")
    header = _header(rows)
    file = next((place for place, cell in enumerate(header) if cell in FILE_COLUMNS), None)
    if file is None:
        _check_first_row(path, rows[0])
        return _Columns(0, list(range(1, max(map(len, rows)))) if label_key else [], None, 0)
    split = header.index("split") if "split" in header else None
    labels = _label_columns(path, rows, file, split, label_key) if label_key else []
    return _Columns(file, labels, split, 1)


def _header(rows: list[list[str]]) -> list[str]:
    """Returns the cells of the first row in lower case, for comparison with column names."""
    return [cell.strip().lower() for cell in rows[0]]


def _label_columns(
    path: str, rows: list[list[str]], file: int, split: int | None, label_key: str
) -> list[int]:
    """Returns the indices of the label columns.

    Label columns have the name `label_key`, optionally with a number or "s" at the end. Without
    such a column, the only column besides image paths and split names (with the indices `file` and
    `split`) is the label column, unless its name is in `CAPTION_KEYS`.

    Raises:
      UserError: no column contains the labels.
    """
    header = _header(rows)
    others = [place for place in range(len(header)) if place not in (file, split)]
    pattern = rf"{re.escape(label_key.lower())}(s|[-_ ]?\d+)?"
    labels = [place for place in others if re.fullmatch(pattern, header[place])]
    if labels:
        return labels
    if len(others) == 1 and header[others[0]] not in CAPTION_KEYS:
        return others
    there = ", ".join(as_text(rows[0][place]) for place in others) or "none"
    raise UserError(
        f"{path} has no column {label_key!r}: name the label's column with "
        f"--config.data.label_key=NAME; besides {rows[0][file].strip()!r} there are: {there}"
    )


def _check_first_row(path: str, row: list[str]) -> None:
    """Raises UserError if the first row is neither a known header nor a row with an image."""
    file = _cell(row, 0)
    if why_left_out(file) and not os.path.exists(os.path.join(os.path.dirname(path), file)):
        raise UserError(
            f"{path}: the first row, {as_text(','.join(row))}, names no column of files, and "
            f"{as_text(file)!r} is no image: call the column of files 'file'"
        )


def _group_columns(
    path: str, rows: list[list[str]], columns: _Columns, listed: Collection[str], groups: Any
) -> dict[str, dict[str, str]]:
    """Returns the cells of the column that the option `data.groups` names, by image file.

    The result is `{column name: {file: cell}}`, or {} if `groups` is not the name of a column.

    Raises:
      UserError: an image file has several rows, and the groups in these rows differ.
    """
    key = groups.strip().lower() if isinstance(groups, str) and columns.rows else None
    header = _header(rows)
    if key not in header:
        return {}
    place, cells = header.index(key), {}
    for row in rows[1:]:
        file = _file(row, columns)
        if file in listed and cells.setdefault(file, _cell(row, place)) != _cell(row, place):
            raise UserError(f"{path} has {as_text(file)} in two groups (data.groups={groups!r})")
    return {key: cells}


def _file(row: list[str], columns: _Columns) -> str:
    """Returns the file name in a row, normalized: `./a.png` becomes `a.png`."""
    file = _cell(row, columns.file)
    return re.sub(r"(^|(?<=/))(\./+)+", "", file)


def _cell(row: list[str], place: int) -> str:
    return row[place].strip() if place < len(row) else ""


def _check_names(path: str, labels: list[list[str]]) -> None:
    """Raises UserError if no image has a label, or if labels are columns of zeros and ones."""
    if not any(labels):
        raise UserError(
            f"{path} has no labels, and the objective needs them: write them behind the file"
        )
    names = {name for row in labels for name in row}
    if any(len(row) > 1 for row in labels) and names <= {"0", "1"}:
        raise UserError(
            f"{path} has columns of zeros and ones: write the names of an image's classes instead"
        )


def _class_names(labels: list[list[str]]) -> tuple[str, ...]:
    """Returns the names of all classes, sorted; numbers are sorted by their value."""
    names = {as_text(name) for row in labels for name in row}
    by_value = all(re.fullmatch(r"\d{1,18}", name) for name in names)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if by_value else None))


def _table(
    path: str, files: list[str], labels: list[list[str]], class_names: tuple[str, ...]
) -> np.ndarray:
    """Returns class indices, int32 `[images, max_labels]`, padded with -1."""
    number = {name: label for label, name in enumerate(class_names)}
    table = np.full((len(files), max(1, *map(len, labels))), -1, np.int32)
    for index, row in enumerate(labels):
        for place, name in enumerate(map(as_text, row)):
            if name not in number:
                raise UserError(
                    f"{path} has the class {name!r}, of {as_text(files[index])}, that training "
                    "lacks"
                )
            table[index, place] = number[name]
    return table


def _check_there(path: str, source: CsvList) -> None:
    """Raises UserError if none of the first `LOOKED_AT` listed image files exists.

    With captions, all files must exist.
    """
    if "://" in path:
        return
    first = [source._path(index) for index in range(min(LOOKED_AT, len(source)))]
    if not any(map(os.path.exists, first)):
        raise UserError(
            f"{path}: none of its first {len(first)} files exists, such as {as_text(first[0])}: "
            "paths are from the folder of the CSV, with the suffix of the file"
        )
    if not source.captions:
        return
    files = source.files
    if missing := [file for file in files if not os.path.exists(os.path.join(source.root, file))]:
        raise UserError(
            f"{path}: {len(missing):,} of {len(source):,} images do not exist: "
            f"{shortened(missing)}; copy them, or remove their rows"
        )


def lists_files(path: str) -> bool:
    """Returns True if a CSV lists images.

    The CSV must have a column with image paths, or its first cell must be the path of an image.
    """
    try:
        _columns(path, _read(path), None)
    except UserError:
        return False
    return True


def value_columns(path: str) -> list[str]:
    """Returns the names of a CSV's columns, except those with image paths and with split names.

    The names are in lower case. The list is empty if the CSV has no header.

    Raises:
      UserError: the CSV cannot be read, or has no column with image paths.
    """
    rows = _read(path)
    columns = _columns(path, rows, None)
    if not columns.rows:
        return []
    header = _header(rows)
    return [header[place] for place in _other_columns(rows, columns)]


def split_files(path: str) -> dict[str, str]:
    """Returns the CSV of each split.

    Args:
      path: a folder of CSVs with the names of splits, such as train.csv; or a CSV with the column
        `split`. In a CSV without this column, all rows belong to the split `all`.

    Raises:
      UserError: the CSV cannot be read, or has no column with image paths.
    """
    if os.path.isdir(path):
        stems = [(*os.path.splitext(name), name) for name in sorted(os.listdir(path))]
        return {
            split: os.path.join(path, name)
            for stem, suffix, name in stems
            if suffix.lower() in LISTS and (split := split_name(stem))
        }
    rows = rows_of_splits(path)
    return {"all": path} if rows is None else {split: path for split in rows if split}


def rows_of_splits(path: str) -> dict[str, int] | None:
    """Returns the number of rows of each split in a CSV; None if it has no column `split`.

    Rows with an empty cell in the column `split` are counted for the key "".
    """
    rows = _read(path)
    columns = _columns(path, rows, None)
    if columns.split is None:
        return None
    cells = (_cell(row, columns.split) for row in rows[columns.rows :] if row)
    return dict(Counter(split_name(cell) or cell for cell in cells))


def _is_whole(path: str) -> bool:
    """Returns True if the path is a CSV or JSON lines file without a column of split names."""
    return path.lower().endswith(LISTS) and _columns(path, _read(path), None).split is None


CSV = SourceKind(
    "csv",
    "image files that a CSV lists, with their labels or captions",
    open_csv,
    path="a CSV with rows FILE,LABEL[,LABEL...] or FILE,CAPTION, JSON lines with the keys "
    "file_name and label or caption, or a folder with train.csv and test.csv",
    name_of=lambda path: last_folder(re.sub(r"\.(csv|jsonl)$", "", path, flags=re.IGNORECASE)),
    is_whole=_is_whole,
    splits_at=split_files,
)
