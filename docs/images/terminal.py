#!/usr/bin/env python3
"""Terminal output with colours (standard input) as a page for a browser (standard output).

    script -qec 'stty cols 80; doorbell doctor' /dev/null | python3 docs/images/terminal.py [LINES] > screen.html
    python3 docs/images/page.py screen.html screen.png --width 760 --at pre
"""
import html
import re
import sys

STYLES = {
    "1": "font-weight:700;color:#fff",
    "2": "color:#8b949e",
    "31": "color:#ff7b72",
    "32": "color:#56d364",
    "33": "color:#e3b341",
    "36": "color:#76e3ea",
}


def page(text):
    out, opened = [], 0
    for part in re.split(r"(\x1b\[[\d;]*m)", text.replace("\r", "")):
        code = re.fullmatch(r"\x1b\[([\d;]*)m", part)
        if code is None:
            out.append(html.escape(part))
        elif code.group(1) in ("", "0"):
            out.append("</span>" * opened)
            opened = 0
        else:
            style = ";".join(STYLES.get(c, "") for c in code.group(1).split(";"))
            out.append(f'<span style="{style}">')
            opened += 1
    out.append("</span>" * opened)
    return (
        '<!doctype html><meta charset="utf-8"><style>body{margin:0;background:#0d1117}'
        "pre{font:14px/1.35 'DejaVu Sans Mono',monospace;color:#c9d1d9;margin:0;padding:18px 20px;background:#0d1117}</style>"
        f"<pre>{''.join(out).rstrip()}</pre>"
    )


text = sys.stdin.read()
if len(sys.argv) > 1:
    text = "\n".join(text.split("\n")[: int(sys.argv[1])])
sys.stdout.write(page(text))
