#!/usr/bin/env python3
"""Terminal output with colours (standard input) as a page for a browser (standard output).

    script -qc 'doorbell doctor' /dev/null | python3 docs/images/terminal.py > screen.html
    chromium --headless --no-sandbox --window-size=760,900 --screenshot=screen.png screen.html
"""
import html
import re
import sys

COLOURS = {"1": "font-weight:700;color:#fff", "2": "color:#8b949e", "31": "color:#ff7b72", "32": "color:#56d364", "33": "color:#e3b341"}


def page(text):
    out = []
    for part in re.split(r"(\x1b\[\d*m)", text.replace("\r", "")):
        code = re.fullmatch(r"\x1b\[(\d*)m", part)
        if code is None:
            out.append(html.escape(part))
        elif code.group(1) in ("", "0"):
            out.append("</span>")
        else:
            out.append(f'<span style="{COLOURS.get(code.group(1), "")}">')
    return (
        '<!doctype html><meta charset="utf-8"><style>body{margin:0;background:#0d1117}'
        "pre{font:14px/1.35 'DejaVu Sans Mono',monospace;color:#c9d1d9;margin:0;padding:18px 20px}</style>"
        f"<pre>{''.join(out)}</pre>"
    )


sys.stdout.write(page(sys.stdin.read()))
