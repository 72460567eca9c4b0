"""The ``megacompile`` command."""
