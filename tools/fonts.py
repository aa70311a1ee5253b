"""Cut the fonts of the admin's theme down to what its pages show: of 750 KB, 86 remain.

Run it with a Python that has the theme, fonttools and brotli (``pip install fonttools brotli``). It
writes into ``inference_site/console/static``, where Django finds the files before the theme's own.
Run it again when a page has a new icon (a browser test fails for one that the font lacks), or when
the theme has new fonts.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fontTools.subset import Options, Subsetter, parse_unicodes
from fontTools.ttLib import TTFont

ROOT = Path(__file__).resolve().parent.parent
FONTS = ROOT / "inference_site" / "console" / "static" / "unfold" / "fonts"
LATIN = (
    "U+20-7E, U+A0-17F, U+2009, U+2010-2027, U+202F-2030, U+2039-203A, U+20AC, U+2122, "
    "U+2190-2193, U+2212, U+2260, U+2264-2265"
)
"""Characters of the small files."""
OTHER_ALPHABETS = "U+180-52F, U+1D00-1FFF, U+A720-A7FF"
"""Characters for which a browser reads the theme's whole files. Other fonts have the others."""
WEIGHTS = {"Regular": 400, "Medium": 500, "SemiBold": 600, "Bold": 700}
_ICON_TEXT = re.compile(r"material-symbols-outlined[^>]*>([^<]*)<")
_ICON_OF_STYLE = re.compile(r'content: ?"([a-z][a-z0-9_]+)"')
_WORD = re.compile(r"[a-z][a-z0-9_]+")


def theme() -> Path:
    """Return the folder of the theme's package."""
    spec = find_spec("unfold")
    if spec is None or spec.origin is None:
        raise SystemExit("The theme, django-unfold, is not installed.")
    return Path(spec.origin).parent


def icon_words() -> set[str]:
    """Return words that may name icons: those of the theme and its styles, and our own strings."""
    words: set[str] = set()
    for template in (theme() / "templates").rglob("*.html"):
        for text in _ICON_TEXT.findall(template.read_text()):
            words.update(_WORD.findall(text))
    for style in (theme() / "static").rglob("*.css"):
        words.update(_ICON_OF_STYLE.findall(style.read_text()))
    for python in theme().glob("*.py"):
        words.update(re.findall(r'icon="([a-z0-9_]+)"', python.read_text()))
    for package in ("inference_site", "completions", "responses_api"):
        for source in (ROOT / package).rglob("*"):
            if source.suffix in (".py", ".html", ".js") and "icon" in (text := source.read_text()):
                words.update(re.findall(r"""["'>\s]([a-z][a-z0-9_]+)["'<\s]""", text))
    return words


def read_font(name: str) -> TTFont:
    """Return a font of the theme, with its time as it is: the same fonts give the same files."""
    return TTFont(theme() / "static" / "unfold" / "fonts" / name, recalcTimestamp=False)


def save_part(font: TTFont, file: Path, options: Options, **kept: Collection[Any]) -> None:
    """Write a font with these ``glyphs`` or ``unicodes`` only, as WOFF2."""
    subsetter = Subsetter(options)
    subsetter.populate(**kept)
    subsetter.subset(font)
    font.flavor = "woff2"
    font.save(file)


def cut_icons() -> None:
    """Write the font of icons with the icons that some page names."""
    font = read_font("material-symbols/Material-Symbols-Outlined.woff2")
    names = {glyph: character for character, glyph in font.getBestCmap().items()}
    wanted = icon_words()
    kept: set[str] = set()
    for lookup in font["GSUB"].table.LookupList.Lookup:
        for table in lookup.SubTable:
            for first, ligatures in list(table.ligatures.items()):
                for ligature in ligatures:
                    parts = [first, *ligature.Component]
                    if "".join(chr(names[part]) for part in parts if part in names) in wanted:
                        kept.update(parts, [ligature.LigGlyph])
    options = Options(layout_features=["*"], layout_closure=False, hinting=False)
    save_part(font, FONTS / "material-symbols" / "used.woff2", options, glyphs=kept)


def cut_letters() -> None:
    """Write the Latin part of each weight of the theme's text font."""
    for weight in WEIGHTS:
        font = read_font(f"inter/Inter-{weight}.woff2")
        features = ["kern", "liga", "calt", "ccmp", "locl", "mark", "mkmk", "tnum"]
        options = Options(layout_features=features, hinting=False)
        file = FONTS / "inter" / f"latin-{weight.lower()}.woff2"
        save_part(font, file, options, unicodes=parse_unicodes(LATIN))


def write_stylesheets() -> None:
    """Write the stylesheets that take the place of the theme's."""
    face = (
        '@font-face {{\n  font-family: "{}";\n  font-style: normal;\n  font-weight: {};\n  {}\n}}\n'
    )
    faces = []
    for weight, number in WEIGHTS.items():
        source = (
            'font-display: swap;\n  src: url("{}.woff2") format("woff2");\n  unicode-range: {};'
        )
        small = source.format(f"latin-{weight.lower()}", LATIN)
        whole = source.format(f"Inter-{weight}", OTHER_ALPHABETS)
        faces += [face.format("Inter", number, small), face.format("Inter", number, whole)]
    (FONTS / "inter" / "styles.css").write_text("".join(faces))
    icons = 'src: url("used.woff2") format("woff2");'
    (FONTS / "material-symbols" / "styles.css").write_text(
        face.format("Material Symbols Outlined", 400, icons)
    )


if __name__ == "__main__":
    cut_icons()
    cut_letters()
    write_stylesheets()
