"""`python -m drumline`: the same as the command `drumline`."""

import sys

from drumline.core.processes import die_with_parent

if __name__ == "__main__":
    # Before anything slow is imported: a worker whose launcher is killed must not live on until torch is loaded.
    die_with_parent()
    from drumline.cli import main

    sys.exit(main())
