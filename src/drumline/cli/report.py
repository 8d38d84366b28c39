"""`drumline report`: a report on a run, or on several side by side."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.core.files import check_output, write_output
from drumline.core.text import print_result
from drumline.observe.runs import is_run


@dataclass(frozen=True)
class Options:
    """The arguments of `drumline report`."""

    runs: tuple[str, ...]
    """Run folders."""
    out: str = ""
    """The file to write. Required for several runs; the default for one run is RUN/report.html."""
    serve: bool = False
    """Serve the page on a local port instead of writing it, and update it while the run trains. Ctrl-C stops the
    server."""
    host: str = "127.0.0.1"
    """The address to serve on. An address that other machines can reach requires the token in the printed URL."""
    port: Annotated[int, Range(0, 65535)] = 6008
    """The port to serve on. 0: any free port."""


COMMAND = Command(
    name="report",
    usage="RUN [RUN ...] [options]",
    about="""
        Write a report on a run as one HTML page: summary, curves, where the time went and
        what would make the run faster, confusion matrix, worst mistakes as pictures, accuracy
        of each class, calibration, agreement with the teacher, restarts and warnings,
        fingerprint, recipe and environment. For several runs, the page shows their results
        and curves side by side, and the settings that differ.

        The page is self-contained: it opens from disk, loads nothing else, and can be mailed
        or archived. It needs only the run folder or a copy of it, not the data. Each run
        writes its own page, RUN/report.html, when it ends, and after evaluations while it
        trains.

        If stdout is not a terminal, its last line is JSON.
    """,
    options=Options,
    examples="""
  drumline report runs/photos-resnet50-1
  drumline report runs/a runs/b runs/c --out comparison.html
  drumline report runs/photos-resnet50-1 --serve   watch it train
  drumline report runs/a --serve --host 0.0.0.0    from other machines
""",
)


def main(argv: list[str]) -> int:
    options = read_options(argv, Options, "report")
    runs = [Path(name) for name in options.runs]
    for run in runs:
        if not is_run(run):
            raise UserError(f"{run} is not a run", "give run folders; `drumline runs` lists them")
    if options.serve:
        return serve(runs, options)
    if len(runs) > 1 and not options.out:
        raise UserError("a report on several runs needs an output file", "add --out FILE.html")

    from drumline.report.page import PAGE, page, read_runs

    file = Path(options.out) if options.out else runs[0] / PAGE
    if options.out:
        check_output("--out", file)
    content = page(read_runs(runs)).encode()
    try:
        write_output(file, content)
    except OSError as error:
        raise UserError(
            f"cannot write {file}: {error.strerror or error}", "give another file: --out"
        ) from error
    print(f"report written to {file} ({len(content) / 1024:,.0f} KiB)", file=sys.stderr)
    print_result({"report": str(file), "runs": list(map(str, runs)), "bytes": len(content)})
    return 0


def serve(runs: list[Path], options: Options) -> int:
    """Serves the page until Ctrl-C."""
    if options.out:
        raise UserError("--out and --serve exclude each other", "leave one of them out")

    from drumline.report.serve import PageServer

    with PageServer(runs, options.host, options.port) as server:
        try:
            print(f"the report is at {server.url} (Ctrl-C stops the server)", file=sys.stderr, flush=True)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
        print_result({"url": server.url, "runs": list(map(str, runs))})
    return 0
