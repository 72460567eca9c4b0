"""``python -m megacompile`` is the ``megacompile`` command."""

import sys

from megacompile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
