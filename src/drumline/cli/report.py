"""`drumline report`: the page of a run, or of several side by side."""

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
    """The file to write. Several runs need it; the default for one is RUN/report.html."""
    serve: bool = False
    """Serve the page instead of writing it. It updates itself while a run goes on; Ctrl-C ends it."""
    host: str = "127.0.0.1"
    """The address to serve at. At any but this machine's own, the page is shown only with the token of the printed
    URL."""
    port: Annotated[int, Range(0, 65535)] = 6008
    """The port to serve at; 0 takes any that is free."""


COMMAND = Command(
    name="report",
    usage="RUN [RUN ...] [options]",
    about="""
        Write the page of a run: one HTML file with everything about it. It has a summary,
        curves, where the time went and what would make the run faster, the confusion matrix,
        the worst mistakes as pictures, the accuracy of each class, how far its confidence can
        be trusted, how it agrees with its teacher, what it survived, its fingerprint, recipe
        and environment. Of several runs, it has their results, curves and the settings in
        which they differ.

        The page opens from disk, loads nothing, and can be mailed or archived. It is made
        from the files of the run folder alone, so a copy of that folder is enough; the data
        may be gone. A run writes its own page, RUN/report.html, at its end, and from time to
        time while it trains.

        If stdout is not a terminal, its last line is JSON.
    """,
    options=Options,
    examples="""
  drumline report runs/photos-resnet50-1
  drumline report runs/a runs/b runs/c --out comparison.html
  drumline report runs/photos-resnet50-1 --serve   watch it train
  drumline report runs/a --serve --host 0.0.0.0    from elsewhere, with a token
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
        raise UserError("a page of several runs needs a file", "add --out FILE.html")

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
            print(f"the report is at {server.url} (Ctrl-C ends it)", file=sys.stderr, flush=True)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("\nended", file=sys.stderr)
        print_result({"url": server.url, "runs": list(map(str, runs))})
    return 0
