"""`python -m drumline`: the same as the command `drumline`."""

import sys

from drumline.cli import main

if __name__ == "__main__":
    sys.exit(main())
