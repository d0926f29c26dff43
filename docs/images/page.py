#!/usr/bin/env python3
"""A picture of a page (pip install playwright pillow; Chromium of the system).

    python3 docs/images/page.py report.html light.png [--dark] [--width 1180] [--height 1500] [--at SELECTOR]
"""
import argparse
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

parser = argparse.ArgumentParser()
parser.add_argument("page", type=Path)
parser.add_argument("picture")
parser.add_argument("--dark", action="store_true")
parser.add_argument("--width", type=int, default=1180)
parser.add_argument("--height", type=int, default=0, help="0: the whole page")
parser.add_argument("--at", help="only the element that this selects")
parser.add_argument("--hover", help="point at this first")
parser.add_argument("--pdf", action="store_true", help="print it instead")
args = parser.parse_args()

with sync_playwright() as p:
    browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    page = browser.new_page(
        viewport={"width": args.width, "height": args.height or 900},
        color_scheme="dark" if args.dark else "light",
    )
    page.goto(args.page.resolve().as_uri())
    if args.hover:
        page.locator(args.hover).first.scroll_into_view_if_needed()
        page.locator(args.hover).first.hover()
        page.wait_for_timeout(300)
    if args.pdf:
        page.pdf(path=args.picture, format="A4", margin={side: "14mm" for side in ("top", "right", "bottom", "left")})
    elif args.at:
        page.locator(args.at).first.screenshot(path=args.picture)
    else:
        page.screenshot(path=args.picture, full_page=not args.height)
    browser.close()

if not args.pdf:
    # Few colours are enough for a page, and make a small file.
    Image.open(args.picture).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(args.picture, optimize=True)
