"""Names from models and files as text that can be printed anywhere: in source, on a terminal, in a page."""

from __future__ import annotations

from urllib.parse import quote


def is_printable(text: str) -> bool:
    """Return whether all characters of a text show, and none ends a string of Python or begins an escape."""
    return text.isprintable() and '"' not in text and "\\" not in text


def printable(name: str) -> str:
    """Write the characters of a name that are not printable as a URL has them: ``%22`` for a quote.

    All other characters, and so ordinary names, stay as they are.
    """
    if is_printable(name):
        return name
    return "".join(c if is_printable(c) else quote(c, safe="", errors="surrogatepass") for c in name)
