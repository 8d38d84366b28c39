"""Label files: a CSV, TSV or Parquet table that names the images of a data set, their classes and their splits.

Promises: columns are found by name, in any order; other columns are ignored. Quotes, a byte-order mark, CRLF and the
separators comma, semicolon and tab are supported. Ambiguity (two columns that may be the labels, a row with too few
fields, an unknown encoding) is rejected with the line and the fix, never guessed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from drumline.core.errors import UserError
from drumline.core.text import printable
from drumline.data.reading import open_error, open_regular

ENDINGS = (".csv", ".tsv", ".parquet")
PATH = (
    "path", "filepath", "file_path", "filename", "file_name", "file", "image", "image_path", "image_name", "image_id",
    "img", "img_path", "img_name",
)  # fmt: skip
LABEL = ("label", "class", "target", "category", "class_name", "classname", "label_name")
SPLIT = ("split", "subset", "set", "partition")
"""Names of the columns. The first of each is preferred; the others are accepted if only one of them exists."""
_SEPARATORS = (",", ";", "\t")


class Row(NamedTuple):
    """A row of the file. `line` is its line, or in a Parquet file its row, counted from 1."""

    line: int
    path: str
    label: str
    split: str
    """Empty if the file has no such column."""


class LabelFile(NamedTuple):
    """The rows of a file, and whether it has a column of splits."""

    rows: list[Row]
    has_splits: bool


def read_label_file(file: Path) -> LabelFile:
    """Reads a label file by its extension."""
    try:
        with open_regular(file) as stream:
            data = stream.readall() or b""
    except OSError as error:
        fix = f"check data.labels; write {ENDINGS[0]}, {ENDINGS[1]} or {ENDINGS[2]}"
        raise open_error(file, error, fix) from error
    if file.suffix.lower() == ".parquet":
        return _parquet(file, data)
    if file.suffix.lower() not in ENDINGS:
        raise UserError(
            f"{file} does not have the extension of a label file",
            fix=f"give a file that ends in {', '.join(ENDINGS)}",
        )
    return _text(file, data)


def _text(file: Path, data: bytes) -> LabelFile:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:4096]:
        raise UserError(f"{file} is not UTF-8 text (it looks like UTF-16)", fix="save it as CSV in UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {line}: is not UTF-8 text", fix="save it as CSV in UTF-8") from error
    separators = ("\t",) if file.suffix.lower() == ".tsv" else _SEPARATORS
    stream = io.StringIO(text, newline="")
    first = next((line for line in stream if line.strip("\r\n")), "")[: csv.field_size_limit()]
    stream.seek(0)
    headers = [next(csv.reader([first], delimiter=each), []) for each in separators]
    most = max(range(len(headers)), key=lambda index: len(headers[index]))
    columns = _columns(headers[most], file)
    rows: list[Row] = []
    reader = csv.reader(stream, delimiter=separators[most], strict=True)
    width, seen_header = len(headers[most]), False
    try:
        for fields in reader:
            if not any(field.strip() for field in fields):
                continue
            if not seen_header:
                seen_header = True
                continue
            if len(fields) != width:
                raise UserError(
                    f"{file}, line {reader.line_num}: has {len(fields)} fields, but the header has {width}",
                    fix="put a value that contains the separator in double quotes",
                )
            path, label, split = (fields[at].strip() if at is not None else "" for at in columns)
            rows.append(Row(reader.line_num, path, label, split))
    except csv.Error as error:
        raise UserError(
            f"{file}, line {reader.line_num}: is not valid CSV: {error}",
            fix='write a value that contains quotes as "a ""quoted"" word"',
        ) from error
    return _with_rows(rows, columns[2] is not None, file)


def _parquet(file: Path, data: bytes) -> LabelFile:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(
            f"{file} is a Parquet file, which needs pyarrow",
            fix="pip install pyarrow, or convert the file to CSV where pyarrow is installed: "
            f"pandas.read_parquet({file.name!r}).to_csv({file.stem + '.csv'!r}, index=False)",
        ) from error
    try:
        names = list(parquet.read_schema(io.BytesIO(data)).names)
        columns = _columns(names, file)
        wanted = [names[at] for at in columns if at is not None]
        table = parquet.read_table(io.BytesIO(data), columns=wanted)
        values = [[_plain(value) for value in table.column(name).to_pylist()] for name in wanted]
    except (arrow.ArrowException, OSError) as error:
        raise UserError(
            f"{file} cannot be read as Parquet: {error}", fix="write the file again, or write a CSV"
        ) from error
    paths, labels, *rest = values
    splits = rest[0] if rest else [""] * len(paths)
    rows = [Row(number, *each) for number, each in enumerate(zip(paths, labels, splits, strict=True), 1)]
    return _with_rows(rows, columns[2] is not None, file)


def _plain(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _with_rows(rows: list[Row], has_splits: bool, file: Path) -> LabelFile:
    if not rows:
        raise UserError(f"{file} has no rows below its header", fix="give a row for each image")
    for row in rows:
        if "\0" in row.path:
            raise UserError(
                f"{file}, line {row.line}: the path has a NUL byte", fix="write the file again: it is damaged"
            )
    return LabelFile(rows, has_splits)


def _columns(header: Sequence[str], file: Path) -> tuple[int, int, int | None]:
    """The columns of the paths, the labels and the splits."""
    names = [name.strip().lower().replace(" ", "_").replace("-", "_") for name in header]
    path, label = (_column(names, known, file) for known in (PATH, LABEL))
    if path is None or label is None:
        if not header:
            raise UserError(
                f"{file} is empty", fix="write a header, such as path,label, and a row for each image"
            )
        missing, known = ("paths", PATH) if path is None else ("labels", LABEL)
        shown = ", ".join(printable(name) for name in header[:8])
        raise UserError(
            f"{file} has no column of {missing}; its first line is: {shown}",
            fix=f"the first line must name the columns: call it {known[0]} (or {', '.join(known[1:7])})",
        )
    return path, label, _column(names, SPLIT, file)


def _column(names: list[str], known: tuple[str, ...], file: Path) -> int | None:
    """The column with the preferred name, or the only column with one of the other known names."""
    found = [at for at, name in enumerate(names) if name in known]
    own = [at for at in found if names[at] == known[0]]
    if len(own) == 1 or len(found) <= 1:
        return next(iter(own or found), None)
    some = " and ".join(f"'{names[at]}'" for at in (own or found)[:3])
    raise UserError(
        f"{file} has several columns that may be the {known[0]}: {some}",
        fix=f"rename the right one to {known[0]}, and keep only one of that name",
    )
