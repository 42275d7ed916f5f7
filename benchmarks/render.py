"""Write the tables of benchmarks/README.md anew from the JSON files beside it.

python benchmarks/render.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from partita.bench.table import markdown

HERE = Path(__file__).parent


def render(text: str) -> str:
    """The text with what stands between <!-- name.json --> and <!-- end --> replaced by that file's tables."""

    def tables(match: re.Match[str]) -> str:
        found = json.loads((HERE / match[1]).read_text("utf-8"))
        return f"<!-- {match[1]} -->\n\n{markdown(found)}\n<!-- end -->"

    return re.sub(r"<!-- (\S+\.json) -->.*?<!-- end -->", tables, text, flags=re.DOTALL)


if __name__ == "__main__":
    page = HERE / "README.md"
    page.write_text(render(page.read_text("utf-8")), "utf-8")
