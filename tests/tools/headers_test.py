#!/usr/bin/env python3
"""The installed headers compile without a warning, also where a project has files of the same names before them on its
include path, and the guides name no other ones.

headers_test.py BUILD_DIR each COMPILER [FLAG...]         each by itself, and all together
headers_test.py BUILD_DIR together COMPILER [FLAG...]     all together

Those of comm, all together, also without exceptions and run-time types.

Ends with 77, which skips the test, where there is no such compiler.
"""
import concurrent.futures
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

build, what, compiler, *flags = sys.argv[1:]
if not shutil.which(compiler):
    print(f"{compiler} is not installed")
    sys.exit(77)

with tempfile.TemporaryDirectory() as prefix:
    subprocess.run(["cmake", "--install", build, "--component", "headers", "--prefix", prefix], check=True,
                   stdout=subprocess.DEVNULL)
    root = next(pathlib.Path(prefix).glob("**/ringzero"))
    headers = sorted(str(h.relative_to(root)) for h in root.rglob("*.h"))
    own = pathlib.Path(prefix, "own")
    for name in [h.relative_to(root) for h in root.rglob("*.*")]:
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("#error this is a project's own file, included in place of the installed one: name that "
                                "one by its path relative to the header that includes it\n")
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wconversion", "-Werror", f"-I{own}",
               f"-I{root.parent}", *flags, "-x", "c++", "-"]

    without_exceptions = "the headers of comm without exceptions"

    def errors(unit):
        source = "".join(f"#include <ringzero/{h}>\n" for h in units[unit])
        further = ["-fno-exceptions", "-fno-rtti"] if unit == without_exceptions else []
        run = subprocess.run(command[:-3] + further + command[-3:], input=source, text=True, capture_output=True)
        return run.stderr if run.returncode else ""

    units = {"all headers together": headers,
             without_exceptions: [h for h in headers if h.startswith("comm/") and "/mpi/" not in h]}
    if what == "each":
        units |= {h: [h] for h in headers}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = dict(zip(units, pool.map(errors, units)))

bad = {unit: text for unit, text in found.items() if text}
guides = pathlib.Path(__file__).resolve().parents[2] / "docs/guide"
for guide in sorted(guides.glob("*.md")):
    named = set(re.findall(r"\b(?:comm|tensor|autograd_lite|sharding)/[\w/]+\.h\b", guide.read_text()))
    if other := sorted(named - set(headers)):
        bad[guide.name] = f"names headers that are not installed: {', '.join(other)}"
    if other := re.findall(r'^#include "[^"\n]*"', guide.read_text(), re.M):
        bad[guide.name] = f"expected #include <ringzero/...>, found {', '.join(other)}"
for unit, text in bad.items():
    print(f"{unit}:\n{text[:1500]}")
    if missing := re.search(r"([\w./]+\.(?:h|inc))'?(?: file not found|: No such file)", text):
        print(f"{missing[1]} is not installed: see the list in cmake/RzInstall.cmake\n")
print(f"{len(headers)} headers, {compiler}: {len(bad)} of {len(units)} programs and of the guides are wrong")
sys.exit(bool(bad) or len(headers) < 50)
