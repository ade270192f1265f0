"""Makes the text that `shoal.data.text_set` reads, of the documentation as it is now.

    python tools/text_set.py

Every page of docs/, by name, with only the characters that the set knows. The file in the package is the
text of one day, so that results stay comparable: making it anew makes another task, whose digest `text_set`
must be told.
"""

from __future__ import annotations

import gzip
import hashlib
import unicodedata
from pathlib import Path

from shoal.data.text_set import FILE, PAGE_END, is_known

DOCS = Path(__file__).parent.parent / "docs"
PLAIN = str.maketrans(
    {
        "\N{EN DASH}": "-",
        "\N{EM DASH}": "-",
        "\N{MINUS SIGN}": "-",
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{MULTIPLICATION SIGN}": "x",
    }
)


def plain(text: str) -> str:
    """Without accents, and without what is left that the set does not know."""
    spelled = unicodedata.normalize("NFKD", text.translate(PLAIN))
    return "".join(character for character in spelled if is_known(character))


def main() -> None:
    """Write the file, and say its digest."""
    pages = [plain(path.read_text("utf-8")).encode("ascii") for path in sorted(DOCS.glob("*.md"))]
    text = PAGE_END.join(pages)
    FILE.write_bytes(gzip.compress(text, mtime=0))
    print(f"{FILE}: {len(pages)} pages, {len(text)} characters, digest {hashlib.sha256(text).hexdigest()}")


if __name__ == "__main__":
    main()
