"""A report as text for people, about 100 columns wide."""

from __future__ import annotations

import textwrap

from megacompile.cli.report_rows import Report, Row, Section


def render_text(report: Report) -> str:
    """The sections that have a title, with a blank line between them."""
    return "\n\n".join(_section(section) for section in report if section.title) + "\n"


def _section(section: Section) -> str:
    lines = [section.title]
    for row in section.rows:
        if row.label is not None:
            lines += _row(row, section)
    return "\n".join(lines)


def _row(row: Row, section: Section) -> list[str]:
    texts = row.texts()
    said = row.text.format(*texts) if row.text else "".join(map(format, texts, section.cells))
    notes = [_paragraph(note, section.indent, section.wrap) for note in row.notes]
    if not row.label:
        return [_paragraph(said, 2, section.wrap), *notes]
    return [f"  {row.label:<{section.width}} {said}".rstrip(), *notes]


def _paragraph(text: str, indent: int, wrap: int) -> str:
    return textwrap.fill(text, wrap, initial_indent=" " * indent, subsequent_indent=" " * indent)
