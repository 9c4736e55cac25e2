"""The page of a memory curve is self-contained and carries every byte."""

from __future__ import annotations

import json
import re

from overlap.draw_curve import draw_curve_png, write_curve_html
from overlap.memory.bins import Bin, Border, Usage

CURVE = Usage(
    curve=tuple(
        Border(slot=slot, bytes={**dict.fromkeys(Bin, 0), Bin.REST: 100 * place, Bin.LIVE_SEGMENT: 7})
        for place, slot in enumerate(("F0.embed", "N0.0.attn", "B0.head</script>"))
    )
)


def test_page(tmp_path) -> None:
    write_curve_html(CURVE, tmp_path / "curve.html", "a step")
    page = (tmp_path / "curve.html").read_text()
    (text,) = re.findall(r"const data = (.*);", page)
    data = json.loads(text)
    assert data["slots"] == [border.slot for border in CURVE.curve]
    assert [kind["label"] for kind in data["kinds"]] == ["live segment", "eager graphs, temporaries, gradients"]
    assert data["bytes"] == [[7, 7, 7], [0, 100, 200]]
    assert page.count("</script>") == 1
    # The namespace of SVG is a name, not a place.
    assert re.findall(r"https?://[^\"]*", page) == ["http://www.w3.org/2000/svg"]


def test_picture(tmp_path) -> None:
    draw_curve_png(CURVE, tmp_path / "curve.png", "a step")
    assert (tmp_path / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
