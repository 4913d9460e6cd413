"""Chat templates with sections for tools, in the shape of those that models come with."""

from pathlib import Path

TEMPLATES = {
    path.stem: path.read_text() for path in sorted(Path(__file__).with_suffix("").glob("*.jinja"))
}
"""Format -> a template that has it."""

UNKNOWN = "{% for tool in tools or () %}({{ tool }}){% endfor %}{{ messages[-1].content }}"
"""Knows tools, and does not tell how calls are written."""

NONE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
