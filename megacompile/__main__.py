"""``python -m megacompile`` is the ``megacompile`` command."""

import sys

from megacompile.cli import main

if __name__ == "__main__":
    sys.exit(main())
