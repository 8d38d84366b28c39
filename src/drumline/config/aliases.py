"""Names of the distillation methods in papers and other programs."""

from __future__ import annotations

from drumline.config.sources import names_code

METHOD_ALIASES = {
    "ab": "abound",
    "at": "attention",
    "cc": "correlation",
    "fitnet": "hint",
    "fitnets": "hint",
    "ft": "factor",
    "overhaul": "ofd",
    "review": "reviewkd",
    "sp": "similarity",
    "svd": "kdsvd",
}


def method_name(name: str) -> str:
    """The name that the recipe records: aliases are resolved, and capitals do not matter, except in the user's own
    code (`package.module:Class`)."""
    if names_code(name) or "." in name:
        return name
    return METHOD_ALIASES.get(name.lower(), name.lower())
